//! `llama`: Llama 1 to 3, Mistral, Mixtral, SmolLM2, TinyLlama and all that is converted under that name.
//!
//! q and k rows are permuted by the converter so that rotary pairs are neighbours.

use super::decoder::{Decoder, Presence};
use crate::backend::RopeLayout;

pub(super) const LLAMA: Decoder = Decoder {
    name: "llama",
    layout: RopeLayout::Interleaved,
    qkv_bias: Presence::Optional,
    output_bias: Presence::Optional,
    ffn_bias: Presence::Optional,
    head_norms: Presence::Never,
    experts: true,
};
