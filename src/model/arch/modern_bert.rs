//! `modern-bert`: an encoder with norms before each half of a layer, gated GELU and RoPE. Most layers have a window that looks both
//! ways, and a RoPE base of their own.

use super::sizes::{Sizes, norm};
use super::window::{Ropes, window_but_first};
use super::writer::{Attention, Norm, Presence, Writer};
use super::{Encoded, bert, experts, rope};
use crate::model::plan::PlanError;
use crate::program::{Activation, NormKind, RopeLayout};

/// Default period of layers without a window, where the file does not name the layers.
const PATTERN: u32 = 3;

pub(super) fn write(w: &mut Writer<'_>) -> Result<Encoded, PlanError> {
    let sizes = Sizes::of_encoder(&w.metadata, w.vocab)?;
    let heads = sizes.heads;
    let layer_norm = Norm { bias: false, ..norm(&w.metadata, NormKind::Layer)? };
    experts::none(&w.metadata)?;
    let angles = rope::without_factors(&w.metadata, RopeLayout::Halves, heads.dim, sizes.context)?;
    let windows = window_but_first(&w.metadata, &sizes, angles.dims, PATTERN)?;

    let x = w.embedding(sizes.hidden, 1.0);
    w.norm_groups("embedding norm", "token_embd_norm", layer_norm, sizes.hidden, x);
    let ropes = Ropes::of(w, &windows, &angles)?;
    for layer in 0..sizes.layers {
        w.layer(layer);
        // The first layer's input has its norm already.
        let normed = match layer {
            0 => x,
            _ => w.norm("attention norm", "attn_norm", layer_norm, x),
        };
        let qkv = w.qkv(heads, normed, Presence::Never);
        let window = windows.of(layer);
        let rope = ropes.at(window);
        w.rotate(heads, [rope, rope], qkv);
        let how = Attention { both_ways: true, ..Attention::of(heads.scale(), window) };
        let attended = w.store_and_attend(heads, qkv, how);
        w.add_projection("attention output", "attn_output", attended, x, Presence::Never);
        let normed = w.norm("feed-forward norm", "ffn_norm", layer_norm, x);
        let gated = w.gated_pieces(normed, sizes.ffn, Activation::Gelu);
        w.add_projection("feed-forward down", "ffn_down", gated, x, Presence::Never);
    }
    w.norm_last(layer_norm, x);
    bert::encoded(w, &sizes, x, Some(layer_norm))
}
