//! Special tokens: those that end an answer, and their search in a text.
//!
//! Files mark these tokens inconsistently, so llama.cpp also recognises them by name. The names and rules here are
//! those of its `src/llama-vocab.cpp`.

use aho_corasick::{AhoCorasick, AhoCorasickKind, MatchKind};

use super::TokenizerError;
use super::parts::{SpecialIds, VocabParts};
use super::vocab::{TextIndex, TokenKind, Vocab};

/// Longest special token in bytes. Searching a text of `n` bytes costs at most `n` times this. Real ones stay below
/// 100.
pub(super) const SPECIAL_TOKEN_BYTES_MAX: usize = 1 << 10;

/// Most bytes of all special tokens; the automaton takes about 30 bytes for each. Gemma 3 has 70,000.
pub(super) const SPECIAL_BYTES_MAX: usize = 1 << 20;

/// Tokens that end an answer, by name.
const END_NAMES: [&str; 23] = [
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
    "<|fim_pad|>",
];

/// Padding, repository and file marks of fill-in-the-middle models; they end an answer too.
const FILL_END_NAMES: [&str; 10] = [
    "<fim-pad>",
    "<fim_pad>",
    "<PAD>",
    "[PAD]",
    "<|fim_repo|>",
    "<|repo_name|>",
    "<fim-repo>",
    "<REPO>",
    "<reponame>",
    "<|file_sep|>",
];

/// Fill-in-the-middle marks: always control tokens, whatever the file says.
const FILL_NAMES: [&str; 21] = [
    "<|fim_prefix|>",
    "<fim-prefix>",
    "<fim_prefix>",
    "<｜fim▁begin｜>",
    "<PRE>",
    "▁<PRE>",
    "<|code_prefix|>",
    "<|fim_suffix|>",
    "<fim-suffix>",
    "<fim_suffix>",
    "<｜fim▁hole｜>",
    "<SUF>",
    "▁<SUF>",
    "<|code_suffix|>",
    "<|fim_middle|>",
    "<fim-middle>",
    "<fim_middle>",
    "<｜fim▁end｜>",
    "<MID>",
    "▁<MID>",
    "<|code_middle|>",
];

/// Marks of the gpt-oss channels; they belong to the text.
const CHANNEL_NAMES: [&str; 4] = ["<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"];

/// Sets the kinds of tokens known by name. Returns the ids that end an answer, ascending.
pub(super) fn mark_known_tokens(vocab: &mut Vocab, index: &TextIndex, special: &SpecialIds) -> Vec<u32> {
    for name in FILL_NAMES {
        if let Some(id) = index.get(vocab, name) {
            vocab.set_kind(id, TokenKind::Control);
        }
    }
    let mut ends = Vec::new();
    for name in END_NAMES.into_iter().chain(FILL_END_NAMES) {
        if let Some(id) = index.get(vocab, name) {
            vocab.set_kind(id, TokenKind::Control);
            ends.push(id);
        }
    }
    for name in CHANNEL_NAMES {
        if let Some(id) = index.get(vocab, name) {
            vocab.set_kind(id, TokenKind::UserDefined);
        }
    }
    let named = [special.eos, special.eot, special.eom, special.fim_pad, special.fim_rep, special.fim_sep];
    ends.extend(named.into_iter().flatten());
    ends.sort_unstable();
    ends.dedup();

    let has = |name: &str, ends: &[u32]| index.get(vocab, name).is_some_and(|id| ends.contains(&id));
    let called = has("<|call|>", &ends) || has("<|calls|>", &ends);
    // In gpt-oss and Solar, <|end|> ends a message, not the answer.
    let message_end = called && (has("<|return|>", &ends) || has("<|flush|>", &ends));
    // In Gemma 4 and PLaMo </s> is text (HTML's end of strike-through).
    let plain_s = has("<|tool_response>", &ends) || has("<|plamo:eos|>", &ends);
    for (applies, name, kind) in
        [(message_end, "<|end|>", TokenKind::UserDefined), (plain_s, "</s>", TokenKind::Normal)]
    {
        if applies && let Some(id) = index.get(vocab, name) {
            ends.retain(|&end| end != id);
            vocab.set_kind(id, kind);
        }
    }
    ends
}

/// A fragment of a text, cut at special tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fragment<'t> {
    /// Text to split and merge; never empty.
    Text(&'t str),
    /// A special token written out in the text.
    Token(u32),
}

/// Finds special tokens written out in a text.
#[derive(Debug)]
pub(super) struct SpecialMatcher {
    /// Finds all special tokens, for texts that may contain commands.
    all: Option<Finder>,
    /// Finds user-defined tokens only, which are text.
    user_defined: Option<Finder>,
}

#[derive(Debug)]
struct Finder {
    automaton: AhoCorasick,
    /// Per pattern: its token, and whether it swallows the spaces after it.
    tokens: Vec<(u32, bool)>,
}

impl SpecialMatcher {
    pub fn new(vocab: &Vocab, parts: &VocabParts<'_>) -> Result<Self, TokenizerError> {
        let (mut all, mut user_defined, mut bytes) = (Vec::new(), Vec::new(), 0usize);
        for (id, text) in (0..).zip(vocab.texts()) {
            let kind = vocab.kind(id);
            if text.is_empty()
                || !matches!(kind, Some(TokenKind::Control | TokenKind::Unknown | TokenKind::UserDefined))
            {
                continue;
            }
            if text.len() > SPECIAL_TOKEN_BYTES_MAX {
                let limit = SPECIAL_TOKEN_BYTES_MAX;
                return Err(TokenizerError::TokenTooLong { id, bytes: text.len(), limit });
            }
            bytes += text.len();
            all.push(id);
            if kind == Some(TokenKind::UserDefined) {
                user_defined.push(id);
            }
        }
        if bytes > SPECIAL_BYTES_MAX {
            return Err(TokenizerError::SpecialText { bytes, limit: SPECIAL_BYTES_MAX });
        }
        let swallow = swallows_spaces(parts.model_name);
        let build = |ids: &[u32]| Finder::new(vocab, ids, swallow, bytes);
        Ok(Self { all: build(&all)?, user_defined: build(&user_defined)? })
    }

    /// Calls `each` with the fragments of `text` in order. Of overlapping tokens the leftmost wins, then the longest.
    pub fn fragments<'t>(&self, text: &'t str, parse_special: bool, mut each: impl FnMut(Fragment<'t>)) {
        let finder = if parse_special { &self.all } else { &self.user_defined };
        let mut rest = 0;
        if let Some(finder) = finder {
            for found in finder.automaton.find_iter(text) {
                // The previous token may have swallowed spaces that overlap this one.
                if found.start() < rest {
                    continue;
                }
                if rest < found.start() {
                    each(Fragment::Text(&text[rest..found.start()]));
                }
                let (id, swallows) = finder.tokens[found.pattern().as_usize()];
                each(Fragment::Token(id));
                rest = found.end();
                if swallows {
                    let spaces = |byte: &&u8| matches!(byte, b' ' | b'\t'..=b'\r');
                    rest += text.as_bytes()[rest..].iter().take_while(spaces).count();
                }
            }
        }
        if rest < text.len() {
            each(Fragment::Text(&text[rest..]));
        }
    }
}

impl Finder {
    fn new(vocab: &Vocab, ids: &[u32], swallow: bool, bytes: usize) -> Result<Option<Self>, TokenizerError> {
        if ids.is_empty() {
            return Ok(None);
        }
        let texts = ids.iter().map(|&id| vocab.text(id).unwrap_or_default());
        let automaton = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .kind(Some(AhoCorasickKind::ContiguousNFA))
            .build(texts.clone())
            .map_err(|_| TokenizerError::SpecialText { bytes, limit: SPECIAL_BYTES_MAX })?;
        let swallows = |text: &str| swallow && !matches!(text, "<unk>" | "<s>" | "<|endoftext|>");
        let tokens = ids.iter().copied().zip(texts.map(swallows)).collect();
        Ok(Some(Self { automaton, tokens }))
    }
}

/// True for Phi-3, whose special tokens swallow the spaces after them. Only the model's name says so.
pub(super) fn swallows_spaces(model_name: Option<&str>) -> bool {
    model_name.is_some_and(|name| {
        let name = name.to_ascii_lowercase();
        name.contains("phi-3") || name.contains("phi3")
    })
}
