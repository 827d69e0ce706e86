//! Layers of experts: their numbers, and each expert as tensors of its own.

use std::ops::RangeInclusive;

use super::decoder::FFN_MAX;
use super::metadata::Metadata;
use super::tensors::{Tensors, Want};
use crate::backend::ExpertDims;
use crate::model::plan::{ExpertPlan, PlanError};
use crate::tensor::LazyTensor;

/// Experts of a layer: four times what published models of these architectures have, and what GPU kernels route among.
const EXPERTS_MAX: u64 = 512;

/// `expert_gating_func`: the router's logits become shares of 1.
const SOFTMAX: usize = 1;

/// What the metadata say of experts; `None` for a model without. An architecture may have none that are `supported`.
pub(super) fn dims(metadata: &Metadata<'_>, supported: bool) -> Result<Option<ExpertDims>, PlanError> {
    let number = |name: &str, range: RangeInclusive<u64>| metadata.count_if_there(name, range);
    let count = number("expert_count", 0..=EXPERTS_MAX)?.unwrap_or(0);
    if count == 0 {
        return Ok(None);
    }
    if !supported {
        return Err(metadata.unsupported(&format!("{count} experts ({})", metadata.key("expert_count"))));
    }
    let used = metadata.count("expert_used_count", 0..=EXPERTS_MAX)?;
    if used == 0 || used > count {
        return Err(PlanError::Experts { used, count });
    }
    let gating = number("expert_gating_func", 0..=u64::from(u32::MAX))?.unwrap_or(0);
    if gating != 0 && gating != SOFTMAX {
        return Err(metadata.unsupported(&format!("gating function {gating} (expert_gating_func)")));
    }
    for name in ["expert_shared_count", "expert_group_count", "leading_dense_block_count"] {
        let found = number(name, 0..=u64::MAX)?.unwrap_or(0);
        if found > 0 {
            return Err(metadata.unsupported(&format!("{found} ({})", metadata.key(name))));
        }
    }
    // Files without the width of an expert (Mixtral) have it as the layer's.
    let ffn = match number("expert_feed_forward_length", 0..=FFN_MAX)? {
        None | Some(0) => metadata.count("feed_forward_length", 1..=FFN_MAX)?,
        Some(ffn) => ffn,
    };
    // All models of these architectures were trained with weights that add up to 1, whatever `expert_weights_norm` says:
    // converters leave that key out or at its default. 0 as a scale is none.
    let scale = metadata.float_if_there("expert_weights_scale")?.filter(|&scale| scale != 0.0).unwrap_or(1.0);
    Ok(Some(ExpertDims { count, used, ffn, normalise: true, scale }))
}

/// A layer's experts, from tensors that hold all of one role.
pub(super) fn of_layer(
    tensors: &mut Tensors<'_>,
    dims: &ExpertDims,
    hidden: usize,
    index: usize,
) -> Option<Vec<ExpertPlan>> {
    let mut all = |role, part: &str, rows: usize, cols: usize| {
        let want = Want::Matrices { count: dims.count, rows, cols };
        tensors.required(role, &format!("blk.{index}.{part}.weight"), want)
    };
    let gate = all("gates of the experts", "ffn_gate_exps", dims.ffn, hidden);
    let up = all("ups of the experts", "ffn_up_exps", dims.ffn, hidden);
    let down = all("downs of the experts", "ffn_down_exps", hidden, dims.ffn);
    let (gate, up, down) = (gate?, up?, down?);
    let plan = |number: u64| {
        Some(ExpertPlan {
            gate: expert(&gate, number, dims.ffn)?,
            up: expert(&up, number, dims.ffn)?,
            down: expert(&down, number, hidden)?,
        })
    };
    // A tensor of another shape has no such parts: `Tensors::finish` reports it.
    (0..dims.count as u64).map(plan).collect()
}

fn expert(all: &LazyTensor, number: u64, rows: usize) -> Option<LazyTensor> {
    let first = number.checked_mul(rows as u64)?;
    let name = format!("{}[{number}]", all.name());
    all.part(&name, first..first.checked_add(rows as u64)?).ok()
}
