//! Runs one sequence through a model's parts and returns its logits.

use std::fs::File;
use std::path::Path;

use rocmforge::backend::cpu::{CpuBackend, CpuOptions, Isa};
use rocmforge::backend::{
    ActivationType, Backend, KV_PAGE_TOKENS, KvType, ModelSlot, RecurrentPlace, StepBatch, StepLimits,
};
use rocmforge::model::{Model, ModelId};

use super::loaded::Loaded;

/// Rows per step: fewer than the longest prompt, so that prompts are split into chunks, and not a multiple of a page.
const ROWS_MAX: usize = 100;

/// Positions a sequence may fill.
const CONTEXT: usize = 512;

/// Places of recurrent states: each step reads what the one before it wrote, and writes the other.
const PLACES: [RecurrentPlace; 2] =
    [RecurrentPlace { before: Some(5), after: 2 }, RecurrentPlace { before: Some(2), after: 5 }];

/// The place of a sequence that begins.
const FIRST: [RecurrentPlace; 1] = [RecurrentPlace { before: None, after: 2 }];

/// A model, a backend, one sequence.
pub struct Runner {
    pub model: Model,
    loaded: Loaded<Box<dyn Backend>>,
    pages: Vec<u32>,
    position: usize,
    /// Steps so far.
    steps: usize,
    /// Another open model on the same device, whose steps come between the parts of this one's.
    other: Option<ModelSlot>,
}

impl Runner {
    /// Maps the file and opens a new CPU backend for it.
    pub fn open(path: &Path, isa: Isa, activations: ActivationType, kv: KvType) -> Self {
        let options = CpuOptions { threads: None, isa: Some(isa), activations, kv, unfused: false };
        Self::on(path, Box::new(CpuBackend::new(options).expect("the CPU backend did not start")))
    }

    /// Maps the file and opens it on this backend.
    pub fn on(path: &Path, backend: Box<dyn Backend>) -> Self {
        let file = File::open(path).expect("the model's file did not open");
        let model = Model::open(ModelId(1), "reference", vec![file]).expect("the model was refused");
        let pages = CONTEXT.div_ceil(KV_PAGE_TOKENS) as u32;
        let limits = StepLimits { rows: ROWS_MAX, wanted_rows: 1 };
        let loaded = Loaded::new(model.plan.program.as_ref().clone(), backend, limits, pages);
        // Pages in descending order: their numbers must not matter.
        Self { model, loaded, pages: (0..pages).rev().collect(), position: 0, steps: 0, other: None }
    }

    /// Description of the backend, for messages.
    pub fn describe(&self) -> String {
        let info = self.loaded.backend.info();
        format!("{} {}, {:?} activations, {:?} cache", info.kind, info.isa, info.activations, info.kv)
    }

    /// Makes each step from now on make way between its parts for a whole step of another model.
    pub fn interrupt(&mut self) {
        let Loaded { backend, program, .. } = &mut self.loaded;
        let limits = StepLimits { rows: ROWS_MAX, wanted_rows: 1 };
        self.other =
            Some(backend.open_model(program, limits, self.pages.len() as u32).expect("no second model"));
    }

    fn make_way(&mut self) {
        let Some(other) = self.other else { return };
        let batch = StepBatch {
            token_ids: &[5, 6, 7],
            positions: &[0, 1, 2],
            row_sequences: &[0; 3],
            page_tables: &self.pages,
            page_table_stride: self.pages.len(),
            logits_rows: &[2],
            recurrent: if self.loaded.program.is_recurrent() { &FIRST } else { &[] },
        };
        self.loaded.backend.suspend_step().expect("the step was not suspended");
        self.loaded.backend.begin_step(other, &batch).expect("the other model's batch was refused");
        (0..=self.loaded.program.head_part()).for_each(|part| self.loaded.run(part));
        self.loaded.backend.logits(0).expect("the other model's logits are not finite");
        self.loaded.backend.resume_step(self.loaded.slot).expect("the step was not resumed");
    }

    /// Drops the sequence.
    pub fn reset(&mut self) {
        self.loaded.backend.release_pages(self.loaded.slot, &self.pages);
        self.loaded.backend.release_states(self.loaded.slot, &PLACES.map(|place| place.after));
        self.position = 0;
    }

    /// Appends `ids` to the sequence, in chunks; returns the logits after the last.
    pub fn feed(&mut self, ids: &[u32]) -> Vec<f32> {
        self.feed_in(ids, ROWS_MAX)
    }

    /// As [`Runner::feed`], in chunks of so many tokens.
    pub fn feed_in(&mut self, ids: &[u32], rows: usize) -> Vec<f32> {
        let chunks: Vec<&[u32]> = ids.chunks(rows).collect();
        let (last, before) = chunks.split_last().expect("there are no tokens to feed");
        before.iter().for_each(|chunk| {
            self.step(chunk, &[]);
        });
        self.step(last, &[last.len() as u32 - 1]).expect("the step returned no logits")
    }

    fn step(&mut self, ids: &[u32], logits_rows: &[u32]) -> Option<Vec<f32>> {
        let places = self.loaded.program.is_recurrent().then(|| {
            let places = PLACES[self.steps % 2];
            RecurrentPlace { before: places.before.filter(|_| self.position > 0), ..places }
        });
        let places: Vec<RecurrentPlace> = places.into_iter().collect();
        self.steps += 1;
        let positions: Vec<u32> = (self.position..self.position + ids.len()).map(|p| p as u32).collect();
        let batch = StepBatch {
            token_ids: ids,
            positions: &positions,
            row_sequences: &vec![0; ids.len()],
            page_tables: &self.pages,
            page_table_stride: self.pages.len(),
            logits_rows,
            recurrent: &places,
        };
        self.loaded.backend.begin_step(self.loaded.slot, &batch).expect("the batch was refused");
        let head = self.loaded.program.head_part();
        (0..head).for_each(|part| {
            self.loaded.run(part);
            self.make_way();
        });
        self.position += ids.len();
        if logits_rows.is_empty() {
            return None;
        }
        self.loaded.run(head);
        Some(self.loaded.backend.logits(0).expect("the logits are not finite"))
    }
}
