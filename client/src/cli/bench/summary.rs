//! The figures of a benchmark, from its samples.

use std::collections::BTreeMap;

use serde::Serialize;

use super::fleet::Measured;
use super::link::Sample;
use super::percentiles::Percentiles;

/// The arguments that shape a benchmark, as they are written on the command line.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Shape {
    pub model: String,
    pub clients: u32,
    pub arrivals: String,
    pub prompt_tokens: String,
    pub answer_tokens: String,
    pub shared_prefix: u32,
    pub seed: u64,
    /// The file of the answers' JSON schema.
    pub schema: Option<String>,
}

/// The figures. Times and tokens are those of requests that did not fail. A request that Ctrl-C cancelled adds the
/// tokens that came before.
#[derive(Debug, Serialize)]
pub struct Summary {
    #[serde(flatten)]
    pub shape: Shape,
    /// From the beginning to the last request's end; not less than the duration that was asked for.
    pub window_s: f64,
    pub requests: Requests,
    pub errors: Vec<ErrorCount>,
    pub tokens: Tokens,
    /// Until the first token.
    pub ttft_ms: Option<Percentiles>,
    /// Between each token and the one before, over all requests.
    pub inter_token_ms: Option<Percentiles>,
    /// Until the answer was complete.
    pub request_ms: Option<Percentiles>,
    /// In the daemon's queue.
    pub queue_ms: Option<Percentiles>,
    /// From the intended arrival to the sending: until a client was free, and the lateness of its timer.
    pub sent_late_ms: Option<Percentiles>,
    /// Sorted times, for the plot.
    #[serde(skip)]
    pub sorted: Sorted,
}

/// How many requests ended how.
#[derive(Debug, Serialize)]
pub struct Requests {
    pub done: u64,
    pub failed: u64,
    /// By Ctrl-C.
    pub cancelled: u64,
    pub done_per_s: f64,
}

/// Failed requests of one error.
#[derive(Debug, PartialEq, Serialize)]
pub struct ErrorCount {
    pub name: String,
    pub count: u64,
    /// Message of the first.
    pub message: String,
}

/// Tokens, and tokens a second over the window.
#[derive(Debug, Serialize)]
pub struct Tokens {
    /// Of prompts, reused ones included.
    pub prompt: u64,
    pub prompt_per_s: f64,
    /// Of prompts, not computed.
    pub reused: u64,
    /// Share of the prompts, 0 to 1.
    pub reused_share: f64,
    /// Of answers.
    pub answer: u64,
    pub answer_per_s: f64,
}

/// Sorted times in microseconds.
#[derive(Debug, Default)]
pub struct Sorted {
    pub ttft_us: Vec<u64>,
    pub inter_token_us: Vec<u64>,
}

impl Summary {
    pub fn of(shape: Shape, measured: &Measured) -> Self {
        let samples = &measured.samples;
        let failed = |sample: &&Sample| sample.error.as_ref().is_some_and(|error| !error.cancelled);
        let done: Vec<&Sample> = samples.iter().filter(|sample| sample.error.is_none()).collect();
        // A cancelled request whose first token came has had its prompt computed.
        let counted: Vec<&Sample> =
            samples.iter().filter(|sample| !failed(sample) && sample.first_us.is_some()).collect();
        let end_us = samples.iter().map(|sample| sample.end_us).max().unwrap_or(measured.start_us);
        let window_us = end_us.saturating_sub(measured.start_us).max(measured.window_min_us);
        let window_s = window_us as f64 / 1e6;
        let per_s = |count: u64| if window_s > 0.0 { count as f64 / window_s } else { 0.0 };
        let failures = samples.iter().filter(failed).count() as u64;
        let requests = Requests {
            done: done.len() as u64,
            failed: failures,
            cancelled: samples.len() as u64 - done.len() as u64 - failures,
            done_per_s: per_s(done.len() as u64),
        };
        let sum = |value: fn(&Sample) -> u64| counted.iter().map(|sample| value(sample)).sum::<u64>();
        let (prompt, answer) = (sum(|sample| sample.prompt_tokens), sum(|sample| sample.answer_tokens));
        let reused = sum(|sample| sample.reused_tokens);
        let tokens = Tokens {
            prompt,
            prompt_per_s: per_s(prompt),
            reused,
            reused_share: if prompt > 0 { reused as f64 / prompt as f64 } else { 0.0 },
            answer,
            answer_per_s: per_s(answer),
        };
        let firsts = counted.iter().filter_map(|sample| Some(sample.first_us?.saturating_sub(sample.due_us)));
        let gaps = counted.iter().flat_map(|sample| sample.gaps_us.iter().copied());
        let sorted = Sorted { ttft_us: sort(firsts), inter_token_us: sort(gaps) };
        let of_done =
            |value: fn(&Sample) -> u64| Percentiles::of(&sort(done.iter().map(|sample| value(sample))));
        Self {
            shape,
            window_s,
            requests,
            errors: errors(samples),
            tokens,
            ttft_ms: Percentiles::of(&sorted.ttft_us),
            inter_token_ms: Percentiles::of(&sorted.inter_token_us),
            request_ms: of_done(|sample| sample.end_us.saturating_sub(sample.due_us)),
            queue_ms: of_done(|sample| sample.queue_us),
            sent_late_ms: of_done(|sample| sample.sent_us.saturating_sub(sample.due_us)),
            sorted,
        }
    }
}

fn sort(values: impl Iterator<Item = u64>) -> Vec<u64> {
    let mut values: Vec<u64> = values.collect();
    values.sort_unstable();
    values
}

/// Failures by error, the most frequent first.
pub fn errors(samples: &[Sample]) -> Vec<ErrorCount> {
    let mut by_name: BTreeMap<&str, ErrorCount> = BTreeMap::new();
    for error in samples.iter().filter_map(|sample| sample.error.as_ref()).filter(|error| !error.cancelled) {
        let first = || ErrorCount { name: error.name.clone(), count: 0, message: error.message.clone() };
        by_name.entry(&error.name).or_insert_with(first).count += 1;
    }
    let mut errors: Vec<_> = by_name.into_values().collect();
    errors.sort_by_key(|error| std::cmp::Reverse(error.count));
    errors
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::bench::link::Problem;

    fn problem(name: &str, message: &str) -> Option<Problem> {
        Some(Problem { name: name.into(), message: message.into(), cancelled: name == "Cancelled" })
    }

    /// Sent 1 ms after it was due, first token after 11 ms, then two more.
    fn done(due_us: u64) -> Sample {
        Sample {
            due_us,
            sent_us: due_us + 1000,
            first_us: Some(due_us + 11_000),
            end_us: due_us + 20_000,
            gaps_us: vec![3000, 5000],
            prompt_tokens: 100,
            reused_tokens: 40,
            answer_tokens: 3,
            queue_us: 500,
            ..Sample::default()
        }
    }

    #[test]
    fn figures_are_those_of_requests_that_did_not_fail() {
        let failed =
            |name: &str, message: &str| Sample { error: problem(name, message), end_us: 1, ..done(0) };
        let cancelled = Sample {
            reused_tokens: 0,
            end_us: 2_000_000,
            error: problem("Cancelled", "after Ctrl-C"),
            ..done(0)
        };
        let early = Sample { first_us: None, gaps_us: vec![], answer_tokens: 0, ..cancelled.clone() };
        let samples = vec![
            done(0),
            failed("Quota", "a"),
            done(10_000),
            failed("Busy", "b"),
            failed("Busy", "c"),
            cancelled,
            early,
        ];
        let measured = Measured { samples, start_us: 0, interrupted: true, window_min_us: 0 };
        let summary = Summary::of(Shape::default(), &measured);
        assert_eq!(summary.window_s, 2.0);
        let Requests { done, failed, cancelled, done_per_s } = summary.requests;
        assert_eq!((done, failed, cancelled, done_per_s), (2, 3, 2, 1.0));
        let errors: Vec<_> =
            summary.errors.iter().map(|e| (e.name.as_str(), e.count, e.message.as_str())).collect();
        assert_eq!(errors, [("Busy", 2, "b"), ("Quota", 1, "a")]);
        let tokens = summary.tokens;
        assert_eq!((tokens.prompt, tokens.reused, tokens.answer), (300, 80, 9));
        assert_eq!((tokens.prompt_per_s, tokens.answer_per_s), (150.0, 4.5));
        assert_eq!(tokens.reused_share, 80.0 / 300.0);
        assert_eq!(summary.ttft_ms.unwrap().max, 11.0);
        assert_eq!(summary.inter_token_ms.unwrap(), Percentiles { p50: 3.0, p90: 5.0, p99: 5.0, max: 5.0 });
        assert_eq!(summary.request_ms.unwrap().max, 20.0, "not that of a cancelled one");
        assert_eq!((summary.queue_ms.unwrap().p50, summary.sent_late_ms.unwrap().p50), (0.5, 1.0));
    }

    #[test]
    fn nothing_measured_is_no_figure() {
        let mut measured = Measured { samples: vec![], start_us: 7, interrupted: true, window_min_us: 0 };
        let summary = Summary::of(Shape::default(), &measured);
        assert_eq!((summary.window_s, summary.tokens.prompt_per_s, summary.ttft_ms), (0.0, 0.0, None));
        measured.window_min_us = 3_000_000;
        assert_eq!(Summary::of(Shape::default(), &measured).window_s, 3.0);
    }
}
