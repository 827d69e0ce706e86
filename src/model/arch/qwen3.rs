//! `qwen3`: Qwen 3, dense. Heads of q and k are normed before they turn.

use super::decoder::{Decoder, Presence};
use crate::backend::RopeLayout;

pub(super) const QWEN3: Decoder = Decoder {
    name: "qwen3",
    layout: RopeLayout::Halves,
    qkv_bias: Presence::Optional, // where `attention_bias` was set in training
    output_bias: Presence::Never,
    ffn_bias: Presence::Never,
    head_norms: Presence::Required,
    experts: false,
};
