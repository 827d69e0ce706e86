//! Binding a program: which units compute it, and where each value lies between them.
//!
//! No device is asked: the same program, limits and modes always give the same. `uses` follows the values, `fusions` finds what one
//! kernel computes together, `lower` makes units of the rest one by one, [`planes`] gives them memory, `limits` refuses by name
//! what no kernel computes.

mod forms;
mod fusions;
mod heads;
mod limits;
mod lower;
mod ops;
mod planes;
#[cfg(test)]
mod tests;
mod unit;
mod uses;

pub use forms::{FORMS, Form, Forms, Wanted, form, pair_form};
pub use limits::embed_kernel;
pub use ops::fuses;
pub use planes::{PlaneId, Slot};
pub use unit::*;

use super::Modes;
use crate::backend::hip::kv::KvLayout;
use crate::backend::{BackendError, StepLimits};
use crate::program::{Program, Rows, TensorId};

/// A program as a device runs it.
#[derive(Debug)]
pub struct Bound {
    /// Parts in the order in which they run.
    pub parts: Vec<BoundPart>,
    /// Memory for values.
    pub slots: Vec<Slot>,
    /// Number of its slot for each plane.
    pub places: Vec<u32>,
    /// What attention needs beside planes, and products of many rows.
    pub room: Room,
    /// Where pages have what.
    pub kv: KvLayout,
    /// The table of embeddings, and bytes of its rows in the file.
    pub table: Option<(TensorId, usize)>,
    /// Where logits are, without gaps.
    pub logits: View,
    /// Different windows of attention; 0 is none.
    pub windows: Vec<u32>,
    /// Query heads that share a head of keys, at most, where tiles of many rows can hold them; 0 where there are none.
    pub group_max: u32,
    /// For steps of at most so many rows.
    pub limits: StepLimits,
    /// How it computes.
    pub modes: Modes,
}

/// A part of a program.
#[derive(Debug, Default)]
pub struct BoundPart {
    /// In the order in which they run.
    pub units: Vec<Unit>,
    /// Tensors that have to be on the device, in the order in which units use them.
    pub operands: Vec<TensorId>,
    /// Experts that come when they are chosen.
    pub experts: Vec<ExpertSet>,
}

/// The most that any unit needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Room {
    /// Query heads.
    pub heads: usize,
    /// Values of all query heads.
    pub head_values: usize,
    /// Values of the largest matrix that is expanded for many rows.
    pub matrix: usize,
}

/// Binds a program for steps of at most `limits` rows.
///
/// # Errors
/// [`BackendError::Unsupported`], [`BackendError::Operation`], [`BackendError::Dims`]: no kernel computes it.
pub fn bind(program: &Program, limits: StepLimits, modes: Modes) -> Result<Bound, BackendError> {
    lower::lower(program, limits, modes)
}

/// Why a program cannot be bound, whatever the size of its steps and the way to compute.
pub fn refuse(program: &Program) -> Option<BackendError> {
    bind(program, StepLimits { rows: 1, wanted_rows: 1 }, Modes::default()).err()
}

impl Bound {
    /// Rows that there is room for.
    pub fn rows(&self, rows: Rows) -> usize {
        use crate::backend::hip::scratch::GRAPH_ROWS;
        let rows = match rows {
            Rows::All => self.limits.rows,
            Rows::Wanted => self.limits.wanted_rows,
        };
        rows.max(GRAPH_ROWS)
    }
}
