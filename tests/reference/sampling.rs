//! The samplers on fixed logits, compared with an independent model of them in Python: `sampling.py`.

use std::io::Write;
use std::process::{Command, Stdio};

use rocmforge::backend::chain::{distribution, draw};
use rocmforge::backend::{Chain, MASKED_LOGIT, SampleRow};
use rocmforge::scheduler::{Dry, Mirostat};
use serde_json::{Value, json};

use crate::common;

/// Gives these cases to the model; it fails with the first that is wrong.
fn check(cases: &[Value]) {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/reference/sampling.py");
    let mut command = Command::new("python3");
    command.args([script, "check"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let Ok(mut child) = command.spawn() else {
        return common::not_run("python3 is not installed");
    };
    let lines: String = cases.iter().map(|case| format!("{case}\n")).collect();
    let _ = child.stdin.take().unwrap().write_all(lines.as_bytes()); // a wrong case ends the program early
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), cases.len().to_string());
}

/// Numbers in [0, 1), the same in every run.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as f32 / (1u64 << 24) as f32
    }

    fn below(&mut self, count: usize) -> usize {
        ((self.next() * count as f32) as usize).min(count - 1)
    }

    fn one_of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }

    /// Logits as of a model: some tokens are likely, most are not. About one of eight may not be drawn.
    fn logits(&mut self, count: usize, masked: bool) -> Vec<f32> {
        let flat = self.one_of(&[0.02, 1.0, 4.0, 9.0]);
        let mut logits: Vec<f32> = (0..count).map(|_| (self.next() + self.next() - 1.0) * flat).collect();
        (0..self.below(6)).for_each(|_| {
            let at = self.below(count);
            logits[at] = 6.0 + self.next() * 3.0;
        });
        let mut mask = |at: usize| masked && at > 0 && self.below(8) == 0;
        (0..count).filter(|at| mask(*at)).for_each(|at| logits[at] = MASKED_LOGIT);
        logits
    }
}

fn settings(row: &SampleRow, chain: &Chain) -> Value {
    json!({
        "temperature": row.temperature, "top_k": row.top_k, "top_p": row.top_p, "min_p": row.min_p,
        "top_n_sigma": chain.top_n_sigma, "typical_p": chain.typical_p, "xtc_probability": chain.xtc_probability,
        "xtc_threshold": chain.xtc_threshold, "dynatemp_range": chain.dynatemp_range,
        "dynatemp_exponent": chain.dynatemp_exponent, "mirostat": chain.mirostat,
    })
}

fn plain() -> SampleRow {
    SampleRow {
        temperature: 1.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        seed: 1,
        position: 0,
        top_logprobs: 0,
        changes: None,
        mask: None,
        chain: None,
    }
}

fn case(logits: &[f32], row: &SampleRow, chain: &Chain) -> Value {
    let kept = distribution(logits, row, chain).unwrap();
    let logits: Vec<Option<f32>> = logits.iter().map(|l| (*l > MASKED_LOGIT).then_some(*l)).collect();
    json!({ "logits": logits, "settings": settings(row, chain), "kept": kept })
}

#[test]
fn each_sampler_alone_keeps_what_the_model_keeps() {
    let random = &mut Numbers(1);
    let mut cases = Vec::new();
    for round in 0..40 {
        let logits = random.logits([1, 2, 50, 1000][round % 4], round % 3 == 0);
        let mut add = |row: SampleRow, chain: Chain| cases.push(case(&logits, &row, &chain));
        for n in [0.5, 1.0, 2.5] {
            add(plain(), Chain { top_n_sigma: n, ..Chain::NONE });
        }
        for p in [0.0, 0.1, 0.5, 0.95] {
            add(plain(), Chain { typical_p: p, ..Chain::NONE });
        }
        for threshold in [0.0, 0.01, 0.1, 0.5, 0.6] {
            add(plain(), Chain { xtc_probability: 1.0, xtc_threshold: threshold, ..Chain::NONE });
        }
        for (range, exponent) in [(0.5, 1.0), (1.5, 0.5), (0.25, 3.0)] {
            let chain = Chain { dynatemp_range: range, dynatemp_exponent: exponent, ..Chain::NONE };
            add(SampleRow { temperature: 0.75, ..plain() }, chain);
        }
        for cut in [-1.0, 0.5, 3.0, 8.0, 20.0] {
            let temperature = random.one_of(&[0.5, 1.0, 1.5]);
            add(SampleRow { temperature, ..plain() }, Chain { mirostat: Some(cut), ..Chain::NONE });
        }
    }
    check(&cases);
}

#[test]
fn all_samplers_together_come_in_the_order_of_the_model() {
    let random = &mut Numbers(2);
    let mut cases = Vec::new();
    for round in 0..600 {
        let logits = random.logits([5, 60, 700][round % 3], round % 4 == 0);
        let row = SampleRow {
            temperature: random.one_of(&[0.3, 0.8, 1.0, 1.7]),
            top_k: random.one_of(&[0, 1, 7, 40]),
            top_p: random.one_of(&[1.0, 0.95, 0.4]),
            min_p: random.one_of(&[0.0, 0.05, 0.3]),
            ..plain()
        };
        let chain = Chain {
            top_n_sigma: random.one_of(&[0.0, 1.0, 2.0]),
            typical_p: random.one_of(&[1.0, 0.9, 0.5]),
            xtc_probability: random.one_of(&[0.0, 1.0]),
            xtc_threshold: random.one_of(&[0.1, 0.3]),
            dynatemp_range: random.one_of(&[0.0, 0.5]),
            dynatemp_exponent: random.one_of(&[1.0, 2.0]),
            mirostat: None,
        };
        cases.push(case(&logits, &row, &chain));
    }
    check(&cases);
}

#[test]
fn tokens_are_drawn_as_often_as_they_are_likely() {
    const DRAWS: u32 = 20_000;
    let logits: Vec<f32> = (0..30u8).map(|id| f32::from(id % 10) / -2.0).collect();
    let frequencies = |chain: &Chain| {
        let mut counts = vec![0u32; logits.len()];
        for position in 0..DRAWS {
            let (id, surprise) = draw(&logits, &SampleRow { position, ..plain() }, chain).unwrap();
            counts[id as usize] += 1;
            assert!(surprise >= 0.0);
        }
        counts
    };
    let near = |count: u32, p: f64| {
        let (mean, sigma) = (f64::from(DRAWS) * p, (f64::from(DRAWS) * p * (1.0 - p)).sqrt());
        assert!((f64::from(count) - mean).abs() <= 4.5 * sigma + 1e-9, "{count} instead of {mean}");
    };
    let typical = Chain { typical_p: 0.8, ..Chain::NONE };
    let counts = frequencies(&typical);
    let kept = distribution(&logits, &plain(), &typical).unwrap();
    assert_eq!(counts.iter().sum::<u32>(), DRAWS);
    kept.iter().for_each(|(id, p)| near(counts[*id as usize], *p));
    // A third of the draws excludes top choices: the frequencies are a third of the one and two thirds of the other.
    let xtc = |probability| Chain { xtc_probability: probability, xtc_threshold: 0.05, ..Chain::NONE };
    let all = |chain: &Chain| {
        let mut all = vec![0.0; logits.len()];
        distribution(&logits, &plain(), chain).unwrap().iter().for_each(|(id, p)| all[*id as usize] = *p);
        all
    };
    let (with, without) = (all(&xtc(1.0)), all(&Chain::NONE));
    assert_ne!(with, without);
    let counts = frequencies(&xtc(1.0 / 3.0));
    for (id, count) in counts.iter().enumerate() {
        near(*count, with[id] / 3.0 + without[id] * 2.0 / 3.0);
    }
}

#[test]
fn mirostat_follows_the_surprise_and_reaches_what_it_aims_at() {
    let random = &mut Numbers(4);
    let (temperature, aim) = (1.0, Mirostat { tau: 3.0, eta: 0.1 });
    let (mut cut, mut draws, mut surprises) = (aim.first(), Vec::new(), Vec::new());
    for position in 0..400 {
        let logits: Vec<f32> = (0..300).map(|_| (random.next() + random.next() - 1.0) * 6.0).collect();
        let row = SampleRow { temperature, position, ..plain() };
        let chain = Chain { mirostat: Some(cut), ..Chain::NONE };
        let (token, surprise) = draw(&logits, &row, &chain).unwrap();
        draws.push(json!({ "cut": cut, "logits": logits, "token": token }));
        surprises.push(surprise);
        cut = aim.next(cut, surprise);
    }
    let settings = json!({ "temperature": temperature, "tau": aim.tau, "eta": aim.eta });
    check(&[json!({ "settings": settings, "draws": draws })]);
    let mean = surprises[100..].iter().sum::<f32>() / 300.0;
    assert!((mean - aim.tau).abs() < 0.1, "{mean} bits");
}

#[test]
fn dry_penalises_what_the_model_penalises() {
    const TEXTS: [&str; 8] = ["a", " b", "\n", "c:", "\"d", "e", "**", " f\n"];
    let random = &mut Numbers(5);
    let mut cases = Vec::new();
    for round in 0..800 {
        let kinds = random.one_of(&[1, 2, 3, 8]);
        let tokens: Vec<u32> = (0..random.below(90)).map(|_| random.below(kinds) as u32).collect();
        let breakers: &[&str] = [&["\n", ":", "\"", "*"][..], &[], &["a b"], &["e", "\nc"]][round % 4];
        let dry = Dry {
            multiplier: random.one_of(&[0.5, 0.8]),
            base: random.one_of(&[1.0, 1.75, 3.0]),
            allowed_length: random.one_of(&[0, 1, 2, 5]),
            last: random.one_of(&[0, 10, 4096]),
            breakers: breakers.iter().map(|text| (*text).to_owned()).collect(),
        };
        let less = dry.less(&tokens, |id| TEXTS[id as usize].as_bytes());
        let settings = json!({ "multiplier": dry.multiplier, "base": dry.base, "last": dry.last,
            "allowed_length": dry.allowed_length, "breakers": dry.breakers });
        let less: Vec<(u32, f32)> = less.into_iter().collect();
        cases.push(json!({ "tokens": tokens, "texts": TEXTS, "settings": settings, "less": less }));
    }
    check(&cases);
}
