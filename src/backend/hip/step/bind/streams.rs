//! Operations on residual streams and on the sizes of rows: their units, and their lowering.

use super::limits;
use super::lower::Lower;
use super::unit::{Add, Operand, View, Work};
use crate::backend::BackendError;
use crate::program::{Op, ValueId};

/// `rows *= weight`, in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Multiply {
    /// `[cols]`.
    pub weight: Operand,
    /// Read and written.
    pub rows: View,
    /// Values of a row.
    pub cols: u32,
}

/// See [`Op::Rescale`], in place.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rescale {
    /// Read and written.
    pub rows: View,
    /// Values of a group.
    pub group: u32,
    /// Groups of a row.
    pub groups: u32,
    /// Added to the mean square.
    pub eps: f32,
    /// Rows whose size the groups get, and their width.
    pub like: Option<(View, u32)>,
}

/// See [`Op::Sparsify`], in place.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sparsify {
    /// Read and written.
    pub rows: View,
    /// Values of a row.
    pub cols: u32,
    /// Number of deviations.
    pub deviations: f32,
}

/// See [`Op::MixStreams`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MixStreams {
    /// `streams * streams` numbers.
    pub amounts: View,
    /// Read.
    pub from: View,
    /// Written.
    pub out: View,
    /// Number of streams.
    pub streams: u32,
    /// Values of a stream.
    pub cols: u32,
}

/// See [`Op::AddToStreams`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddToStreams {
    /// Read.
    pub from: View,
    /// A number for each stream.
    pub amounts: Option<View>,
    /// The first stream that is changed.
    pub first: u32,
    /// Read and written.
    pub out: View,
    /// Number of streams.
    pub streams: u32,
    /// Values of a stream.
    pub cols: u32,
}

impl Lower<'_> {
    /// Lowers an operation on streams, or on the sizes of rows.
    pub fn streams(&mut self, number: usize, op: &Op) -> Result<(), BackendError> {
        match *op {
            Op::Slice { from, first, out } => self.slice(number, from, first, out),
            Op::Multiply { weight, value } => {
                let (weight, cols) = (self.operand(weight), self.value(value)?.width);
                self.in_place(number, |rows| Work::Multiply(Multiply { weight, rows, cols }))
            }
            Op::Rescale { group, eps, like, value } => {
                let groups = self.value(value)?.width / group.max(1);
                limits::heads(groups)?;
                let like = like.map(|like| self.view_of(number, like)).transpose()?;
                let unit = |rows| Work::Rescale(Rescale { rows, group, groups, eps, like });
                self.in_place(number, unit)
            }
            Op::Sparsify { deviations, value } => {
                let cols = self.value(value)?.width;
                self.in_place(number, |rows| Work::Sparsify(Sparsify { rows, cols, deviations }))
            }
            Op::MixStreams { amounts, from, .. } => {
                let ((amounts, pairs), (from, width)) =
                    (self.view_of(number, amounts)?, self.view_of(number, from)?);
                let streams = pairs.isqrt().max(1);
                let (cols, wrote) = (width / streams, self.wrote(number)?);
                let rows = self.value(self.version(wrote)?.value)?.rows;
                if let Some(out) = self.fresh(wrote, true)?.float {
                    self.emit(Work::MixStreams(MixStreams { amounts, from, out, streams, cols }), rows);
                }
                self.convert(wrote)
            }
            Op::AddToStreams { from, amounts, first, out } => {
                let (from, cols) = self.view_of(number, from)?;
                let amounts = amounts.map(|amounts| self.view_of(number, amounts)).transpose()?;
                let (amounts, streams) =
                    (amounts.map(|(view, _)| view), self.value(out)?.width / cols.max(1));
                let unit =
                    |out| Work::AddToStreams(AddToStreams { from, amounts, first, out, streams, cols });
                self.in_place(number, unit)
            }
            _ => Ok(()),
        }
    }

    fn slice(&mut self, number: usize, from: ValueId, first: u32, out: ValueId) -> Result<(), BackendError> {
        let (from, _) = self.view_of(number, from)?;
        let (wrote, value) = (self.wrote(number)?, self.value(out)?);
        if let Some(out) = self.fresh(wrote, true)?.float {
            let from = View { column: from.column + first, ..from };
            let unit = Add { from, out, scale: 1.0, keep: false, cols: value.width };
            self.emit(Work::Add(unit), value.rows);
        }
        self.convert(wrote)
    }

    /// Emits a unit that changes a value in place.
    pub fn in_place(&mut self, number: usize, unit: impl FnOnce(View) -> Work) -> Result<(), BackendError> {
        let wrote = self.wrote(number)?;
        let rows = self.value(self.version(wrote)?.value)?.rows;
        if let Some(view) = self.updated(wrote)?.float {
            self.emit(unit(view), rows);
        }
        self.convert(wrote)
    }

    /// View of a value that an operation reads, and its width.
    fn view_of(&self, number: usize, value: ValueId) -> Result<(View, u32), BackendError> {
        Ok((self.float(self.read(number, value)?)?, self.value(value)?.width))
    }
}
