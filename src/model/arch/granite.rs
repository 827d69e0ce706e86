//! `granite`: Granite 3 and later, dense; `granitemoe`: with experts, and maybe one that all rows share. Most layers of
//! `granitehybrid`, which is either, have Mamba 2 instead of attention. Embeddings, scores and layer halves have their own
//! factors. Logits are divided by `logit_scale`.

use super::Written;
use super::experts::{self, Experts};
use super::recurrent::Mamba;
use super::rope;
use super::sizes::{FFN_MAX, Sizes, norm};
use super::writer::{Presence, Writer};
use crate::model::plan::{PlanError, Shape};
use crate::program::{Activation, NormKind, RopeLayout};

pub(super) fn write(w: &mut Writer<'_>) -> Result<Written, PlanError> {
    experts::none(&w.metadata)?;
    let sizes = Sizes::read(&w.metadata, w.vocab)?;
    write_layers(w, &sizes, None, None)
}

pub(super) fn write_moe(w: &mut Writer<'_>) -> Result<Written, PlanError> {
    let experts = experts::read(&w.metadata)?;
    let sizes = Sizes::read(&w.metadata, w.vocab)?;
    write_layers(w, &sizes, experts, None)
}

pub(super) fn write_hybrid(w: &mut Writer<'_>) -> Result<Written, PlanError> {
    let experts = experts::read(&w.metadata)?;
    let (sizes, attends) = Sizes::read_hybrid(&w.metadata, w.vocab)?;
    let mamba = Mamba::read(&w.metadata)?;
    write_layers(w, &sizes, experts, Some(Hybrid { mamba, attends }))
}

/// Layers with Mamba 2.
struct Hybrid {
    mamba: Mamba,
    /// Whether each layer has attention instead.
    attends: Vec<bool>,
}

fn write_layers(
    w: &mut Writer<'_>,
    sizes: &Sizes,
    mut experts: Option<Experts>,
    hybrid: Option<Hybrid>,
) -> Result<Written, PlanError> {
    let (heads, rms) = (sizes.heads, norm(&w.metadata, NormKind::Rms)?);
    let angles = rope::rope(&w.metadata, RopeLayout::Interleaved, heads.dim, sizes.context)?;
    w.metadata.refuse_any("deepstack_mapping", "image embeddings in deeper layers", |n| n >= 0)?;
    // Where the key is false, positions are not used: no pair of a head is rotated.
    let turns = w.metadata.flag_if_there("rope.scaling.finetuned")?.unwrap_or(true);
    // 0 means no factor.
    let factor = |name: &str| Ok::<_, PlanError>(w.metadata.float_if_there(name)?.filter(|by| *by != 0.0));
    let key = w.metadata.key("logit_scale");
    let divisor = match (factor("logit_scale")?, &hybrid) {
        (Some(divisor), _) => divisor,
        (None, Some(_)) => 1.0, // Bamba has none
        (None, None) => return Err(PlanError::Key { key, want: "a real number" }),
    };
    let (embedded, residual) =
        (factor("embedding_scale")?.unwrap_or(1.0), factor("residual_scale")?.unwrap_or(1.0));
    let scale = factor("attention.scale")?.unwrap_or(heads.scale());
    let named = w.metadata.count_if_there("expert_shared_feed_forward_length", 0..=FFN_MAX)?;
    let named = named.filter(|ffn| *ffn > 0);
    let shared = match &mut experts {
        // Files of Granite 4 without experts name the width of their only feed-forward so.
        None if named.is_none_or(|ffn| ffn == sizes.ffn) => None,
        None => {
            let feature = "a shared expert beside no others (expert_shared_feed_forward_length)";
            return Err(w.metadata.unsupported(feature));
        }
        Some(experts) => {
            // The weights of a row's experts take the factor of what a layer adds.
            experts.scale *= residual;
            named
        }
    };

    let x = w.embedding(sizes.hidden, embedded);
    let rope = if turns { w.rope(&angles) } else { w.unrotated(&angles.spec) };
    for layer in 0..sizes.layers {
        w.layer(layer);
        let normed = w.norm("attention norm", "attn_norm", rms, x);
        let out = match &hybrid {
            Some(Hybrid { mamba, attends }) if attends.get(layer) == Some(&false) => {
                let out = w.mamba(mamba, rms, [Presence::Optional, Presence::Required], normed);
                w.project("recurrent output", "ssm_out", out, sizes.hidden, Presence::Never)
            }
            _ => {
                let qkv = w.qkv(heads, normed, Presence::Optional);
                let attended = w.attend(heads, rope, qkv, scale, None);
                w.project("attention output", "attn_output", attended, sizes.hidden, Presence::Optional)
            }
        };
        w.add(out, residual, x);
        let normed = w.norm("feed-forward norm", "ffn_norm", rms, x);
        let out = match &experts {
            None => {
                let gated = w.gated(normed, sizes.ffn, Activation::Silu, Presence::Optional);
                Some(w.project("feed-forward down", "ffn_down", gated, sizes.hidden, Presence::Optional))
            }
            Some(experts) => {
                w.experts(experts, normed, x);
                shared.map(|ffn| w.shared_expert(normed, ffn))
            }
        };
        if let Some(out) = out {
            w.add(out, residual, x);
        }
    }
    let logits = w.head(rms, x);
    w.scale(logits, 1.0 / divisor);
    let ffn = if experts.is_some() { 0 } else { sizes.ffn };
    Ok(Written { logits, shape: Shape::new(sizes, ffn, experts.as_ref()), context: sizes.context })
}
