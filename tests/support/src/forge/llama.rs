//! A whole small untrained llama model, for tests that break the meaning of its metadata and tensors.

use super::{Forge, Value, ggml};

const HEADS: u32 = 4;
const KV_HEADS: u32 = 2;
const LAYERS: u32 = 2;

/// Adds a SentencePiece vocabulary of 3 special, 256 byte and 4 text tokens. Also returns their number.
pub(super) fn with_vocabulary(forge: Forge) -> (Forge, u64) {
    let mut tokens: Vec<String> = ["<unk>", "<s>", "</s>"].map(str::to_owned).into();
    tokens.extend((0..=255).map(|byte: u8| format!("<0x{byte:02X}>")));
    tokens.extend(["\u{2581}", "a", "b", "ab"].map(str::to_owned));
    // Token types: 1 normal, 2 unknown, 3 control, 6 byte.
    let mut types = vec![2, 3, 3];
    types.extend([6; 256]);
    types.extend([1; 4]);
    let mut scores = vec![0.0; 259];
    scores.extend([-1.0, -2.0, -3.0, -0.5]);
    let forge = forge
        .set("tokenizer.ggml.model", Value::string("llama"))
        .set("tokenizer.ggml.tokens", Value::strings(&tokens))
        .set("tokenizer.ggml.scores", Value::f32s(&scores))
        .set("tokenizer.ggml.token_type", Value::i32s(&types))
        .set("tokenizer.ggml.bos_token_id", Value::u32(1))
        .set("tokenizer.ggml.eos_token_id", Value::u32(2))
        .set("tokenizer.ggml.unknown_token_id", Value::u32(0));
    (forge, tokens.len() as u64)
}

/// Two layers of width 32, 4 heads over 2 KV heads, a SentencePiece vocabulary of 3 special, 256 byte and 4 text tokens.
pub fn tiny_llama(seed: u64) -> Forge {
    shaped_llama(seed, 32, 64)
}

/// Like [`tiny_llama`], with matrices of 1 and 2 MiB.
pub fn wide_llama(seed: u64) -> Forge {
    shaped_llama(seed, 512, 1024)
}

/// Like [`tiny_llama`], of these widths.
pub fn shaped_llama(seed: u64, hidden: u64, ffn: u64) -> Forge {
    let kv = hidden / u64::from(HEADS) * u64::from(KV_HEADS);
    let forge = Forge::new(seed)
        .set("general.architecture", Value::string("llama"))
        .set("general.name", Value::string("forged llama"))
        .set("llama.context_length", Value::u32(64))
        .set("llama.embedding_length", Value::u32(hidden as u32))
        .set("llama.block_count", Value::u32(LAYERS))
        .set("llama.feed_forward_length", Value::u32(ffn as u32))
        .set("llama.rope.dimension_count", Value::u32(hidden as u32 / HEADS))
        .set("llama.attention.head_count", Value::u32(HEADS))
        .set("llama.attention.head_count_kv", Value::u32(KV_HEADS))
        .set("llama.attention.layer_norm_rms_epsilon", Value::f32(1e-5));
    let (forge, vocab) = with_vocabulary(forge);
    let mut forge = forge
        .tensor("token_embd.weight", &[hidden, vocab], ggml::F32)
        .tensor("output_norm.weight", &[hidden], ggml::F32)
        .tensor("output.weight", &[hidden, vocab], ggml::F32);
    for layer in 0..LAYERS {
        let rows: [(&str, &[u64]); 9] = [
            ("attn_norm", &[hidden]),
            ("attn_q", &[hidden, hidden]),
            ("attn_k", &[hidden, kv]),
            ("attn_v", &[hidden, kv]),
            ("attn_output", &[hidden, hidden]),
            ("ffn_norm", &[hidden]),
            ("ffn_gate", &[hidden, ffn]),
            ("ffn_up", &[hidden, ffn]),
            ("ffn_down", &[ffn, hidden]),
        ];
        for (role, dims) in rows {
            forge = forge.tensor(&format!("blk.{layer}.{role}.weight"), dims, ggml::F32);
        }
    }
    forge
}
