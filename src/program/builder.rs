//! Builds a program, part after part.

use std::sync::OnceLock;

use super::{
    Classifier, Content, Op, Output, Part, PartKind, Program, ProgramError, Residence, Rope, RopeId,
    RopeSpec, Rows, State, StateId, Tensor, TensorId, Value, ValueId,
};
use crate::tensor::LazyTensor;

/// A program under construction. Tensors and operations belong to the current part.
#[derive(Debug)]
pub struct Builder {
    program: Program,
}

/// The next number. Numbers are assigned in order; a program has far fewer than 2^32 of anything: a file has at most
/// 2^20 tensors.
fn next(len: usize) -> u32 {
    u32::try_from(len).unwrap_or(u32::MAX)
}

impl Builder {
    /// An empty program for a vocabulary of `vocab` tokens.
    pub fn new(vocab: usize) -> Self {
        Self {
            program: Program {
                tensors: Vec::new(),
                values: Vec::new(),
                states: Vec::new(),
                ropes: Vec::new(),
                parts: Vec::new(),
                vocab: next(vocab),
                result: Output::Logits(ValueId(u32::MAX)),
                classifier: None,
                row_bytes: OnceLock::new(),
            },
        }
    }

    /// Begins the next part.
    pub fn part(&mut self, kind: PartKind) {
        let at = next(self.program.tensors.len());
        self.program.parts.push(Part { kind, tensors: at..at, ops: Vec::new() });
    }

    /// Adds a tensor to the current part.
    pub fn tensor(&mut self, lazy: LazyTensor, residence: Residence) -> TensorId {
        let id = TensorId(next(self.program.tensors.len()));
        self.program.tensors.push(Tensor { lazy, residence });
        if let Some(part) = self.program.parts.last_mut() {
            part.tensors.end = next(self.program.tensors.len());
        }
        id
    }

    /// Number of the next tensor.
    pub fn next_tensor(&self) -> TensorId {
        TensorId(next(self.program.tensors.len()))
    }

    /// Adds a value of `width` real numbers for every row.
    pub fn value(&mut self, width: usize) -> ValueId {
        self.add_value(width, Rows::All, Content::Real)
    }

    /// Adds a value of `width` real numbers for the rows whose logits are wanted.
    pub fn wanted_value(&mut self, width: usize) -> ValueId {
        self.add_value(width, Rows::Wanted, Content::Real)
    }

    /// Adds a value of `width` real numbers for the rows that another one has.
    pub fn value_beside(&mut self, other: ValueId, width: usize) -> ValueId {
        let rows = self.program.values.get(other.0 as usize).map_or(Rows::All, |value| value.rows);
        self.add_value(width, rows, Content::Real)
    }

    /// Adds a choice of `used` experts for every row.
    pub fn choice(&mut self, used: usize) -> ValueId {
        self.add_value(used, Rows::All, Content::Choice)
    }

    fn add_value(&mut self, width: usize, rows: Rows, content: Content) -> ValueId {
        let id = ValueId(next(self.program.values.len()));
        self.program.values.push(Value { width: next(width), rows, content });
        id
    }

    /// Numbers per row of a value; 0 for an unknown value.
    pub fn width(&self, value: ValueId) -> usize {
        self.program.values.get(value.0 as usize).map_or(0, |value| value.width as usize)
    }

    /// Adds a state that sequences keep.
    pub fn state(&mut self, state: State) -> StateId {
        let id = StateId(next(self.program.states.len()));
        self.program.states.push(state);
        id
    }

    /// Adds a rotary embedding. `factors` is the tensor of its frequency divisors.
    pub fn rope(&mut self, spec: RopeSpec, factors: Option<TensorId>) -> RopeId {
        let id = RopeId(next(self.program.ropes.len()));
        self.program.ropes.push(Rope { spec, factors });
        id
    }

    /// Lets the program score texts. The classifier's tensors belong to the head.
    pub fn classifier(&mut self, classifier: Option<Classifier>) {
        self.program.classifier = classifier;
    }

    /// Whether the program scores texts.
    pub fn scores(&self) -> bool {
        self.program.classifier.is_some()
    }

    /// Adds an operation to the current part.
    pub fn push(&mut self, op: Op) {
        if let Some(part) = self.program.parts.last_mut() {
            part.ops.push(op);
        }
    }

    /// Checks and returns the program, which computes `result`.
    ///
    /// # Errors
    /// [`ProgramError`]: the program is inconsistent, which is a bug in its writer.
    pub fn finish(mut self, result: Output) -> Result<Program, ProgramError> {
        self.program.result = result;
        self.program.check()?;
        Ok(self.program)
    }
}
