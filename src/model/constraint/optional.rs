//! Refuses texts with very many optional parts.
//!
//! In a row of optional parts any of the rest may come next. The compiler keeps that set for each part. 30,000 times `a?`, 60 KB of
//! text, took 3.5 GB and went on after the longest time. The compiler bounds that neither when it compiles nor for a token.

use serde_json::Value;

use super::{ConstraintError, ConstraintKind};

/// Most optional parts of a text: a row of them takes 4 bytes for each pair, 12 MiB in all.
const OPTIONAL_MAX: usize = 2_500;

/// Refuses a text with more optional parts than the compiler can take.
///
/// # Errors
/// [`ConstraintError::TooComplex`].
pub(super) fn checked(kind: ConstraintKind, text: &str) -> Result<(), ConstraintError> {
    bounded(kind, optional(text))
}

/// The same for all strings of a schema, of which some are regular expressions.
///
/// # Errors
/// [`ConstraintError::TooComplex`].
pub(super) fn checked_schema(schema: &Value) -> Result<(), ConstraintError> {
    fn of(value: &Value) -> usize {
        match value {
            Value::String(text) => optional(text),
            Value::Array(list) => list.iter().map(of).sum(),
            Value::Object(keys) => keys.iter().map(|(key, value)| optional(key) + of(value)).sum(),
            Value::Null | Value::Bool(_) | Value::Number(_) => 0,
        }
    }
    bounded(ConstraintKind::JsonSchema, of(schema))
}

fn bounded(kind: ConstraintKind, optional: usize) -> Result<(), ConstraintError> {
    if optional <= OPTIONAL_MAX {
        return Ok(());
    }
    let reason = format!("it has {optional} optional parts, the limit is {OPTIONAL_MAX}");
    Err(ConstraintError::TooComplex { kind, reason })
}

/// At least the number of a text's optional parts: it also counts characters that mean themselves.
fn optional(text: &str) -> usize {
    // With the flag x, white space and comments may stand anywhere: then each alternative may be empty.
    let spaced = text.split("(?").skip(1).any(|rest| {
        rest.chars().take_while(|c| c.is_ascii_alphabetic() || *c == '-').any(|flag| flag == 'x')
    });
    let mut before = '|'; // an alternative at the very beginning may be empty
    let mut count = 0;
    for now in text.chars() {
        let empty = match (before, now) {
            ('|' | '(' | ':', '|') | ('|', ')') => true,
            (_, '|') => spaced,
            (_, '?' | '*' | '{') => true,
            _ => false,
        };
        count += usize::from(empty);
        before = now;
    }
    count
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn optional_parts_are_counted_however_they_are_written() {
        for (text, least) in [
            ("a?b*c{0,3}", 3),
            ("(|a)(b|)(?:|c)(d||e)", 4),
            ("(?x)(#\n|a)(b| )", 2),
            ("(?i)(?s-x)(?isx:a |b)", 1),
            ("[abc]+(day|night)|never", 0),
        ] {
            assert!(optional(text) >= least, "{text}: {}", optional(text));
        }
        assert_eq!(optional("[abc]+(day|night)|never"), 0);
        let words: Vec<String> = (0..6000).map(|n| format!("{n:x}")).collect();
        assert!(checked(ConstraintKind::Regex, &words.join("|")).is_ok(), "alternatives alone are none");
    }

    #[test]
    fn very_many_are_refused_with_their_number() {
        let text = "a?".repeat(30_000);
        let told = checked(ConstraintKind::Regex, &text).unwrap_err().to_string();
        assert_eq!(
            told,
            "the regular expression is too complex: it has 30000 optional parts, the limit is 2500: simplify it"
        );
        assert!(checked(ConstraintKind::Regex, &"a?".repeat(OPTIONAL_MAX)).is_ok());
        // An escaped question mark is one, too.
        let hidden: Value =
            serde_json::from_str(&format!(r#"{{"pattern":"{}"}}"#, r"a\u003f".repeat(3000))).unwrap();
        assert!(checked_schema(&hidden).is_err());
        assert!(checked_schema(&json!({"properties": {"a": {"pattern": "x?"}}})).is_ok());
    }
}
