//! Expert layers: their sizes, and the split into one tensor per expert and role.

use std::ops::RangeInclusive;

use super::metadata::Metadata;
use super::sizes::FFN_MAX;
use super::tensors::{Tensors, Want};
use super::writer::Presence;
use crate::model::plan::PlanError;
use crate::program::{Activation, ExpertGroups, Gating};
use crate::tensor::LazyTensor;

/// Sizes of a model's expert layers. All layers are alike.
pub(super) struct Experts {
    /// Experts per layer.
    pub count: usize,
    /// Experts per row: 1 to `count`.
    pub used: usize,
    /// Width of one expert's hidden layer.
    pub ffn: usize,
    /// Makes chances of the router's logits.
    pub gating: Gating,
    /// Groups of experts, of which a row's experts are chosen.
    pub groups: Option<ExpertGroups>,
    /// Says whether layers have a bias of the chances, `exp_probs_b.bias`.
    pub bias: Presence,
    /// Says whether the router and all matrices of experts have biases.
    pub biases: Presence,
    /// Whether experts have gates.
    pub gated: bool,
    /// Activation of the gate, or of the up.
    pub activation: Activation,
    /// Normalises the weights of a row's experts to a sum of 1.
    pub normalise: bool,
    /// Factor of the weights, after normalisation.
    pub scale: f32,
}

/// Most experts per layer: four times what published models of these architectures have, and the limit of the GPU
/// kernels.
const EXPERTS_MAX: u64 = 512;

/// Values of `expert_gating_func`; 0 is the architecture's own.
const GATINGS: [(usize, Gating); 2] = [(1, Gating::Softmax), (2, Gating::Sigmoid)];

/// Reads the number of the first layers, of `blocks`, that have no experts.
pub(super) fn leading_dense(metadata: &Metadata<'_>, blocks: usize) -> Result<usize, PlanError> {
    Ok(metadata.count_if_there("leading_dense_block_count", 0..=blocks as u64)?.unwrap_or(0))
}

/// Reads the width of the expert for all rows, which is as wide as some of `experts`. All published models of such architectures
/// have one. Without it, there is no other engine to compare with.
pub(super) fn shared_width(metadata: &Metadata<'_>, experts: &Experts) -> Result<usize, PlanError> {
    let most = (FFN_MAX / experts.ffn as u64).min(64);
    Ok(metadata.count("expert_shared_count", 1..=most)? * experts.ffn)
}

/// Reads the sizes of expert layers with a softmax over the router's logits; `None` for a dense model.
pub(super) fn read(metadata: &Metadata<'_>) -> Result<Option<Experts>, PlanError> {
    read_gated(metadata, Gating::Softmax, &[Gating::Softmax])
}

/// As [`read`], for an architecture that is nothing without experts. Its files may name a gating, one of `known`; `own` where
/// they name none.
pub(super) fn required(metadata: &Metadata<'_>, own: Gating, known: &[Gating]) -> Result<Experts, PlanError> {
    let key = metadata.key("expert_count");
    read_gated(metadata, own, known)?.ok_or(PlanError::Key { key, want: "a number above 0" })
}

fn read_gated(metadata: &Metadata<'_>, own: Gating, known: &[Gating]) -> Result<Option<Experts>, PlanError> {
    let number = |name: &str, range: RangeInclusive<u64>| metadata.count_if_there(name, range);
    let count = number("expert_count", 0..=EXPERTS_MAX)?.unwrap_or(0);
    if count == 0 {
        return Ok(None);
    }
    let used = metadata.count("expert_used_count", 0..=EXPERTS_MAX)?;
    if used == 0 || used > count {
        return Err(PlanError::Experts { used, count });
    }
    let gating = match number("expert_gating_func", 0..=u64::from(u32::MAX))?.unwrap_or(0) {
        0 => own,
        number => {
            let named = GATINGS.iter().find(|(known, _)| *known == number).map(|(_, gating)| *gating);
            named.filter(|gating| known.contains(gating)).ok_or_else(|| {
                metadata.unsupported(&format!("gating function {number} (expert_gating_func)"))
            })?
        }
    };
    // Files without an expert width (Mixtral) use the layer's width for each expert.
    let ffn = match number("expert_feed_forward_length", 0..=FFN_MAX)? {
        None | Some(0) => metadata.count("feed_forward_length", 1..=FFN_MAX)?,
        Some(ffn) => ffn,
    };
    // All models of these architectures were trained with weights that sum to 1, whatever `expert_weights_norm` says:
    // converters omit that key or write its default. A scale of 0 means no scale.
    let scale = metadata.float_if_there("expert_weights_scale")?.filter(|&scale| scale != 0.0).unwrap_or(1.0);
    Ok(Some(Experts {
        count,
        used,
        ffn,
        gating,
        groups: None,
        bias: Presence::Never,
        biases: Presence::Never,
        gated: true,
        activation: Activation::Silu,
        normalise: true,
        scale,
    }))
}

/// Reads the groups of the experts. A file without the keys, or with one group, has none.
pub(super) fn groups(metadata: &Metadata<'_>, experts: &Experts) -> Result<Option<ExpertGroups>, PlanError> {
    let number = |name: &str| metadata.count_if_there(name, 0..=EXPERTS_MAX);
    let Some(count) = number("expert_group_count")?.filter(|count| *count > 1) else { return Ok(None) };
    if experts.gating == Gating::Softmax {
        // DeepSeek V2 takes a group's largest chance, the other engine the two largest.
        return Err(metadata.unsupported("groups of experts with shares of all (expert_group_count)"));
    }
    let used = number("expert_group_used_count")?.unwrap_or(0);
    let size = experts.count / count;
    if !experts.count.is_multiple_of(count) || size < 2 || used > count || used * size < experts.used {
        let feature = format!(
            "{} of {} experts in {used} (expert_group_used_count) of {count} groups (expert_group_count)",
            experts.used, experts.count
        );
        return Err(metadata.unsupported(&feature));
    }
    // At most EXPERTS_MAX.
    Ok(Some(ExpertGroups { count: count as u32, used: used as u32 }))
}

/// Refuses a file with experts, for an architecture that has none.
pub(super) fn none(metadata: &Metadata<'_>) -> Result<(), PlanError> {
    match metadata.count_if_there("expert_count", 0..=EXPERTS_MAX)?.unwrap_or(0) {
        0 => Ok(()),
        count => Err(metadata.unsupported(&format!("{count} experts ({})", metadata.key("expert_count")))),
    }
}

/// A role of a layer's experts, in a tensor that holds all of them.
#[derive(Clone)]
struct Role {
    all: LazyTensor,
    /// Rows of an expert's matrix.
    rows: usize,
    /// Rows of the tensor for each expert.
    each: usize,
    /// The first of them that are of this role.
    first: usize,
    /// The role's name, where the tensor holds two.
    half: &'static str,
}

impl Role {
    fn expert(&self, number: u64) -> Option<LazyTensor> {
        let first = number.checked_mul(self.each as u64)?.checked_add(self.first as u64)?;
        let name = format!("{}[{number}]{}", self.all.name(), self.half);
        self.all.part(&name, first..first.checked_add(self.rows as u64)?).ok()
    }

    /// The gates and ups of a tensor that holds both, gates first.
    fn halves(self) -> [Self; 2] {
        let rows = self.rows / 2;
        let of = |first, half| Self { rows, first, half, ..self.clone() };
        [of(0, ".gate"), of(rows, ".up")]
    }
}

impl Experts {
    /// Gate, up and down of each expert, or up and down, cut from the tensors that hold all of a role. Newer files hold gates
    /// and ups in one.
    pub fn find(&self, tensors: &mut Tensors<'_>, prefix: &str, hidden: usize) -> Option<Vec<LazyTensor>> {
        let (ffn, merged) = (self.ffn, tensors.has(&format!("{prefix}ffn_gate_up_exps.weight")));
        let mut all = |role, part: &str, rows: usize, cols: usize| {
            let want = Want::Matrices { count: self.count, rows, cols };
            let all = tensors.required(role, &format!("{prefix}{part}.weight"), want)?;
            Some(Role { all, rows, each: rows, first: 0, half: "" })
        };
        let mut roles = Vec::new();
        if self.gated && merged {
            let both = all("expert gates and up projections", "ffn_gate_up_exps", 2 * ffn, hidden);
            roles.extend(both.map(Role::halves).map_or([None, None], |halves| halves.map(Some)));
        } else {
            if self.gated {
                roles.push(all("expert gates", "ffn_gate_exps", ffn, hidden));
            }
            roles.push(all("expert up projections", "ffn_up_exps", ffn, hidden));
        }
        roles.push(all("expert down projections", "ffn_down_exps", hidden, ffn));
        let roles: Vec<Role> = roles.into_iter().collect::<Option<_>>()?;
        let experts = 0..self.count as u64;
        // A misshapen tensor has no such parts; `Tensors::finish` reports it.
        experts.flat_map(|number| roles.iter().map(move |role| role.expert(number))).collect()
    }
}
