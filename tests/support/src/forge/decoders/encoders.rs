//! Encoders: bert and its like, modern-bert and gemma-embedding. The vocabulary of all but the last is WordPiece.

use super::{DIMS as DECODERS, Dims, EPSILON, Forge, HEADS, Qkv, Random, Value, Weights, start, with};

/// Each query head has keys of its own.
const DIMS: Dims = Dims { kv_heads: HEADS, ..DECODERS };

const JINA_V2: Dims = Dims { hidden: 96, heads: 6, kv_heads: 6, ..DECODERS };

/// Most tokens of a text.
const CONTEXT: u32 = 128;

pub(super) fn encoders() -> Vec<(&'static str, Forge)> {
    let pooled = |forge: Forge, pooling: u32| with(forge, "pooling_type", Value::u32(pooling));
    vec![
        ("bert", pooled(bert(81, 2), 1)),
        ("bert-first", pooled(bert(82, 1), 2)),
        ("bert-last", pooled(bert(83, 1), 3)),
        ("nomic-bert", pooled(nomic(84, true), 1)),
        ("nomic-bert-parts", pooled(nomic(85, false), 2)),
        ("jina-bert-v3", pooled(jina(88), 1)),
        ("modern-bert", pooled(modern(89), 1)),
        ("jina-bert-v2", pooled(jina_v2(191, Gate::Apart), 1)),
        ("jina-bert-v2-merged", pooled(jina_v2(192, Gate::Merged), 1)),
        ("jina-bert-v2-normed", pooled(jina_v2(193, Gate::None), 2)),
        ("gemma-embedding", pooled(super::gemma3::encoder(90), 1)),
    ]
}

/// Encoders that score a document for a query, by name.
pub(super) fn rankers() -> Vec<(&'static str, Forge)> {
    let ranker = |seed: u64, forge: Forge| {
        let forge = with(forge, "pooling_type", Value::u32(4));
        let forge = with(forge, "classifier.output_labels", Value::strings(&["LABEL_0"]));
        Weights { forge, random: Random(seed + 100) }
    };
    let mut alone = ranker(195, jina_v2(195, Gate::None));
    alone.linear("cls", [JINA_V2.hidden, 1], 2.0, true);
    let ended = |mut weights: Weights, gain| {
        weights.linear("cls.output", [DIMS.hidden, 1], gain, true);
        weights.forge
    };
    let mut dense = ranker(86, bert(86, 1));
    dense.linear("cls", [DIMS.hidden, DIMS.hidden], 1.0, true);
    let mut modern = ranker(194, modern(194));
    modern.linear("cls", [DIMS.hidden, DIMS.hidden], 1.0, false);
    modern.norm("cls.norm.weight", DIMS.hidden);
    vec![
        ("bert-ranker", ended(dense, 2.0)),
        ("bert-ranker-output", ended(ranker(87, bert(87, 1)), 2.0)),
        ("modern-bert-ranker", ended(modern, 1.0)),
        ("jina-bert-v2-ranker", alone.forge),
    ]
}

/// A file with five special tokens, all letters as beginnings and ends of words, a few pieces, and punctuation.
fn begin(seed: u64, architecture: &str, types: u32) -> (Forge, u64) {
    let mut tokens: Vec<String> = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"].map(str::to_owned).into();
    let letters: Vec<String> = ('a'..='z').map(String::from).collect();
    let pieces = ["th", "the", "ing", "er", "cat", "dog", "sat", "on", "mat", "sky"].map(str::to_owned);
    let words: Vec<String> = letters.into_iter().chain(pieces).collect();
    tokens.extend(words.iter().map(|word| format!("\u{2581}{word}")));
    tokens.extend(words);
    tokens.extend([".", ",", "?", "!", "天", "空"].map(|sign| format!("\u{2581}{sign}")));
    // As many as the tests' ids reach to.
    tokens.extend((tokens.len()..260).map(|number| format!("[unused{number}]")));
    let mut kinds = vec![3; 5];
    kinds.resize(tokens.len(), 1);
    let (forge, _) = start(seed, architecture, DIMS);
    let forge = forge
        .without("tokenizer.ggml.scores")
        .without("tokenizer.ggml.eos_token_id")
        .set("tokenizer.ggml.model", Value::string("bert"))
        .set("tokenizer.ggml.tokens", Value::strings(&tokens))
        .set("tokenizer.ggml.token_type", Value::i32s(&kinds))
        .set("tokenizer.ggml.token_type_count", Value::u32(types))
        .set("tokenizer.ggml.padding_token_id", Value::u32(0))
        .set("tokenizer.ggml.unknown_token_id", Value::u32(1))
        .set("tokenizer.ggml.bos_token_id", Value::u32(2))
        .set("tokenizer.ggml.cls_token_id", Value::u32(2))
        .set("tokenizer.ggml.seperator_token_id", Value::u32(3))
        .set("tokenizer.ggml.mask_token_id", Value::u32(4));
    let forge = with(forge, "attention.layer_norm_epsilon", Value::f32(EPSILON));
    let forge = with(forge, "attention.causal", Value::bool(false));
    (with(forge, "context_length", Value::u32(CONTEXT)), tokens.len() as u64)
}

fn bert(seed: u64, types: u32) -> Forge {
    let (forge, vocab) = begin(seed, "bert", types);
    let mut weights = Weights { forge, random: Random(seed) };
    embeddings(&mut weights, vocab, types);
    weights.add("position_embd.weight", &[DIMS.hidden, CONTEXT.into()], 0.0, 0.7);
    biased_layers(&mut weights, false);
    weights.forge
}

/// Layers whose matrices all have biases, without a gate.
fn biased_layers(weights: &mut Weights, fused: bool) {
    for index in 0..DIMS.layers {
        let layer = format!("blk.{index}");
        weights.qkv(&layer, DIMS, Qkv { fused, bias: true });
        weights.linear(&format!("{layer}.attn_output"), [DIMS.hidden, DIMS.hidden], 1.0, true);
        weights.layer_norm(&format!("{layer}.attn_output_norm"), DIMS.hidden);
        weights.linear(&format!("{layer}.ffn_up"), [DIMS.hidden, DIMS.ffn], 1.5, true);
        weights.linear(&format!("{layer}.ffn_down"), [DIMS.ffn, DIMS.hidden], 1.5, true);
        weights.layer_norm(&format!("{layer}.layer_output_norm"), DIMS.hidden);
    }
}

/// Two of four layers have a window.
fn modern(seed: u64) -> Forge {
    let (forge, vocab) = begin(seed, "modern-bert", 1);
    let forge = forge.without("tokenizer.ggml.token_type_count");
    let forge = with(forge, "block_count", Value::u32(4));
    let forge = with(forge, "attention.sliding_window", Value::u32(17));
    let forge = with(forge, "rope.freq_base", Value::f32(160_000.0));
    let forge = with(forge, "rope.freq_base_swa", Value::f32(8000.0));
    let mut weights = Weights { forge, random: Random(seed) };
    weights.embedding(DIMS.hidden, vocab, false);
    weights.norm("token_embd_norm.weight", DIMS.hidden);
    for index in 0..4 {
        let layer = format!("blk.{index}");
        if index > 0 {
            weights.norm(&format!("{layer}.attn_norm.weight"), DIMS.hidden);
        }
        weights.qkv(&layer, DIMS, Qkv { fused: true, bias: false });
        weights.attention_output(&layer, DIMS);
        weights.norm(&format!("{layer}.ffn_norm.weight"), DIMS.hidden);
        weights.linear(&format!("{layer}.ffn_up"), [DIMS.hidden, 2 * DIMS.ffn], 1.5, false);
        weights.linear(&format!("{layer}.ffn_down"), [DIMS.ffn, DIMS.hidden], 1.5, false);
    }
    weights.norm("output_norm.weight", DIMS.hidden);
    weights.forge
}

/// The gate of a feed-forward.
#[derive(Clone, Copy, PartialEq)]
enum Gate {
    Apart,
    Merged,
    None,
}

/// Six heads, so that some slopes are no powers of two. Those without a gate have the norms that only some files have.
fn jina_v2(seed: u64, gate: Gate) -> Forge {
    let (forge, vocab) = begin(seed, "jina-bert-v2", 2);
    let mut forge = with(forge, "embedding_length", Value::u32(JINA_V2.hidden as u32));
    for key in ["attention.head_count", "attention.head_count_kv"] {
        forge = with(forge, key, Value::u32(JINA_V2.heads as u32));
    }
    let mut weights = Weights { forge, random: Random(seed) };
    let Dims { hidden, ffn, .. } = JINA_V2;
    weights.embedding(hidden, vocab, false);
    weights.add("token_types.weight", &[hidden, 2], 0.0, 0.7);
    weights.layer_norm("token_embd_norm", hidden);
    for index in 0..JINA_V2.layers {
        let name = |part: &str| format!("blk.{index}.{part}");
        weights.qkv(&format!("blk.{index}"), JINA_V2, Qkv { fused: false, bias: true });
        if gate == Gate::None {
            for stem in ["attn_q_norm", "attn_k_norm", "attn_norm_2"] {
                weights.layer_norm(&name(stem), hidden);
            }
        }
        weights.linear(&name("attn_output"), [hidden, hidden], 1.0, true);
        weights.layer_norm(&name("attn_output_norm"), hidden);
        if gate == Gate::Apart {
            weights.linear(&name("ffn_gate"), [hidden, ffn], 1.5, false);
        }
        let width = if gate == Gate::Merged { 2 * ffn } else { ffn };
        weights.linear(&name("ffn_up"), [hidden, width], 1.5, gate == Gate::None);
        weights.linear(&name("ffn_down"), [ffn, hidden], 1.5, true);
        weights.layer_norm(&name("layer_output_norm"), hidden);
    }
    weights.forge
}

fn jina(seed: u64) -> Forge {
    let (forge, vocab) = begin(seed, "jina-bert-v3", 1);
    let forge = with(forge, "rope.freq_base", Value::f32(20000.0));
    let mut weights = Weights { forge, random: Random(seed) };
    embeddings(&mut weights, vocab, 1);
    biased_layers(&mut weights, true);
    weights.forge
}

fn nomic(seed: u64, fused: bool) -> Forge {
    let (forge, vocab) = begin(seed, "nomic-bert", 2);
    let forge = with(forge, "rope.freq_base", Value::f32(1000.0));
    let mut weights = Weights { forge, random: Random(seed) };
    embeddings(&mut weights, vocab, 2);
    for index in 0..DIMS.layers {
        let layer = format!("blk.{index}");
        weights.qkv(&layer, DIMS, Qkv { fused, bias: false });
        weights.attention_output(&layer, DIMS);
        weights.layer_norm(&format!("{layer}.attn_output_norm"), DIMS.hidden);
        weights.gated(&layer, DIMS, false);
        weights.layer_norm(&format!("{layer}.layer_output_norm"), DIMS.hidden);
    }
    weights.forge
}

fn embeddings(weights: &mut Weights, vocab: u64, types: u32) {
    weights.embedding(DIMS.hidden, vocab, false);
    if types > 0 {
        weights.add("token_types.weight", &[DIMS.hidden, types.into()], 0.0, 0.7);
    }
    weights.layer_norm("token_embd_norm", DIMS.hidden);
}
