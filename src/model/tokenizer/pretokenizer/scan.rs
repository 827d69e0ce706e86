//! Hand-written scanners for the regular expressions of pre-tokenisers.

use super::super::unicode::Class;
use super::cased::cased;

/// One regular expression. Its matches become pieces, and so does the text between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Stage {
    /// `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`
    Gpt2,
    /// `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,digits}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`;
    /// with `marks`, `\p{M}` counts as a letter in the second and the fourth part.
    Cl100k { digits: usize, marks: bool },
    /// The expression of `cased`, where numbers have at most `digits` digits; without `contractions`, words have no C.
    Cased { digits: usize, contractions: bool },
    /// ``[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+``
    DeepSeekWords,
    /// `\p{N}{1,3}`
    NumberTriples,
    /// `[一-龥぀-ゟ゠-ヿ]+`
    HanKana,
    /// `\p{N}`
    EachNumber,
    /// `\p{N}+`
    NumberRuns,
    /// `[0-9][0-9][0-9]`
    DigitTriples,
    /// `` [\p{P}\$\+<=>\^~\|]+ ``, and `` ` `` where `backtick`.
    PunctuationRuns { backtick: bool },
    /// `[\r\n]`
    EachNewline,
    /// `\s?\p{L}+`
    SpaceLetters,
    /// `\s?\p{P}+`
    SpacePunctuation,
    /// `\s?[` [`DEEPSEEK_LETTERS`] `]+`
    DeepSeekLetters,
    /// `\s?[!-/:-~！-／：-～‘-‟　-。]+`. Includes U+3000, as in the Python tokenizers. llama.cpp has already replaced it
    /// here, like all white space beyond ASCII.
    DeepSeekPunctuation,
    /// `\s+$`
    TrailingSpace,
    /// `[一-龥ࠀ-一가-퟿]+`
    EastAsian,
}

impl Stage {
    /// Calls `each` with the pieces of `text`, in order; none is empty.
    pub fn split<'t>(self, text: &'t str, each: &mut dyn FnMut(&'t str)) {
        if self == Self::TrailingSpace {
            let (body, spaces) = text.split_at(text.trim_end_matches(char::is_whitespace).len());
            return [body, spaces].into_iter().filter(|piece| !piece.is_empty()).for_each(each);
        }
        let (mut gap, mut at) = (0, 0);
        while let Some(first) = text[at..].chars().next() {
            let bytes = self.match_bytes(&text[at..], first);
            if bytes == 0 {
                at += first.len_utf8();
                continue;
            }
            if gap < at {
                each(&text[gap..at]);
            }
            each(&text[at..at + bytes]);
            at += bytes;
            gap = at;
        }
        if gap < text.len() {
            each(&text[gap..]);
        }
    }

    /// Bytes of the match at the start of `rest`, which begins with `first`; 0 for none.
    fn match_bytes(self, rest: &str, first: char) -> usize {
        match self {
            Self::Gpt2 => gpt2(rest, first),
            Self::Cl100k { digits, marks } => cl100k(rest, first, digits, marks),
            Self::Cased { digits, contractions } => cased(rest, first, digits, contractions),
            Self::DeepSeekWords => deepseek_words(rest, first),
            Self::NumberTriples => {
                let number = |c: &char| Class::of(*c).any(Class::NUMBER);
                rest.chars().take(3).take_while(number).map(char::len_utf8).sum()
            }
            Self::HanKana => while_in(rest, |c| matches!(c, '一'..='龥' | '\u{3040}'..='\u{30ff}')),
            Self::EachNumber if Class::of(first).any(Class::NUMBER) => first.len_utf8(),
            Self::EachNewline if is_newline(first) => 1,
            Self::EachNumber | Self::EachNewline | Self::TrailingSpace => 0,
            Self::NumberRuns => run(rest, Class::NUMBER),
            Self::DigitTriples => match rest.as_bytes() {
                [b'0'..=b'9', b'0'..=b'9', b'0'..=b'9', ..] => 3,
                _ => 0,
            },
            Self::PunctuationRuns { backtick } => while_in(rest, |c| {
                matches!(c, '$' | '+' | '<' | '=' | '>' | '^' | '~' | '|')
                    || (backtick && c == '`')
                    || Class::of(c).any(Class::PUNCTUATION)
            }),
            Self::SpaceLetters => after_space(rest, first, |c| Class::of(c).any(Class::LETTER)),
            Self::SpacePunctuation => after_space(rest, first, |c| Class::of(c).any(Class::PUNCTUATION)),
            Self::DeepSeekLetters => after_space(rest, first, is_deepseek_letter),
            Self::DeepSeekPunctuation => after_space(rest, first, is_deepseek_punctuation),
            Self::EastAsian => while_in(rest, |c| matches!(c, 'ࠀ'..='龥' | '가'..='\u{d7ff}')),
        }
    }
}

fn gpt2(rest: &str, first: char) -> usize {
    let contraction = contraction(rest, false);
    if contraction > 0 {
        return contraction;
    }
    let space = usize::from(first == ' ');
    let body = &rest[space..];
    for class in [Class::LETTER, Class::NUMBER] {
        let bytes = run(body, class);
        if bytes > 0 {
            return space + bytes;
        }
    }
    let bytes = run_outside(body, SPACE_LETTER_NUMBER);
    if bytes > 0 {
        return space + bytes;
    }
    spaces(rest)
}

fn cl100k(rest: &str, first: char, digits: usize, marks: bool) -> usize {
    let contraction = contraction(rest, true);
    if contraction > 0 {
        return contraction;
    }
    let letters = if marks { Class::LETTER.or(Class::MARK) } else { Class::LETTER };
    let class = Class::of(first);
    if class.any(letters) {
        return run(rest, letters);
    }
    if class.any(Class::NUMBER) {
        let number = |c: &char| Class::of(*c).any(Class::NUMBER);
        return rest.chars().take(digits).take_while(number).map(char::len_utf8).sum();
    }
    if !is_newline(first) {
        let bytes = run(&rest[first.len_utf8()..], letters);
        if bytes > 0 {
            return first.len_utf8() + bytes;
        }
    }
    let space = usize::from(first == ' ');
    let bytes = run_outside(&rest[space..], SPACE_LETTER_NUMBER.or(letters));
    if bytes > 0 {
        return space + bytes + while_in(&rest[space + bytes..], is_newline);
    }
    space_runs(rest)
}

fn deepseek_words(rest: &str, first: char) -> usize {
    let (class, marks) = (Class::of(first), Class::PUNCTUATION.or(Class::SYMBOL));
    if first.is_ascii_punctuation() {
        let letters = while_in(&rest[1..], |c| c.is_ascii_alphabetic());
        if letters > 0 {
            return 1 + letters;
        }
    }
    let letters = Class::LETTER.or(Class::MARK);
    let before = if class.any(marks.or(Class::LETTER)) || is_newline(first) { 0 } else { first.len_utf8() };
    for before in [before, 0] {
        let bytes = run(&rest[before..], letters);
        if bytes > 0 {
            return before + bytes;
        }
    }
    let space = usize::from(first == ' ');
    let bytes = run(&rest[space..], marks);
    if bytes > 0 {
        return space + bytes + while_in(&rest[space + bytes..], is_newline);
    }
    space_runs(rest)
}

/// `\s*[\r\n]+|\s+(?!\S)|\s+`: everything up to the last line end of the white space, if it has one.
pub(super) fn space_runs(rest: &str) -> usize {
    let white = run(rest, Class::SPACE);
    match rest[..white].rfind(is_newline) {
        Some(last) => last + 1,
        None => spaces(rest),
    }
}

const SPACE_LETTER_NUMBER: Class = Class::SPACE.or(Class::LETTER).or(Class::NUMBER);

/// `\s+(?!\S)|\s+`: white space, except its last character where a word follows.
fn spaces(rest: &str) -> usize {
    let bytes = run(rest, Class::SPACE);
    match rest[..bytes].char_indices().next_back() {
        Some((last, _)) if bytes < rest.len() && last > 0 => last,
        _ => bytes,
    }
}

/// `'s|'t|'re|'ve|'m|'ll|'d`
pub(super) fn contraction(rest: &str, any_case: bool) -> usize {
    let [b'\'', tail @ ..] = rest.as_bytes() else { return 0 };
    let lower = |byte: &u8| if any_case { byte.to_ascii_lowercase() } else { *byte };
    match (tail.first().map(lower), tail.get(1).map(lower)) {
        (Some(b's' | b't' | b'm' | b'd'), _) => 2,
        (Some(b'r' | b'v'), Some(b'e')) | (Some(b'l'), Some(b'l')) => 3,
        _ => 0,
    }
}

/// Bytes of the characters at the start of `text` that are in any of `classes`.
fn run(text: &str, classes: Class) -> usize {
    while_in(text, |c| Class::of(c).any(classes))
}

/// Bytes of the characters at the start of `text` that are in none of `classes`.
pub(super) fn run_outside(text: &str, classes: Class) -> usize {
    while_in(text, |c| !Class::of(c).any(classes))
}

pub(super) fn while_in(text: &str, member: impl Fn(char) -> bool) -> usize {
    text.find(|c| !member(c)).unwrap_or(text.len())
}

/// `\s?[members]+`
fn after_space(rest: &str, first: char, member: impl Fn(char) -> bool) -> usize {
    let space = if Class::of(first).any(Class::SPACE) { first.len_utf8() } else { 0 };
    let bytes = while_in(&rest[space..], &member);
    if bytes > 0 {
        return space + bytes;
    }
    // A white-space character that is itself a member (U+3000), with no member after it.
    if member(first) { first.len_utf8() } else { 0 }
}

pub(super) fn is_newline(character: char) -> bool {
    matches!(character, '\r' | '\n')
}

fn is_deepseek_punctuation(character: char) -> bool {
    matches!(character, '!'..='/' | ':'..='~' | '！'..='／' | '：'..='～' | '‘'..='‟' | '\u{3000}'..='。')
}

fn is_deepseek_letter(character: char) -> bool {
    if character.is_ascii() {
        return character.is_ascii_alphabetic();
    }
    DEEPSEEK_LETTERS
        .binary_search_by(|range| {
            if *range.end() < character {
                std::cmp::Ordering::Less
            } else if *range.start() > character {
                std::cmp::Ordering::Greater
            } else {
                std::cmp::Ordering::Equal
            }
        })
        .is_ok()
}

/// Letters of scripts with upper and lower case, as the expression of the deepseek-llm tokenizer lists them; ascending.
const DEEPSEEK_LETTERS: [std::ops::RangeInclusive<char>; 85] = [
    '\u{b5}'..='\u{b5}',
    '\u{c0}'..='\u{d6}',
    '\u{d8}'..='\u{f6}',
    '\u{f8}'..='\u{1ba}',
    '\u{1bc}'..='\u{1bf}',
    '\u{1c4}'..='\u{293}',
    '\u{295}'..='\u{2af}',
    '\u{370}'..='\u{373}',
    '\u{376}'..='\u{376}',
    '\u{377}'..='\u{377}',
    '\u{37b}'..='\u{37d}',
    '\u{37f}'..='\u{37f}',
    '\u{386}'..='\u{386}',
    '\u{388}'..='\u{38a}',
    '\u{38c}'..='\u{38c}',
    '\u{38e}'..='\u{3a1}',
    '\u{3a3}'..='\u{3f5}',
    '\u{3f7}'..='\u{481}',
    '\u{48a}'..='\u{52f}',
    '\u{531}'..='\u{556}',
    '\u{10a0}'..='\u{10c5}',
    '\u{13a0}'..='\u{13f5}',
    '\u{13f8}'..='\u{13fd}',
    '\u{1c90}'..='\u{1cba}',
    '\u{1cbd}'..='\u{1cbf}',
    '\u{1d00}'..='\u{1d2b}',
    '\u{1d6b}'..='\u{1d77}',
    '\u{1d79}'..='\u{1d9a}',
    '\u{1e00}'..='\u{1f15}',
    '\u{1f18}'..='\u{1f1d}',
    '\u{1f20}'..='\u{1f45}',
    '\u{1f48}'..='\u{1f4d}',
    '\u{1f50}'..='\u{1f57}',
    '\u{1f59}'..='\u{1f59}',
    '\u{1f5b}'..='\u{1f5b}',
    '\u{1f5d}'..='\u{1f5d}',
    '\u{1f5f}'..='\u{1f7d}',
    '\u{1f80}'..='\u{1fb4}',
    '\u{1fb6}'..='\u{1fbc}',
    '\u{1fbe}'..='\u{1fbe}',
    '\u{1fc2}'..='\u{1fc4}',
    '\u{1fc6}'..='\u{1fcc}',
    '\u{1fd0}'..='\u{1fd3}',
    '\u{1fd6}'..='\u{1fdb}',
    '\u{1fe0}'..='\u{1fec}',
    '\u{1ff2}'..='\u{1ff4}',
    '\u{1ff6}'..='\u{1ffc}',
    '\u{2102}'..='\u{2102}',
    '\u{2107}'..='\u{2107}',
    '\u{210a}'..='\u{2113}',
    '\u{2115}'..='\u{2115}',
    '\u{2119}'..='\u{211d}',
    '\u{2124}'..='\u{2124}',
    '\u{2126}'..='\u{2126}',
    '\u{2128}'..='\u{2128}',
    '\u{212a}'..='\u{212d}',
    '\u{212f}'..='\u{2134}',
    '\u{2139}'..='\u{2139}',
    '\u{213c}'..='\u{213f}',
    '\u{2145}'..='\u{2149}',
    '\u{214e}'..='\u{214e}',
    '\u{2183}'..='\u{2183}',
    '\u{2184}'..='\u{2184}',
    '\u{2c00}'..='\u{2c7b}',
    '\u{2c7e}'..='\u{2ce4}',
    '\u{2ceb}'..='\u{2cee}',
    '\u{2cf2}'..='\u{2cf2}',
    '\u{2cf3}'..='\u{2cf3}',
    '\u{a640}'..='\u{a66d}',
    '\u{a680}'..='\u{a69b}',
    '\u{a722}'..='\u{a76f}',
    '\u{a771}'..='\u{a787}',
    '\u{a78b}'..='\u{a78e}',
    '\u{ab70}'..='\u{abbf}',
    '\u{fb00}'..='\u{fb06}',
    '\u{fb13}'..='\u{fb17}',
    '\u{ff21}'..='\u{ff3a}',
    '\u{ff41}'..='\u{ff5a}',
    '\u{10400}'..='\u{1044f}',
    '\u{104b0}'..='\u{104d3}',
    '\u{104d8}'..='\u{104fb}',
    '\u{10c80}'..='\u{10cb2}',
    '\u{10cc0}'..='\u{10cf2}',
    '\u{118a0}'..='\u{118df}',
    '\u{1e900}'..='\u{1e943}',
];
