//! `deepseek2`: DeepSeek V2 and V3, Kimi K2, GLM 4.7 Flash. A position's keys and values are one latent vector for all heads.
//!
//! A head's own keys and values are products of the latent ones. So a head's queries are multiplied by the matrix of its keys,
//! and its weighted latent values by that of its values. Attention then reads the latent vector alone, and a rotated part before
//! it. The stored values have that part as well, which is left out afterwards. Experts are as in `glm4moe.rs`. A file that lacks
//! the two matrices is of an older converter.

use super::Written;
use super::experts::{self, Experts};
use super::metadata::Metadata;
use super::rope;
use super::sizes::{HEAD_DIM_MAX, Sizes, norm};
use super::writer::{Attention, Heads, Norm, Presence, Qkv, Writer};
use crate::model::plan::{PlanError, Shape};
use crate::program::{Gating, HeadPart, NormKind, RopeId, RopeLayout, RopeScaling, RopeSpec, ValueId};

/// Vocabulary of GLM 4.7 Flash. Its first files do not state that its experts are chosen by sigmoids.
const GLM_VOCAB: usize = 154_880;

/// Widest compressed queries: those of DeepSeek V3 have 1,536 values.
const QUERY_RANK_MAX: u64 = 1 << 17;

/// Widths and factor of latent attention.
struct Latent {
    /// Width of compressed queries; `None` where they are not compressed.
    queries: Option<usize>,
    /// Width of the latent vector.
    rank: usize,
    /// Values of a head's query that are not rotated.
    plain: u32,
    /// Values of a head's query that are rotated: those after the others.
    rotated: u32,
    /// Values of a head's result.
    value: usize,
    /// Factor of the scores.
    scale: f32,
}

impl Latent {
    fn read(metadata: &Metadata<'_>, sizes: &Sizes) -> Result<(Self, RopeSpec), PlanError> {
        let width = |name: &str| metadata.count(name, 1..=HEAD_DIM_MAX);
        for name in ["attention.key_length_mla", "attention.value_length_mla"] {
            if metadata.count_if_there(name, 1..=HEAD_DIM_MAX)?.is_none() {
                let feature =
                    format!("keys and values of each head, as old files have them ({name} is missing)");
                return Err(metadata.unsupported(&feature));
            }
        }
        let [key, value] = [width("attention.key_length_mla")?, width("attention.value_length_mla")?];
        let [rank, rotated] = [width("attention.kv_lora_rank")?, width("rope.dimension_count")?];
        let stored = width("attention.value_length")?;
        if (sizes.heads.dim, stored) != (rank + rotated, rank) || rotated >= key {
            let feature = format!(
                "heads of {key} values (attention.key_length_mla) with {rotated} rotated, and {} and {stored} stored \
                 for a latent vector of {rank} (attention.kv_lora_rank)",
                sizes.heads.dim
            );
            return Err(metadata.unsupported(&feature));
        }
        let angles =
            rope::without_factors(metadata, RopeLayout::Interleaved, sizes.heads.dim, sizes.context)?;
        let (angles, longer) = of_scores(metadata, angles)?;
        let queries = metadata.count_if_there("attention.q_lora_rank", 0..=QUERY_RANK_MAX)?;
        let latent = Self {
            queries: queries.filter(|width| *width > 0),
            rank,
            plain: (key - rotated) as u32, // at most HEAD_DIM_MAX
            rotated: rotated as u32,
            value,
            scale: longer / (key as f32).sqrt(),
        };
        Ok((latent, angles))
    }

    /// The rotated part of a stored head, and the latent one after it.
    fn stored(&self) -> [HeadPart; 2] {
        let (rotated, latent) = (self.rotated, self.rank as u32); // at most HEAD_DIM_MAX
        let head_dim = rotated + latent;
        [
            HeadPart { head_dim, first: 0, width: rotated },
            HeadPart { head_dim, first: rotated, width: latent },
        ]
    }

    /// Attends to the norm of `x`, and adds the output to `x`.
    fn attend(&self, w: &mut Writer<'_>, (heads, rope): (Heads, RopeId), norm: Norm, x: ValueId) {
        let &Self { rank, plain, rotated, .. } = self;
        let normed = w.norm("attention norm", "attn_norm", norm, x);
        let pieces = [rank, rotated as usize];
        let role = "latent vector and rotated key";
        let [latent, key] = w.project_pieces(role, "attn_kv_a_mqa", normed, pieces, Presence::Never);
        w.norm_groups("norm of the latent vector", "attn_kv_a_norm", norm, rank, latent);
        let query = self.queries(w, heads, norm, normed);
        let head_dim = plain + rotated;
        let [unrotated, turned] = [(0, plain), (plain, rotated)];
        let [unrotated, turned] =
            [unrotated, turned].map(|(first, width)| HeadPart { head_dim, first, width });
        let role = "keys of the latent vector";
        let of_latent = w.project_heads(role, "attn_k_b", query, (heads.queries, unrotated), rank);
        let whole = HeadPart::whole(rank as u32); // at most HEAD_DIM_MAX
        let q = w.join_heads([(query, turned), (of_latent, whole)]);
        let k = w.join_heads([(key, HeadPart::whole(rotated)), (latent, whole)]);
        w.rotate(heads, [rope, rope], Qkv { q, k, v: k });
        let attended = w.store_and_attend(heads, Qkv { q, k, v: k }, Attention::of(self.scale, None));
        let [_, latent] = self.stored();
        let role = "values of the latent vector";
        let values = w.project_heads(role, "attn_v_b", attended, (heads.queries, latent), self.value);
        w.add_projection("attention output", "attn_output", values, x, Presence::Never);
    }

    /// The queries of all heads, of which each has its rotated values last.
    fn queries(&self, w: &mut Writer<'_>, heads: Heads, norm: Norm, normed: ValueId) -> ValueId {
        let width = heads.queries * (self.plain + self.rotated) as usize;
        let Some(rank) = self.queries else {
            return w.project("query projection", "attn_q", normed, width, Presence::Never);
        };
        let compressed = w.project("compressed queries", "attn_q_a", normed, rank, Presence::Never);
        w.norm_groups("norm of compressed queries", "attn_q_a_norm", norm, rank, compressed);
        w.project("query projection", "attn_q_b", compressed, width, Presence::Never)
    }
}

/// The angles, and the factor of scores. Other models lengthen queries and keys with YaRN. These leave what they rotate as
/// it is, and scores grow by the square instead.
fn of_scores(metadata: &Metadata<'_>, mut angles: RopeSpec) -> Result<(RopeSpec, f32), PlanError> {
    if angles.magnitude != 1.0 {
        return Err(metadata.unsupported("longer queries and keys (rope.scaling.attn_factor)"));
    }
    let longer = match &mut angles.scaling {
        RopeScaling::None => 1.0,
        RopeScaling::Linear { .. } => {
            let feature = "positions that are scaled alike (rope.scaling.factor, rope.scale_linear)";
            return Err(metadata.unsupported(feature));
        }
        RopeScaling::Yarn(yarn) => {
            if yarn.log_multiplier == 0.0 || yarn.ext_factor != 1.0 {
                let feature = "YaRN (rope.scaling.type) without rope.scaling.yarn_log_multiplier, or in part \
                               (rope.scaling.yarn_ext_factor)";
                return Err(metadata.unsupported(feature));
            }
            let length = 1.0 + yarn.log_multiplier * yarn.factor.max(1.0).ln();
            yarn.log_multiplier = 1.0;
            length * length
        }
    };
    Ok((angles, longer))
}

pub(super) fn write(w: &mut Writer<'_>) -> Result<Written, PlanError> {
    let sizes = Sizes::read_latent(&w.metadata, w.vocab)?;
    let (heads, rms) = (sizes.heads, norm(&w.metadata, NormKind::Rms)?);
    let (latent, angles) = Latent::read(&w.metadata, &sizes)?;
    let flash = matches!(sizes.layers, 47 | 48) && w.vocab == GLM_VOCAB;
    let own = if flash { Gating::Sigmoid } else { Gating::Softmax };
    let found = experts::required(&w.metadata, own, &[Gating::Softmax, Gating::Sigmoid])?;
    let normalise = w.metadata.flag_if_there("expert_weights_norm")?.unwrap_or(false);
    let groups = experts::groups(&w.metadata, &found)?;
    let experts = Experts { groups, bias: Presence::Optional, normalise, ..found };
    let shared = experts::shared_width(&w.metadata, &experts)?;
    let dense = experts::leading_dense(&w.metadata, sizes.blocks)?;

    let x = w.embedding(sizes.hidden, 1.0);
    let rope = w.plain_rope(&angles);
    for layer in 0..sizes.layers {
        w.layer(layer);
        latent.attend(w, (heads, rope), rms, x);
        if layer < dense {
            w.feed_forward(rms, x, sizes.ffn, Presence::Never);
            continue;
        }
        let normed = w.norm("feed-forward norm", "ffn_norm", rms, x);
        w.experts_and_shared(&experts, normed, shared, x);
    }
    (sizes.layers..sizes.blocks).for_each(|layer| w.unused_layer(layer));
    let logits = w.head(rms, x);
    let ffn = if dense > 0 { sizes.ffn } else { 0 };
    Ok(Written { logits, shape: Shape::new(&sizes, ffn, Some(&experts)), context: sizes.context })
}
