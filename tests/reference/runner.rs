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
    /// The steps that come between the parts of this sequence's.
    others: Others,
    /// Logits of the step beside it.
    beside: Option<Vec<f32>>,
}

/// Steps for which each step makes way.
#[derive(Clone, Copy)]
enum Others {
    None,
    /// Those of another open model on the same device.
    Model(ModelSlot),
    /// Those of another sequence of the same model, which make way for that other model too. They also come inside parts.
    Beside(ModelSlot),
}

/// A step inside a part makes way at each pause of this number.
const PAUSES: u32 = 5;

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
        let loaded = Loaded::new(model.plan.program.as_ref().clone(), backend, limits, 2 * pages);
        // Pages in descending order: their numbers must not matter.
        let pages = (0..pages).rev().collect();
        Self { model, loaded, pages, position: 0, steps: 0, others: Others::None, beside: None }
    }

    /// Description of the backend, for messages.
    pub fn describe(&self) -> String {
        let info = self.loaded.backend.info();
        format!("{} {}, {:?} activations, {:?} cache", info.kind, info.isa, info.activations, info.kv)
    }

    /// Makes each step from now on make way between its parts for a whole step of another model.
    pub fn interrupt(&mut self) {
        self.others = Others::Model(self.open_other());
    }

    /// Makes each step from now on make way, also inside its parts, for steps of another sequence of the same model.
    pub fn interrupt_beside(&mut self) {
        self.others = Others::Beside(self.open_other());
    }

    fn open_other(&mut self) -> ModelSlot {
        let Loaded { backend, program, .. } = &mut self.loaded;
        let limits = StepLimits { rows: ROWS_MAX, wanted_rows: 1 };
        backend.open_model(program, limits, self.pages.len() as u32).expect("no second model")
    }

    fn make_way(&mut self) {
        let slot = self.loaded.slot;
        match self.others {
            Others::None => return,
            Others::Model(other) => self.step_of(other),
            Others::Beside(other) => self.step_beside(other),
        }
        self.loaded.backend.resume_step(slot).expect("the step was not resumed");
    }

    /// A whole step of another model.
    fn step_of(&mut self, other: ModelSlot) {
        self.loaded.backend.suspend_step().expect("the step was not suspended");
        let (pages, places) = (self.pages.clone(), self.first(FIRST));
        self.loaded.backend.begin_step(other, &three(&pages, &places)).expect("the other batch was refused");
        (0..=self.loaded.program.head_part()).for_each(|part| self.loaded.run(part));
        self.loaded.backend.logits(0).expect("the other model's logits are not finite");
    }

    /// A whole step of another sequence, which makes way for another model too.
    fn step_beside(&mut self, other: ModelSlot) {
        self.loaded.backend.suspend_step().expect("the step was not suspended");
        let first = self.pages.len() as u32;
        let pages: Vec<u32> = (first..2 * first).collect();
        let places = self.first([RecurrentPlace { before: None, after: 9 }]);
        let begun = self.loaded.backend.begin_beside(self.loaded.slot, &three(&pages, &places));
        begun.expect("the batch beside the step was refused");
        let head = self.loaded.program.head_part();
        (0..head).for_each(|part| self.loaded.run(part));
        self.step_of(other);
        self.loaded.backend.resume_beside(self.loaded.slot).expect("the step beside was not resumed");
        self.loaded.run(head);
        let logits = self.loaded.backend.logits(0).expect("the logits beside the step are not finite");
        assert!(
            *self.beside.get_or_insert_with(|| logits.clone()) == logits,
            "the step beside has other logits"
        );
    }

    fn first(&self, place: [RecurrentPlace; 1]) -> Vec<RecurrentPlace> {
        if self.loaded.program.is_recurrent() { place.to_vec() } else { Vec::new() }
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
        for part in 0..head {
            while !self.loaded.stretch(part) {
                if matches!(self.others, Others::Beside(_)) && self.loaded.pauses.is_multiple_of(PAUSES) {
                    self.make_way();
                }
            }
            self.make_way();
        }
        self.position += ids.len();
        if logits_rows.is_empty() {
            return None;
        }
        self.loaded.run(head);
        Some(self.loaded.backend.logits(0).expect("the logits are not finite"))
    }
}

/// A batch of three tokens.
fn three<'a>(pages: &'a [u32], recurrent: &'a [RecurrentPlace]) -> StepBatch<'a> {
    StepBatch {
        token_ids: &[5, 6, 7],
        positions: &[0, 1, 2],
        row_sequences: &[0; 3],
        page_tables: pages,
        page_table_stride: pages.len(),
        logits_rows: &[2],
        recurrent,
    }
}
