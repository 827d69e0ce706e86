//! `phi3`: Phi 3, 3.5 and 4. Queries, keys and values are one tensor, and so are gate and up. Attention may have a
//! window in all layers. Frequencies have divisors for short and for long contexts.

use super::Written;
use super::sizes::{Sizes, norm};
use super::window::window;
use super::writer::{Presence, Writer};
use super::{experts, rope};
use crate::model::plan::{PlanError, Shape};
use crate::program::{Activation, NormKind, RopeLayout};

pub(super) fn write(w: &mut Writer<'_>) -> Result<Written, PlanError> {
    let sizes = Sizes::read(&w.metadata, w.vocab)?;
    let (heads, rms) = (sizes.heads, norm(&w.metadata, NormKind::Rms)?);
    let angles = rope::rope(&w.metadata, RopeLayout::Halves, heads.dim, sizes.context)?;
    experts::none(&w.metadata)?;
    // A period of 0: every layer has the window, as in training. llama.cpp ignores the key.
    let windows = window(&w.metadata, &sizes, angles.spec.dims, 0)?;

    let x = w.embedding(sizes.hidden, 1.0);
    let rope = w.longrope(angles);
    for layer in 0..sizes.layers {
        w.layer(layer);
        let normed = w.norm("attention norm", "attn_norm", rms, x);
        let qkv = w.qkv(heads, normed, Presence::Never);
        let attended = w.attend(heads, rope, qkv, heads.scale(), windows.of(layer));
        w.add_projection("attention output", "attn_output", attended, x, Presence::Never);
        let normed = w.norm("feed-forward norm", "ffn_norm", rms, x);
        let gated = w.gated_pieces(normed, sizes.ffn, Activation::Silu);
        w.add_projection("feed-forward down", "ffn_down", gated, x, Presence::Never);
    }
    let logits = w.head(rms, x);
    Ok(Written { logits, shape: Shape::new(&sizes, sizes.ffn, None), context: sizes.context })
}
