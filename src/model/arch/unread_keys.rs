//! Refuses files with keys that their architecture does not read, unless the key's value changes nothing.
//!
//! A key that is neither read nor listed here may ask for another computation. The file is then refused by that key's
//! name. Only the architecture's own keys are checked, those that begin with its name. Names: llama.cpp
//! `src/llama-arch.cpp`. Keys below `vision.` and `mm.` belong to other converters and to images.

use super::metadata::{Metadata, integers};
use crate::model::gguf::{Array, Value};
use crate::model::plan::{PlanError, excerpt};

/// Values of a key that do not change the computation.
enum Neutral {
    /// Any value.
    Any,
    /// These numbers, or arrays of them.
    Numbers(&'static [f64]),
    /// This bool.
    Flag(bool),
    /// 0, or at least the context length.
    WholeContext,
    /// 0, or the width of the residual stream.
    Hidden,
}

/// Prefixes of keys that do not concern the text model.
const OTHER_MODELS: [&str; 2] = ["vision.", "mm."];

/// Keys without the architecture's prefix.
const NEUTRAL: &[(&str, Neutral)] = &[
    // The token array gives the count, and the embedding is checked against it.
    ("vocab_size", Neutral::Any),
    // All files have the same layout.
    ("tensor_data_layout", Neutral::Any),
    // Describes training only.
    ("rope.scaling.finetuned", Neutral::Any),
    // Expert weights are normalised as in training, whatever converters wrote.
    ("expert_weights_norm", Neutral::Any),
    // Only used by another scaling type.
    ("rope.scaling.yarn_ext_factor", Neutral::Any),
    ("rope.scaling.yarn_beta_fast", Neutral::Any),
    ("rope.scaling.yarn_beta_slow", Neutral::Any),
    ("rope.scaling.yarn_log_multiplier", Neutral::Any),
    ("rope.scaling.original_context_length", Neutral::Any),
    // Old name of a key that the file also has under its new name.
    ("rope.scale_linear", Neutral::Any),
    // Only used with a window.
    ("attention.sliding_window_pattern", Neutral::Any),
    ("attention.key_length_swa", Neutral::Any),
    ("attention.value_length_swa", Neutral::Any),
    ("rope.dimension_count_swa", Neutral::Any),
    ("rope.freq_base_swa", Neutral::Any),
    ("attention.sliding_window", Neutral::WholeContext),
    ("embedding_length_out", Neutral::Hidden),
    ("use_parallel_residual", Neutral::Flag(false)),
    ("n_deepstack_layers", Neutral::Numbers(&[0.0])),
    ("deepstack_mapping", Neutral::Numbers(&[-1.0])),
    ("leading_dense_block_count", Neutral::Numbers(&[0.0])),
    ("classifier.pooling_type", Neutral::Numbers(&[0.0])),
    ("expert_used_count", Neutral::Numbers(&[0.0])),
    ("expert_shared_count", Neutral::Numbers(&[0.0])),
    ("expert_group_count", Neutral::Numbers(&[0.0, 1.0])),
    ("expert_group_used_count", Neutral::Numbers(&[0.0, 1.0])),
    ("expert_gating_func", Neutral::Numbers(&[0.0, 1.0])),
    ("expert_feed_forward_length", Neutral::Numbers(&[0.0])),
    ("expert_shared_feed_forward_length", Neutral::Numbers(&[0.0])),
    ("expert_weights_scale", Neutral::Numbers(&[0.0, 1.0])),
    ("interleave_moe_layer_step", Neutral::Numbers(&[0.0, 1.0])),
    ("moe_every_n_layers", Neutral::Numbers(&[0.0, 1.0])),
    ("attention.max_alibi_bias", Neutral::Numbers(&[0.0])),
    ("attention.clamp_kqv", Neutral::Numbers(&[0.0])),
    ("attention.scale", Neutral::Numbers(&[0.0])),
    ("attn_logit_softcapping", Neutral::Numbers(&[0.0])),
    ("final_logit_softcapping", Neutral::Numbers(&[0.0])),
    ("router_logit_softcapping", Neutral::Numbers(&[0.0])),
    ("logit_scale", Neutral::Numbers(&[0.0, 1.0])),
    ("residual_scale", Neutral::Numbers(&[0.0, 1.0])),
    ("embedding_scale", Neutral::Numbers(&[0.0, 1.0])),
    ("rope.dimension_sections", Neutral::Numbers(&[0.0])),
    ("rope.scaling.alpha", Neutral::Numbers(&[0.0])),
    ("rope.scaling.yarn_attn_factor", Neutral::Numbers(&[1.0])),
    ("attention.layer_norm_epsilon", Neutral::Any),
    ("attention.layer_norm_rms_epsilon", Neutral::Any),
];

/// Refuses the first unread key that may change the computation.
pub(super) fn check(metadata: &Metadata<'_>, hidden: usize, context: u32) -> Result<(), PlanError> {
    for (name, value) in metadata.unread() {
        if OTHER_MODELS.iter().any(|prefix| name.starts_with(prefix)) {
            continue;
        }
        let known = NEUTRAL.iter().find(|(known, _)| *known == name);
        if known.is_none_or(|(_, neutral)| !neutral.holds(value, hidden, context)) {
            let feature = format!("{} = {}", excerpt(&metadata.key(name)), value.describe());
            return Err(metadata.unsupported(&feature));
        }
    }
    Ok(())
}

impl Neutral {
    fn holds(&self, value: &Value, hidden: usize, context: u32) -> bool {
        let all = |holds: &dyn Fn(f64) -> bool| {
            numbers(value).is_some_and(|numbers| numbers.into_iter().all(holds))
        };
        match self {
            Self::Any => true,
            Self::Numbers(neutral) => all(&|number| neutral.contains(&number)),
            Self::Flag(neutral) => matches!(value, Value::Bool(flag) if flag == neutral),
            Self::WholeContext => all(&|number| number == 0.0 || number >= f64::from(context)),
            Self::Hidden => all(&|number| number == 0.0 || number == hidden as f64),
        }
    }
}

/// The number, or the numbers of an array; `None` for other types.
fn numbers(value: &Value) -> Option<Vec<f64>> {
    Some(match value {
        Value::F32(number) => vec![f64::from(*number)],
        Value::F64(number) => vec![*number],
        Value::Array(Array::F32(numbers)) => numbers.iter().map(|&number| number.into()).collect(),
        Value::Array(Array::F64(numbers)) => numbers.clone(),
        Value::Array(array) => integers(array)?.into_iter().map(|number| number as f64).collect(),
        Value::U8(n) => vec![(*n).into()],
        Value::I8(n) => vec![(*n).into()],
        Value::U16(n) => vec![(*n).into()],
        Value::I16(n) => vec![(*n).into()],
        Value::U32(n) => vec![(*n).into()],
        Value::I32(n) => vec![(*n).into()],
        Value::U64(n) => vec![*n as f64],
        Value::I64(n) => vec![*n as f64],
        Value::Bool(_) | Value::String(_) => return None,
    })
}
