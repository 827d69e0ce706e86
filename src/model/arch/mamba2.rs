//! `mamba2`: Mamba 2 alone, without attention and feed-forward halves, as Mamba-Codestral.

use super::Written;
use super::recurrent::Mamba;
use super::sizes::{Sizes, norm};
use super::writer::{Presence, Writer};
use crate::model::plan::{PlanError, Shape};
use crate::program::NormKind;

pub(super) fn write(w: &mut Writer<'_>) -> Result<Written, PlanError> {
    let sizes = Sizes::read_recurrent(&w.metadata, w.vocab)?;
    let (mamba, rms) = (Mamba::read(&w.metadata)?, norm(&w.metadata, NormKind::Rms)?);
    let x = w.embedding(sizes.hidden, 1.0);
    for layer in 0..sizes.layers {
        w.layer(layer);
        let normed = w.norm("norm of the layer", "attn_norm", rms, x);
        let out = w.mamba(&mamba, rms, [Presence::Required, Presence::Required], normed);
        w.add_projection("recurrent output", "ssm_out", out, x, Presence::Never);
    }
    let logits = w.head(rms, x);
    Ok(Written { logits, shape: Shape::new(&sizes, 0, None), context: sizes.context })
}
