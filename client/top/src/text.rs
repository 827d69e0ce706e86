//! Text cut to its place and free of terminal control characters.

use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

/// Shown instead of the name of another user's model.
pub const UNNAMED: &str = "(another user's)";

/// Replaces a character that may not be shown.
const INSTEAD: char = '\u{fffd}';

/// A text from a file or the daemon. Escapes characters that could control a terminal, reorder the text beside them or
/// hide. Other characters without width are replaced: on a screen of cells they change the character before them.
pub fn printable(text: &str) -> String {
    let shown = |c: char| if c.width().unwrap_or(0) == 0 { INSTEAD } else { c };
    rocmforge_client::printable(text).chars().map(shown).collect()
}

/// A model's name for display.
pub fn model_name(name: &str) -> String {
    if name.is_empty() { UNNAMED.to_owned() } else { printable(name) }
}

/// The longest prefix of a text within `columns` columns; a cut is marked.
pub fn cut(text: &str, columns: usize) -> String {
    if text.width() <= columns {
        return text.to_owned();
    }
    let mut cut = String::new();
    let mut taken = 0;
    for c in text.chars() {
        taken += c.width().unwrap_or(0);
        if taken >= columns {
            break;
        }
        cut.push(c);
    }
    if columns > 0 {
        cut.push('~');
    }
    cut
}

/// A list in lines of at most `columns` columns, broken behind its commas and semicolons.
pub fn wrapped(text: &str, columns: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for piece in text.split_inclusive(", ").flat_map(|piece| piece.split_inclusive("; ")) {
        match lines.last_mut() {
            Some(line) if line.is_empty() || (line.width() + piece.trim_end().width()) <= columns => {
                line.push_str(piece);
            }
            _ => lines.push(piece.to_owned()),
        }
    }
    lines.iter().map(|line| cut(line.trim_end(), columns)).collect()
}

/// Cuts and fills with spaces to exactly `columns` columns.
pub fn fit(text: &str, columns: usize) -> String {
    let mut fitted = cut(text, columns);
    fitted.push_str(&" ".repeat(columns.saturating_sub(fitted.width())));
    fitted
}

/// As [`fit`], with the spaces first.
pub fn fit_right(text: &str, columns: usize) -> String {
    let cut = cut(text, columns);
    format!("{}{cut}", " ".repeat(columns.saturating_sub(cut.width())))
}

/// A size in binary units.
pub fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let steps = [40, 30, 20, 10].iter().position(|shift| count >> shift != 0).map_or(0, |at| 4 - at);
    if steps == 0 {
        format!("{count} B")
    } else {
        format!("{:.1} {}", count as f64 / (1u64 << (10 * steps)) as f64, UNITS[steps])
    }
}

/// A duration in its largest unit.
pub fn age(ms: u64) -> String {
    match ms / 1000 {
        0..100 => format!("{:.1} s", ms as f64 / 1e3),
        seconds @ 100..6000 => format!("{} min", seconds / 60),
        seconds @ 6000..360_000 => format!("{} h", seconds / 3600),
        seconds => format!("{} d", seconds / 86400),
    }
}

/// `EndOfGeneration` as `end of generation`.
pub fn words(name: &str) -> String {
    let mut words = String::new();
    for c in name.chars() {
        if c.is_ascii_uppercase() && !words.is_empty() {
            words.push(' ');
        }
        words.push(c.to_ascii_lowercase());
    }
    words
}
