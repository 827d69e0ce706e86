//! Sizes of recurrent layers: those of Mamba 2 and of gated delta rules.

use std::ops::RangeInclusive;

use super::metadata::Metadata;
use super::sizes::{HEADS_MAX, WIDTH_MAX};
use crate::model::plan::PlanError;
use crate::program::DeltaHeads;

/// Rows that a convolution sees: 3 or 4 in published models.
pub(super) const TAPS: RangeInclusive<u64> = 2..=16;

/// Columns of a state: 128 or 256 in published models.
const COLUMNS: RangeInclusive<u64> = 1..=1024;

/// Sizes of Mamba 2.
pub(super) struct Mamba {
    /// Rows that the convolution sees.
    pub taps: usize,
    /// Values of all heads.
    pub width: usize,
    /// Heads; a divisor of `width`.
    pub heads: usize,
    /// Groups of heads.
    pub groups: usize,
    /// Columns of a head's state.
    pub columns: usize,
}

impl Mamba {
    /// Reads the sizes.
    pub fn read(metadata: &Metadata<'_>) -> Result<Self, PlanError> {
        let taps = metadata.count("ssm.conv_kernel", TAPS)?;
        let width = metadata.count("ssm.inner_size", 1..=WIDTH_MAX)?;
        let heads = metadata.count("ssm.time_step_rank", 1..=HEADS_MAX)?;
        let groups = metadata.count("ssm.group_count", 1..=HEADS_MAX)?;
        let columns = metadata.count("ssm.state_size", COLUMNS)?;
        if !width.is_multiple_of(heads) || !heads.is_multiple_of(groups) {
            let feature = format!(
                "{heads} heads (ssm.time_step_rank) of {width} values (ssm.inner_size) in {groups} groups (ssm.group_count)"
            );
            return Err(metadata.unsupported(&feature));
        }
        Ok(Self { taps, width, heads, groups, columns })
    }
}

/// Sizes of gated delta rules.
pub(super) struct DeltaNet {
    /// Rows that the convolution sees.
    pub taps: usize,
    /// Heads of keys and values.
    pub heads: DeltaHeads,
}

impl DeltaNet {
    /// Reads the sizes. `in_turn` says how value heads share key heads; see [`DeltaHeads`].
    pub fn read(metadata: &Metadata<'_>, in_turn: bool) -> Result<Self, PlanError> {
        let taps = metadata.count("ssm.conv_kernel", TAPS)?;
        let dim = metadata.count("ssm.state_size", COLUMNS)?;
        let keys = metadata.count("ssm.group_count", 1..=HEADS_MAX)?;
        let values = metadata.count("ssm.time_step_rank", 1..=HEADS_MAX)?;
        let width = metadata.count("ssm.inner_size", 1..=WIDTH_MAX)?;
        // The other engine has one width of heads, so there is nothing to compare others with.
        if !values.is_multiple_of(keys) || width != values * dim {
            let feature = format!(
                "{width} values (ssm.inner_size) in {values} heads (ssm.time_step_rank) with {keys} keys (ssm.group_count) of {dim} values (ssm.state_size)"
            );
            return Err(metadata.unsupported(&feature));
        }
        let [keys, key_dim, values, value_dim] = [keys, dim, values, dim].map(|count| count as u32);
        Ok(Self { taps, heads: DeltaHeads { keys, key_dim, values, value_dim, in_turn } })
    }

    /// Values of all queries and keys and values of a row.
    pub fn mixed_width(&self) -> usize {
        self.heads.width().unwrap_or(u32::MAX) as usize // each factor is below 2^18
    }

    /// Values of all value heads.
    pub fn width(&self) -> usize {
        self.heads.values as usize * self.heads.value_dim as usize
    }
}
