//! Reads JSON schemas, and refuses those that would explode.
//!
//! The compiler intersects what stands side by side: `allOf`, and `$ref` or `anyOf` beside other keys. Each part of the one meets
//! each part of the other. Ten parts of ten alternatives make ten thousand million, in a text of a few hundred bytes. The
//! compiler bounds neither that time nor that memory. So the work is estimated first.

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use super::{ConstraintError, ConstraintKind, standard};

/// Most schemas that intersections may make.
const WORK_MAX: u64 = 100_000;

/// White space of answers where JSON allows it: without a bound a model may write nothing else for long.
const WHITE_SPACE: &str = r"[\x20\x0A\x0D\x09]{1,16}";

/// Keys whose parts are intersected with what stands beside them.
const JOINED: [&str; 4] = ["allOf", "anyOf", "oneOf", "$ref"];

/// Reads a schema.
///
/// # Errors
/// [`ConstraintError::Invalid`] for a text that is no JSON, [`ConstraintError::TooComplex`] for a schema that would explode.
pub(super) fn checked(text: &str) -> Result<Value, ConstraintError> {
    let kind = ConstraintKind::JsonSchema;
    let invalid = |reason: String| ConstraintError::Invalid { kind, reason };
    let mut schema: Value =
        serde_json::from_str(text).map_err(|error| invalid(format!("it is no JSON: {error}")))?;
    standard::rewrite(&mut schema).map_err(invalid)?;
    let work = Estimate { root: &schema, known: HashMap::new() }.of(&schema, false);
    if work > WORK_MAX {
        let reason = format!("joining its parts makes more than {WORK_MAX} schemas");
        return Err(ConstraintError::TooComplex { kind, reason });
    }
    if let Value::Object(keys) = &mut schema
        && !keys.contains_key("x-guidance")
    {
        keys.insert("x-guidance".to_owned(), json!({ "whitespace_pattern": WHITE_SPACE }));
    }
    Ok(schema)
}

struct Estimate<'a> {
    root: &'a Value,
    /// Work of the targets of references; 1 while a target is being estimated, because a circle is cut there.
    known: HashMap<&'a str, u64>,
}

impl<'a> Estimate<'a> {
    /// Schemas that a part becomes. One that is `joined` is multiplied with others, and so is what its references name.
    fn of(&mut self, schema: &'a Value, joined: bool) -> u64 {
        match schema {
            Value::Object(keys) => self.of_object(keys, joined),
            Value::Array(list) => list.iter().map(|one| self.of(one, joined)).fold(1, u64::saturating_add),
            _ => 1,
        }
    }

    fn of_object(&mut self, keys: &'a Map<String, Value>, joined: bool) -> u64 {
        let beside = keys.keys().filter(|key| JOINED.contains(&key.as_str())).count();
        let joined = joined || beside > 1 || (beside == 1 && keys.len() > 1) || keys.contains_key("allOf");
        let (mut sum, mut product) = (1u64, 1u64);
        for (key, value) in keys {
            match (key.as_str(), value) {
                ("$ref", Value::String(target)) if joined => {
                    product = product.saturating_mul(self.of_reference(target));
                }
                ("allOf", Value::Array(parts)) => {
                    for part in parts {
                        product = product.saturating_mul(self.of(part, true));
                    }
                }
                ("anyOf" | "oneOf", value) if joined => {
                    product = product.saturating_mul(self.of(value, true))
                }
                // Lists of values or names. A property of such a name is no list.
                ("enum" | "examples" | "required", Value::Array(_)) => {}
                (_, value) => sum = sum.saturating_add(self.of(value, joined)),
            }
        }
        sum.saturating_mul(product)
    }

    fn of_reference(&mut self, target: &'a str) -> u64 {
        if let Some(known) = self.known.get(target) {
            return *known;
        }
        let Some(schema) = target.strip_prefix('#').and_then(|pointer| self.root.pointer(pointer)) else {
            return 1;
        };
        self.known.insert(target, 1);
        let work = self.of(schema, true);
        self.known.insert(target, work);
        work
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn work(schema: &Value) -> u64 {
        Estimate { root: schema, known: HashMap::new() }.of(schema, false)
    }

    #[test]
    fn alternatives_that_meet_are_multiplied_and_others_are_added() {
        let ten: Vec<Value> = (0..10).map(|i| json!({ "const": i })).collect();
        let of = |count| json!({ "allOf": vec![json!({ "anyOf": ten }); count] });
        assert!(work(&of(2)) < WORK_MAX && work(&of(10)) > WORK_MAX);
        let apart =
            json!({ "properties": { "a": { "anyOf": ten }, "b": { "anyOf": ten }, "c": { "anyOf": ten } } });
        assert!(work(&apart) < 100, "{}", work(&apart));
        let doubling: Map<String, Value> = (0..40)
            .map(|i| {
                let next = json!({ "$ref": format!("#/$defs/d{}", i + 1) });
                (format!("d{i}"), json!({ "allOf": [next, next, { "type": "object" }] }))
            })
            .collect();
        assert!(work(&json!({ "$defs": doubling, "$ref": "#/$defs/d0" })) > WORK_MAX);
    }

    #[test]
    fn references_in_circles_end() {
        let tree = json!({
            "$ref": "#/$defs/node",
            "$defs": { "node": { "type": "object", "properties": { "next": { "$ref": "#/$defs/node" } } } }
        });
        assert!(work(&tree) < 100);
        let circle = json!({ "$defs": { "a": { "allOf": [{ "$ref": "#/$defs/a" }] } }, "allOf": [{ "$ref": "#/$defs/a" }] });
        assert!(work(&circle) < 100);
    }

    #[test]
    fn a_text_that_is_no_json_is_refused_and_white_space_is_bounded() {
        assert!(matches!(checked("{"), Err(ConstraintError::Invalid { .. })));
        assert!(matches!(checked(&"[".repeat(5000)), Err(ConstraintError::Invalid { .. })));
        assert_eq!(checked("true"), Ok(Value::Bool(true)));
        let read = checked(r#"{"type": "null"}"#).unwrap();
        assert_eq!(read["x-guidance"]["whitespace_pattern"], WHITE_SPACE);
        let own = checked(r#"{"type": "null", "x-guidance": {}}"#).unwrap();
        assert_eq!(own["x-guidance"], json!({}));
    }
}
