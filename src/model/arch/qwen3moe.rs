//! `qwen3moe`: Qwen 3 with experts, as 30B-A3B and 235B-A22B.

use super::decoder::Decoder;
use super::qwen3::QWEN3;

pub(super) const QWEN3MOE: Decoder = Decoder { name: "qwen3moe", experts: true, ..QWEN3 };
