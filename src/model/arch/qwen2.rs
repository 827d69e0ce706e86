//! `qwen2`: Qwen 2 and 2.5, QwQ, and what was distilled into them. q, k and v have biases.

use super::decoder::{Decoder, Presence};
use crate::backend::RopeLayout;

pub(super) const QWEN2: Decoder = Decoder {
    name: "qwen2",
    layout: RopeLayout::Halves,
    qkv_bias: Presence::Required,
    output_bias: Presence::Never,
    ffn_bias: Presence::Never,
    head_norms: Presence::Never,
    experts: false,
};
