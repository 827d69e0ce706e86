//! Class 5: well-formed headers that describe no model that can run.

use rocmforge_client::wire::ErrorCode;

use super::{CORRUPT, Cases, UNSUPPORTED, good};
use crate::forge::{Forge, Value, decoders, ggml, kind};

pub fn add(cases: &mut Cases) {
    sizes(cases);
    tensors(cases);
    experts(cases);
    sentencepiece(cases);
    byte_pairs(cases);
}

fn sizes(cases: &mut Cases) {
    let mut set = |key: &str, what: &str, value: Value, code: ErrorCode| {
        cases.forge(5, format!("{key} is {what}"), code, &good().set(&format!("llama.{key}"), value));
    };
    // Too few and too many of each, and values that overflow.
    for (key, bad) in [
        ("block_count", &[0, 3, 512, 513, 1 << 31, u32::MAX][..]),
        ("embedding_length", &[0, 1, 31, 64, 1 << 17, 1 << 31, u32::MAX]),
        ("feed_forward_length", &[0, 1, 63, 128, 1 << 31, u32::MAX]),
        ("attention.head_count", &[0, 3, 5, 1025, 1 << 31, u32::MAX]),
        ("attention.head_count_kv", &[0, 1, 3, 4, 8, 1025, u32::MAX]),
        ("attention.key_length", &[0, 1, 7, 16, 1025, u32::MAX]),
        ("context_length", &[0, (1 << 30) + 1, u32::MAX]),
        ("rope.dimension_count", &[0, 7, 10, 1025, u32::MAX]),
        ("nextn_predict_layers", &[2, u32::MAX]),
    ] {
        for &value in bad {
            set(key, &value.to_string(), Value::u32(value), CORRUPT);
        }
        set(key, "a string", Value::string("2"), CORRUPT);
        set(key, "a float", Value::f32(2.0), CORRUPT);
        set(key, "negative", Value::i32(-1), CORRUPT);
        set(key, "2^63", Value::u64(1 << 63), CORRUPT);
        set(key, "an empty array", Value::i32s(&[]), CORRUPT);
        set(key, "another for each layer", Value::i32s(&[2, 3]), UNSUPPORTED);
    }
    // One layer fewer: no layer uses the last layer's tensors.
    set("block_count", "1", Value::u32(1), UNSUPPORTED);
    let eps = "attention.layer_norm_rms_epsilon";
    for bad in [-1e-5, 1.0, f32::INFINITY, f32::NAN, f32::NEG_INFINITY] {
        set(eps, &bad.to_string(), Value::f32(bad), CORRUPT);
    }
    for bad in [0.0, -1.0, f32::INFINITY, f32::NAN] {
        set("rope.freq_base", &bad.to_string(), Value::f32(bad), CORRUPT);
    }
    for bad in [-1.0, f32::INFINITY, f32::NAN] {
        set("rope.scaling.factor", &bad.to_string(), Value::f32(bad), CORRUPT);
    }
    set("rope.scaling.type", "a number", Value::u32(1), CORRUPT);
    set("rope.scaling.type", "unknown", Value::string("fractal"), UNSUPPORTED);
    set("attention.causal", "a number", Value::u32(1), CORRUPT);
    set("attention.causal", "false", Value::bool(false), UNSUPPORTED);
    for key in ["context_length", "embedding_length", "block_count", "attention.head_count", eps] {
        cases.forge(5, format!("no {key}"), CORRUPT, &good().without(&format!("llama.{key}")));
    }
    for (what, value) in [
        ("unknown", Value::string("llamb")),
        ("empty", Value::string("")),
        ("another's", Value::string("qwen3moe")),
        ("a number", Value::u32(1)),
    ] {
        let code = if what == "another's" { CORRUPT } else { UNSUPPORTED };
        cases.forge(
            5,
            format!("an architecture that is {what}"),
            code,
            &good().set("general.architecture", value),
        );
    }
    cases.forge(5, "no architecture", UNSUPPORTED, &good().without("general.architecture"));
}

fn tensors(cases: &mut Cases) {
    for name in ["token_embd.weight", "output_norm.weight", "blk.1.attn_k.weight", "blk.0.ffn_norm.weight"] {
        cases.forge(5, format!("no tensor {name}"), CORRUPT, &good().without(name));
        // As many values in another shape.
        let turned =
            good().filled().with_tensor(name, |t| t.dims = vec![2, t.dims.iter().product::<u64>() / 2]);
        cases.forge(5, format!("{name} of another shape"), CORRUPT, &turned);
    }
    let named = good().filled().tensor("blk.0.attn_sinks.weight", &[4], ggml::F32);
    cases.forge(5, "a tensor that has no place", UNSUPPORTED, &named);
    let layer = good().filled().tensor("blk.2.attn_q.weight", &[32, 32], ggml::F32);
    cases.forge(5, "a tensor of a layer that is not there", UNSUPPORTED, &layer);
    let norm = good().filled().with_tensor("output_norm.weight", |t| (t.ggml, t.data) = (ggml::F16, None));
    cases.forge(5, "a norm in half precision", UNSUPPORTED, &norm);
}

fn experts(cases: &mut Cases) {
    let moe = decoders().into_iter().find(|(name, _)| *name == "qwen3moe").unwrap().1;
    let mut set = |key: &str, value: u32, code| {
        let forge = moe.clone().set(&format!("qwen3moe.{key}"), Value::u32(value));
        cases.forge(5, format!("{key} is {value}"), code, &forge);
    };
    for count in [0, 1, 7, 9, 513, u32::MAX] {
        set("expert_count", count, CORRUPT);
    }
    for used in [0, 9, 513, u32::MAX] {
        set("expert_used_count", used, CORRUPT);
    }
    set("expert_feed_forward_length", 31, CORRUPT);
    set("expert_feed_forward_length", u32::MAX, CORRUPT);
    set("expert_gating_func", 2, UNSUPPORTED);
    set("expert_shared_count", 1, UNSUPPORTED);
    let llama = good().set("llama.expert_count", Value::u32(8)).set("llama.expert_used_count", Value::u32(9));
    cases.forge(5, "more experts used than there are", CORRUPT, &llama);
}

const TOKENS: usize = 263;

fn sentencepiece(cases: &mut Cases) {
    let key = |name: &str| format!("tokenizer.ggml.{name}");
    let mut set = |name: &str, what: &str, value: Value, code| {
        cases.forge(5, format!("{name}: {what}"), code, &good().set(&key(name), value));
    };
    for id in [TOKENS as u32, 1 << 31, u32::MAX] {
        for name in ["bos_token_id", "eos_token_id", "unknown_token_id", "eot_token_id", "fim_pad_token_id"] {
            set(name, &id.to_string(), Value::u32(id), CORRUPT);
        }
    }
    set("eos_token_id", "a string", Value::string("2"), CORRUPT);
    set("eos_token_id", "negative", Value::i32(-1), CORRUPT);
    set("add_bos_token", "a number", Value::u32(1), CORRUPT);
    set("model", "unknown", Value::string("rwkv"), UNSUPPORTED);
    set("model", "a number", Value::u32(1), CORRUPT);
    for (what, count) in [("one too few", TOKENS - 1), ("one too many", TOKENS + 1), ("none", 0)] {
        set("scores", what, Value::f32s(&vec![0.0; count]), CORRUPT);
        set("token_type", what, Value::i32s(&vec![1; count]), CORRUPT);
    }
    // Other engines declared these as bytes, read them as floats, and read past the end.
    for element in [kind::I8, kind::U8, kind::U32] {
        let width = if element == kind::U32 { 4 } else { 1 };
        let array = Value::array(element, TOKENS as u64, &vec![0; TOKENS * width]);
        set("scores", &format!("of type {element}"), array, CORRUPT);
    }
    set("scores", "a float", Value::f32(0.0), CORRUPT);
    let mut scores = vec![0.0; TOKENS];
    scores[100] = f32::NAN;
    set("scores", "not a number", Value::f32s(&scores), CORRUPT);
    set("token_type", "of type f32", Value::f32s(&[1.0; TOKENS]), CORRUPT);
    for bad in [-1, 7, i32::MIN, i32::MAX] {
        let mut types = vec![1; TOKENS];
        types[5] = bad;
        set("token_type", &bad.to_string(), Value::i32s(&types), CORRUPT);
    }
    set("tokens", "none", Value::strings::<&str>(&[]), CORRUPT);
    set("tokens", "numbers", Value::i32s(&[1; TOKENS]), CORRUPT);
    set("tokens", "a string", Value::string("a"), CORRUPT);
    for name in ["tokens", "scores", "model"] {
        cases.forge(5, format!("no {name}"), CORRUPT, &good().without(&key(name)));
    }
    for text in ["<0x-1>", "<0xZZ>", "<0x>", "<0x100>", "<0x0", "", "<0x+1>", "<0x00>"] {
        let mut tokens = texts();
        tokens[3 + 0x41] = text.to_owned();
        cases.forge(
            5,
            format!("a byte token {text:?}"),
            CORRUPT,
            &good().set(&key("tokens"), Value::strings(&tokens)),
        );
    }
    let mut long = texts();
    long[262] = "x".repeat((64 << 10) + 1);
    cases.forge(5, "a token of 65,537 bytes", CORRUPT, &good().set(&key("tokens"), Value::strings(&long)));
    let fewer = good().set(&key("tokens"), Value::strings(&texts()[..259]));
    let fewer = fewer.without(&key("token_type")).set(&key("scores"), Value::f32s(&[0.0; 259]));
    cases.forge(5, "an embedding of more tokens than there are", CORRUPT, &fewer);
}

/// The texts of the good file's tokens.
fn texts() -> Vec<String> {
    let mut tokens: Vec<String> = ["<unk>", "<s>", "</s>"].map(str::to_owned).into();
    tokens.extend((0..=255).map(|byte: u8| format!("<0x{byte:02X}>")));
    tokens.extend(["\u{2581}", "a", "b", "ab"].map(str::to_owned));
    tokens
}

/// The good file with a byte-pair vocabulary of the same size.
fn paired(merges: &[&str]) -> Forge {
    let mut tokens: Vec<String> = (0..TOKENS - 5).map(|n| format!("token{n}")).collect();
    tokens.extend(["a", "b", "c", "ab", "<|end|>"].map(str::to_owned));
    good()
        .set("tokenizer.ggml.model", Value::string("gpt2"))
        .set("tokenizer.ggml.pre", Value::string("gpt-2"))
        .set("tokenizer.ggml.tokens", Value::strings(&tokens))
        .set("tokenizer.ggml.merges", Value::strings(merges))
        .without("tokenizer.ggml.scores")
        .without("tokenizer.ggml.token_type")
}

fn byte_pairs(cases: &mut Cases) {
    cases.good(5, "a byte-pair vocabulary", &paired(&["a b"]));
    for merge in ["a d", "d a", "b c", "ab", "", " ", "a b c d", "a  b"] {
        cases.forge(5, format!("a merge {merge:?}"), CORRUPT, &paired(&["a b", merge]));
    }
    cases.forge(5, "no merges", CORRUPT, &paired(&[]).without("tokenizer.ggml.merges"));
    let numbers = paired(&[]).set("tokenizer.ggml.merges", Value::i32s(&[1, 2]));
    cases.forge(5, "merges that are numbers", CORRUPT, &numbers);
    for (what, pre) in [("unknown", Value::string("llama-9")), ("a number", Value::u32(1))] {
        let code = if what == "unknown" { UNSUPPORTED } else { CORRUPT };
        let forge = paired(&["a b"]).set("tokenizer.ggml.pre", pre);
        cases.forge(5, format!("a pre-tokenizer that is {what}"), code, &forge);
    }
    let mut twice: Vec<String> = (0..TOKENS).map(|n| format!("token{n}")).collect();
    twice[9] = "token8".to_owned();
    let forge = paired(&[]).set("tokenizer.ggml.tokens", Value::strings(&twice));
    cases.forge(5, "two tokens of one text", CORRUPT, &forge);
}
