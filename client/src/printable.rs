//! Texts of models, files and other users, made safe to show on a terminal.

use std::fmt::Write;

use unicode_properties::{GeneralCategory, UnicodeGeneralCategory};

/// A name or message for one line. Each character that could control a terminal, reorder the text beside it or hide is
/// shown escaped, such as `\u{1b}`. So are spaces at both ends, and all spaces other than U+0020.
pub fn printable(text: &str) -> String {
    let inner = text.trim_matches(' ');
    let before = text.len() - text.trim_start_matches(' ').len();
    let spaces = |count: usize| "\\u{20}".repeat(count);
    let is_escaped = |c| is_hidden(c) || (c != ' ' && c.is_whitespace());
    let after = text.len().saturating_sub(before + inner.len());
    format!("{}{}{}", spaces(before), escaped(inner, is_escaped), spaces(after))
}

/// A text of several lines for a terminal: control characters other than newline and tab are shown escaped. Marks of
/// direction stay, because texts of some languages need them.
pub fn printable_text(text: &str) -> String {
    escaped(text, |c| c.is_control() && !matches!(c, '\n' | '\t'))
}

/// Controls, marks of direction, characters without width, ends of lines, and characters without a meaning. With them,
/// two names that differ look the same, or a terminal shows something else.
pub(crate) fn is_hidden(c: char) -> bool {
    use GeneralCategory::{Control, Format, LineSeparator, ParagraphSeparator, PrivateUse, Unassigned};
    let hidden = [Control, Format, LineSeparator, ParagraphSeparator, PrivateUse, Unassigned];
    !matches!(c, ' '..='~') && (hidden.contains(&c.general_category()) || is_blank(c))
}

/// Letters and marks that show nothing: fillers of Hangul, and selectors of variants.
fn is_blank(c: char) -> bool {
    matches!(
        c,
        '\u{34f}' | '\u{115f}' | '\u{1160}' | '\u{17b4}' | '\u{17b5}' | '\u{180b}'..='\u{180f}' | '\u{3164}'
            | '\u{fe00}'..='\u{fe0f}' | '\u{ffa0}' | '\u{e0100}'..='\u{e01ef}'
    )
}

fn escaped(text: &str, is_escaped: impl Fn(char) -> bool) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        if is_escaped(c) {
            // Writing to a string cannot fail.
            let _ = write!(shown, "\\u{{{:x}}}", u32::from(c));
        } else {
            shown.push(c);
        }
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_show_what_would_steer_or_hide() {
        assert_eq!(printable("a\u{1b}[31m\n\t\u{7f}\u{9b}2J"), "a\\u{1b}[31m\\u{a}\\u{9}\\u{7f}\\u{9b}2J");
        for unseen in
            "\u{61c}\u{200b}\u{200c}\u{200d}\u{200e}\u{200f}\u{202a}\u{202e}\u{2060}\u{2066}\u{2069}\u{feff}"
                .chars()
        {
            assert_eq!(printable(&unseen.to_string()), format!("\\u{{{:x}}}", u32::from(unseen)));
        }
        for unseen in
            "\u{ad}\u{2028}\u{2029}\u{e0001}\u{e0041}\u{e007f}\u{e000}\u{378}\u{3164}\u{fe0f}\u{a0}\u{3000}"
                .chars()
        {
            assert_eq!(printable(&format!("a{unseen}b")), format!("a\\u{{{:x}}}b", u32::from(unseen)));
        }
        assert_eq!(printable("模 é \u{301}\\"), "模 é \u{301}\\");
        assert_eq!(printable("  a b "), "\\u{20}\\u{20}a b\\u{20}");
        assert_eq!((printable(" "), printable("")), ("\\u{20}".to_owned(), String::new()));
    }

    #[test]
    fn texts_keep_their_lines_and_their_direction() {
        assert_eq!(
            printable_text("a\tb\n\u{200f}\u{1b}]0;x\u{7}\r"),
            "a\tb\n\u{200f}\\u{1b}]0;x\\u{7}\\u{d}"
        );
        assert_eq!(printable_text("\u{0}\u{80}\u{9f}\u{a0}"), "\\u{0}\\u{80}\\u{9f}\u{a0}");
    }
}
