//! One request at a time: the speeds of prompts and of answers, as llama-bench reports them.

use serde::Serialize;

use super::link::{Job, Sample};

/// The results.
#[derive(Debug, Serialize)]
pub struct Single {
    pub model: String,
    pub seed: u64,
    pub tests: Vec<Test>,
}

/// The result of one test.
#[derive(Debug, PartialEq, Serialize)]
pub struct Test {
    /// `pp` or `tg`, and the number of tokens.
    pub test: String,
    /// Of each repetition.
    pub tokens_per_s: Vec<f64>,
    pub mean_tokens_per_s: f64,
    /// Of the sample, with one degree of freedom less than repetitions; 0 for a single one.
    pub stddev_tokens_per_s: f64,
}

/// The tests: a prompt with one answer token, then an answer to a prompt of one token.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub prompt_tokens: u32,
    /// Tokens measured; the request asks for one more, because the first belongs to its prompt.
    pub answer_tokens: u32,
    pub repetitions: u32,
}

impl Plan {
    /// Requests of one test: one that is not measured, which loads weights, and the repetitions.
    fn requests(self) -> u64 {
        u64::from(self.repetitions) + 1
    }

    /// Requests of both tests.
    pub fn total(self) -> u64 {
        self.requests() * 2
    }

    /// The request of this number.
    pub fn job(self, number: u64) -> Option<Job> {
        let (prompt_tokens, answer_tokens) = if number < self.requests() {
            (self.prompt_tokens, 1)
        } else {
            (1, self.answer_tokens.saturating_add(1))
        };
        (number < self.total()).then_some(Job { number, due_us: None, prompt_tokens, answer_tokens })
    }

    /// The results of the repetitions that were answered.
    pub fn tests(self, samples: &[Sample]) -> Vec<Test> {
        let of = |from: u64, rate: fn(&Sample) -> Option<f64>| -> Vec<f64> {
            let measured = from + 1..from + self.requests();
            let answered = samples.iter().filter(|s| measured.contains(&s.number) && s.error.is_none());
            answered.filter_map(rate).collect()
        };
        let tests = [
            (format!("pp{}", self.prompt_tokens), of(0, prompt_rate)),
            (format!("tg{}", self.answer_tokens), of(self.requests(), answer_rate)),
        ];
        tests
            .into_iter()
            .filter(|(_, rates)| !rates.is_empty())
            .map(|(test, rates)| Test::of(test, rates))
            .collect()
    }
}

impl Test {
    fn of(test: String, rates: Vec<f64>) -> Self {
        let count = rates.len() as f64;
        let mean = rates.iter().sum::<f64>() / count;
        let squares = rates.iter().map(|rate| (rate - mean).powi(2)).sum::<f64>();
        let stddev = if rates.len() > 1 { (squares / (count - 1.0)).sqrt() } else { 0.0 };
        Self { test, tokens_per_s: rates, mean_tokens_per_s: mean, stddev_tokens_per_s: stddev }
    }
}

/// Prompt tokens a second until the first token came.
fn prompt_rate(sample: &Sample) -> Option<f64> {
    rate(sample.prompt_tokens, sample.first_us?.saturating_sub(sample.sent_us))
}

/// Tokens a second after the first.
fn answer_rate(sample: &Sample) -> Option<f64> {
    rate(sample.gaps_us.len() as u64, sample.gaps_us.iter().sum())
}

fn rate(tokens: u64, us: u64) -> Option<f64> {
    (tokens > 0 && us > 0).then(|| tokens as f64 * 1e6 / us as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAN: Plan = Plan { prompt_tokens: 100, answer_tokens: 4, repetitions: 2 };

    #[test]
    fn each_test_begins_with_a_request_that_is_not_measured() {
        let jobs: Vec<_> = (0..9).map_while(|number| PLAN.job(number)).collect();
        assert_eq!(jobs.len() as u64, PLAN.total());
        let lengths: Vec<_> = jobs.iter().map(|job| (job.prompt_tokens, job.answer_tokens)).collect();
        assert_eq!(lengths, [(100, 1), (100, 1), (100, 1), (1, 5), (1, 5), (1, 5)]);
    }

    #[test]
    fn means_and_deviations_are_of_the_measured_repetitions() {
        let prompt = |number, ms: u64| Sample {
            number,
            sent_us: 5,
            first_us: Some(5 + ms * 1000),
            prompt_tokens: 100,
            ..Sample::default()
        };
        let answer = |number, gap_us| Sample { number, gaps_us: vec![gap_us; 4], ..Sample::default() };
        let samples =
            [prompt(0, 9000), prompt(1, 100), prompt(2, 50), answer(3, 1), answer(4, 1000), answer(5, 1000)];
        let tests = PLAN.tests(&samples);
        let expected = [
            // 1000 and 2000 tokens a second: 500 from the mean, each.
            Test {
                test: "pp100".into(),
                tokens_per_s: vec![1000.0, 2000.0],
                mean_tokens_per_s: 1500.0,
                stddev_tokens_per_s: 500_000f64.sqrt(),
            },
            Test {
                test: "tg4".into(),
                tokens_per_s: vec![1000.0; 2],
                mean_tokens_per_s: 1000.0,
                stddev_tokens_per_s: 0.0,
            },
        ];
        assert_eq!(tests, expected);
        assert_eq!(PLAN.tests(&samples[..1]), []);
    }
}
