//! Writing a program, part after part.

use super::{
    Content, Op, Part, PartKind, Program, ProgramError, Residence, Rope, RopeId, RopeSpec, Rows, State,
    StateId, Tensor, TensorId, Value, ValueId,
};
use crate::tensor::LazyTensor;

/// A program that is being written. Tensors and operations belong to the part begun last.
#[derive(Debug)]
pub struct Builder {
    program: Program,
}

/// Numbers are given out in order. A program has far fewer than 2^32 of anything: a file has at most 2^20 tensors.
fn next(len: usize) -> u32 {
    u32::try_from(len).unwrap_or(u32::MAX)
}

impl Builder {
    /// An empty program over `vocab` tokens.
    pub fn new(vocab: usize) -> Self {
        Self {
            program: Program {
                tensors: Vec::new(),
                values: Vec::new(),
                states: Vec::new(),
                ropes: Vec::new(),
                parts: Vec::new(),
                vocab: next(vocab),
                logits: ValueId(u32::MAX),
            },
        }
    }

    /// Begins the next part.
    pub fn part(&mut self, kind: PartKind) {
        let at = next(self.program.tensors.len());
        self.program.parts.push(Part { kind, tensors: at..at, ops: Vec::new() });
    }

    /// Adds a tensor to the part at hand.
    pub fn tensor(&mut self, lazy: LazyTensor, residence: Residence) -> TensorId {
        let id = TensorId(next(self.program.tensors.len()));
        self.program.tensors.push(Tensor { lazy, residence });
        if let Some(part) = self.program.parts.last_mut() {
            part.tensors.end = next(self.program.tensors.len());
        }
        id
    }

    /// The number that the next tensor gets.
    pub fn next_tensor(&self) -> TensorId {
        TensorId(next(self.program.tensors.len()))
    }

    /// A value of `width` real numbers for every row.
    pub fn value(&mut self, width: usize) -> ValueId {
        self.add_value(width, Rows::All, Content::Real)
    }

    /// A value of `width` real numbers for the rows whose logits are wanted.
    pub fn wanted_value(&mut self, width: usize) -> ValueId {
        self.add_value(width, Rows::Wanted, Content::Real)
    }

    /// A choice of `used` experts for every row.
    pub fn choice(&mut self, used: usize) -> ValueId {
        self.add_value(used, Rows::All, Content::Choice)
    }

    fn add_value(&mut self, width: usize, rows: Rows, content: Content) -> ValueId {
        let id = ValueId(next(self.program.values.len()));
        self.program.values.push(Value { width: next(width), rows, content });
        id
    }

    /// Numbers of a row of a value; 0 for one that there is not.
    pub fn width(&self, value: ValueId) -> usize {
        self.program.values.get(value.0 as usize).map_or(0, |value| value.width as usize)
    }

    /// Something that sequences keep.
    pub fn state(&mut self, state: State) -> StateId {
        let id = StateId(next(self.program.states.len()));
        self.program.states.push(state);
        id
    }

    /// Angles that heads turn by.
    pub fn rope(&mut self, spec: RopeSpec, factors: Option<TensorId>) -> RopeId {
        let id = RopeId(next(self.program.ropes.len()));
        self.program.ropes.push(Rope { spec, factors });
        id
    }

    /// Adds an operation to the part at hand.
    pub fn push(&mut self, op: Op) {
        if let Some(part) = self.program.parts.last_mut() {
            part.ops.push(op);
        }
    }

    /// The program, checked, whose tokens are drawn from `logits`.
    ///
    /// # Errors
    /// [`ProgramError`]: the program contradicts itself, which is a fault of whatever wrote it.
    pub fn finish(mut self, logits: ValueId) -> Result<Program, ProgramError> {
        self.program.logits = logits;
        self.program.check()?;
        Ok(self.program)
    }
}
