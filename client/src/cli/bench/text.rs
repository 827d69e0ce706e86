//! Prints a benchmark's figures for people.

use std::io;

use rocmforge_client::printable;

use super::percentiles::Percentiles;
use super::single::Single;
use super::summary::Summary;
use crate::cli::tables::{Out, pairs, table};

/// The figures of a load.
pub fn summary(out: Out<'_>, summary: &Summary) -> io::Result<()> {
    let Summary { shape, requests, tokens, .. } = summary;
    let cancelled =
        if requests.cancelled > 0 { format!(", {} cancelled", requests.cancelled) } else { String::new() };
    let fields = [
        ("model", printable(&shape.model)),
        ("load", format!("{} clients, arrivals {}, seed {}", shape.clients, shape.arrivals, shape.seed)),
        ("lengths", lengths(summary)),
        (
            "requests",
            format!(
                "{} done, {} failed{cancelled}, in {:.2} s: {:.2} a second",
                requests.done, requests.failed, summary.window_s, requests.done_per_s
            ),
        ),
        ("prompt tokens", format!("{}, {:.1} a second", tokens.prompt, tokens.prompt_per_s)),
        ("reused tokens", format!("{}, {:.1} % of the prompts'", tokens.reused, tokens.reused_share * 100.0)),
        ("answer tokens", format!("{}, {:.1} a second", tokens.answer, tokens.answer_per_s)),
    ];
    pairs(out, fields.into_iter())?;
    writeln!(out)?;
    let rows = [
        ("first token", summary.ttft_ms),
        ("between tokens", summary.inter_token_ms),
        ("whole request", summary.request_ms),
        ("daemon's queue", summary.queue_ms),
        ("sent late by", summary.sent_late_ms),
    ];
    table(out, ["MS", "P50", "P90", "P99", "MAX"], rows.into_iter().map(|(name, times)| row(name, times)))?;
    for (number, error) in summary.errors.iter().enumerate() {
        if number == 0 {
            writeln!(out)?;
        }
        writeln!(out, "{} x {}: {}", error.count, printable(&error.name), printable(&error.message))?;
    }
    Ok(())
}

fn lengths(summary: &Summary) -> String {
    let shape = &summary.shape;
    let shared =
        if shape.shared_prefix > 0 { format!("{} shared + ", shape.shared_prefix) } else { String::new() };
    let form = shape.schema.as_ref().map_or(String::new(), |file| format!(" by {}", printable(file)));
    format!("prompts {shared}{} tokens, answers {}{form}", shape.prompt_tokens, shape.answer_tokens)
}

fn row(name: &str, times: Option<Percentiles>) -> [String; 5] {
    let shown = |time: fn(&Percentiles) -> f64| {
        times.as_ref().map_or("-".to_owned(), |times| format!("{:.3}", time(times)))
    };
    [name.to_owned(), shown(|t| t.p50), shown(|t| t.p90), shown(|t| t.p99), shown(|t| t.max)]
}

/// The figures of single requests, one row for each test.
pub fn single(out: Out<'_>, single: &Single) -> io::Result<()> {
    let rows = single.tests.iter().map(|test| {
        let rate = format!("{:.2} ± {:.2}", test.mean_tokens_per_s, test.stddev_tokens_per_s);
        [printable(&single.model), test.test.clone(), rate]
    });
    table(out, ["MODEL", "TEST", "TOKENS/S"], rows)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::bench::fleet::Measured;
    use crate::cli::bench::link::{Problem, Sample};
    use crate::cli::bench::summary::Shape;

    #[test]
    fn figures_are_a_page() {
        let shape = Shape {
            model: "m\u{1b}".into(),
            clients: 2,
            arrivals: "closed".into(),
            prompt_tokens: "8".into(),
            answer_tokens: "2".into(),
            shared_prefix: 4,
            schema: None,
            seed: 7,
        };
        let done = Sample {
            first_us: Some(1500),
            end_us: 2000,
            gaps_us: vec![500],
            prompt_tokens: 12,
            reused_tokens: 3,
            answer_tokens: 2,
            ..Sample::default()
        };
        let problem = Problem { name: "Busy".into(), message: "later\n".into(), cancelled: false };
        let failed = Sample { error: Some(problem), ..Sample::default() };
        let measured =
            Measured { samples: vec![done, failed], start_us: 0, interrupted: false, window_min_us: 0 };
        let mut out = Vec::new();
        summary(&mut out, &Summary::of(shape, &measured)).unwrap();
        assert_eq!(
            String::from_utf8(out).unwrap(),
            "model             m\\u{1b}\n\
             load              2 clients, arrivals closed, seed 7\n\
             lengths           prompts 4 shared + 8 tokens, answers 2\n\
             requests          1 done, 1 failed, in 0.00 s: 500.00 a second\n\
             prompt tokens     12, 6000.0 a second\n\
             reused tokens     3, 25.0 % of the prompts'\n\
             answer tokens     2, 1000.0 a second\n\
             \n\
             MS              P50    P90    P99    MAX\n\
             first token     1.500  1.500  1.500  1.500\n\
             between tokens  0.500  0.500  0.500  0.500\n\
             whole request   2.000  2.000  2.000  2.000\n\
             daemon's queue  0.000  0.000  0.000  0.000\n\
             sent late by    0.000  0.000  0.000  0.000\n\
             \n\
             1 x Busy: later\\u{a}\n"
        );
    }
}
