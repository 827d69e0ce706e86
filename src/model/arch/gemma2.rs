//! `gemma2`: Gemma 2. Each half of a layer has a norm before and after it. Scores of attention and logits are capped. It
//! uses GELU and scales embeddings. Every second layer has a window.

use super::Written;
use super::metadata::Metadata;
use super::sizes::{Sizes, norm};
use super::window::{refuse_other_base, window_or};
use super::writer::{Attention, Presence, Writer};
use super::{experts, rope};
use crate::model::plan::{PlanError, Shape};
use crate::program::{NormKind, RopeLayout};

/// Default period of layers without a window, where the file does not name the layers.
const PATTERN: u32 = 2;

/// Window of files that state none: early ones do not.
const WINDOW: u32 = 4096;

/// Layers of the 27B model. It scales scores by a width other than that of its heads; no key states this.
const LAYERS_27B: usize = 46;

/// A cap; `default` in files that state none, as early ones. 0 means no cap.
pub(super) fn cap(
    metadata: &Metadata<'_>,
    name: &'static str,
    default: f32,
) -> Result<Option<f32>, PlanError> {
    let value = metadata.float_if_there(name)?.unwrap_or(default);
    if value < 0.0 {
        return Err(PlanError::Float { key: metadata.key(name), value, want: "at least 0" });
    }
    Ok((value != 0.0).then_some(value))
}

pub(super) fn write(w: &mut Writer<'_>) -> Result<Written, PlanError> {
    let sizes = Sizes::read(&w.metadata, w.vocab)?;
    let (heads, rms) = (sizes.heads, norm(&w.metadata, NormKind::Rms)?);
    experts::none(&w.metadata)?;
    let score_cap = cap(&w.metadata, "attn_logit_softcapping", 50.0)?;
    let logit_cap = cap(&w.metadata, "final_logit_softcapping", 30.0)?;
    let angles = rope::without_factors(&w.metadata, RopeLayout::Halves, heads.dim, sizes.context)?;
    refuse_other_base(&w.metadata, angles.theta)?;
    let windows = window_or(&w.metadata, &sizes, angles.dims, PATTERN, WINDOW)?;
    let scale = match sizes.layers {
        LAYERS_27B => 1.0 / ((sizes.hidden / heads.queries) as f32).sqrt(),
        _ => heads.scale(),
    };

    let x = w.embedding(sizes.hidden, (sizes.hidden as f32).sqrt());
    let rope = w.plain_rope(&angles);
    for layer in 0..sizes.layers {
        w.layer(layer);
        let normed = w.norm("attention norm", "attn_norm", rms, x);
        let qkv = w.qkv(heads, normed, Presence::Never);
        w.rotate(heads, [rope, rope], qkv);
        let how = Attention { cap: score_cap, ..Attention::of(scale, windows.of(layer)) };
        let attended = w.store_and_attend(heads, qkv, how);
        w.add_normed_halves(rms, attended, x, sizes.ffn);
    }
    let logits = w.head(rms, x);
    if let Some(cap) = logit_cap {
        w.cap(logits, cap);
    }
    Ok(Written { logits, shape: Shape::new(&sizes, sizes.ffn, None), context: sizes.context })
}
