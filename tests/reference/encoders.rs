//! Small random encoders against another engine, and their rows in steps of several texts.
//!
//! tests/support/src/forge/decoders/encoders.rs makes the files; `cargo xtask oracle` made tests/reference/expected/encoders.*
//! from the same bytes.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rocmforge::backend::cpu::{CpuBackend, CpuOptions, Slices};
use rocmforge::backend::hip::{HipBackend, HipOptions};
use rocmforge::backend::{ActivationType, KV_PAGE_TOKENS, KvType, StepBatch, StepLimits};
use rocmforge::model::embedding::{Pooled, Pooler, Pooling};
use rocmforge::model::{Model, ModelId};
use sha2::{Digest, Sha256};

use crate::forge;
use crate::gpu;
use crate::loaded::{Device, Loaded};
use crate::steps::{FLOAT, isas};

/// Largest difference of a number of an embedding. Norms keep these near 1.
const DIFF_MAX: f32 = 2e-5;

/// The same on a GPU, and there with 8-bit activations, and keys and values of 11 bits.
const GPU_DIFF_MAX: f32 = 1e-4;
const HALF_DIFF_MAX: f32 = 3e-2;

/// Most rows of a step, and pages of each sequence.
const ROWS_MAX: usize = 300;
const PAGES: usize = 4;

#[derive(serde::Deserialize)]
struct Expected {
    rows_sha256: String,
    ids: Vec<u32>,
    /// The numbers of tokens whose embedding was recorded.
    lengths: Vec<usize>,
    models: Vec<Encoder>,
    rankers: Vec<Ranker>,
}

#[derive(serde::Deserialize)]
struct Ranker {
    name: String,
    sha256: String,
    /// Queries and documents, the tokens of both as one text, and the document's score.
    pairs: Vec<(String, String)>,
    ids: Vec<Vec<u32>>,
    scores: Vec<f32>,
}

#[derive(serde::Deserialize)]
struct Encoder {
    name: String,
    sha256: String,
    width: usize,
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A small encoder on a device.
struct Rig<B> {
    model: Model,
    loaded: Loaded<B>,
}

impl<B: Device> Rig<B> {
    fn open(forge: &forge::Forge, backend: B) -> Self {
        let mut written = tempfile::NamedTempFile::new().unwrap();
        std::io::Write::write_all(&mut written, &forge.build().bytes).unwrap();
        let file = fs::File::open(written.path()).unwrap();
        let model = Model::open(ModelId(1), "encoder", vec![file]).unwrap();
        let limits = StepLimits { rows: ROWS_MAX, wanted_rows: 1 };
        let loaded = Loaded::new(model.plan.program.as_ref().clone(), backend, limits, 64);
        Self { model, loaded }
    }

    /// The embeddings of texts in one step, as the file pools them. Rows of the texts come one after the other, or in turns.
    fn embed(&mut self, texts: &[&[u32]], in_turns: bool) -> Vec<Vec<f32>> {
        let longest = texts.iter().map(|text| text.len()).max().unwrap();
        let mut rows: Vec<(usize, usize)> = Vec::new();
        if in_turns {
            rows.extend((0..longest).flat_map(|at| (0..texts.len()).map(move |text| (text, at))));
            rows.retain(|(text, at)| *at < texts[*text].len());
        } else {
            rows.extend(
                texts.iter().enumerate().flat_map(|(text, ids)| (0..ids.len()).map(move |at| (text, at))),
            );
        }
        let column = |of: &dyn Fn(usize, usize) -> u32| -> Vec<u32> {
            rows.iter().map(|(text, at)| of(*text, *at)).collect()
        };
        let pages: Vec<u32> = (0..(texts.len() * PAGES) as u32).rev().collect();
        assert!(longest <= PAGES * KV_PAGE_TOKENS && rows.len() <= ROWS_MAX);
        let batch = StepBatch {
            token_ids: &column(&|text, at| texts[text][at]),
            positions: &column(&|_, at| at as u32),
            row_sequences: &column(&|text, _| text as u32),
            page_tables: &pages,
            page_table_stride: PAGES,
            logits_rows: &[],
            recurrent: &[],
        };
        self.loaded.backend.get().begin_step(self.loaded.slot, &batch).unwrap();
        (0..self.loaded.program.head_part()).for_each(|part| self.loaded.run(part));
        let pooler = Arc::new(Pooler::new(&self.model, None, false).unwrap());
        let mut pooled: Vec<Pooled> = texts.iter().map(|_| Pooled::new(Arc::clone(&pooler))).collect();
        for (row, (text, _)) in (0..).zip(&rows) {
            let last = rows.iter().rposition(|(of, _)| of == text) == Some(row as usize);
            if last || pooler.pooling != Pooling::Last {
                pooled[*text].add(&self.loaded.backend.get().last_rows(row..row + 1).unwrap());
            }
        }
        pooled.iter().map(|pooled| pooled.embedding().unwrap()).collect()
    }
}

fn backend(options: CpuOptions, threads: usize) -> CpuBackend {
    CpuBackend::with_exact_threads(options, threads).unwrap()
}

fn expected() -> Expected {
    serde_json::from_str(include_str!("expected/encoders.json")).unwrap()
}

#[test]
fn documents_have_the_scores_of_the_reference() {
    let (expected, made) = (expected(), forge::rankers());
    assert_eq!(made.len(), expected.rankers.len());
    for ((name, forge), ranker) in made.iter().zip(&expected.rankers) {
        assert_eq!((*name, sha256(&forge.build().bytes)), (ranker.name.as_str(), ranker.sha256.clone()));
        let mut rig = Rig::open(forge, backend(FLOAT, 2));
        let pooler = Arc::new(Pooler::scoring(&rig.model).unwrap());
        assert!(ranker.pairs.len() == ranker.ids.len() && ranker.ids.len() == ranker.scores.len());
        for (((query, document), ids), want) in ranker.pairs.iter().zip(&ranker.ids).zip(&ranker.scores) {
            assert_eq!(rig.model.encode_pair(query, document).unwrap(), *ids);
            rig.embed(&[ids], false);
            let mut pooled = Pooled::new(Arc::clone(&pooler));
            let count = ids.len() as u32;
            let rows = match pooler.pooling {
                Pooling::First => 0..1,
                Pooling::Last => count - 1..count,
                Pooling::Mean => 0..count,
            };
            pooled.add(&rig.loaded.backend.get().last_rows(rows).unwrap());
            let got = pooled.embedding().unwrap();
            assert!(got.len() == 1 && (got[0] - want).abs() < DIFF_MAX, "{name}: {got:?} {want}");
        }
        let spread = |of: fn(f32, f32) -> f32| ranker.scores.iter().copied().reduce(of).unwrap();
        assert!(spread(f32::max) - spread(f32::min) > 0.1, "{name}: all scores are alike");
    }
}

#[test]
fn every_encoder_gives_the_reference() {
    check(|| Some(backend(FLOAT, 2)), DIFF_MAX);
}

#[test]
fn every_encoder_gives_the_reference_on_a_gpu() {
    for (activations, kv, most) in
        [(ActivationType::F32, KvType::F32, GPU_DIFF_MAX), (ActivationType::Int8, KvType::F16, HALF_DIFF_MAX)]
    {
        let options = HipOptions { activations, kv, upload_threads: 1, ..HipOptions::default() };
        let open = || Some(HipBackend::with_runtime(gpu::runtime()?, options.clone()).unwrap());
        check(open, most);
    }
}

/// Compares embeddings on the devices that `open` opens with the reference.
fn check<B: Device>(open: impl Fn() -> Option<B>, most: f32) {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/reference/expected");
    let expected = expected();
    let kept = fs::read(dir.join("encoders.rows")).unwrap();
    assert_eq!(sha256(&kept), expected.rows_sha256, "encoders.rows belongs to another run");
    let mut kept = kept.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes));
    let made = forge::encoders();
    assert_eq!(made.len(), expected.models.len());
    for ((name, forge), model) in made.iter().zip(&expected.models) {
        assert_eq!(*name, model.name);
        assert_eq!(sha256(&forge.build().bytes), model.sha256, "{name}: the reference used another file");
        let Some(device) = open() else { return };
        let mut rig = Rig::open(forge, device);
        let mut worst = 0f32;
        for &length in &expected.lengths {
            let want: Vec<f32> = kept.by_ref().take(model.width).collect();
            // A short text beside it, in the same step.
            let ids = &expected.ids[..length];
            let got = rig.embed(&[ids, &expected.ids[7..9]], false).remove(0);
            assert_eq!((got.len(), want.len()), (model.width, model.width));
            worst = got.iter().zip(&want).map(|(got, want)| (got - want).abs()).fold(worst, f32::max);
            assert!(worst <= most, "{name}: off by {worst:.1e} with {length} tokens");
        }
        println!("{name}: off by {worst:.1e} at most");
    }
    assert_eq!(kept.next(), None, "the reference has embeddings of more models");
}

#[test]
fn texts_beside_it_threads_and_instructions_change_no_bit_of_an_embedding() {
    let ids: Vec<u32> = (0..120).map(|i| (i * 53 + 7) % 250 + 5).collect();
    let texts: [&[u32]; 4] = [&ids[..1], &ids[3..80], &ids[..120], &ids[40..74]];
    for (name, forge) in forge::encoders() {
        for options in [FLOAT, CpuOptions { kv: KvType::F16, activations: ActivationType::Int8, ..FLOAT }] {
            let mut rig = Rig::open(&forge, backend(options, 1));
            let want: Vec<_> = texts.iter().map(|text| rig.embed(&[text], false).remove(0)).collect();
            assert!(want[1] != want[3]);
            for (isa, threads) in isas().into_iter().flat_map(|isa| [(isa, 1), (isa, 3)]) {
                let options = CpuOptions { isa: Some(isa), ..options };
                let mut rig = Rig::open(&forge, backend(options, threads));
                for in_turns in [false, true] {
                    let got = rig.embed(&texts, in_turns);
                    assert!(got == want, "{name} on {isa}, {threads} threads, in turns: {in_turns}");
                }
            }
            let mut cut = backend(options, 2);
            cut.set_slices(Slices { pause: Duration::ZERO, ..Slices::default() });
            let mut rig = Rig::open(&forge, cut);
            assert!(rig.embed(&texts, false) == want, "{name} in pieces");
            assert!(rig.loaded.pauses > 10, "{name}: {} pauses", rig.loaded.pauses);
        }
    }
}

#[test]
fn a_fixed_order_of_sums_makes_texts_beside_it_change_no_bit_on_a_gpu() {
    let ids: Vec<u32> = (0..120).map(|i| (i * 53 + 7) % 250 + 5).collect();
    let texts: [&[u32]; 4] = [&ids[..1], &ids[3..80], &ids[..120], &ids[40..74]];
    for (name, forge) in forge::encoders() {
        let Some(runtime) = gpu::runtime() else { return };
        let options = HipOptions { deterministic: true, upload_threads: 1, ..HipOptions::default() };
        let mut rig = Rig::open(&forge, HipBackend::with_runtime(runtime, options).unwrap());
        let want: Vec<_> = texts.iter().map(|text| rig.embed(&[text], false).remove(0)).collect();
        assert!(want[1] != want[3]);
        assert!(rig.embed(&texts, false) == want, "{name}");
    }
}

#[test]
fn each_token_changes_all_rows_of_its_text() {
    let ids: Vec<u32> = (0..70).map(|i| (i * 53 + 7) % 250 + 5).collect();
    for (name, forge) in forge::encoders() {
        let mut rig = Rig::open(&forge, backend(FLOAT, 2));
        let mut first_row = |ids: &[u32]| {
            rig.embed(&[ids], false);
            rig.loaded.backend.get().last_rows(0..1).unwrap()
        };
        let whole = first_row(&ids);
        for at in [0, 33, 69] {
            let mut other = ids.clone();
            other[at] = 4;
            assert!(first_row(&other) != whole, "{name}: token {at} changes nothing before it");
        }
    }
}
