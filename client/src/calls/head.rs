//! Reads the beginning of a call's object, up to its arguments.

use serde_json::Value;

use super::body::Known;

/// Most bytes of a call before its arguments; calls with more are told once they are whole.
pub const HEAD_BYTES_MAX: usize = 512;

/// The beginning of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Head {
    pub name: String,
    pub id: Option<String>,
    /// The byte at which the arguments begin.
    pub at: usize,
}

/// Why there is no beginning of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Not {
    /// More text is needed.
    Yet,
    /// The object must be read as a whole: it may be a call in another order of its fields, or none.
    Ever,
}

/// The beginning of the call whose object begins at that byte. Its name comes before the arguments, and all before them is plain
/// values. However much of the text is there, the result is the same once it is not [`Not::Yet`].
pub fn of_object(text: &str, from: usize, known: Known<'_>) -> Result<Head, Not> {
    let first = (from + HEAD_BYTES_MAX).min(text.len());
    let first = (0..=first).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
    let mut cursor = Cursor { text: &text[..first], at: from };
    match cursor.head(known) {
        Err(Not::Yet) if first < text.len() => Err(Not::Ever),
        head => head,
    }
}

/// Whether arguments begin at that byte, or after white space of [`HEAD_BYTES_MAX`] bytes at most. `None` until enough of the text
/// is there.
pub fn arguments_begin(text: &str, at: usize) -> Option<bool> {
    let rest = text.as_bytes().get(at..).unwrap_or_default();
    let mut bytes = rest.iter().take(HEAD_BYTES_MAX).filter(|byte| !byte.is_ascii_whitespace());
    match (bytes.next(), bytes.next()) {
        (Some(b'{'), Some(next)) => Some(matches!(next, b'"' | b'}')),
        (Some(b'{'), None) | (None, _) if rest.len() < HEAD_BYTES_MAX => None,
        _ => Some(false),
    }
}

struct Cursor<'a> {
    text: &'a str,
    at: usize,
}

impl Cursor<'_> {
    fn head(&mut self, known: Known<'_>) -> Result<Head, Not> {
        let (mut name, mut id) = (String::new(), None);
        self.take(b'{')?;
        loop {
            let key = self.string()?;
            self.take(b':')?;
            let first = self.peek()?;
            match key.as_str() {
                "arguments" | "parameters" if known.has(&name) => return self.arguments(name, id),
                "name" if first == b'"' => name = self.string()?,
                "id" if first == b'"' => id = Some(self.string()?).filter(|id| !id.is_empty()),
                "name" | "arguments" | "parameters" | "function" | "tool_call" | "tool_calls" => {
                    return Err(Not::Ever);
                }
                _ => self.plain(first)?,
            }
            self.take(b',')?;
        }
    }

    fn arguments(&self, name: String, id: Option<String>) -> Result<Head, Not> {
        match arguments_begin(self.text, self.at) {
            None => Err(Not::Yet),
            Some(false) => Err(Not::Ever),
            Some(true) => Ok(Head { name, id, at: self.at }),
        }
    }

    /// The next byte after white space, which stays.
    fn peek(&mut self) -> Result<u8, Not> {
        let rest = self.text[self.at..].trim_start_matches([' ', '\n', '\r', '\t']);
        self.at = self.text.len() - rest.len();
        rest.bytes().next().ok_or(Not::Yet)
    }

    fn take(&mut self, wanted: u8) -> Result<(), Not> {
        if self.peek()? != wanted {
            return Err(Not::Ever);
        }
        self.at += 1;
        Ok(())
    }

    fn string(&mut self) -> Result<String, Not> {
        self.take(b'"')?;
        let (from, mut escaped) = (self.at, false);
        let end = self.text[from..].bytes().position(|byte| {
            let ends = byte == b'"' && !escaped;
            escaped = byte == b'\\' && !escaped;
            ends
        });
        self.at = from + end.ok_or(Not::Yet)? + 1;
        serde_json::from_str(&self.text[from - 1..self.at]).map_err(|_| Not::Ever)
    }

    /// Skips a value that is neither an object nor a list.
    fn plain(&mut self, first: u8) -> Result<(), Not> {
        if first == b'"' {
            return self.string().map(drop);
        }
        let rest = &self.text[self.at..];
        let end = rest.find([',', '}', ']', '{', '[', '"']).ok_or(Not::Yet)?;
        let value: Value = serde_json::from_str(&rest[..end]).map_err(|_| Not::Ever)?;
        self.at += end;
        if value.is_object() || value.is_array() { Err(Not::Ever) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::calls::Tool;

    fn of(text: &str) -> Result<Head, Not> {
        of_object(text, 0, Known::ANY)
    }

    #[test]
    fn a_call_begins_once_its_name_and_its_arguments_are_there() {
        let text = r#"{"type": "function", "id" :"a\"b", "n": 1.5, "name": "f", "arguments" : {"x": "#;
        let at = text.rfind("{").unwrap_or_default();
        assert_eq!(of(text), Ok(Head { name: "f".into(), id: Some("a\"b".into()), at }));
        for end in 0..at + 2 {
            assert_eq!(of(&text[..end]), Err(Not::Yet), "{end}");
        }
        assert!(of(r#"{"name": "f", "parameters": {}"#).is_ok());
    }

    #[test]
    fn other_objects_are_read_whole() {
        for text in [
            r#"{"name": "f"}"#,
            r#"{"name": "f", "arguments": "{}"#,
            r#"{"name": "f", "arguments": {x"#,
            r#"{"arguments": {"#,
            r#"{"name": "", "arguments": {"#,
            r#"{"name": 1, "#,
            r#"{"name": "\x", "#,
            r#"{"a": [1], "#,
            r#"{"a": no, "#,
            r#"{"function": {"#,
            r#"{"name": "f" "#,
        ] {
            let result = of(&(text.to_owned() + "x"));
            assert_eq!(result, Err(Not::Ever), "{text}");
        }
        let long = format!(r#"{{"a": "{}", "name": "f", "arguments": {{}}}}"#, "é".repeat(300));
        assert_eq!(of(&long), Err(Not::Ever));
        assert_eq!(of(&long[..401]), Err(Not::Yet));
    }

    #[test]
    fn where_there_is_no_mark_a_name_is_a_tools() {
        let tool = |name: &str| Tool { name: name.into(), description: None, parameters: Value::Null };
        let text = r#"{"name": "f", "arguments": {}"#;
        assert!(of_object(text, 0, Known::of(&[tool("f")])).is_ok());
        assert_eq!(of_object(text, 0, Known::of(&[tool("g")])), Err(Not::Ever));
    }
}
