//! Sizes common to all architectures, each read within limits that keep later arithmetic from overflowing.

use super::experts::Experts;
use super::metadata::Metadata;
use super::writer::{Heads, Norm};
use crate::model::plan::{ExpertShape, PlanError, Shape};
use crate::program::NormKind;

// Each limit is a few times the largest published model. Their products stay far below 2^63. The largest product, a KV
// page's values (layers * kv heads * head_dim * 64), stays below 2^37.
const LAYERS_MAX: u64 = 512;
pub(super) const WIDTH_MAX: u64 = 1 << 17; // Llama 3 405B: 16,384
pub(super) const FFN_MAX: u64 = 1 << 19; // Llama 3 405B: 53,248
pub(super) const HEADS_MAX: u64 = 1024; // Llama 3 405B: 128
pub(super) const HEAD_DIM_MAX: u64 = 1024; // 256 in the widest
const VOCAB_MAX: u64 = 1 << 22; // 262,144 in the widest
const CONTEXT_MAX: u64 = 1 << 30; // positions are u32

/// Sizes of a decoder or an encoder.
pub(super) struct Sizes {
    /// Context length in tokens, as stated in the file.
    pub context: u32,
    /// Layers that run.
    pub layers: usize,
    /// Layers of the file: those that run, then those that only predict further tokens.
    pub blocks: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of a dense feed-forward layer.
    pub ffn: usize,
    /// Heads of attention.
    pub heads: Heads,
}

impl Sizes {
    /// Reads a decoder's sizes from the metadata.
    pub fn read(metadata: &Metadata<'_>, vocab: usize) -> Result<Self, PlanError> {
        check_causal(metadata)?;
        Self::of(metadata, vocab, head_dim, Layers::Alike)
    }

    /// Reads the sizes of a decoder where some layers have no attention, or no feed-forward half. Also returns whether each
    /// layer has attention.
    pub fn read_hybrid(metadata: &Metadata<'_>, vocab: usize) -> Result<(Self, Vec<bool>), PlanError> {
        check_causal(metadata)?;
        let sizes = Self::of(metadata, vocab, head_dim, Layers::Hybrid)?;
        let attends = metadata.layers_above_0("attention.head_count_kv", sizes.blocks)?;
        Ok((sizes, attends))
    }

    /// Reads the sizes of a decoder that has neither attention nor feed-forward halves.
    pub fn read_recurrent(metadata: &Metadata<'_>, vocab: usize) -> Result<Self, PlanError> {
        for name in ["feed_forward_length", "attention.head_count", "attention.head_count_kv"] {
            metadata.count_if_there(name, 0..=0)?;
        }
        let context = metadata.count("context_length", 1..=CONTEXT_MAX)? as u32;
        let blocks = metadata.count("block_count", 1..=LAYERS_MAX)?;
        let hidden = metadata.count("embedding_length", 1..=WIDTH_MAX)?;
        check_vocab(vocab)?;
        let heads = Heads { queries: 0, keys: 0, dim: 0 };
        Ok(Self { context, layers: blocks, blocks, hidden, ffn: 0, heads })
    }

    /// Reads the sizes of a decoder whose keys and values are the same latent ones for all heads.
    pub fn read_latent(metadata: &Metadata<'_>, vocab: usize) -> Result<Self, PlanError> {
        metadata.refuse_any("attention.head_count_kv", "several latent keys", |heads| heads != 1)?;
        let dim = |metadata: &Metadata<'_>, _, _| metadata.count("attention.key_length", 1..=HEAD_DIM_MAX);
        Self::of(metadata, vocab, dim, Layers::Alike)
    }

    /// Reads an encoder's sizes from the metadata.
    pub fn of_encoder(metadata: &Metadata<'_>, vocab: usize) -> Result<Self, PlanError> {
        if metadata.flag_if_there("attention.causal")? == Some(true) {
            return Err(metadata.unsupported("causal attention (attention.causal)"));
        }
        Self::of(metadata, vocab, head_dim, Layers::Alike)
    }

    fn of(
        metadata: &Metadata<'_>,
        vocab: usize,
        head_dim: fn(&Metadata<'_>, usize, usize) -> Result<usize, PlanError>,
        layers: Layers,
    ) -> Result<Self, PlanError> {
        let by_layer = |name: &str, range| match layers {
            Layers::Alike => metadata.count_if_there(name, range),
            Layers::Hybrid => metadata.count_beside_0(name, range),
        };
        let context = metadata.count("context_length", 1..=CONTEXT_MAX)? as u32;
        let blocks = metadata.count("block_count", 1..=LAYERS_MAX)?;
        let unused = metadata.count_if_there("nextn_predict_layers", 0..=blocks as u64 - 1)?.unwrap_or(0);
        let hidden = metadata.count("embedding_length", 1..=WIDTH_MAX)?;
        let key = metadata.key("feed_forward_length");
        let ffn = by_layer("feed_forward_length", 1..=FFN_MAX)?;
        let ffn = ffn.ok_or(PlanError::Key { key, want: "an unsigned integer" })?;
        let queries = metadata.count("attention.head_count", 1..=HEADS_MAX)?;
        let keys = by_layer("attention.head_count_kv", 1..=HEADS_MAX)?.unwrap_or(queries);
        if !queries.is_multiple_of(keys) {
            return Err(PlanError::HeadGroups { heads: queries, kv_heads: keys });
        }
        let dim = head_dim(metadata, hidden, queries)?;
        check_vocab(vocab)?;
        let heads = Heads { queries, keys, dim };
        Ok(Self { context, layers: blocks - unused, blocks, hidden, ffn, heads })
    }
}

/// Says whether numbers of an array may be 0 in some layers.
#[derive(Clone, Copy)]
enum Layers {
    Alike,
    Hybrid,
}

fn check_causal(metadata: &Metadata<'_>) -> Result<(), PlanError> {
    match metadata.flag_if_there("attention.causal")? {
        Some(false) => Err(metadata.unsupported("non-causal attention (attention.causal)")),
        _ => Ok(()),
    }
}

fn check_vocab(vocab: usize) -> Result<(), PlanError> {
    if (1..=VOCAB_MAX).contains(&(vocab as u64)) {
        return Ok(());
    }
    let key = "tokenizer.ggml.tokens".to_owned();
    Err(PlanError::Range { key, value: vocab as u64, min: 1, max: VOCAB_MAX })
}

/// Head width: stated, or the hidden width divided by the number of heads.
fn head_dim(metadata: &Metadata<'_>, hidden: usize, heads: usize) -> Result<usize, PlanError> {
    let stated = metadata.count_if_there("attention.key_length", 1..=HEAD_DIM_MAX)?;
    let value = metadata.count_if_there("attention.value_length", 1..=HEAD_DIM_MAX)?;
    let head_dim = match stated {
        Some(width) => width,
        None if hidden.is_multiple_of(heads) && (hidden / heads) as u64 <= HEAD_DIM_MAX => hidden / heads,
        None => return Err(PlanError::HeadWidth { hidden, heads }),
    };
    metadata.ignore_if("attention.scale", |scale| (scale * (head_dim as f32).sqrt() - 1.0).abs() < 1e-6);
    match value {
        Some(width) if width != head_dim => {
            let feature = format!("key width {head_dim} and value width {width} (attention.value_length)");
            Err(metadata.unsupported(&feature))
        }
        _ => Ok(head_dim),
    }
}

/// The architecture's norm. Its eps is required. LayerNorms have biases, RMSNorms have none.
pub(super) fn norm(metadata: &Metadata<'_>, kind: NormKind) -> Result<Norm, PlanError> {
    let name = match kind {
        NormKind::Rms => "attention.layer_norm_rms_epsilon",
        NormKind::Layer => "attention.layer_norm_epsilon",
    };
    let key = metadata.key(name);
    match metadata.float_if_there(name)? {
        None => Err(PlanError::Key { key, want: "a real number" }),
        Some(eps) if (0.0..1.0).contains(&eps) => Ok(Norm { kind, eps, bias: kind == NormKind::Layer }),
        Some(value) => Err(PlanError::Float { key, value, want: "at least 0 and below 1" }),
    }
}

impl Shape {
    /// The shape of a model. `ffn` is the width of dense feed-forward layers, or 0 where it has none.
    pub(super) fn new(sizes: &Sizes, ffn: usize, experts: Option<&Experts>) -> Self {
        Self {
            hidden: sizes.hidden,
            heads: sizes.heads.queries,
            kv_heads: sizes.heads.keys,
            head_dim: sizes.heads.dim,
            ffn,
            experts: experts.map(|e| ExpertShape { count: e.count, used: e.used, ffn: e.ffn }),
        }
    }
}
