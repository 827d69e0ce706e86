//! Cuts text into words before byte-pair merging.
//!
//! Models are trained with regular expressions for this step, named by `tokenizer.ggml.pre`. Here each expression is a
//! hand-written scanner: one pass without backtracking, so any text costs only a few looks at each character. The
//! expressions stand above the scanners. The mapping of names is llama.cpp's table (`src/llama-vocab.cpp`).

use super::TokenizerError;
use super::error::excerpt;

mod cased;
mod scan;
#[cfg(test)]
mod words;

pub(super) use scan::Stage;
use scan::Stage::{
    Cased, Cl100k, DeepSeekLetters, DeepSeekPunctuation, DeepSeekWords, DigitTriples, EachNewline,
    EachNumber, EastAsian, Gpt2, HanKana, NumberRuns, NumberTriples, PunctuationRuns, SpaceLetters,
    SpacePunctuation, TrailingSpace,
};

/// How a vocabulary cuts text into words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PreTokenizer {
    /// Stages in order; each splits the pieces of the previous one.
    pub stages: &'static [Stage],
    /// True to take a word that is a token as a whole, without merging.
    pub whole_words: bool,
    /// Default of `add_bos_token`.
    pub add_bos: bool,
}

impl PreTokenizer {
    /// The pre-tokeniser of a name. Without a name, llama.cpp's default is used.
    pub fn named(name: Option<&str>) -> Result<Self, TokenizerError> {
        let name = name.unwrap_or("default");
        let known = TABLE.iter().find(|(names, _)| names.contains(&name));
        known.map(|&(_, pre)| pre).ok_or_else(|| {
            let supported: Vec<_> = TABLE.iter().flat_map(|(names, _)| *names).copied().collect();
            TokenizerError::PreTokenizer { name: excerpt(name), supported: supported.join(", ") }
        })
    }

    /// Calls `each` with the words of `text` in order. Joined, the words equal `text`.
    pub fn words<'t>(&self, text: &'t str, each: &mut dyn FnMut(&'t str)) {
        run(self.stages, text, each);
    }
}

fn run<'t>(stages: &[Stage], piece: &'t str, each: &mut dyn FnMut(&'t str)) {
    match stages.split_first() {
        Some((stage, rest)) => stage.split(piece, &mut |part| run(rest, part, each)),
        None => each(piece),
    }
}

const fn merging(stages: &'static [Stage]) -> PreTokenizer {
    PreTokenizer { stages, whole_words: false, add_bos: false }
}

/// Names by pre-tokeniser. Only proven expressions are here: by a published list of texts and tokens
/// (`tests/reference/tokenizer.rs`), or by another engine's words of 10,000 texts (`words.rs` beside this file).
pub(super) const TABLE: &[(&[&str], PreTokenizer)] = &[
    (&["default"], merging(&[PunctuationRuns { backtick: false }, Gpt2, NumberRuns, DigitTriples])),
    (
        &[
            "gpt-2",
            "phi-2",
            "mpt",
            "olmo",
            "jais",
            "exaone4",
            "gigachat",
            "a.x-4.0",
            "mellum",
            "trillion",
            "modern-bert",
            "jina-v1-en",
            "jina-v2-code",
            "jina-v2-de",
            "jina-v2-es",
            "jina-de",
            "jina-es",
            "roberta-bpe",
        ],
        merging(&[Gpt2]),
    ),
    (
        &["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"],
        merging(&[EachNumber, Gpt2]),
    ),
    (&["falcon"], merging(&[PunctuationRuns { backtick: true }, Gpt2, DigitTriples])),
    (
        &["llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"],
        PreTokenizer { stages: &[Cl100k { digits: 3, marks: false }], whole_words: true, add_bos: true },
    ),
    (&["dbrx", "smaug-bpe", "chatglm-bpe"], merging(&[Cl100k { digits: 3, marks: false }])),
    (
        &["glm4", "glm5"],
        PreTokenizer { stages: &[Cl100k { digits: 3, marks: false }], whole_words: true, add_bos: false },
    ),
    (
        &["qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan", "solar-open", "grok-2", "kormo"],
        merging(&[Cl100k { digits: 1, marks: false }]),
    ),
    (&["gpt-4o", "llama4", "kanana2", "minimax-m2"], merging(&[Cased { digits: 3, contractions: true }])),
    (
        &["tekken"],
        PreTokenizer {
            stages: &[Cased { digits: 1, contractions: false }],
            whole_words: true,
            add_bos: true,
        },
    ),
    (&["deepseek-v3", "hunyuan-dense"], merging(&[NumberTriples, HanKana, DeepSeekWords])),
    (&["qwen35"], merging(&[Cl100k { digits: 1, marks: true }])),
    (
        &["deepseek-llm"],
        merging(&[EachNewline, DeepSeekLetters, DeepSeekPunctuation, TrailingSpace, EastAsian, NumberRuns]),
    ),
    (&["deepseek-coder"], merging(&[EachNewline, SpaceLetters, SpacePunctuation, EastAsian, EachNumber])),
];
