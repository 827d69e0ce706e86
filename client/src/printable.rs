//! Texts of models, files and other users, made safe to show on a terminal.

use std::fmt::Write;

/// A name or message for one line: each character that could control a terminal, reorder the text beside it or hide is
/// shown escaped, such as `\u{1b}`.
pub fn printable(text: &str) -> String {
    escaped(text, |c| c.is_control() || is_unseen(c))
}

/// A text of several lines for a terminal: control characters other than newline and tab are shown escaped. Marks of
/// direction stay, because texts of some languages need them.
pub fn printable_text(text: &str) -> String {
    escaped(text, |c| c.is_control() && !matches!(c, '\n' | '\t'))
}

/// Marks of direction and characters without width: with them, two names that differ look the same.
fn is_unseen(c: char) -> bool {
    matches!(
        c,
        '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}' | '\u{2066}'..='\u{2069}' | '\u{feff}'
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
        assert_eq!(printable("模 é \u{301}\\"), "模 é \u{301}\\");
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
