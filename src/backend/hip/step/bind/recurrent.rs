//! Operations with recurrent states: their units, and their lowering.

use super::limits;
use super::lower::Lower;
use super::unit::{Operand, View, Work};
use crate::backend::BackendError;
use crate::program::{Activation, DeltaHeads, Op, Rows, StateId, TensorId, ValueId};

/// See [`Op::Convolve`](Op::Convolve).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Convolve {
    /// Bytes from an array of states to its own.
    pub state: u64,
    /// `[width, taps]`, each row padded to 16 bytes.
    pub weight: Operand,
    /// `[width]`.
    pub bias: Option<Operand>,
    /// Of the sum.
    pub activation: Activation,
    /// Rows to read.
    pub from: View,
    /// Rows to write.
    pub out: View,
    /// Values of a row.
    pub width: u32,
    /// Rows of a sum.
    pub taps: Taps,
}

/// How many rows a convolution sums up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taps {
    /// A row and the one before it.
    Two,
    /// A row and two before it.
    Three,
    /// A row and three before it.
    Four,
}

/// A number for each head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OfHeads {
    /// The tensor.
    pub at: Operand,
    /// Values from number to number.
    pub stride: u32,
}

/// See [`Op::SelectiveScan`](Op::SelectiveScan).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SelectiveScan {
    /// Bytes from an array of states to its own.
    pub state: u64,
    /// Number of heads.
    pub heads: u32,
    /// Groups of heads.
    pub groups: u32,
    /// Values of a head.
    pub head_dim: u32,
    /// Columns of a head's matrix.
    pub columns: u32,
    /// x of all heads, b and c of all groups.
    pub from: View,
    /// A step of each head.
    pub steps: View,
    /// Added to the steps.
    pub step_bias: OfHeads,
    /// Factors of the exponents.
    pub rate: OfHeads,
    /// Factors of x in the result.
    pub skip: OfHeads,
    /// Rows to write.
    pub out: View,
}

/// See [`Op::DeltaRule`](Op::DeltaRule).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeltaRule {
    /// Bytes from an array of states to its own.
    pub state: u64,
    /// The heads in `from`.
    pub heads: DeltaHeads,
    /// Added to the squared lengths of q and k.
    pub eps: f32,
    /// q and k of all key heads, v of all value heads.
    pub from: View,
    /// A decay of each value head.
    pub decay: View,
    /// Added to the decays.
    pub decay_bias: OfHeads,
    /// Factors of the exponents.
    pub rate: OfHeads,
    /// An amount of each value head.
    pub amount: View,
    /// Rows to write.
    pub out: View,
}

impl Lower<'_> {
    /// Lowers an operation with a recurrent state.
    pub fn recurrent(&mut self, number: usize, op: &Op) -> Result<(), BackendError> {
        match *op {
            Op::Convolve { .. } => self.convolve(number, op),
            Op::SelectiveScan { .. } => self.selective_scan(number, op),
            Op::DeltaRule { .. } => self.delta_rule(number, op),
            _ => Ok(()),
        }
    }

    fn convolve(&mut self, number: usize, op: &Op) -> Result<(), BackendError> {
        let Op::Convolve { state, weight, bias, activation, from, out } = *op else { return Ok(()) };
        let (width, taps) = (self.value(out)?.width, limits::tensor(self.program, weight)?.shape().cols());
        let taps = limits::convolution(width, taps)?;
        let activation = activation.unwrap_or(Activation::Linear);
        limits::gate(activation)?;
        let (state, from) = (self.recurrent_state(state)?, self.fours(number, op, from)?);
        let (weight, bias) = (self.operand(weight), bias.map(|bias| self.operand(bias)));
        self.write_recurrent(number, |out| {
            Work::Convolve(Convolve { state, weight, bias, activation, from, out, width, taps })
        })
    }

    fn selective_scan(&mut self, number: usize, op: &Op) -> Result<(), BackendError> {
        let Op::SelectiveScan { state, heads, groups, from, steps, step_bias, rate, skip, out } = *op else {
            return Ok(());
        };
        limits::heads(heads)?;
        let (width, all) = (self.value(out)?.width, self.value(from)?.width);
        // Programs are checked: these divisions leave no rest.
        let (head_dim, columns) =
            (width / heads.max(1), (all - width.min(all)) / groups.max(1).saturating_mul(2));
        limits::scan(head_dim, columns)?;
        let state = self.recurrent_state(state)?;
        let (from, steps) = (self.fours(number, op, from)?, self.all_rows(number, op, steps)?);
        let (step_bias, rate, skip) = (self.of_heads(step_bias)?, self.of_heads(rate)?, self.of_heads(skip)?);
        self.write_recurrent(number, |out| {
            Work::SelectiveScan(SelectiveScan {
                state,
                heads,
                groups,
                head_dim,
                columns,
                from,
                steps,
                step_bias,
                rate,
                skip,
                out,
            })
        })
    }

    fn delta_rule(&mut self, number: usize, op: &Op) -> Result<(), BackendError> {
        let Op::DeltaRule { state, heads, from, eps, decay, decay_bias, rate, amount, .. } = *op else {
            return Ok(());
        };
        limits::heads(heads.values)?;
        limits::delta(heads.key_dim, heads.value_dim)?;
        let state = self.recurrent_state(state)?;
        let (from, decay, amount) = (
            self.fours(number, op, from)?,
            self.all_rows(number, op, decay)?,
            self.all_rows(number, op, amount)?,
        );
        let (decay_bias, rate) = (self.of_heads(decay_bias)?, self.of_heads(rate)?);
        self.write_recurrent(number, |out| {
            let unit = DeltaRule { state, heads, eps, from, decay, decay_bias, rate, amount, out };
            Work::DeltaRule(unit)
        })
    }

    /// Emits the unit that writes an operation's result in f32.
    fn write_recurrent(&mut self, number: usize, work: impl Fn(View) -> Work) -> Result<(), BackendError> {
        let wrote = self.wrote(number)?;
        if let Some(out) = self.fresh(wrote, true)?.float {
            self.emit(work(out), Rows::All);
        }
        self.convert(wrote)
    }

    /// f32 rows of a value that the operation reads: all rows of a step, because each depends on those before it.
    fn all_rows(&self, number: usize, op: &Op, value: ValueId) -> Result<View, BackendError> {
        if self.value(value)?.rows != Rows::All {
            return Err(limits::operation(format!("a {} of only the rows with logits", op.name())));
        }
        self.float(self.read(number, value)?)
    }

    /// The same, at addresses that are multiples of 16 bytes. Its width is a multiple of 4.
    fn fours(&mut self, number: usize, op: &Op, value: ValueId) -> Result<View, BackendError> {
        let view = self.all_rows(number, op, value)?;
        if view.stride.is_multiple_of(4) && view.column.is_multiple_of(4) {
            return Ok(view);
        }
        let width = self.value(value)?.width;
        let out = self.plane(width, Rows::All);
        self.copy(view, out, width, Rows::All);
        Ok(out)
    }

    /// Numbers of heads. A row of a tensor takes whole 16 bytes, and a column has rows of one number.
    fn of_heads(&mut self, id: TensorId) -> Result<OfHeads, BackendError> {
        let is_column = limits::tensor(self.program, id)?.shape().cols() == 1;
        Ok(OfHeads { at: self.operand(id), stride: if is_column { 4 } else { 1 } })
    }

    fn recurrent_state(&self, id: StateId) -> Result<u64, BackendError> {
        let offset = self.states.offsets.get(id.0 as usize).copied();
        offset.ok_or_else(|| BackendError::Internal("there is no such recurrent state".to_owned()))
    }
}
