//! Reads the rotary embedding from the metadata.

use super::metadata::Metadata;
use super::sizes::HEAD_DIM_MAX;
use super::tensors::{Tensors, Want};
use crate::model::plan::{PlanError, excerpt};
use crate::program::{Growth, RopeLayout, RopeScaling, RopeSpec, Yarn};
use crate::tensor::LazyTensor;

/// A model's rotary embedding, as stated in the metadata.
pub(super) struct Rope {
    pub spec: RopeSpec,
    /// `longrope`: the file has factors for short and for long contexts.
    longrope: bool,
    /// The stated context exceeds the trained one, so factors for long contexts are used. The choice depends on the file
    /// and not on the request, so cached keys stay valid while a sequence grows.
    long: bool,
}

pub(super) fn rope(
    metadata: &Metadata<'_>,
    layout: RopeLayout,
    head_dim: usize,
    context: u32,
) -> Result<Rope, PlanError> {
    let dims = metadata.count_if_there("rope.dimension_count", 1..=HEAD_DIM_MAX)?.unwrap_or(head_dim);
    if !dims.is_multiple_of(2) || dims > head_dim {
        return Err(PlanError::RopeDims { dims, head_dim });
    }
    let theta = metadata.above_0("rope.freq_base")?.unwrap_or(10_000.0);
    // A factor without a type means linear, as in llama.cpp.
    let kind = metadata.string_if_there("rope.scaling.type")?.unwrap_or("linear");
    let factor = factor(metadata)?;
    let original = original_context(metadata, context)?;
    let linear = factor.map_or(RopeScaling::None, |factor| RopeScaling::Linear { factor });
    let (scaling, longrope) = match kind {
        "none" => (RopeScaling::None, false),
        "linear" => (linear, false),
        "longrope" => (linear, true),
        "yarn" => (yarn(metadata, factor.unwrap_or(1.0), original)?, false),
        other => {
            return Err(
                metadata.unsupported(&format!("rope scaling {:?} (rope.scaling.type)", excerpt(other)))
            );
        }
    };
    let magnitude = metadata.above_0("rope.scaling.attn_factor")?.unwrap_or(1.0);
    let spec = RopeSpec { layout, dims, theta, scaling, magnitude, growth: None };
    Ok(Rope { spec, longrope, long: context > original })
}

/// As [`rope`], for an architecture whose files have no frequency factors.
pub(super) fn without_factors(
    metadata: &Metadata<'_>,
    layout: RopeLayout,
    head_dim: usize,
    context: u32,
) -> Result<RopeSpec, PlanError> {
    let rope = rope(metadata, layout, head_dim, context)?;
    if rope.longrope {
        return Err(metadata.unsupported("rope scaling \"longrope\" (rope.scaling.type)"));
    }
    Ok(rope.spec)
}

/// How queries grow with their position; `None` where the file states no growth.
pub(super) fn growth(metadata: &Metadata<'_>, context: u32) -> Result<Option<Growth>, PlanError> {
    let Some(scale) = metadata.float_if_there("attention.temperature_scale")?.filter(|by| *by != 0.0) else {
        return Ok(None);
    };
    let period = original_context(metadata, context)?;
    Ok(Some(Growth { scale, period }))
}

/// Context length of the training, before positions were scaled.
fn original_context(metadata: &Metadata<'_>, context: u32) -> Result<u32, PlanError> {
    Ok(match metadata.count_if_there("rope.scaling.original_context_length", 0..=1 << 30)? {
        None | Some(0) => context,
        Some(tokens) => tokens as u32,
    })
}

/// The divisor of positions; 0 in the file means none.
fn factor(metadata: &Metadata<'_>) -> Result<Option<f32>, PlanError> {
    let name = match metadata.float_if_there("rope.scaling.factor")? {
        Some(_) => "rope.scaling.factor",
        None => "rope.scale_linear", // the key's name until 2023-09
    };
    match metadata.float_if_there(name)? {
        Some(value) if value < 0.0 => {
            Err(PlanError::Float { key: metadata.key(name), value, want: "at least 0" })
        }
        factor => Ok(factor.filter(|&f| f > 0.0)),
    }
}

fn yarn(metadata: &Metadata<'_>, factor: f32, original_context: u32) -> Result<RopeScaling, PlanError> {
    let ext_factor = metadata.float_if_there("rope.scaling.yarn_ext_factor")?.unwrap_or(-1.0);
    Ok(RopeScaling::Yarn(Yarn {
        factor,
        original_context,
        ext_factor: if ext_factor < 0.0 { 1.0 } else { ext_factor }, // negative: not set
        beta_fast: metadata.above_0("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0),
        beta_slow: metadata.above_0("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
        log_multiplier: metadata.float_if_there("rope.scaling.yarn_log_multiplier")?.unwrap_or(0.0),
        whole_pairs: true,
    }))
}

impl Rope {
    /// For an architecture whose converter writes factors for short and for long contexts without a scaling type.
    pub fn longrope_if_there(self, tensors: &Tensors<'_>) -> Self {
        Self { longrope: self.longrope || tensors.has("rope_factors_long.weight"), ..self }
    }

    /// The frequency divisors, if the file has any.
    pub fn factors(&self, tensors: &mut Tensors<'_>) -> Option<LazyTensor> {
        let want = Want::Vector(self.spec.dims / 2);
        if !self.longrope {
            return tensors.optional("rope factors", "rope_freqs.weight", want);
        }
        let [used, unused] = match self.long {
            true => ["rope_factors_long.weight", "rope_factors_short.weight"],
            false => ["rope_factors_short.weight", "rope_factors_long.weight"],
        };
        tensors.unused(unused);
        tensors.required("rope factors", used, want)
    }
}
