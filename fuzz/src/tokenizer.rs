//! Target `tokenizer`: a vocabulary, and a text encoded with it.

use rocmforge::model::gguf::Gguf;
use rocmforge::model::tokenizer::{EncodeOptions, Tokenizer};

use crate::allocations::peak_of;
use crate::forge::{Forge, Value};

/// Most tokens, and most merges, of a vocabulary.
const LIST_MAX: usize = 64;

/// `data` is a byte of settings, then lines: the tokens, an empty line, the merges, an empty line, a text. For any
/// input: no panic, heap proportional to the input, ids within the vocabulary, and all ids decode.
pub fn tokenizer(data: &[u8], plant: bool) {
    let Some((&settings, rest)) = data.split_first() else { return };
    let text = String::from_utf8_lossy(rest);
    let mut parts = text.splitn(3, "\n\n");
    let mut lines = || parts.next().unwrap_or_default().split('\n').take(LIST_MAX).collect::<Vec<_>>();
    let (tokens, merges) = (lines(), lines());
    let text = parts.next().unwrap_or_default();
    let file = vocabulary(settings, &tokens, &merges).build().bytes;
    let gguf = Gguf::parse(&file[..]).expect("the forge writes good files");
    let (result, peak) = peak_of(|| Tokenizer::from_gguf(&gguf));
    assert!(peak <= (1 << 20) + 256 * data.len(), "{peak} bytes of heap for {}", data.len());
    let tokenizer = match result {
        Ok(tokenizer) => tokenizer,
        Err(error) => return assert!(!error.to_string().is_empty()),
    };
    for parse_special in [false, true] {
        let ids = tokenizer.encode(text, EncodeOptions { add_special: true, parse_special });
        assert!(ids.iter().all(|&id| (id as usize) < tokenizer.vocab_size()));
        assert!(tokenizer.decode(&ids, true).is_some());
    }
    if plant {
        crate::planted_short(tokenizer.token_text(0).unwrap_or_default().as_bytes());
    }
}

fn vocabulary(settings: u8, tokens: &[&str], merges: &[&str]) -> Forge {
    const PRE: [&str; 4] = ["gpt-2", "llama-bpe", "qwen2", "smollm"];
    let types = |token: &&str| match token {
        token if token.starts_with("<0x") => 6,
        token if token.starts_with('<') => 3,
        _ => 1 + i32::from(settings >> 4 == 5),
    };
    let forge = Forge::new(0)
        .set("tokenizer.ggml.tokens", Value::strings(tokens))
        .set("tokenizer.ggml.bos_token_id", Value::u32(u32::from(settings >> 5)));
    let forge = if settings & 8 == 0 {
        forge
    } else {
        forge.set("tokenizer.ggml.token_type", Value::i32s(&tokens.iter().map(types).collect::<Vec<_>>()))
    };
    if settings & 1 == 0 {
        let pre = PRE[usize::from(settings >> 1 & 3)];
        forge
            .set("tokenizer.ggml.model", Value::string("gpt2"))
            .set("tokenizer.ggml.pre", Value::string(pre))
            .set("tokenizer.ggml.merges", Value::strings(merges))
    } else {
        let scores: Vec<f32> = (0..tokens.len()).map(|n| -((n * 7 % 11) as f32)).collect();
        forge
            .set("tokenizer.ggml.model", Value::string("llama"))
            .set("tokenizer.ggml.scores", Value::f32s(&scores))
    }
}
