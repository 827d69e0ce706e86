//! `gpt-oss`: attention with a sink for each head, windows in every second layer, and experts with biases and a clamped
//! gate.

use super::Written;
use super::experts::{self, Experts};
use super::rope;
use super::sizes::{Sizes, norm};
use super::window::{refuse_other_base, window};
use super::writer::{Attention, Presence, Writer};
use crate::model::plan::{PlanError, Shape};
use crate::program::{Activation, Gating, NormKind, RopeLayout, RopeScaling};

/// Default period of layers without a window, where the file does not name the layers.
const PATTERN: u32 = 2;

pub(super) fn write(w: &mut Writer<'_>) -> Result<Written, PlanError> {
    let sizes = Sizes::read(&w.metadata, w.vocab)?;
    let (heads, rms) = (sizes.heads, norm(&w.metadata, NormKind::Rms)?);
    let mut angles = rope::without_factors(&w.metadata, RopeLayout::Halves, heads.dim, sizes.context)?;
    if let RopeScaling::Yarn(yarn) = &mut angles.scaling {
        yarn.whole_pairs = false; // the models were trained so, and no key says it
    }
    refuse_other_base(&w.metadata, angles.theta)?;
    let windows = window(&w.metadata, &sizes, angles.dims, PATTERN)?;
    let found = experts::required(&w.metadata, Gating::Softmax, &[Gating::Softmax])?;
    let experts = Experts { biases: Presence::Required, activation: Activation::Clamped, ..found };

    let x = w.embedding(sizes.hidden, 1.0);
    let rope = w.plain_rope(&angles);
    for layer in 0..sizes.layers {
        w.layer(layer);
        let normed = w.norm("attention norm", "attn_norm", rms, x);
        let qkv = w.qkv(heads, normed, Presence::Required);
        w.rotate(heads, [rope, rope], qkv);
        let sinks = Some(w.sinks(heads));
        let how = Attention { sinks, ..Attention::of(heads.scale(), windows.of(layer)) };
        let attended = w.store_and_attend(heads, qkv, how);
        w.add_projection("attention output", "attn_output", attended, x, Presence::Required);
        let normed = w.norm("feed-forward norm", "post_attention_norm", rms, x);
        w.experts(&experts, normed, x);
    }
    let logits = w.head_with(rms, x, Presence::Required, Presence::Never);
    Ok(Written { logits, shape: Shape::new(&sizes, 0, Some(&experts)), context: sizes.context })
}
