//! Facts that stay fixed while a device is open: its limits, and the bytes that programs take on it.

use super::sequence::STATES;
use super::{EngineOptions, sequence_pages};
use crate::backend::{Backend, BackendError, BackendInfo, ScratchBytes, StepLimits};
use crate::program::Program;
use crate::tensor::LazyTensor;

/// Host memory for the values of a decoder's step: wide models take fewer rows in each. 256 rows of 8B take as much.
const STEP_BYTES: u64 = 64 << 20;

/// The same for all steps in flight: one that runs, and suspended ones. An encoder reads a text in one step, and 8,192 tokens of a model
/// of 110M take 0.8 GiB. Without a bound, a file of 70 MB with wide layers made a daemon take 34 GB.
pub(super) const VALUES_BYTES: u64 = 1 << 30;

/// Bytes and rows of a model's sequences.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    /// Bytes of one KV page; above 0.
    pub page_bytes: u64,
    /// Bytes of one recurrent state; 0 for most models.
    pub state_bytes: u64,
    /// Host memory that the values of a row of a step take; 0 where they are on a device.
    pub row_bytes: u64,
    /// Most rows of a step.
    pub rows_max: u32,
}

/// Facts that stay fixed while a device is open.
#[derive(Debug)]
pub(super) struct Facts {
    pub info: BackendInfo,
    pub(super) refuses: fn(&Program) -> Option<BackendError>,
    pub kv_budget_bytes: u64,
    /// The part of that that one user may hold, and the same in percent.
    pub kv_user_bytes: u64,
    pub(super) kv_percent_per_user: u32,
    pub(super) kv_page_bytes: fn(&Program) -> u64,
    pub(super) recurrent_bytes: fn(&Program) -> u64,
    pub(super) weight_bytes: fn(&LazyTensor) -> u64,
    pub(super) scratch_bytes: ScratchBytes,
    pub(super) row_bytes: fn(&Program) -> u64,
    /// Most rows of a decoder's step.
    pub limits: StepLimits,
    /// Whether the device may leave a step before its end.
    pub suspends: bool,
}

impl Facts {
    pub fn of(backend: &dyn Backend, options: &EngineOptions) -> Self {
        let most = backend.kv_bytes_max().unwrap_or(u64::MAX);
        let (info, percent) = (backend.info(), options.kv_percent_per_user.clamp(1, 100));
        let kv_budget_bytes = options.kv_budget_bytes.min(most);
        let rows_max =
            options.rows_max.unwrap_or_else(|| info.step_rows.max(options.sequences_max.unwrap_or(1))).max(1);
        let sequences = options.sequences_max.unwrap_or(info.sequences).clamp(1, rows_max);
        Self {
            info,
            suspends: backend.reads_in_place(),
            weight_bytes: backend.weight_bytes(),
            scratch_bytes: backend.scratch_bytes(),
            row_bytes: backend.row_bytes(),
            limits: StepLimits { rows: rows_max, wanted_rows: sequences },
            refuses: backend.refuses(),
            kv_budget_bytes,
            kv_user_bytes: kv_budget_bytes / 100 * u64::from(percent)
                + kv_budget_bytes % 100 * u64::from(percent) / 100,
            kv_percent_per_user: percent,
            kv_page_bytes: backend.kv_page_bytes(),
            recurrent_bytes: backend.recurrent_bytes(),
        }
    }

    /// Device bytes of a tensor.
    pub fn weight_bytes(&self, tensor: &LazyTensor) -> u64 {
        (self.weight_bytes)(tensor)
    }

    /// Most rows of a program's steps. Those of an encoder have room for a whole text, if its values fit into [`VALUES_BYTES`].
    pub fn limits_of(&self, program: &Program) -> StepLimits {
        let row_bytes = self.row_bytes(program).max(1);
        let rows_in = |bytes: u64| usize::try_from(bytes / row_bytes).unwrap_or(usize::MAX).max(1);
        let rows = match program.encoder() {
            Some(encoder) => self.limits.rows.max(encoder.text_rows as usize).min(rows_in(VALUES_BYTES)),
            None => self.limits.rows.min(rows_in(STEP_BYTES)),
        };
        StepLimits { rows, wanted_rows: self.limits.wanted_rows.min(rows) }
    }

    /// Bytes and rows of a model's sequences.
    pub fn sizes_of(&self, program: &Program) -> Sizes {
        Sizes {
            page_bytes: self.page_bytes(program),
            state_bytes: self.state_bytes(program),
            row_bytes: self.row_bytes(program),
            rows_max: u32::try_from(self.limits_of(program).rows).unwrap_or(u32::MAX),
        }
    }

    /// Host memory of a row of a step.
    pub fn row_bytes(&self, program: &Program) -> u64 {
        (self.row_bytes)(program)
    }

    /// Device bytes of a model's activations.
    pub fn scratch_bytes(&self, program: &Program) -> u64 {
        self.scratch_bytes.bytes(program, self.limits_of(program))
    }

    /// Device bytes of one KV page of a model.
    pub fn page_bytes(&self, program: &Program) -> u64 {
        (self.kv_page_bytes)(program)
    }

    /// Device bytes of one recurrent state of a model; 0 for most.
    pub fn state_bytes(&self, program: &Program) -> u64 {
        (self.recurrent_bytes)(program)
    }

    /// Device bytes of a sequence of so many positions: its pages, and its recurrent states.
    pub fn sequence_bytes(&self, program: &Program, positions: u32) -> u64 {
        let pages = u64::from(sequence_pages(positions)).saturating_mul(self.page_bytes(program));
        pages.saturating_add(self.state_bytes(program).saturating_mul(STATES))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::cpu::{CpuBackend, CpuOptions};
    use crate::scheduler::tests::{kept_model, open};

    #[test]
    fn a_step_takes_as_many_rows_as_their_values_have_room() {
        let backend = CpuBackend::new(CpuOptions::default()).unwrap();
        let mut facts = Facts::of(&backend, &EngineOptions::default());
        let model = open(1, &kept_model());
        let program = &model.plan.program;
        let row_bytes = facts.row_bytes(program);
        // Some planes of 64 to 172 values.
        assert!((1 << 10..1 << 14).contains(&row_bytes), "{row_bytes}");
        assert_eq!(facts.limits_of(program), facts.limits, "a small model takes all rows");
        facts.row_bytes = |_| STEP_BYTES / 20 + 1;
        assert_eq!(facts.limits_of(program), StepLimits { rows: 19, wanted_rows: 19 });
        facts.row_bytes = |_| u64::MAX;
        assert_eq!(facts.limits_of(program), StepLimits { rows: 1, wanted_rows: 1 });
    }
}
