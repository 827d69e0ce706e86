//! The expressions of o200k (`gpt-4o`) and Tekken: words end where a capital letter follows a small one.
//!
//! `[^\r\n\p{L}\p{N}]?U*W+C|[^\r\n\p{L}\p{N}]?U+W*C|\p{N}{1,digits}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+`,
//! where U is `[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]`, W is `[\p{Ll}\p{Lm}\p{Lo}\p{M}]`, and C is the optional contraction
//! `(?i:'s|'t|'re|'ve|'m|'ll|'d)?`. These are the models' own expressions. llama.cpp's copy has no marks, and takes only
//! `A-Z` and `a-z` for capital and small.

use super::super::unicode::Class;
use super::scan::{contraction, is_newline, run_outside, space_runs, while_in};

/// Bytes of the match at the start of `rest`, which begins with `first`; 0 for none.
pub(super) fn cased(rest: &str, first: char, digits: usize, contractions: bool) -> usize {
    let class = Class::of(first);
    if class.any(Class::NUMBER) {
        let number = |c: &char| Class::of(*c).any(Class::NUMBER);
        return rest.chars().take(digits).take_while(number).map(char::len_utf8).sum();
    }
    let before = if class.any(Class::LETTER) || is_newline(first) { 0 } else { first.len_utf8() };
    // An expression first tries with the character before the word, then without it.
    let tries = [
        (small_end as fn(&str) -> usize, before),
        (small_end, 0),
        (capital_start, before),
        (capital_start, 0),
    ];
    for (word, before) in tries {
        let bytes = word(&rest[before..]);
        if bytes > 0 {
            let end = before + bytes;
            return end + if contractions { contraction(&rest[end..], true) } else { 0 };
        }
    }
    let space = usize::from(first == ' ');
    let bytes = run_outside(&rest[space..], Class::SPACE.or(Class::LETTER).or(Class::NUMBER));
    if bytes > 0 {
        return space + bytes + while_in(&rest[space + bytes..], |c| is_newline(c) || c == '/');
    }
    space_runs(rest)
}

/// `U*W+`
fn small_end(text: &str) -> usize {
    let capitals = while_in(text, is_capital);
    let small = while_in(&text[capitals..], is_small);
    if small > 0 {
        return capitals + small;
    }
    // U* gives characters back until W+ has one: a letter without case, or a mark.
    text[..capitals].trim_end_matches(|c| !is_small(c)).len()
}

/// `U+W*`
fn capital_start(text: &str) -> usize {
    let capitals = while_in(text, is_capital);
    if capitals == 0 { 0 } else { capitals + while_in(&text[capitals..], is_small) }
}

/// In U: a capital letter, a letter without case, or a mark.
fn is_capital(character: char) -> bool {
    let class = Class::of(character);
    class.any(Class::LETTER.or(Class::MARK)) && !class.any(Class::LOWER)
}

/// In W: a small letter, a letter without case, or a mark.
fn is_small(character: char) -> bool {
    let class = Class::of(character);
    class.any(Class::LETTER.or(Class::MARK)) && !class.any(Class::UPPER)
}
