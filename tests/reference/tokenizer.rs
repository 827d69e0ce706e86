//! Tokens against the lists that llama.cpp publishes with its vocabularies.

use std::fs::File;
use std::path::Path;

use rocmforge::model::gguf::Gguf;
use rocmforge::model::tokenizer::{EncodeOptions, Tokenizer};

use crate::common;

fn open(path: &Path) -> Tokenizer {
    let (gguf, _file) = Gguf::open(File::open(path).unwrap()).unwrap();
    Tokenizer::from_gguf(&gguf).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Encodes every text of `NAME.gguf.inp` and compares with the line of `NAME.gguf.out`.
fn check_published(name: &str) {
    let Some(path) = common::cached(&format!("vocab/ggml-vocab-{name}.gguf")) else { return };
    let beside = |end: &str| std::fs::read_to_string(format!("{}{end}", path.display())).unwrap();
    let tokenizer = open(&path);
    let (texts, expected) = (beside(".inp"), beside(".out"));
    // Each text ends with a line of its own, whose line ends are not the text's.
    let mut texts: Vec<_> = texts.split("\n__ggml_vocab_test__\n").collect();
    assert_eq!(texts.pop(), Some(""), "{name}: the last text ends too");
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
