//! Binding: the units that compute a program, and the place of each value between them.
//!
//! Binding asks no device: the same program, limits and modes always give the same result. `uses` tracks the values,
//! `fusions` finds operations for one kernel, and `lower` turns the rest into units. `neighbours` joins units that
//! one kernel can compute at few rows. [`planes`] assigns memory, and `limits` refuses by name.

mod forms;
mod fusions;
mod heads;
mod limits;
mod lower;
mod neighbours;
mod ops;
mod planes;
mod recurrent;
mod streams;
#[cfg(test)]
mod tests;
mod unit;
mod uses;

pub use forms::{FORMS, Form, Wanted, are_grouped, form, pair_form};
pub use limits::is_wide;
pub use ops::fuses;
pub use planes::{PlaneId, Slot};
pub use recurrent::{Convolve, DeltaRule, SelectiveScan, Taps};
pub use streams::{AddToStreams, MixStreams, Multiply, Rescale, Sparsify};
pub use unit::*;

use super::Modes;
use crate::backend::hip::step::kv::KvLayout;
use crate::backend::hip::step::states::StateLayout;
use crate::backend::{BackendError, StepLimits};
use crate::program::{Program, Rows, TensorId};

/// A program bound for a device.
#[derive(Debug)]
pub struct Bound {
    /// Parts in execution order.
    pub parts: Vec<BoundPart>,
    /// Memory slots of the planes.
    pub slots: Vec<Slot>,
    /// Slot number of each plane.
    pub places: Vec<u32>,
    /// Extra memory for attention and for products of many rows.
    pub room: ScratchNeed,
    /// Layout of a KV page.
    pub kv: KvLayout,
    /// Layout of a sequence's recurrent states.
    pub states: StateLayout,
    /// The rows that the step's tokens begin with, of each table.
    pub tables: Vec<TableRows>,
    /// Some attention sees later tokens too.
    pub both_ways: bool,
    /// Some attention sees later tokens within a window: only tiles of rows compute that.
    pub around: bool,
    /// View of the logits, without gaps; `None` for an encoder.
    pub logits: Option<View>,
    /// View of the rows that the last layer leaves, kept until after the last unit; `None` if the head takes none.
    pub last_rows: Option<View>,
    /// Distinct attention windows in tokens; 0 is unlimited.
    pub windows: Vec<u32>,
    /// Most query heads per KV head among groups that fit a prefill tile; 0 if there are none.
    pub group_max: u32,
    /// Most queries of a KV head in a prefill tile; `u32::MAX` if no attention has tiles.
    pub tile_queries: u32,
    /// Largest step that this binding serves.
    pub limits: StepLimits,
    /// Element types to compute with.
    pub modes: Modes,
}

/// A bound part of a program.
#[derive(Debug, Default)]
pub struct BoundPart {
    /// Units in execution order.
    pub units: Vec<Unit>,
    /// Tensors that must be resident, in the order in which units use them.
    pub operands: Vec<TensorId>,
    /// Expert sets; an expert is loaded when a row chooses it.
    pub experts: Vec<ExpertSet>,
}

/// The largest needs of any unit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScratchNeed {
    /// Query heads, times rows per attention launch.
    pub heads: usize,
    /// Values of all query heads, times rows per attention launch.
    pub head_values: usize,
    /// Values of the largest matrix that is expanded for many rows.
    pub matrix: usize,
    /// Most tiles, with their splits, of a product on the matrix unit.
    pub sums: u32,
    /// Whether there are float matrices that many rows expand.
    pub floats: bool,
}

/// Binds a program for steps of at most `limits` rows.
///
/// # Errors
/// [`BackendError::Unsupported`], [`BackendError::Operation`], [`BackendError::Dims`] when no kernel computes it.
pub fn bind(program: &Program, limits: StepLimits, modes: Modes) -> Result<Bound, BackendError> {
    lower::lower(program, limits, Modes { kv: modes.kv.within(program), ..modes })
}

/// Why a program cannot be bound at any step size and in any mode; `None` if it can.
pub fn refuse(program: &Program) -> Option<BackendError> {
    bind(program, StepLimits { rows: 1, wanted_rows: 1 }, Modes::default()).err()
}

impl Bound {
    /// Most rows of a kind.
    pub fn rows(&self, rows: Rows) -> usize {
        let rows = match rows {
            Rows::All => self.limits.rows,
            Rows::Wanted => self.limits.wanted_rows,
        };
        // A recorded step has as many rows as the next power of two.
        rows.max(rows.next_power_of_two().min(self.modes.thresholds().recorded_max))
    }
}
