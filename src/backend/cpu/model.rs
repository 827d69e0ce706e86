//! One open model: its bound program, KV pages and the values of a step.

use std::sync::Arc;

use super::activations::ActivationBuffer;
use super::attention::Partials;
use super::bind::{Bound, Place};
use super::experts::ChoiceRows;
use super::kv::KvPool;
use super::rope::RopeTable;
use super::scratch::Plane;
use super::states::StatePool;
use super::step::Step;
use crate::backend::{BackendError, KvType, Progress, StepBatch, StepLimits};
use crate::program::{Program, Rows};

/// An open model's state on this backend.
pub struct OpenModel {
    /// The program that it runs.
    pub program: Arc<Program>,
    /// The program as units over `now.values.planes`.
    pub bound: Arc<Bound>,
    limits: StepLimits,
    /// KV pages.
    pub kv: KvPool,
    /// Recurrent states.
    pub states: StatePool,
    /// The current step, or the last one.
    pub now: InFlight,
    /// The suspended step, while a step beside it is `now`.
    aside: Option<InFlight>,
}

/// A step in flight: its batch, its values and how far it came.
pub struct InFlight {
    /// The batch.
    pub step: Step,
    /// Rotary angles of the step's rows, by number; `None` until the step first uses them.
    pub ropes: Vec<Option<RopeTable>>,
    /// Values between units.
    pub values: Values,
    /// Choices of experts, by number.
    pub choices: Vec<ChoiceRows>,
    /// Progress of the step: the current part and how many of its units are done.
    pub at: (u32, usize),
    /// Columns of the current unit's products that are done, of all its products together.
    pub within: usize,
    /// Whether the logits belong to this step.
    pub has_logits: bool,
    /// Attention results of splits.
    pub partials: Partials,
}

/// Buffers that units read and write.
pub struct Values {
    /// Input of the next product.
    pub acts: ActivationBuffer,
    /// By plane number: `[rows][cols]`.
    pub planes: Vec<Plane>,
    /// Small weights of the current unit, as f32.
    pub vectors: Vec<f32>,
}

impl OpenModel {
    /// Allocates for a program's steps, with an empty pool of `pages` KV pages.
    ///
    /// # Errors
    /// [`BackendError::OutOfMemory`].
    pub fn open(
        program: &Arc<Program>,
        limits: StepLimits,
        kv: KvType,
        pages: u32,
        fused: bool,
    ) -> Result<Self, BackendError> {
        let bound = Bound::of(program, fused);
        Ok(Self {
            kv: KvPool::new(program.states(), kv, pages)?,
            states: StatePool::new(program.states())?,
            now: InFlight::new(program, &bound, limits)?,
            aside: None,
            program: Arc::clone(program),
            bound: Arc::new(bound),
            limits,
        })
    }

    /// Checks a batch and starts its step. A suspended step is given up.
    ///
    /// # Errors
    /// [`BackendError::Batch`], [`BackendError::OutOfMemory`]; then no step is active.
    pub fn begin(&mut self, batch: &StepBatch<'_>) -> Result<(), BackendError> {
        self.aside = None;
        self.start(batch)
    }

    /// As [`OpenModel::begin`], but the suspended step can be resumed afterwards.
    ///
    /// # Errors
    /// As [`OpenModel::begin`]; the suspended step can be resumed all the same.
    pub fn begin_beside(&mut self, batch: &StepBatch<'_>) -> Result<(), BackendError> {
        if self.aside.is_none() {
            let fresh = InFlight::new(&self.program, &self.bound, self.limits)?;
            self.aside = Some(std::mem::replace(&mut self.now, fresh));
        }
        self.start(batch)
    }

    /// True if a step is under way beside a suspended one.
    pub fn is_beside(&self) -> bool {
        self.aside.is_some() && self.now.step.rows() > 0
    }

    /// Makes the suspended step the current one, and gives one beside it up. False if there is none.
    pub fn resume(&mut self) -> bool {
        if let Some(suspended) = self.aside.take() {
            self.now = suspended;
        }
        self.now.step.rows() > 0
    }

    /// Ends all steps: they may read pages or states that are released now.
    pub fn end_steps(&mut self) {
        self.aside = None;
        self.now.step.clear();
    }

    /// Gives the memory of the last step's values back, unless a step is suspended.
    pub fn release_values(&mut self) {
        if self.aside.is_none() {
            self.now.step.clear();
            self.now.has_logits = false;
            self.now.values.release();
            self.now.choices.iter_mut().for_each(ChoiceRows::release);
            self.now.partials = Partials::default();
        }
    }

    fn start(&mut self, batch: &StepBatch<'_>) -> Result<(), BackendError> {
        let pools = (&mut self.kv, &mut self.states);
        self.now.clear();
        self.now.step.begin(batch, &self.program, self.limits, &self.bound.groups, pools)?;
        if cfg!(debug_assertions) {
            self.now.poison(&self.bound);
        }
        Ok(())
    }

    /// Notes the first column that the current unit has left.
    pub fn stops_at(&mut self, left: Option<usize>) -> Progress {
        self.now.within = left.unwrap_or(0);
        if left.is_some() { Progress::Paused } else { Progress::Done }
    }

    /// A row of logits.
    pub fn logits(&self, index: usize) -> &[f32] {
        self.bound.logits.map_or(&[], |place| self.now.values.row(place, index))
    }
}

impl InFlight {
    fn new(program: &Program, bound: &Bound, limits: StepLimits) -> Result<Self, BackendError> {
        let rows = |rows| if rows == Rows::All { limits.rows } else { limits.wanted_rows };
        let planes =
            bound.planes.iter().map(|spec| Plane::new("values of a step", rows(spec.rows), spec.cols));
        let choices = bound.choices.iter().map(|spec| ChoiceRows::new(*spec, limits.rows));
        Ok(Self {
            step: Step::default(),
            ropes: program.ropes().iter().map(|_| None).collect(),
            values: Values {
                acts: ActivationBuffer::new(),
                planes: planes.collect::<Result<_, _>>()?,
                vectors: Vec::new(),
            },
            choices: choices.collect::<Result<_, _>>()?,
            at: (0, 0),
            within: 0,
            has_logits: false,
            partials: Partials::default(),
        })
    }

    fn clear(&mut self) {
        self.has_logits = false;
        (self.at, self.within) = ((0, 0), 0);
        self.ropes.iter_mut().for_each(|table| *table = None);
        self.choices.iter_mut().for_each(ChoiceRows::clear);
    }

    /// Fills everything that the step will write with NaN, so that a read before the first write shows.
    fn poison(&mut self, bound: &Bound) {
        for (plane, spec) in self.values.planes.iter_mut().zip(&bound.planes) {
            plane.values_mut()[..self.step.rows_of(spec.rows) * spec.cols].fill(f32::NAN);
        }
        let rows = self.step.rows();
        self.choices.iter_mut().for_each(|choice| choice.poison(rows));
    }
}

impl Values {
    /// One row of a value.
    pub fn row(&self, place: Place, row: usize) -> &[f32] {
        &self.planes[place.plane].row(row)[place.first..][..place.width]
    }

    /// One row of a value, mutable.
    pub fn row_mut(&mut self, place: Place, row: usize) -> &mut [f32] {
        &mut self.planes[place.plane].row_mut(row)[place.first..][..place.width]
    }

    /// Gives the memory back; all values are zero then.
    fn release(&mut self) {
        self.acts = ActivationBuffer::new();
        self.planes.iter_mut().for_each(Plane::release);
    }
}
