//! All changes of a kernel file that are tried: each changes one number or operator of its code.

use sha2::{Digest, Sha256};

/// Operators and their replacements.
const OPERATORS: [(&str, &str); 26] = [
    (" + ", " - "),
    (" - ", " + "),
    (" * ", " + "),
    (" / ", " * "),
    (" % ", " / "),
    (" << ", " >> "),
    (" >> ", " << "),
    (" & ", " | "),
    (" | ", " & "),
    (" ^ ", " | "),
    (" < ", " <= "),
    (" <= ", " < "),
    (" > ", " >= "),
    (" >= ", " > "),
    (" == ", " != "),
    (" != ", " == "),
    (" && ", " || "),
    (" || ", " && "),
    (" += ", " -= "),
    (" -= ", " += "),
    (" *= ", " += "),
    (" |= ", " &= "),
    ("min_u32(", "max_u32("),
    ("max_u32(", "min_u32("),
    ("min_f32(", "max_f32("),
    ("max_f32(", "min_f32("),
];

/// A place in a text and its replacement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    start: usize,
    end: usize,
    becomes: String,
}

impl Change {
    /// Applies the change to `text`.
    pub fn applied(&self, text: &str) -> String {
        format!("{}{}{}", &text[..self.start], self.becomes, &text[self.end..])
    }

    /// Describes the change: file, position, old and new text.
    pub fn shown(&self, name: &str, text: &str) -> String {
        let before = &text[..self.start];
        let line = before.matches('\n').count() + 1;
        let column = self.start - before.rfind('\n').map_or(0, |at| at + 1) + 1;
        let code = text.lines().nth(line - 1).unwrap_or_default().trim();
        let was = text[self.start..self.end].trim();
        format!("{name}:{line}:{column}: {was} -> {} in `{code}`", self.becomes.trim())
    }
}

/// All changes of a file in a pseudo-random order that is the same on every machine. The order of changes of
/// unmodified lines is stable too.
pub fn shuffled(name: &str, text: &str) -> Vec<Change> {
    let mut all = changes(text);
    all.sort_by_cached_key(|change| {
        let from = text[..change.start].rfind('\n').map_or(0, |at| at + 1);
        let line = text[from..].lines().next().unwrap_or_default();
        Sha256::digest(format!("{name} {line} {} {}", change.start - from, change.becomes))
    });
    all
}

/// All changes of numbers and operators in code. Bounds of launches (`KERNEL(256, ...`), alignments and preprocessor
/// lines are skipped: most of these changes do not affect what a kernel computes.
fn changes(text: &str) -> Vec<Change> {
    let mut found = Vec::new();
    let mut start = 0;
    for line in text.split_inclusive('\n') {
        let code = line.split("//").next().unwrap_or_default();
        let is_left = code.starts_with('#')
            || ["KERNEL(", "static_assert", "alignas"].iter().any(|word| code.contains(word));
        if !is_left {
            found.extend(numbers(code).chain(operators(code)).map(|change| Change {
                start: change.start + start,
                end: change.end + start,
                becomes: change.becomes,
            }));
        }
        start += line.len();
    }
    found
}

fn operators(code: &str) -> impl Iterator<Item = Change> + '_ {
    OPERATORS.iter().flat_map(move |(operator, becomes)| {
        // `template <class T>` has no spaces on both sides.
        code.match_indices(operator).map(|(at, _)| Change {
            start: at,
            end: at + operator.len(),
            becomes: (*becomes).to_owned(),
        })
    })
}

fn numbers(code: &str) -> impl Iterator<Item = Change> + '_ {
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '.';
    let mut words = Vec::new();
    let mut start = None;
    for (at, c) in code.char_indices().chain([(code.len(), ' ')]) {
        match start {
            None if is_word(c) => start = Some(at),
            Some(from) if !is_word(c) => {
                words.push((from, at));
                start = None;
            }
            _ => (),
        }
    }
    words
        .into_iter()
        .filter_map(|(start, end)| Some(Change { start, end, becomes: other_number(&code[start..end])? }))
}

/// Another number of the same type; `None` if `word` is not a number.
fn other_number(word: &str) -> Option<String> {
    if !word.starts_with(|c: char| c.is_ascii_digit()) {
        return None;
    }
    if let Some(digits) = word.strip_prefix("0x") {
        let (digits, suffix) = digits.split_at(digits.trim_end_matches(['u', 'l']).len());
        return Some(format!("{:#x}{suffix}", u64::from_str_radix(digits, 16).ok()?.checked_add(1)?));
    }
    if word.contains('.') {
        let value: f64 = word.trim_end_matches('f').parse().ok()?;
        let suffix = if word.ends_with('f') { "f" } else { "" };
        return Some(if value == 0.0 {
            format!("0.25{suffix}")
        } else {
            format!("{:?}{suffix}", value * 1.25)
        });
    }
    let (digits, suffix) = word.split_at(word.trim_end_matches(['u', 'l']).len());
    Some(format!("{}{suffix}", digits.parse::<u64>().ok()?.checked_add(1)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_operators_of_code_are_found_and_nothing_else() {
        let text = "// 1 + 2\n#define X 3\nKERNEL(256, k) {\n    u32 x2 = y[0x1fu] + 0.5f; // 7\n}\n";
        let found: Vec<(&str, String)> =
            changes(text).into_iter().map(|c| (&text[c.start..c.end], c.becomes)).collect();
        let want = [("0x1fu", "0x20u"), ("0.5f", "0.625f"), (" + ", " - ")];
        assert_eq!(found, want.map(|(old, new)| (old, new.to_owned())));
        assert!(changes("DEV template <class T> f32 a(T v2, f32x4 b);\n").is_empty());
        assert_eq!(other_number("0.0f").as_deref(), Some("0.25f"));
        assert_eq!(other_number("16"), Some("17".into()));
        assert_eq!(other_number("1e"), None);
    }

    #[test]
    fn the_order_is_by_chance_and_stays() {
        let text = "a + b - c * d < e\nf & g\n";
        let order = |text: &str| -> Vec<String> {
            shuffled("norm.hip", text).iter().map(|change| change.applied(text)).collect()
        };
        assert_eq!(order(text).len(), 5);
        assert_ne!(order(text), changes(text).iter().map(|c| c.applied(text)).collect::<Vec<_>>());
        let more: Vec<String> = order(&format!("\n\n{text}"));
        assert_eq!(more, order(text).iter().map(|text| format!("\n\n{text}")).collect::<Vec<_>>());
        let shown: Vec<String> =
            changes(text).iter().skip(4).map(|change| change.shown("norm.hip", text)).collect();
        assert_eq!(shown, ["norm.hip:2:2: & -> | in `f & g`"]);
    }
}
