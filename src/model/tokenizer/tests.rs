//! Small vocabularies: refused ones, and the effect of each token kind. Real ones are in tests/reference/tokenizer.rs.

use proptest::prelude::*;

use super::*;
use crate::model::gguf::Strings;

const RAW: EncodeOptions = EncodeOptions { add_special: false, parse_special: false };
const FULL: EncodeOptions = EncodeOptions { add_special: true, parse_special: true };

/// A vocabulary that tests change before it is built.
struct Sample {
    algorithm: Algorithm,
    tokens: Vec<String>,
    types: Vec<i32>,
    scores: Vec<f32>,
    merges: Vec<String>,
}

impl Sample {
    /// `<unk>`, `<s>`, `</s>`, all bytes, then some pieces; ids 0 to 2, 3 to 258, from 259.
    fn sentencepiece() -> Self {
        let mut sample = Self {
            algorithm: Algorithm::SentencePiece,
            tokens: vec![],
            types: vec![],
            scores: vec![],
            merges: vec![],
        };
        for (text, kind) in [("<unk>", 2), ("<s>", 3), ("</s>", 3)] {
            sample.add(text, kind, 0.0);
        }
        for byte in 0..=255 {
            sample.add(&format!("<0x{byte:02X}>"), 6, 0.0);
        }
        for (rank, text) in ["▁", "a", "b", "c", "ab", "bc", "▁a", "▁ab", "<", "/", "s", ">", "</", "</s"]
            .into_iter()
            .enumerate()
        {
            sample.add(text, 1, -(rank as f32));
        }
        sample
    }

    /// All bytes, then `<|end|>` (control), then what the merges make; ids 0 to 255, 256, from 257.
    fn byte_pair() -> Self {
        let mut sample = Self {
            algorithm: Algorithm::BytePair,
            tokens: vec![],
            types: vec![],
            scores: vec![],
            merges: vec![],
        };
        for byte in 0..=255 {
            sample.add(&alphabet::char_of_byte(byte).to_string(), 1, 0.0);
        }
        sample.add("<|end|>", 3, 0.0);
        for merge in ["a b", "ab c", "b c", "Ġ a", "a a", "aa aa"] {
            sample.add(&merge.replace(' ', ""), 1, 0.0);
            sample.merges.push(merge.to_owned());
        }
        sample
    }

    fn add(&mut self, text: &str, kind: i32, score: f32) -> u32 {
        self.tokens.push(text.to_owned());
        self.types.push(kind);
        self.scores.push(score);
        self.tokens.len() as u32 - 1
    }

    fn id(&self, text: &str) -> u32 {
        self.tokens.iter().position(|token| token == text).unwrap() as u32
    }

    fn build(&self) -> Result<Tokenizer, TokenizerError> {
        self.build_with(|_| {})
    }

    fn build_with(&self, change: impl FnOnce(&mut VocabParts<'_>)) -> Result<Tokenizer, TokenizerError> {
        let tokens: Strings = self.tokens.iter().map(String::as_str).collect();
        let merges: Strings = self.merges.iter().map(String::as_str).collect();
        let mut parts = VocabParts::new(self.algorithm, &tokens);
        parts.types = Some(&self.types);
        parts.scores = Some(&self.scores);
        parts.merges = Some(&merges);
        parts.pre = Some("gpt-2");
        change(&mut parts);
        Tokenizer::new(&parts)
    }

    fn error(&self) -> String {
        self.build().unwrap_err().to_string()
    }

    fn error_with(&self, change: impl FnOnce(&mut VocabParts<'_>)) -> String {
        self.build_with(change).unwrap_err().to_string()
    }
}

#[test]
fn arrays_of_unequal_length_are_refused() {
    let mut sample = Sample::sentencepiece();
    sample.scores.pop();
    assert_eq!(sample.error(), "tokenizer.ggml.scores has 272 elements for 273 tokens");
    let mut sample = Sample::byte_pair();
    sample.types.push(1);
    assert_eq!(sample.error(), "tokenizer.ggml.token_type has 264 elements for 263 tokens");
}

#[test]
fn pairs_of_bert_have_one_separator_between_them() {
    for (ends, between) in [("[SEP]", 1), ("</s>", 2)] {
        let mut sample = Sample::byte_pair();
        let (begin, end) = (sample.add("[CLS]", 3, 0.0), sample.add(ends, 3, 0.0));
        let tokenizer = sample.build_with(|parts| {
            (parts.special.bos, parts.special.eos) = (Some(begin), Some(end));
            parts.special.separator = Some(end);
            (parts.add_bos, parts.add_eos) = (Some(true), Some(true));
        });
        let text = |text: &str| vec![sample.id(text)];
        let want = [vec![begin], text("ab"), vec![end; between], text("c"), vec![end]].concat();
        assert_eq!(tokenizer.unwrap().encode_pair("ab", "c"), want, "{ends}");
    }
}

#[test]
fn a_vocabulary_must_have_tokens() {
    let empty = Strings::default();
    let error = Tokenizer::new(&VocabParts::new(Algorithm::BytePair, &empty)).unwrap_err();
    assert_eq!(error.to_string(), "the vocabulary has 0 tokens; it must have 1 to 2097152");
    let many: Strings = std::iter::repeat_n("", vocab::TOKENS_MAX + 1).collect();
    let error = Tokenizer::new(&VocabParts::new(Algorithm::BytePair, &many)).unwrap_err();
    assert!(matches!(error, TokenizerError::TokenCount { count: 2_097_153, .. }), "{error}");
}

#[test]
fn keys_that_a_kind_needs_must_be_there() {
    let error = Sample::sentencepiece().build_with(|parts| parts.scores = None).unwrap_err();
    assert!(matches!(error, TokenizerError::Metadata(_)), "{error}");
    let error = Sample::byte_pair().build_with(|parts| parts.merges = None).unwrap_err();
    assert!(error.to_string().contains("tokenizer.ggml.merges"), "{error}");
}

#[test]
fn scores_must_be_numbers_and_types_known() {
    let mut sample = Sample::sentencepiece();
    sample.scores[5] = f32::NAN;
    assert_eq!(sample.error(), "the score of token 5 is not a number");
    for kind in [-1, 7, i32::MIN] {
        let mut sample = Sample::byte_pair();
        sample.types[3] = kind;
        assert_eq!(sample.error(), format!("token 3 has type {kind}; types are 0 to 6"));
    }
}

#[test]
fn byte_tokens_are_read_strictly() {
    for text in ["<0x-1>", "<0xZZ>", "<0x1>", "<0x100>", "0x41", "<0x+1>", "<0X41>", "", "<0x41> "] {
        let mut sample = Sample::sentencepiece();
        sample.tokens[3 + 0x41] = text.to_owned();
        let expected = format!("token 68 stands for a byte, but its text is {text:?}, not <0x00> to <0xFF>");
        assert_eq!(sample.error(), expected);
    }
    let mut sample = Sample::sentencepiece();
    sample.add("<0x0a>", 6, 0.0);
    assert_eq!(sample.error(), "tokens 13 and 273 both stand for byte 10");
}

#[test]
fn texts_must_be_unique_and_of_sane_length() {
    let mut sample = Sample::byte_pair();
    sample.add("ab", 1, 0.0);
    assert_eq!(sample.error(), "tokens 257 and 263 have the same text \"ab\"");
    let mut sample = Sample::byte_pair();
    sample.add(&"x".repeat(65_537), 1, 0.0);
    assert_eq!(sample.error(), "token 263 has 65537 bytes of text; the limit is 65536 bytes");
    // Padding tokens without text are accepted, even several.
    let mut sample = Sample::byte_pair();
    sample.add("", 1, 0.0);
    sample.add("", 5, 0.0);
    let tokenizer = sample.build().unwrap();
    assert_eq!(tokenizer.token_bytes(264, true), Some(&b""[..]));
}

#[test]
fn special_tokens_have_limits_of_their_own() {
    let mut sample = Sample::byte_pair();
    sample.add(&"x".repeat(1025), 3, 0.0);
    assert_eq!(sample.error(), "token 263 has 1025 bytes of text; the limit is 1024 bytes");
    let mut sample = Sample::byte_pair();
    for index in 0..1100 {
        sample.add(&format!("{index:01000}"), 4, 0.0);
    }
    assert_eq!(
        sample.error(),
        "the special tokens have 1100007 bytes of text in all; the limit is 1048576 bytes"
    );
}

#[test]
fn merges_must_be_of_tokens_into_a_token() {
    for merge in ["ab", "ab ", "", " ", " a"] {
        let mut sample = Sample::byte_pair();
        sample.merges.push(merge.to_owned());
        let expected = format!("merge 6 is {merge:?}, not two token texts with a space between");
        assert_eq!(sample.error(), expected);
    }
    for (merge, missing) in [("zz a", "zz"), ("a zz", "zz"), ("c c", "cc")] {
        let mut sample = Sample::byte_pair();
        sample.merges.push(merge.to_owned());
        assert_eq!(
            sample.error(),
            format!("merge 6 needs a token {missing:?}, which the vocabulary does not have")
        );
    }
}

#[test]
fn unknown_pre_tokenizers_are_named_with_what_is_supported() {
    let error = Sample::byte_pair().error_with(|parts| parts.pre = Some("chameleon"));
    assert!(
        error.starts_with("pre-tokenizer \"chameleon\" is not supported; supported: default, gpt-2,"),
        "{error}"
    );
    assert!(error.contains("smollm"), "{error}");
    // Without a name, llama.cpp's default applies: runs of punctuation apart, numbers in threes.
    let tokenizer = Sample::byte_pair().build_with(|parts| parts.pre = None).unwrap();
    assert_eq!(tokenizer.encode("ab", RAW), [257]);
}

#[test]
fn special_ids_must_be_tokens_and_there_when_asked_for() {
    let error = Sample::byte_pair().error_with(|parts| parts.special.eos = Some(263));
    assert_eq!(error, "tokenizer.ggml.eos_token_id is 263, but the vocabulary has 263 tokens");
    let error = Sample::byte_pair().error_with(|parts| parts.add_bos = Some(true));
    assert_eq!(
        error,
        "tokenizer.ggml.add_bos_token is true, but the file has no tokenizer.ggml.bos_token_id"
    );
    let error = Sample::byte_pair().error_with(|parts| parts.pre = Some("llama-bpe"));
    assert!(error.contains("no tokenizer.ggml.bos_token_id"), "{error}");
}

#[test]
fn ids_outside_the_vocabulary_have_no_bytes() {
    let tokenizer = Sample::byte_pair().build().unwrap();
    assert_eq!(tokenizer.vocab_size(), 263);
    for id in [263, u32::MAX] {
        assert_eq!(tokenizer.token_bytes(id, true), None);
        assert_eq!(tokenizer.token_kind(id), None);
        assert_eq!(tokenizer.decode(&[97, id], true), None);
        assert!(!tokenizer.is_end_of_generation(id));
    }
}

#[test]
fn pairs_merge_by_rank_then_from_the_left() {
    let sample = Sample::byte_pair();
    let tokenizer = sample.build().unwrap();
    let check = |text: &str, expected: &[&str]| {
        let expected: Vec<u32> = expected.iter().map(|token| sample.id(token)).collect();
        assert_eq!(tokenizer.encode(text, RAW), expected, "{text:?}");
    };
    check("abc", &["abc"]);
    check("bc", &["bc"]);
    check("aab", &["a", "ab"]);
    check("aaaaa", &["aaaa", "a"]);
    check(" abc", &["Ġ", "abc"]);
    check(" a", &["Ġa"]);
}

#[test]
fn control_tokens_come_from_text_only_on_request() {
    let mut sample = Sample::byte_pair();
    // A file that lets merging build a control token.
    for merge in ["< /", "</ s", "</s >"] {
        sample.add(&merge.replace(' ', ""), if merge == "</s >" { 3 } else { 1 }, 0.0);
        sample.merges.push(merge.to_owned());
    }
    let tokenizer = sample.build().unwrap();
    let end = sample.id("</s>");
    assert!(!tokenizer.encode("</s>", RAW).contains(&end));
    assert_eq!(tokenizer.encode("</s>", FULL), [end]);
    assert_eq!(tokenizer.decode(&[end, 97], false).unwrap(), "a");
    assert_eq!(tokenizer.decode(&[end, 97], true).unwrap(), "</s>a");
    let sample = Sample::sentencepiece();
    let tokenizer = sample.build().unwrap();
    assert!(!tokenizer.encode("</s>", RAW).contains(&2));
    assert_eq!(tokenizer.encode("</s>", FULL), [1, 2]);
}

#[test]
fn user_defined_tokens_are_found_in_any_text() {
    let mut sample = Sample::byte_pair();
    let (tool, toolbox) = (sample.add("<tool>", 4, 0.0), sample.add("<tool>box", 4, 0.0));
    let tokenizer = sample.build().unwrap();
    assert_eq!(tokenizer.encode("a<tool>a<tool>box", RAW), [97, tool, 97, toolbox]);
    assert_eq!(tokenizer.decode(&[97, tool], false).unwrap(), "a<tool>");
}

#[test]
fn phi_3_tokens_swallow_the_spaces_after_them() {
    let sample = Sample::sentencepiece();
    let ids = |name| {
        let tokenizer = sample.build_with(|parts| parts.model_name = name).unwrap();
        tokenizer.encode("</s> \n\ta<s> a", EncodeOptions { add_special: false, parse_special: true })
    };
    let [space, a, space_a] = ["▁", "a", "▁a"].map(|token| sample.id(token));
    assert_eq!(ids(Some("Phi3 mini")), [2, space_a, 1, space, space_a]);
    assert_eq!(ids(None), [2, space, space, 3 + 10, 3 + 9, a, 1, space, space_a]);
}

#[test]
fn sentencepiece_merges_by_score_and_falls_back_to_bytes() {
    let sample = Sample::sentencepiece();
    let tokenizer = sample.build().unwrap();
    let ids = |names: &[&str]| names.iter().map(|name| sample.id(name)).collect::<Vec<_>>();
    // "ab" (-4) before "bc" (-5); then "▁ab".
    assert_eq!(tokenizer.encode("abc", RAW), ids(&["▁ab", "c"]));
    assert_eq!(tokenizer.encode("é", RAW), ids(&["▁", "<0xC3>", "<0xA9>"]));
    assert!(tokenizer.encode("", RAW).is_empty());
    assert_eq!(tokenizer.encode("", FULL), [1]);
    assert_eq!(tokenizer.decode(&ids(&["▁", "<0xC3>", "<0xA9>"]), false).unwrap(), "é");
    assert_eq!(tokenizer.decode(&ids(&["<0xC3>"]), false).unwrap(), "\u{fffd}");
    let plain = sample.build_with(|parts| parts.add_space_prefix = Some(false)).unwrap();
    assert_eq!(plain.encode("abc", RAW), ids(&["ab", "c"]));
    assert_eq!(plain.decode(&ids(&["▁ab"]), false).unwrap(), " ab");
}

#[test]
fn without_byte_tokens_characters_become_the_unknown_token() {
    let mut sample = Sample::sentencepiece();
    for id in 3..259 {
        sample.types[id] = 5;
    }
    let tokenizer = sample.build().unwrap();
    assert_eq!(tokenizer.encode("é", RAW), [sample.id("▁"), 0, 0]);
    assert_eq!(tokenizer.decode(&[0], false).unwrap(), "");
}

#[test]
fn every_way_to_end_an_answer_is_known() {
    let mut sample = Sample::byte_pair();
    let turn = sample.add("<end_of_turn>", 1, 0.0);
    let plain = sample.add("<plain>", 1, 0.0);
    let eot = sample.add("<my-eot>", 3, 0.0);
    let tokenizer = sample
        .build_with(|parts| {
            parts.special.eos = Some(65);
            parts.special.eot = Some(eot);
        })
        .unwrap();
    // By eos key, by the name <|end|>, by the name <end_of_turn>, by the eot key.
    assert_eq!(tokenizer.end_of_generation(), [65, 256, turn, eot]);
    assert!(!tokenizer.is_end_of_generation(plain));
    assert_eq!(tokenizer.token_kind(turn), Some(TokenKind::Control));
    assert_eq!(tokenizer.token_bytes(turn, false), Some(&b""[..]));
}

#[test]
fn in_gpt_oss_a_message_ends_without_the_answer() {
    let mut sample = Sample::byte_pair();
    let (call, ret) = (sample.add("<|call|>", 3, 0.0), sample.add("<|return|>", 3, 0.0));
    let tokenizer = sample.build().unwrap();
    assert_eq!(tokenizer.end_of_generation(), [call, ret]);
    assert_eq!(tokenizer.token_bytes(256, false), Some(&b"<|end|>"[..]));
}

#[test]
fn a_long_run_of_one_character_takes_no_square_of_its_length() {
    // With a square this would take hours: 10^12 steps. (Below it is 256 KiB, for the sake of the time of many cases.)
    let text = "a".repeat(1 << 20);
    let sample = Sample::byte_pair();
    let ids = sample.build().unwrap().encode(&text, RAW);
    assert_eq!(ids, vec![sample.id("aaaa"); 1 << 18]);
    let sample = Sample::sentencepiece();
    let tokenizer = sample.build().unwrap();
    assert_eq!(tokenizer.encode(&text, RAW).len(), 1 << 20);
    for part in [" ", "\n", "'", "1", "é", "\u{3000}", "日", "'s ", " \n", "\u{301}"] {
        let text = part.repeat((1 << 18) / part.len());
        for pre in [
            "default",
            "gpt-2",
            "smollm",
            "falcon",
            "llama-bpe",
            "qwen2",
            "qwen35",
            "deepseek-llm",
            "deepseek-coder",
        ] {
            let tokenizer = Sample::byte_pair().build_with(|parts| {
                parts.pre = Some(pre);
                parts.special.bos = Some(0);
            });
            // Ends in a letter, so that white space at the end is not taken whole.
            let ids = tokenizer.unwrap().encode(&format!("{text}a"), RAW);
            assert!(ids.len() > 1 << 15, "{pre} {part:?}");
        }
    }
}

proptest! {
    #[test]
    fn texts_come_back(text in any::<String>(), spaced in "[ ab\u{2582}</s>é\n]{0,30}") {
        let tokenizers = [Sample::sentencepiece().build().unwrap(), Sample::byte_pair().build().unwrap()];
        for tokenizer in &tokenizers {
            for text in [&text, &spaced] {
                // SentencePiece cannot tell a space from its mark for one.
                let expected = match tokenizer.kind() {
                    "llama" => text.replace(vocab::SPACE_MARK, " "),
                    _ => text.clone(),
                };
                for options in [RAW, EncodeOptions { add_special: true, parse_special: false }] {
                    let ids = tokenizer.encode(text, options);
                    prop_assert_eq!(tokenizer.decode(&ids, false).unwrap(), &*expected);
                }
            }
        }
    }

    #[test]
    fn words_are_the_text(text in any::<String>(), spaced in "[ \t\n\u{3000}a1'sé日.\u{301}]{0,30}") {
        for (pre, _) in pretokenizer::TABLE {
            let pre = PreTokenizer::named(Some(pre[0])).unwrap();
            for text in [&text, &spaced] {
                let mut words = Vec::new();
                pre.words(text, &mut |word| words.push(word));
                prop_assert!(words.iter().all(|word| !word.is_empty()));
                prop_assert_eq!(words.concat(), text.as_str());
            }
        }
    }
}
