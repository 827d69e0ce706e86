//! Tokens compared with the lists that llama.cpp publishes with its vocabularies.

use std::fs::File;
use std::path::Path;

use rocmforge::model::gguf::Gguf;
use rocmforge::model::tokenizer::{EncodeOptions, Tokenizer};
use sha2::{Digest, Sha256};

use crate::common;

fn open(path: &Path) -> Tokenizer {
    let (gguf, _file) = Gguf::open(File::open(path).unwrap()).unwrap();
    Tokenizer::from_gguf(&gguf).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Encodes every text of `NAME.gguf.inp` and compares it with the line of `NAME.gguf.out`.
fn check_published(name: &str) {
    let Some(path) = common::cached(&format!("vocab/ggml-vocab-{name}.gguf")) else { return };
    let beside = |end: &str| std::fs::read_to_string(format!("{}{end}", path.display())).unwrap();
    let tokenizer = open(&path);
    let (texts, expected) = (beside(".inp"), beside(".out"));
    // A separator line ends each text; its line ends do not belong to the text.
    let mut texts: Vec<_> = texts.split("\n__ggml_vocab_test__\n").collect();
    assert_eq!(texts.pop(), Some(""), "{name}: the last text has no separator");
    let expected: Vec<_> = expected.lines().collect();
    assert!(texts.len() >= 40 && texts.len() == expected.len(), "{} {}", texts.len(), expected.len());
    for (text, expected) in texts.iter().zip(expected) {
        let expected: Vec<u32> = expected.split_whitespace().map(|id| id.parse().unwrap()).collect();
        let ids = tokenizer.encode(text, EncodeOptions::default());
        assert_eq!(ids, expected, "{name}: {text:?}");
    }
}

macro_rules! published {
    ($($test:ident $name:literal)*) => {
        $(#[test] fn $test() { check_published($name); })*
    };
}

published! {
    gpt_2 "gpt-2"
    llama_bpe "llama-bpe"
    llama_spm "llama-spm"
    phi_3 "phi-3"
    qwen2 "qwen2"
    qwen35 "qwen35"
    deepseek_llm "deepseek-llm"
    deepseek_coder "deepseek-coder"
    command_r "command-r"
    falcon "falcon"
    starcoder "starcoder"
    refact "refact"
    mpt "mpt"
}

/// Compares with `expected/tokens.json`, which `make_tokens.py` wrote.
fn check_kept(name: &str, path: &Path) {
    let kept: serde_json::Value = serde_json::from_str(include_str!("expected/tokens.json")).unwrap();
    let kept = &kept["models"][name];
    let sha256 = Sha256::digest(std::fs::read(path).unwrap())
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect::<String>();
    assert_eq!(kept["sha256"], sha256, "{}", path.display());
    let tokenizer = open(path);
    let texts = kept["texts"].as_array().unwrap();
    assert!(texts.len() >= 20);
    for entry in texts {
        let text = entry["text"].as_str().unwrap();
        for (key, special) in [("raw", false), ("full", true)] {
            let ids = tokenizer.encode(text, EncodeOptions { add_special: special, parse_special: special });
            assert_eq!(serde_json::json!(ids), entry[key], "{name}, {key}: {text:?}");
            // Decoding gives back what the vocabulary can represent; SmolLM2 has no token for some bytes.
            if name == "tinystories" && key == "raw" {
                assert_eq!(tokenizer.decode(&ids, false).unwrap(), text.replace('▁', " "));
            }
        }
    }
}

#[test]
fn tinystories_texts_are_tokens_as_kept() {
    check_kept("tinystories", &common::tinystories());
}

#[test]
fn smollm2_texts_are_tokens_as_kept() {
    let Some(path) = common::smollm2() else { return };
    check_kept("smollm2", &path);
    let tokenizer = open(&path);
    assert_eq!((tokenizer.bos(), tokenizer.eos(), tokenizer.vocab_size()), (Some(1), Some(2), 49152));
    // <|endoftext|>, <|im_end|> and <reponame>, which llama.cpp prints when it loads the model.
    assert_eq!(tokenizer.end_of_generation(), [0, 2, 4]);
}
