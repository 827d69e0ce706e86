//! `exaone4`: EXAONE 4. Norms of query and key heads, and after each half of a layer. In a model with windows, the
//! layers without one use no positions.

use super::Written;
use super::sizes::{Sizes, norm};
use super::window::{Window, refuse_other_base, window};
use super::writer::{Presence, Writer};
use super::{experts, rope};
use crate::model::plan::{PlanError, Shape};
use crate::program::{Activation, NormKind, RopeLayout};

/// Default period of layers without a window, where the file does not name the layers.
const PATTERN: u32 = 4;

pub(super) fn write(w: &mut Writer<'_>) -> Result<Written, PlanError> {
    let sizes = Sizes::read(&w.metadata, w.vocab)?;
    let (heads, rms) = (sizes.heads, norm(&w.metadata, NormKind::Rms)?);
    let angles = rope::rope(&w.metadata, RopeLayout::Halves, heads.dim, sizes.context)?;
    experts::none(&w.metadata)?;
    let windows = window(&w.metadata, &sizes, angles.spec.dims, PATTERN)?;
    refuse_other_base(&w.metadata, angles.spec.theta)?;

    let x = w.embedding(sizes.hidden, 1.0);
    let (rotated, unrotated) = (w.rope(&angles), w.unrotated(&angles.spec));
    for layer in 0..sizes.layers {
        w.layer(layer);
        let qkv = w.qkv(heads, x, Presence::Never);
        w.head_norms(rms, heads, qkv);
        let window = windows.of(layer);
        let everywhere = matches!(windows, Window::None);
        let rope = if everywhere || window.is_some() { rotated } else { unrotated };
        let attended = w.attend(heads, rope, qkv, heads.scale(), window);
        let out = w.project("attention output", "attn_output", attended, sizes.hidden, Presence::Never);
        w.add_norm("norm after attention", "post_attention_norm", rms, out, x);
        let gated = w.gated(x, sizes.ffn, Activation::Silu, Presence::Never);
        let out = w.project("feed-forward down", "ffn_down", gated, sizes.hidden, Presence::Never);
        w.add_norm("norm after feed-forward", "post_ffw_norm", rms, out, x);
    }
    (sizes.layers..sizes.blocks).for_each(|layer| w.unused_layer(layer));
    let logits = w.head(rms, x);
    Ok(Written { logits, shape: Shape::new(&sizes, sizes.ffn, None), context: sizes.context })
}
