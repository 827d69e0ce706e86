//! Logits and greedy tokens against another engine's, on 20 prompts: here of the CPU backend, in answers_on_gpu.rs of a
//! GPU.
//!
//! `tests/reference/expected` holds the answers, made by `cargo xtask oracle`; tests/reference/oracle.py documents how
//! they are made and stored. The test runs a model's parts itself, so that it can read the logits.

use std::fs;
use std::path::Path;

use rocmforge::backend::cpu::Isa;
use rocmforge::backend::{ActivationType, KvType};
use rocmforge::model::tokenizer::EncodeOptions;
use sha2::{Digest, Sha256};

use crate::common;
use crate::runner::Runner;

/// Largest difference of a log-probability above the floor, in nats. Single-precision sums of 576 to 1536 products in
/// another order differ by about 1e-5 after a layer. 30 layers and the head keep that below 1e-3. The rest allows for
/// tables and for the rounding of stored values.
const LOGP_DIFF_MAX: f64 = 2e-2;

/// Allowed loss of a computation mode, relative to llama.cpp's own 8-bit defaults.
#[derive(Clone, Copy)]
pub struct Loss {
    /// Mean KL divergence, as a multiple of llama.cpp's.
    pub ratio: f64,
    /// Largest KL divergence of one prompt, in nats.
    pub kl_max: f64,
    /// A greedy token is compared if the reference prefers it by more than this many nats.
    pub clear: f64,
}

/// 8-bit activations: outliers have fine codes beside the 8-bit ones.
const INT8: Loss = Loss { ratio: 0.5, kl_max: 0.01, clear: 0.5 };

/// An F16 cache with F32 weights, which are never multiplied with 8-bit activations: the cache causes all the loss.
pub const CACHE: Loss = Loss { ratio: 1.5, kl_max: f64::INFINITY, clear: 0.1 };

#[derive(serde::Deserialize)]
pub struct Expected {
    sha256: String,
    vocab: usize,
    logp_sha256: String,
    logp_step: f64,
    logp_floor: f64,
    default_kl_mean: f64,
    prompts: Vec<Prompt>,
}

#[derive(serde::Deserialize)]
pub struct Prompt {
    name: String,
    text: String,
    ids: Vec<u32>,
    /// Greedy continuation, end-of-generation tokens included.
    greedy: Vec<u32>,
    /// Margin between the two most likely tokens at each step, in nats.
    margins: Vec<f64>,
    /// Total probability of all tokens below the floor.
    rest: f64,
    /// Tokens above the floor and their log-probabilities; from the `.logp` file.
    #[serde(skip)]
    logp: Vec<(usize, f64)>,
}

/// The part of a reference to compare.
#[derive(Clone, Copy)]
pub struct Part {
    /// Number of prompts, from the first.
    pub prompts: usize,
    /// Steps of each prompt's greedy continuation.
    pub steps: usize,
}

impl Part {
    /// The whole reference.
    pub const WHOLE: Self = Self { prompts: usize::MAX, steps: usize::MAX };
}

/// Distance of a run from the reference.
#[derive(Default)]
struct Distance {
    kl_mean: f64,
    kl_max: f64,
    diff_max: f64,
    greedy_checked: usize,
    /// Steps with another token although the reference clearly preferred its own.
    greedy_wrong: Vec<String>,
}

#[test]
fn smollm2_in_single_precision_gives_the_reference() {
    let Some(model) = common::smollm2() else { return };
    let expected = Expected::read("smollm2", &model);
    let mut runner = Runner::open(&model, best_isa(), ActivationType::F32, KvType::F32);
    expected.check_exact(&mut runner, Part::WHOLE);
}

#[test]
fn smollm2_in_eight_bits_loses_half_of_what_llama_cpp_does() {
    let Some(model) = common::smollm2() else { return };
    let expected = Expected::read("smollm2", &model);
    let mut runner = Runner::open(&model, best_isa(), ActivationType::Int8, KvType::F16);
    expected.check_loss(&mut runner, Part::WHOLE, INT8);
}

/// Codes in the cache lose less than the 8-bit activations beside them: together no more than llama.cpp with an f16 cache.
#[test]
fn smollm2_with_codes_in_its_cache_loses_no_more_than_llama_cpp_does() {
    let Some(model) = common::smollm2() else { return };
    let expected = Expected::read("smollm2", &model);
    let mut runner = Runner::open(&model, best_isa(), ActivationType::Int8, KvType::Int8);
    expected.check_loss(&mut runner, Part::WHOLE, Loss { ratio: 1.0, ..INT8 });
}

#[test]
fn qwen_in_single_precision_gives_the_reference() {
    let Some(model) = common::qwen() else { return };
    let expected = Expected::read(common::QWEN, &model);
    let mut runner = Runner::open(&model, best_isa(), ActivationType::F32, KvType::F32);
    expected.check_exact(&mut runner, Part::WHOLE);
}

#[test]
fn qwen_in_eight_bits_loses_no_more_than_llama_cpp_does() {
    let Some(model) = common::qwen() else { return };
    let expected = Expected::read(common::QWEN, &model);
    let mut runner = Runner::open(&model, best_isa(), ActivationType::Int8, KvType::F16);
    expected.check_loss(&mut runner, Part::WHOLE, Loss { ratio: 1.0, ..INT8 });
}

#[test]
fn gemma_in_single_precision_gives_the_reference() {
    let Some(model) = common::gemma() else { return };
    let expected = Expected::read(common::GEMMA, &model);
    let mut runner = Runner::open(&model, best_isa(), ActivationType::F32, KvType::F32);
    expected.check_exact(&mut runner, Part::WHOLE);
}

#[test]
fn gemma_in_eight_bits_loses_no_more_than_llama_cpp_does() {
    let Some(model) = common::gemma() else { return };
    let expected = Expected::read(common::GEMMA, &model);
    let mut runner = Runner::open(&model, best_isa(), ActivationType::Int8, KvType::F16);
    expected.check_loss(&mut runner, Part::WHOLE, Loss { ratio: 1.0, ..INT8 });
}

#[test]
fn tinystories_gives_the_reference_with_every_instruction_set() {
    let model = common::tinystories();
    let expected = Expected::read("tinystories", &model);
    for isa in Isa::ALL {
        if !isa.is_available() {
            // CI cannot install instructions in a processor, so a missing set is no failure there either.
            common::not_run(&format!("this processor has no {}", isa.name()));
            continue;
        }
        let mut runner = Runner::open(&model, isa, ActivationType::F32, KvType::F32);
        expected.check_exact(&mut runner, Part::WHOLE);
        let mut runner = Runner::open(&model, isa, ActivationType::Int8, KvType::F16);
        expected.check_loss(&mut runner, Part::WHOLE, CACHE);
    }
}

#[test]
fn prompts_become_the_tokens_of_the_reference() {
    let mut models = vec![("tinystories", common::tinystories())];
    models.extend(common::smollm2().map(|path| ("smollm2", path)));
    models.extend(common::qwen().map(|path| (common::QWEN, path)));
    models.extend(common::gemma().map(|path| (common::GEMMA, path)));
    for (name, path) in models {
        let expected = Expected::read(name, &path);
        let runner = Runner::open(&path, Isa::Portable, ActivationType::F32, KvType::F32);
        for prompt in &expected.prompts {
            let options = EncodeOptions { add_special: true, parse_special: true };
            let ids = runner.model.tokenizer.encode(&prompt.text, options);
            // The longest prompt was cut to the model's context.
            assert!(ids.starts_with(&prompt.ids), "{name}, {}: {ids:?}", prompt.name);
            assert!(ids.len() == prompt.ids.len() || prompt.ids.len() > 400, "{name}, {}", prompt.name);
        }
    }
}

#[test]
fn a_wrong_answer_is_noticed() {
    // Checks the comparison itself: the right distribution has distance 0, one with two tokens exchanged has not.
    let path = common::tinystories();
    let expected = Expected::read("tinystories", &path);
    let prompt = &expected.prompts[0];
    let mut logits = vec![-20.0f32; expected.vocab];
    prompt.logp.iter().for_each(|&(token, logp)| logits[token] = logp as f32);
    assert!(expected.distance(prompt, &logits).0 < 1e-3);
    let (first, second) = (prompt.logp[0].0, prompt.logp[1].0);
    logits.swap(first, second);
    assert!(expected.distance(prompt, &logits).1 > LOGP_DIFF_MAX);
}

/// The best instruction set of this machine.
pub fn best_isa() -> Isa {
    Isa::ALL.into_iter().rfind(|isa| isa.is_available()).expect("portable code is not available")
}

impl Expected {
    pub fn read(name: &str, model: &Path) -> Self {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/reference/expected");
        let text =
            fs::read_to_string(dir.join(format!("{name}.json"))).expect("reading expected answers failed");
        let mut expected: Self = serde_json::from_str(&text).expect("expected answers have another form");
        assert_eq!(sha256(model), expected.sha256, "{} differs from the reference's file", model.display());
        let packed = dir.join(format!("{name}.logp"));
        assert_eq!(sha256(&packed), expected.logp_sha256, "{} belongs to another run", packed.display());
        let packed = fs::read(&packed).expect("reading expected log-probabilities failed");
        let mut rest = packed.as_slice();
        for prompt in &mut expected.prompts {
            prompt.logp = unpack(&mut rest, expected.vocab, expected.logp_step);
        }
        assert!(rest.is_empty(), "log-probabilities are left after the last prompt");
        assert!(expected.prompts.len() >= 20);
        expected
    }

    /// Checks that single precision gives the reference.
    #[track_caller]
    pub fn check_exact(&self, runner: &mut Runner, part: Part) {
        let far = self.compare(runner, part, 0.1);
        // Subtracts the rounding of the stored values.
        let most = LOGP_DIFF_MAX - self.logp_step / 2.0;
        let how = runner.describe();
        assert!(far.diff_max <= most, "{how}: a log-probability is off by {}, limit {most}", far.diff_max);
    }

    /// Checks that a coarser computation loses no more than `allowed`.
    #[track_caller]
    pub fn check_loss(&self, runner: &mut Runner, part: Part, allowed: Loss) {
        let far = self.compare(runner, part, allowed.clear);
        let most = allowed.ratio * self.default_kl_mean;
        let how = runner.describe();
        assert!(far.kl_mean <= most, "{how}: mean KL {}, limit {most}", far.kl_mean);
        assert!(far.kl_max <= allowed.kl_max, "{how}: KL of one prompt is {}, above the limit", far.kl_max);
    }

    /// Runs prompts and compares the distribution after each. Then follows the reference's greedy continuation and
    /// compares the token wherever the reference prefers it by more than `clear` nats.
    fn compare(&self, runner: &mut Runner, part: Part, clear: f64) -> Distance {
        let mut far = Distance::default();
        let prompts = &self.prompts[..part.prompts.min(self.prompts.len())];
        for prompt in prompts {
            runner.reset();
            let mut logits = runner.feed(&prompt.ids);
            let (kl, diff) = self.distance(prompt, &logits);
            far.kl_mean += kl / prompts.len() as f64;
            far.kl_max = far.kl_max.max(kl);
            far.diff_max = far.diff_max.max(diff);
            let steps = prompt.greedy.len().min(part.steps);
            for (step, &token) in prompt.greedy[..steps].iter().enumerate() {
                if prompt.margins[step] > clear {
                    far.greedy_checked += 1;
                    let got = argmax(&logits);
                    if got != token {
                        let behind = logits[got as usize] - logits[token as usize];
                        let Prompt { name, margins, .. } = prompt;
                        let margin = margins[step];
                        far.greedy_wrong.push(format!(
                            "{name}, step {step}: {got} is {behind:.3} above {token}, reference margin {margin}"
                        ));
                    }
                }
                // Logits after the last token are not compared.
                if step + 1 < steps {
                    logits = runner.feed(&[token]);
                }
            }
        }
        println!(
            "{}, {} prompts: mean KL {:.3e}, max KL {:.3e}, max difference {:.3e}, {} greedy tokens; llama.cpp's defaults: \
             mean KL {:.3e}",
            runner.describe(),
            prompts.len(),
            far.kl_mean,
            far.kl_max,
            far.diff_max,
            far.greedy_checked,
            self.default_kl_mean
        );
        let steps: usize = prompts.iter().map(|prompt| prompt.greedy.len().min(part.steps)).sum();
        assert!(
            2 * far.greedy_checked > steps,
            "the reference was clear about only {} of {steps} tokens",
            far.greedy_checked
        );
        assert!(
            far.greedy_wrong.is_empty(),
            "tokens differ from the reference's:\n{}",
            far.greedy_wrong.join("\n")
        );
        far
    }

    /// KL divergence of `logits` from the reference, and the largest difference of a log-probability above the floor.
    fn distance(&self, prompt: &Prompt, logits: &[f32]) -> (f64, f64) {
        assert_eq!(logits.len(), self.vocab);
        let got = log_softmax(logits);
        let mut above = vec![false; self.vocab];
        let (mut kl, mut diff, mut got_above) = (0.0, 0f64, 0.0);
        // The stored values are rounded; their true sum is known, so they are scaled to it.
        let stored: f64 = prompt.logp.iter().map(|(_, logp)| logp.exp()).sum();
        let scale = ((1.0 - prompt.rest) / stored).ln();
        for &(token, logp) in &prompt.logp {
            above[token] = true;
            diff = diff.max((got[token] - logp).abs());
            kl += (logp + scale).exp() * (logp + scale - got[token]);
            got_above += got[token].exp();
        }
        // A token below the floor in the reference must not be clearly above it here.
        let strays = (0..self.vocab).filter(|&token| !above[token]).map(|token| got[token] - self.logp_floor);
        diff = strays.fold(diff, f64::max);
        if prompt.rest > 0.0 {
            kl += prompt.rest * (prompt.rest / (1.0 - got_above).max(1e-30)).ln();
        }
        (kl, diff)
    }
}

/// Removes one prompt's tokens above the floor from the front of a `.logp` file.
fn unpack(rest: &mut &[u8], vocab: usize, step: f64) -> Vec<(usize, f64)> {
    let (bitmap, after) = rest.split_at(vocab.div_ceil(8));
    let tokens: Vec<usize> = (0..vocab).filter(|t| bitmap[t / 8] >> (t % 8) & 1 == 1).collect();
    let (codes, after) = after.split_at(2 * tokens.len());
    *rest = after;
    let logp = |code: &[u8]| -step * f64::from(u16::from_le_bytes([code[0], code[1]]));
    tokens.into_iter().zip(codes.chunks_exact(2).map(logp)).collect()
}

/// Log-probabilities from logits.
pub fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let most = logits.iter().fold(f64::NEG_INFINITY, |most, &x| most.max(f64::from(x)));
    let sum: f64 = logits.iter().map(|&x| (f64::from(x) - most).exp()).sum();
    logits.iter().map(|&x| f64::from(x) - most - sum.ln()).collect()
}

fn argmax(logits: &[f32]) -> u32 {
    let best = |a: usize, b: usize| if logits[b] > logits[a] { b } else { a };
    (0..logits.len()).reduce(best).expect("the vocabulary is empty") as u32
}

/// sha256 of a file, in hexadecimal.
fn sha256(path: &Path) -> String {
    let bytes = fs::read(path).expect("reading the file to hash failed");
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}
