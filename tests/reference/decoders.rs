//! Small random decoders of each architecture and position scaling against another engine, in exact arithmetic.
//!
//! tests/support/src/forge/decoders.rs makes the files; `cargo xtask oracle` made tests/reference/expected/decoders.* and
//! newer.* from the same bytes. That engine reads GELU from a coarse table, so answers of decoders with GELU come from
//! plain.py, which agrees with the engine on all others.

use std::fs;
use std::path::Path;
use std::time::Duration;

use rocmforge::backend::cpu::{CpuBackend, CpuOptions, Slices};
use rocmforge::backend::hip::{HipBackend, HipOptions};
use rocmforge::backend::{ActivationType, Backend, KvType};
use rocmforge::model::{Model, ModelId};
use sha2::{Digest, Sha256};

use crate::common;
use crate::forge;
use crate::gpu;
use crate::logits::{best_isa, log_softmax};
use crate::on_gpu::on_gpu;
use crate::runner::Runner;
use crate::steps::{FLOAT, isas};

/// Largest difference of a log-probability, in nats. Sums in another order differ by some 1e-6. The other engine's
/// angles are in single precision: 1e-5 at these positions.
pub const LOGP_DIFF_MAX: f64 = 1e-4;

/// The same with keys and values rounded to 11 bits; the weights are F32, which are never multiplied with 8-bit
/// activations. The five layers of smollm3 are furthest off, by 2.1e-2.
const HALF_DIFF_MAX: f64 = 2.5e-2;

/// Decoders with their names.
type Made = Vec<(&'static str, forge::Forge)>;

#[derive(serde::Deserialize)]
struct Expected {
    logp_sha256: String,
    ids: Vec<u32>,
    /// The numbers of tokens after which the next token's distribution was recorded.
    lengths: Vec<usize>,
    models: Vec<Decoder>,
}

#[derive(serde::Deserialize)]
struct Decoder {
    name: String,
    sha256: String,
    vocab: usize,
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Feeds `ids` to a runner without a sequence; returns the last logits.
type Feed = fn(&mut Runner, &[u32]) -> Vec<f32>;

#[test]
fn every_architecture_gives_the_reference() {
    let open = |path: &Path| Some(Runner::open(path, best_isa(), ActivationType::F32, KvType::F32));
    check(open, (feed_whole, LOGP_DIFF_MAX), |_| true);
}

/// All tokens in one step.
fn feed_whole(runner: &mut Runner, ids: &[u32]) -> Vec<f32> {
    runner.feed(ids)
}

/// The last two tokens go one at a time, as steps that can be replayed.
fn feed_in_steps(runner: &mut Runner, ids: &[u32]) -> Vec<f32> {
    let (first, rest) = ids.split_at(ids.len().saturating_sub(2).max(1));
    rest.chunks(1).fold(runner.feed(first), |_, token| runner.feed(token))
}

#[test]
fn every_architecture_gives_the_reference_on_a_gpu() {
    let open = |path: &Path| on_gpu(path, ActivationType::F32, KvType::F32);
    check(open, (feed_in_steps, LOGP_DIFF_MAX), |_| true);
}

/// The test above feeds all lengths. Here the longest would take two thirds of the time, and no other kernel.
#[test]
fn every_architecture_gives_the_reference_on_a_gpu_with_a_half_precision_cache() {
    let open = |path: &Path| on_gpu(path, ActivationType::Int8, KvType::F16);
    let some = |length| common::is_long() || length == 5 || length == 40;
    check(open, (feed_in_steps, HALF_DIFF_MAX), some);
}

#[test]
fn a_gpu_computes_what_every_small_model_needs() {
    let Some(runtime) = gpu::runtime() else { return };
    let backend = HipBackend::with_runtime(runtime, HipOptions::default()).unwrap();
    let scratch = tempfile::tempdir().unwrap();
    for (name, forge) in forge::newer_decoders().into_iter().chain(forge::encoders()) {
        let path = scratch.path().join(name);
        fs::write(&path, forge.build().bytes).unwrap();
        let model = Model::open(ModelId(1), name, vec![fs::File::open(&path).unwrap()]).unwrap();
        let refused = backend.refuses()(&model.plan.program).map(|error| error.to_string());
        assert_eq!(refused, None, "{name}");
    }
}

#[test]
fn threads_instructions_and_pauses_change_no_bit_of_latent_attention_and_streams() {
    let ids: Vec<u32> = (0..86).map(|i| (i * 53 + 7) % 250 + 3).collect();
    let scratch = tempfile::tempdir().unwrap();
    let such = |name: &str| name.starts_with("deepseek2") || name.starts_with("gemma3n");
    let made = forge::newer_decoders().into_iter().filter(|(name, _)| such(name));
    for (name, forge) in made {
        let path = scratch.path().join(name);
        fs::write(&path, forge.build().bytes).unwrap();
        // A prompt in one step, then tokens one at a time.
        let logits = |options: CpuOptions, threads: usize, slices: Slices| {
            let mut backend = CpuBackend::with_exact_threads(options, threads).unwrap();
            backend.set_slices(slices);
            let mut runner = Runner::on(&path, Box::new(backend));
            let (first, rest) = ids.split_at(80);
            rest.chunks(1).fold(runner.feed(first), |_, token| runner.feed(token))
        };
        for options in [FLOAT, CpuOptions { kv: KvType::F16, ..FLOAT }] {
            let want = logits(options, 1, Slices::default());
            for (isa, threads) in isas().into_iter().flat_map(|isa| [(isa, 1), (isa, 3)]) {
                let options = CpuOptions { isa: Some(isa), ..options };
                let got = logits(options, threads, Slices::default());
                assert!(got == want, "{name} on {isa}, {threads} threads");
            }
            let pauses = Slices { pause: Duration::ZERO, ..Slices::default() };
            assert!(logits(options, 2, pauses) == want, "{name} in pieces");
            let apart = CpuOptions { unfused: true, ..options };
            assert!(logits(apart, 2, Slices::default()) == want, "{name}, each operation by itself");
        }
    }
}

/// Ends of chunks lie inside of what convolutions see, and states pass between steps of one row and of many.
#[test]
fn steps_of_another_sequence_inside_a_step_change_no_bit() {
    let ids: Vec<u32> = (0..50).map(|i| (i * 53 + 7) % 250 + 3).collect();
    let scratch = tempfile::tempdir().unwrap();
    for (name, forge) in forge::decoders() {
        let path = scratch.path().join(name);
        fs::write(&path, forge.build().bytes).unwrap();
        let open = |pause: Duration| {
            let mut backend = CpuBackend::with_exact_threads(FLOAT, 2).unwrap();
            backend.set_slices(Slices { pause, ..Slices::default() });
            Runner::on(&path, Box::new(backend))
        };
        let want = open(Slices::default().pause).feed_in(&ids, 20);
        let mut runner = open(Duration::ZERO);
        runner.interrupt_beside();
        assert!(runner.feed_in(&ids, 20) == want, "{name}");
    }
}

#[test]
fn cuts_threads_instructions_and_pauses_change_no_bit_of_recurrent_layers() {
    let ids: Vec<u32> = (0..50).map(|i| (i * 53 + 7) % 250 + 3).collect();
    let scratch = tempfile::tempdir().unwrap();
    let mut seen = 0;
    for (name, forge) in forge::newer_decoders() {
        let path = scratch.path().join(name);
        fs::write(&path, forge.build().bytes).unwrap();
        let open = |options: CpuOptions, threads: usize, slices: Slices| {
            let mut backend = CpuBackend::with_exact_threads(options, threads).unwrap();
            backend.set_slices(slices);
            Runner::on(&path, Box::new(backend))
        };
        let mut runner = open(FLOAT, 1, Slices::default());
        if !runner.model.plan.program.is_recurrent() {
            continue;
        }
        seen += 1;
        let want = runner.feed(&ids);
        for rows in [1, 2, 7, 33] {
            runner.reset();
            assert!(runner.feed_in(&ids, rows) == want, "{name} in chunks of {rows}");
        }
        for (isa, threads) in isas().into_iter().flat_map(|isa| [(isa, 1), (isa, 3)]) {
            let options = CpuOptions { isa: Some(isa), ..FLOAT };
            assert!(
                open(options, threads, Slices::default()).feed(&ids) == want,
                "{name} on {isa}, {threads} threads"
            );
        }
        let pauses = Slices { pause: Duration::ZERO, ..Slices::default() };
        let mut runner = open(FLOAT, 2, pauses);
        runner.interrupt();
        assert!(runner.feed_in(&ids, 20) == want, "{name} in pieces, beside another model's steps");
        let mut runner = open(FLOAT, 2, pauses);
        runner.interrupt_beside();
        assert!(runner.feed_in(&ids, 20) == want, "{name} in pieces, beside another sequence's steps");
        let apart = CpuOptions { unfused: true, ..FLOAT };
        assert!(
            open(apart, 2, Slices::default()).feed_in(&ids, 9) == want,
            "{name}, each operation by itself"
        );
    }
    assert_eq!(seen, 15, "decoders with recurrent layers");
}

/// Compares the runners that `open` makes with the reference, for some lengths.
fn check(open: impl Fn(&Path) -> Option<Runner>, how: (Feed, f64), lengths: fn(usize) -> bool) {
    check_list("decoders", forge::decoders(), &open, how, lengths);
    check_list("newer", forge::newer_decoders(), &open, how, lengths);
}

fn check_list(
    list: &str,
    made: Made,
    open: &impl Fn(&Path) -> Option<Runner>,
    (feed, most): (Feed, f64),
    lengths: fn(usize) -> bool,
) {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/reference/expected");
    let expected: Expected =
        serde_json::from_str(&fs::read_to_string(dir.join(format!("{list}.json"))).unwrap()).unwrap();
    let logp = fs::read(dir.join(format!("{list}.logp"))).unwrap();
    assert_eq!(sha256(&logp), expected.logp_sha256, "{list}.logp belongs to another run");
    let mut logp = logp.as_chunks().0.iter().map(|&bytes| f64::from(f32::from_le_bytes(bytes)));
    let names = |models: &[Decoder]| models.iter().map(|m| m.name.clone()).collect::<Vec<_>>();
    assert_eq!(made.iter().map(|(name, _)| *name).collect::<Vec<_>>(), names(&expected.models));
    let scratch = tempfile::tempdir().unwrap();
    for ((name, forge), model) in made.iter().zip(&expected.models) {
        let bytes = forge.build().bytes;
        assert_eq!(
            sha256(&bytes),
            model.sha256,
            "{name}: the forge made another file than the reference used"
        );
        let want: Vec<f64> = logp.by_ref().take(model.vocab * expected.lengths.len()).collect();
        let path = scratch.path().join(name);
        fs::write(&path, bytes).unwrap();
        let Some(mut runner) = open(&path) else { return };
        let mut worst = 0f64;
        let answers = expected.lengths.iter().zip(want.chunks(model.vocab));
        for (&length, want) in answers.filter(|(length, _)| lengths(**length)) {
            runner.reset();
            let got = log_softmax(&feed(&mut runner, &expected.ids[..length]));
            assert_eq!(got.len(), model.vocab);
            worst = got.iter().zip(want).map(|(got, want)| (got - want).abs()).fold(worst, f64::max);
            assert!(worst <= most, "{name}: off by {worst:.1e} after {length} tokens");
        }
        println!("{name} on {}: off by {worst:.1e} at most", runner.describe());
    }
    assert_eq!(logp.next(), None, "the reference has answers of more models");
}
