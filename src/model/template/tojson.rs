//! The `tojson` filter as transformers defines it: Python's `json.dumps`, without escapes for HTML.

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, ErrorKind};

/// Deepest nesting written; the same order of magnitude as Python's recursion limit.
const DEPTH_MAX: usize = 200;

/// `value | tojson(indent=2, ensure_ascii=true, sort_keys=true)`.
pub(super) fn tojson(value: &Value, args: Kwargs) -> Result<Value, Error> {
    let ensure_ascii = args.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    let sort_keys = args.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    let indent = args.get::<Option<usize>>("indent")?;
    let separators = args.get::<Option<Vec<String>>>("separators")?;
    args.assert_all_used()?;
    let (item, key) = match separators.as_deref() {
        Some([item, key]) => (item.clone(), key.clone()),
        Some(_) => return Err(invalid("separators must be two texts")),
        None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
        None => (", ".to_owned(), ": ".to_owned()),
    };
    let mut writer = Writer { text: String::new(), ensure_ascii, sort_keys, indent, item, key };
    writer.value(value, 0)?;
    Ok(Value::from(writer.text))
}

struct Writer {
    text: String,
    ensure_ascii: bool,
    sort_keys: bool,
    indent: Option<usize>,
    /// Between two items.
    item: String,
    /// Between a key and its value.
    key: String,
}

impl Writer {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > DEPTH_MAX {
            return Err(invalid("the value nests too deep for JSON"));
        }
        match value.kind() {
            ValueKind::None => self.text.push_str("null"),
            ValueKind::Bool => self.text.push_str(if value.is_true() { "true" } else { "false" }),
            // Formatted as in Python.
            ValueKind::Number => self.text.push_str(&value.to_string()),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<_> = value.try_iter()?.collect();
                self.container(['[', ']'], depth, &items, |writer, item| writer.value(item, depth + 1))?;
            }
            ValueKind::Map => {
                let mut keys: Vec<_> = value.try_iter()?.collect();
                if self.sort_keys {
                    keys.sort();
                }
                self.container(['{', '}'], depth, &keys, |writer, key| {
                    writer.key(key)?;
                    writer.value(&value.get_item(key)?, depth + 1)
                })?;
            }
            kind => return Err(invalid(format!("a value of type {kind} is not JSON serializable"))),
        }
        Ok(())
    }

    fn container(
        &mut self,
        [open, close]: [char; 2],
        depth: usize,
        items: &[Value],
        mut write: impl FnMut(&mut Self, &Value) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.text.push(open);
        for (index, item) in items.iter().enumerate() {
            if index > 0 {
                self.text.push_str(&self.item);
            }
            self.line(depth + 1);
            write(self, item)?;
        }
        if !items.is_empty() {
            self.line(depth);
        }
        self.text.push(close);
        Ok(())
    }

    /// Begins a new line if an indent is set.
    fn line(&mut self, depth: usize) {
        if let Some(indent) = self.indent {
            self.text.push('\n');
            self.text.extend(std::iter::repeat_n(' ', indent.saturating_mul(depth)));
        }
    }

    fn key(&mut self, key: &Value) -> Result<(), Error> {
        match key.kind() {
            ValueKind::String => self.string(key.as_str().unwrap_or_default()),
            ValueKind::None | ValueKind::Bool | ValueKind::Number => {
                self.text.push('"');
                self.value(key, 0)?;
                self.text.push('"');
            }
            kind => return Err(invalid(format!("a key of type {kind} is not JSON serializable"))),
        }
        self.text.push_str(&self.key);
        Ok(())
    }

    fn string(&mut self, string: &str) {
        self.text.push('"');
        for character in string.chars() {
            match character {
                '"' => self.text.push_str("\\\""),
                '\\' => self.text.push_str("\\\\"),
                '\n' => self.text.push_str("\\n"),
                '\r' => self.text.push_str("\\r"),
                '\t' => self.text.push_str("\\t"),
                '\u{8}' => self.text.push_str("\\b"),
                '\u{c}' => self.text.push_str("\\f"),
                '\0'..' ' => self.escape(character),
                _ if self.ensure_ascii && !character.is_ascii() => self.escape(character),
                _ => self.text.push(character),
            }
        }
        self.text.push('"');
    }

    fn escape(&mut self, character: char) {
        for unit in character.encode_utf16(&mut [0; 2]) {
            self.text.push_str(&format!("\\u{unit:04x}"));
        }
    }
}

fn invalid(message: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

#[cfg(test)]
mod tests {
    use minijinja::Environment;

    /// Expected texts come from Python's `json.dumps`, with `ensure_ascii` false unless given.
    #[test]
    fn values_are_written_as_python_writes_them() {
        let mut environment = Environment::new();
        environment.add_filter("tojson", super::tojson);
        for (expression, expected) in [
            ("{'b': 1, 'a': [true, none, 1.5, 2.0]}|tojson", r#"{"b": 1, "a": [true, null, 1.5, 2.0]}"#),
            ("{'b': 1, 'a': 2}|tojson(sort_keys=true)", r#"{"a": 2, "b": 1}"#),
            ("[1, [], {}]|tojson(indent=2)", "[\n  1,\n  [],\n  {}\n]"),
            ("{'a': {'b': 1}}|tojson(indent=4)", "{\n    \"a\": {\n        \"b\": 1\n    }\n}"),
            ("[1, {'a': 2}]|tojson(separators=[',', ':'])", r#"[1,{"a":2}]"#),
            (r#"'<b>&\'" \\ é 🙂'|tojson"#, r#""<b>&'\" \\ é 🙂""#),
            (r#"'é🙂'|tojson(ensure_ascii=true)"#, r#""\u00e9\ud83d\ude42""#),
            (r#""\n\t\r\u0000\u001f\u007f"|tojson"#, "\"\\n\\t\\r\\u0000\\u001f\u{7f}\""),
            ("{1: 2, none: 3}|tojson", r#"{"1": 2, "null": 3}"#),
        ] {
            let rendered = environment.render_str(&format!("{{{{ {expression} }}}}"), ()).unwrap();
            assert_eq!(rendered, expected, "{expression}");
        }
        for bad in ["[1]|tojson(separators=['a'])", "[1]|tojson(indent='x')", "[1]|tojson(default=2)"] {
            assert!(environment.render_str(&format!("{{{{ {bad} }}}}"), ()).is_err(), "{bad}");
        }
    }
}
