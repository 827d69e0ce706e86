//! Rewrites JSON schemas into the words that the compiler takes, where the standard says that they mean the same.
//!
//! The standard (2020-12) compares numbers by their value, so `2.0` counts where `2` does. A key says nothing about values of other
//! types than its own. A format that the standard does not define says nothing. The compiler refuses some of these, and takes
//! others for something else. Keys that do have an effect and that it lacks stay, and are refused by name.

use serde_json::{Map, Value};

/// Up to it, every whole number is a double of its own. The compiler computes in doubles.
const EXACT_MAX: u64 = 1 << 53;

/// Bounds of whole numbers for the compiler: the largest double below 2^63, and its negative. A tighter bound than the stated one
/// keeps to both.
const BOUND_MAX: f64 = 9_223_372_036_854_774_784.0;

/// Keys whose values are counts.
const COUNTS: [&str; 8] = [
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "minContains",
    "maxContains",
];

/// Keys that the compiler lacks, by the only type that they say something about.
const LACKED: [(&str, &[&str]); 2] = [
    ("array", &["uniqueItems", "contains", "minContains", "maxContains", "unevaluatedItems"]),
    (
        "object",
        &["propertyNames", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties"],
    ),
];

/// Formats that the standard defines.
const FORMATS: [&str; 19] = [
    "date-time",
    "date",
    "time",
    "duration",
    "email",
    "idn-email",
    "hostname",
    "idn-hostname",
    "ipv4",
    "ipv6",
    "uri",
    "uri-reference",
    "iri",
    "iri-reference",
    "uuid",
    "uri-template",
    "json-pointer",
    "relative-json-pointer",
    "regex",
];

/// Keys with a schema, or a list of schemas, for the same value.
const IN_PLACE: [&str; 7] = ["allOf", "anyOf", "oneOf", "not", "if", "then", "else"];

/// Further keys that apply schemas to the same value. These and [`IN_PLACE`] may look at its items and properties.
const APPLICATORS: [&str; 5] = ["$ref", "$dynamicRef", "$recursiveRef", "dependentSchemas", "dependencies"];

/// Keys with schemas by name.
const NAMED: [&str; 6] =
    ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"];

/// Keys with a schema, or a list of schemas, for what is in a value.
const NESTED: [&str; 8] = [
    "items",
    "prefixItems",
    "additionalItems",
    "additionalProperties",
    "contains",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
];

/// Rewrites a schema and all schemas in it.
///
/// # Errors
/// A number that the compiler would change, in words.
pub(super) fn rewrite(schema: &mut Value) -> Result<(), String> {
    let Value::Object(keys) = schema else { return Ok(()) };
    for count in COUNTS {
        if let Some(value) = keys.get_mut(count) {
            make_whole(value);
        }
    }
    for key in ["const", "enum"] {
        if let Some(value) = keys.get_mut(key) {
            make_exact(key, value)?;
        }
    }
    for key in ["minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"] {
        if let Some(value) = keys.get_mut(key) {
            tighten(key, value);
        }
    }
    close(keys, "unevaluatedItems", "items", &["contains", "additionalItems"]);
    close(keys, "unevaluatedProperties", "additionalProperties", &[]);
    let idle: Vec<String> =
        keys.iter().filter(|(key, value)| is_idle(key, value, keys)).map(|(key, _)| key.clone()).collect();
    // Not `remove`, which changes the order of the others.
    keys.retain(|key, _| !idle.contains(key));
    for (key, value) in keys.iter_mut() {
        let has_schemas = NESTED.iter().chain(&IN_PLACE).any(|nested| nested == key);
        match value {
            Value::Object(named) if NAMED.contains(&key.as_str()) => {
                named.values_mut().try_for_each(rewrite)?
            }
            Value::Array(list) if has_schemas => list.iter_mut().try_for_each(rewrite)?,
            value if has_schemas => rewrite(value)?,
            _ => {}
        }
    }
    Ok(())
}

/// Writes a whole number that has a fraction of zero without it.
fn make_whole(value: &mut Value) {
    let Some(float) = value.as_f64().filter(|_| value.is_f64()) else { return };
    if float.fract() == 0.0
        && float.abs() <= EXACT_MAX as f64
        && let Ok(whole) = format!("{float:.0}").parse::<i64>()
    {
        *value = Value::from(whole);
    }
}

/// As [`make_whole`] for all numbers in a value that an answer may equal.
fn make_exact(key: &str, value: &mut Value) -> Result<(), String> {
    match value {
        Value::Array(list) => list.iter_mut().try_for_each(|one| make_exact(key, one)),
        Value::Object(fields) => fields.values_mut().try_for_each(|one| make_exact(key, one)),
        Value::Number(number) => {
            let whole = number.as_u64().or(number.as_i64().map(i64::unsigned_abs));
            let exact = match whole {
                Some(whole) => whole <= EXACT_MAX,
                None => number.as_f64().is_some_and(|float| float.abs() <= EXACT_MAX as f64),
            };
            if !exact {
                return Err(format!(
                    "{key} has {number}, and numbers beyond 2^53 are not exact here: make it a text"
                ));
            }
            make_whole(value);
            Ok(())
        }
        _ => Ok(()),
    }
}

/// Bounds further away than the compiler computes are drawn in.
fn tighten(key: &str, value: &mut Value) {
    let Some(bound) = value.as_f64() else { return };
    let tight = if key.ends_with("inimum") { bound.max(-BOUND_MAX) } else { bound.min(BOUND_MAX) };
    if tight.to_bits() != bound.to_bits() {
        *value = Value::from(tight);
    }
}

/// Where no other schema looks at the same value, what nothing evaluated is what is additional.
fn close(keys: &mut Map<String, Value>, unevaluated: &str, additional: &str, looking: &[&str]) {
    if looking.iter().chain(&APPLICATORS).chain(&IN_PLACE).any(|key| keys.contains_key(*key))
        || keys.contains_key(additional)
    {
        return;
    }
    if let Some(value) = keys.get(unevaluated).cloned() {
        keys.insert(additional.to_owned(), value);
    }
}

/// True for a key that changes nothing beside the others.
fn is_idle(key: &str, value: &Value, beside: &Map<String, Value>) -> bool {
    let of_other_type = |(kind, lacked): &(&str, &[&str])| lacked.contains(&key) && !may_be(beside, kind);
    let always = |value: &Value| match value {
        Value::Object(keys) => keys.is_empty(),
        other => *other == true,
    };
    let none_needed =
        || beside.get("minContains").is_some_and(|least| *least == 0) && !beside.contains_key("maxContains");
    LACKED.iter().any(of_other_type)
        || match key {
            "format" => value.as_str().is_some_and(|format| !FORMATS.contains(&format)),
            "uniqueItems" => {
                *value == false || beside.get("maxItems").is_some_and(|most| *most == 0 || *most == 1)
            }
            "contains" => none_needed(),
            "minContains" | "maxContains" => !beside.contains_key("contains") || none_needed(),
            "if" => !beside.contains_key("then") && !beside.contains_key("else"),
            "then" | "else" => !beside.contains_key("if"),
            "not" => *value == false,
            "propertyNames" => always(value),
            "dependentRequired" | "dependentSchemas" | "dependencies" => {
                value.as_object().is_some_and(Map::is_empty)
            }
            // Beside these, all items and properties are evaluated.
            "unevaluatedItems" => always(value) || beside.get("items").is_some_and(|items| !items.is_array()),
            "unevaluatedProperties" => always(value) || beside.contains_key("additionalProperties"),
            _ => false,
        }
}

/// Whether a value of that type may be valid, as far as the keys beside it say.
fn may_be(keys: &Map<String, Value>, kind: &str) -> bool {
    let stated = match keys.get("type") {
        Some(Value::String(one)) => one == kind,
        Some(Value::Array(several)) => several.iter().any(|one| one == kind),
        _ => true,
    };
    let of_kind =
        |value: &Value| (kind == "array" && value.is_array()) || (kind == "object" && value.is_object());
    let equal = keys.get("const").is_none_or(of_kind);
    let among = keys.get("enum").and_then(Value::as_array).is_none_or(|values| values.iter().any(of_kind));
    stated && equal && among
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn rewritten(mut schema: Value) -> Value {
        rewrite(&mut schema).unwrap();
        schema
    }

    #[test]
    fn whole_numbers_are_written_without_fractions() {
        let schema = json!({ "properties": { "a": { "maxLength": 3.0, "minimum": 1.5 } }, "prefixItems": [{ "enum": [2.0, -0.0, 0.5] }] });
        let whole = json!({ "properties": { "a": { "maxLength": 3, "minimum": 1.5 } }, "prefixItems": [{ "enum": [2, 0, 0.5] }] });
        assert_eq!(rewritten(schema), whole);
        // Other numbers stay, and the compiler refuses them.
        for wrong in [json!({ "minItems": -1.0 }), json!({ "minItems": 1.5 }), json!({ "minItems": 1e300 })] {
            assert!(!rewritten(wrong)["minItems"].is_u64());
        }
        for exact in [json!(9_007_199_254_740_992u64), json!(-9_007_199_254_740_992i64)] {
            assert_eq!(rewritten(json!({ "const": exact }))["const"], exact);
        }
        for beyond in [json!(9_007_199_254_740_993u64), json!(u64::MAX), json!(-1e30)] {
            let error = rewrite(&mut json!({ "items": { "enum": [{ "a": beyond }] } })).unwrap_err();
            assert!(error.contains(&beyond.to_string()), "{error}");
        }
        let bounds = rewritten(json!({ "minimum": -1e20, "maximum": 1e20, "exclusiveMinimum": true }));
        assert_eq!(bounds, json!({ "minimum": -BOUND_MAX, "maximum": BOUND_MAX, "exclusiveMinimum": true }));
    }

    #[test]
    fn keys_without_effect_go_and_others_stay_in_their_order() {
        let schema = json!({ "$ref": "#/x", "uniqueItems": true, "type": ["string", "null"], "then": false, "maxLength": 3, "format": "password" });
        let left: Vec<String> = rewritten(schema).as_object().unwrap().keys().cloned().collect();
        assert_eq!(left, ["$ref", "type", "maxLength"]);
        for stays in [
            json!({ "type": ["array", "null"], "uniqueItems": true }),
            json!({ "enum": [1, [2]], "uniqueItems": true, "maxItems": 2 }),
            json!({ "contains": { "const": 1 }, "minContains": 0, "maxContains": 1 }),
            json!({ "if": { "const": 1 }, "then": false }),
            json!({ "propertyNames": { "maxLength": 3 } }),
            json!({ "allOf": [{ "properties": { "a": true } }], "unevaluatedProperties": false }),
            json!({ "type": "string", "format": "json-pointer" }),
            json!({ "not": true }),
            // Names and values, not keys.
            json!({ "properties": { "then": { "type": "null" }, "format": { "const": "then" } }, "$defs": { "uniqueItems": { "type": "null" } } }),
            json!({ "const": { "then": 1, "uniqueItems": false }, "default": { "maxItems": 2.5 } }),
        ] {
            assert_eq!(rewritten(stays.clone()), stays);
        }
    }

    #[test]
    fn unevaluated_values_are_additional_ones_where_nothing_else_looks() {
        let schema = json!({ "properties": { "a": true }, "unevaluatedProperties": false, "unevaluatedItems": { "type": "null" } });
        let closed = json!({ "properties": { "a": true }, "items": { "type": "null" }, "additionalProperties": false });
        assert_eq!(rewritten(schema), closed);
        let open = json!({ "additionalProperties": { "type": "null" }, "unevaluatedProperties": false });
        assert_eq!(rewritten(open), json!({ "additionalProperties": { "type": "null" } }));
    }
}
