use std::sync::Arc;

use super::*;
use crate::model::gguf::Gguf;
use crate::model::tokenizer::{SharedTokenizer, Tokenizers};

/// The tokenizer of a vocabulary of 512 tokens, among them all bytes.
/// Root: the tests together compile more than one user may.
pub(crate) const TESTER: Taker = Taker { uid: 0, privileged: true };

pub(crate) fn tokenizer() -> SharedTokenizer {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/models/tinystories-260k-f32.gguf");
    let gguf = Gguf::parse(&std::fs::read(path).unwrap()[..]).unwrap();
    Tokenizers::default().of(&gguf).unwrap()
}

fn source(kind: ConstraintKind, text: &str) -> ConstraintSource {
    ConstraintSource { kind, text: text.to_owned() }
}

/// The token of one byte.
pub(crate) fn id(tokenizer: &SharedTokenizer, byte: u8) -> u32 {
    let of = |id: &u32| tokenizer.token_bytes(*id, false) == Some(&[byte]);
    (0..tokenizer.vocab_size() as u32).find(of).unwrap()
}

/// How far an answer of single bytes follows a constraint: the number before the first that it forbids, and whether it was
/// complete there.
pub(super) fn followed(
    constraint: &mut Constraint,
    tokenizer: &SharedTokenizer,
    text: &str,
) -> (usize, bool) {
    let mut allowed = constraint.follow(None).unwrap();
    for (number, byte) in text.bytes().enumerate() {
        let id = id(tokenizer, byte);
        match &allowed {
            Allowed::Tokens(mask) if mask.allows(id) => {}
            _ => return (number, allowed == Allowed::Complete),
        }
        allowed = constraint.follow(Some(id)).unwrap();
    }
    let end = tokenizer.end_of_generation()[0];
    let complete = match &allowed {
        Allowed::Complete => true,
        Allowed::Tokens(mask) => mask.allows(end),
    };
    (text.len(), complete)
}

#[test]
fn each_kind_allows_what_fits_and_nothing_else() {
    let tokenizer = tokenizer();
    let compiler = tokenizer.constraints().unwrap();
    let schema = r#"{"type": "object", "properties": {"n": {"type": "integer", "minimum": 3, "maximum": 17}},
        "required": ["n"], "additionalProperties": false}"#;
    let calls = "start: call (\",\" call)*\ncall: NAME \"(\" [NAME] \")\"\nNAME: /[a-z]+/\n";
    let cases = [
        (ConstraintKind::JsonSchema, schema, "{\"n\":12}", 8, true),
        (ConstraintKind::JsonSchema, schema, "{\"n\": 3}", 8, true),
        (ConstraintKind::JsonSchema, schema, "{\"n\":18}", 6, false),
        (ConstraintKind::JsonSchema, schema, "{\"m\":5}", 2, false),
        (ConstraintKind::JsonSchema, schema, "{\"n\":5", 6, false),
        (ConstraintKind::Regex, "[0-9]{2}-(a|b)", "47-b", 4, true),
        (ConstraintKind::Regex, "[0-9]{2}-(a|b)", "475", 2, false),
        (ConstraintKind::Lark, calls, "f(x),g()", 8, true),
        (ConstraintKind::Lark, calls, "f(x),", 5, false),
        (ConstraintKind::Lark, calls, "f(x)g", 4, false),
    ];
    for (kind, text, answer, bytes, complete) in cases {
        let mut constraint = compiler.compile_untried(&source(kind, text), TESTER).unwrap();
        assert_eq!(followed(&mut constraint, &tokenizer, answer), (bytes, complete), "{kind} {answer}");
    }
}

/// Values and verdicts of JSON-Schema-Test-Suite, with its descriptions. A value that is valid need not be allowed.
#[test]
fn numbers_and_idle_keys_mean_what_the_standard_says() {
    let tokenizer = tokenizer();
    let compiler = tokenizer.constraints().unwrap();
    let cases: [(&str, &str, &[&str], &[&str]); 17] = [
        ("maxItems validation with a decimal", r#"{"maxItems": 2.0}"#, &["[1]"], &["[1,2,3]"]),
        ("minItems validation with a decimal", r#"{"minItems": 1.0}"#, &["[1,2]"], &["[]"]),
        ("maxLength validation with a decimal", r#"{"maxLength": 2.0}"#, &["\"f\""], &["\"foo\""]),
        ("minProperties validation with a decimal", r#"{"minProperties": 1.0}"#, &["{\"foo\":1}"], &["{}"]),
        (
            "float and integers are equal",
            r#"{"const": 9007199254740992}"#,
            &["9007199254740992"],
            &["9007199254740991"],
        ),
        ("a whole number with a fraction of zero", r#"{"enum": [2.0, "a"]}"#, &["2", "\"a\""], &["3"]),
        (
            "a whole bound of a whole number",
            r#"{"type": "integer", "minimum": 2.0, "multipleOf": 2.0}"#,
            &["2", "4"],
            &["1", "3"],
        ),
        (
            "minLength beside an integer",
            r#"{"type": "integer", "minLength": 2.0, "pattern": "["}"#,
            &["7"],
            &["\"ab\""],
        ),
        (
            "ignores non-arrays",
            r#"{"type": "string", "uniqueItems": true, "contains": false}"#,
            &["\"a\""],
            &["[]"],
        ),
        ("uniqueItems=false validation", r#"{"type": "array", "uniqueItems": false}"#, &["[1,1]"], &["{}"]),
        ("minContains without contains is ignored", r#"{"minContains": 1}"#, &["[]"], &[]),
        ("ignore then without if", r#"{"type": "integer", "then": {"const": 0}}"#, &["16"], &["\"hello\""]),
        ("allow everything with boolean schema false", r#"{"not": false}"#, &["1"], &[]),
        (
            "unevaluatedProperties with adjacent properties",
            r#"{"type": "object", "properties": {"foo": {"type": "string"}}, "unevaluatedProperties": false}"#,
            &["{\"foo\":\"foo\"}"],
            &["{\"foo\":\"foo\",\"bar\":1}"],
        ),
        (
            "unevaluatedItems with tuple",
            r#"{"type": "array", "prefixItems": [{"type": "string"}], "unevaluatedItems": false}"#,
            &["[\"foo\"]"],
            &["[\"foo\",\"bar\"]"],
        ),
        (
            "annotations say nothing",
            r#"{"$comment": "c", "title": "t", "description": "d", "default": "x", "deprecated": true, "readOnly": true,
                "writeOnly": true, "examples": [1.5, {"maxItems": 2.5}], "contentMediaType": "text/plain", "type": "integer"}"#,
            &["7"],
            &["\"x\"", "1.5"],
        ),
        ("unknown formats say nothing", r#"{"type": "string", "format": "password"}"#, &["\"a\""], &["1"]),
    ];
    for (what, schema, valid, invalid) in cases {
        let compiled = compiler.compile_untried(&source(ConstraintKind::JsonSchema, schema), TESTER);
        let compiled = compiled.unwrap_or_else(|error| panic!("{what}: {error}"));
        for (texts, wanted) in [(valid, true), (invalid, false)] {
            for text in texts {
                let followed = followed(&mut compiled.copy(), &tokenizer, text);
                assert_eq!(followed == (text.len(), true), wanted, "{what}: {text}");
            }
        }
    }
    // Keys that have an effect and cannot be followed are refused by name.
    for (schema, named) in [
        (r#"{"type": "array", "uniqueItems": true}"#, "uniqueItems"),
        (r#"{"if": {"const": 1}, "then": false}"#, "if"),
        (r#"{"const": 9007199254740993}"#, "9007199254740993"),
        (r#"{"type": "string", "format": "json-pointer"}"#, "json-pointer"),
    ] {
        let error =
            compiler.compile_untried(&source(ConstraintKind::JsonSchema, schema), TESTER).unwrap_err();
        assert!(error.to_string().contains(named), "{error}");
    }
}

#[test]
fn a_constraint_that_nothing_can_follow_is_complete_and_another_ends_by_a_token() {
    let tokenizer = tokenizer();
    let compiler = tokenizer.constraints().unwrap();
    let end = tokenizer.end_of_generation()[0];
    let id = |byte| id(&tokenizer, byte);
    let mut one = compiler.compile_untried(&source(ConstraintKind::Regex, "a"), TESTER).unwrap();
    let Allowed::Tokens(mask) = one.follow(None).unwrap() else { panic!("nothing was said") };
    assert!(mask.allows(id(b'a')) && !mask.allows(end) && !mask.allows(id(b'b')));
    assert_eq!(one.follow(Some(id(b'a'))), Ok(Allowed::Complete));
    let mut more = compiler.compile_untried(&source(ConstraintKind::Regex, "a+"), TESTER).unwrap();
    more.follow(None).unwrap();
    let Allowed::Tokens(mask) = more.follow(Some(id(b'a'))).unwrap() else { panic!("more may follow") };
    assert!(mask.allows(id(b'a')) && mask.allows(end));
    assert_eq!(more.follow(Some(end)), Ok(Allowed::Complete));
    assert!(!mask.allows(1_000_000), "what the vocabulary does not have");
}

#[test]
fn the_last_token_of_a_request_completes_an_answer_or_does_not() {
    let tokenizer = tokenizer();
    let compiler = tokenizer.constraints().unwrap();
    for (expression, answer, complete) in [("ab", "ab", true), ("ab", "a", false), ("a+", "aa", false)] {
        let mut constraint =
            compiler.compile_untried(&source(ConstraintKind::Regex, expression), TESTER).unwrap();
        let (last, before) = answer.as_bytes().split_last().unwrap();
        constraint.follow(None).unwrap();
        for byte in before {
            constraint.follow(Some(id(&tokenizer, *byte))).unwrap();
        }
        assert_eq!(constraint.completes(id(&tokenizer, *last)), Ok(complete), "{answer} of {expression}");
    }
}

#[test]
fn compiled_constraints_are_kept_up_to_a_bound_and_copies_are_at_the_beginning() {
    let tokenizer = tokenizer();
    let compiler = tokenizer.constraints().unwrap();
    assert!(Arc::ptr_eq(&compiler, &tokenizer.constraints().unwrap()), "built once");
    let of = source(ConstraintKind::Regex, "[ab]c");
    for _ in 0..3 {
        let mut constraint = compiler.compile_untried(&of, TESTER).unwrap();
        assert_eq!(followed(&mut constraint, &tokenizer, "ac"), (2, true));
    }
    assert_eq!(compiler.cache.size().0, 1);
    let long = |i: usize| source(ConstraintKind::Regex, &format!("{i}{}", "a".repeat(50_000)));
    let mut most = 0;
    for i in 0..14 {
        compiler.compile_untried(&long(i), TESTER).unwrap();
        let (count, bytes) = compiler.cache.size();
        assert!(bytes <= CACHE_BYTES, "{count} constraints take {bytes} bytes");
        most = most.max(count);
    }
    assert!(most < 14, "old ones went");
}

#[test]
fn a_user_of_many_forms_loses_its_own_and_not_those_of_others() {
    let tokenizer = tokenizer();
    let compiler = tokenizer.constraints().unwrap();
    let of = |uid| Taker { uid, privileged: false };
    let kept = |source: &ConstraintSource, uid| compiler.cache.get(&cache::key(source, uid)).is_some();
    let rare = source(ConstraintKind::Regex, "[ab]c");
    compiler.compile_untried(&rare, of(70_006)).unwrap();
    let long = |i: usize| source(ConstraintKind::Regex, &format!("{i}{}", "a".repeat(50_000)));
    for i in 0..14 {
        compiler.compile_untried(&long(i), of(70_007)).unwrap();
    }
    assert!(kept(&rare, 70_006), "another user's forms took its place");
    assert!(!kept(&long(0), 70_007) && kept(&long(13), 70_007));
}

#[test]
fn the_table_of_a_passed_models_vocabulary_is_charged_to_its_user() {
    let tokenizer = tokenizer();
    let shares = Shares::new(2 << 20);
    let room = |bytes| shares.take(TESTER, bytes).unwrap();
    let held = room((1 << 20) - 1000);
    let refused = tokenizer.constraints_charged(Some(room(0)));
    assert!(matches!(refused, Err(ConstraintError::NoRoom(_))), "{refused:?}");
    assert_eq!(shares.held(), (1 << 20) - 1000);
    drop(held);
    tokenizer.constraints_charged(Some(room(0))).unwrap();
    let table = shares.held();
    assert!((20_000..500_000).contains(&table), "{table} bytes");
    tokenizer.constraints_charged(Some(room(0))).unwrap();
    assert_eq!(shares.held(), table, "built once");
    drop(tokenizer);
    assert_eq!(shares.held(), 0);
}

#[test]
fn wrong_and_exploding_constraints_are_refused_by_kind() {
    let tokenizer = tokenizer();
    let compiler = tokenizer.constraints().unwrap();
    let refused = |kind, text: &str| compiler.compile_untried(&source(kind, text), TESTER).unwrap_err();
    let invalid = [
        (ConstraintKind::JsonSchema, "{\"type\": \"strange\"}"),
        (ConstraintKind::JsonSchema, "{\"type\": \"string\", \"pattern\": \"(?=a)\"}"),
        (ConstraintKind::JsonSchema, "not json"),
        (ConstraintKind::Regex, "a("),
        (ConstraintKind::Lark, "start: nowhere"),
        (ConstraintKind::Lark, ""),
    ];
    for (kind, text) in invalid {
        let error = refused(kind, text);
        assert!(matches!(error, ConstraintError::Invalid { .. }), "{text}: {error:?}");
    }
    let long = "a".repeat(SOURCE_BYTES_MAX + 1);
    assert!(matches!(refused(ConstraintKind::Regex, &long), ConstraintError::TooLong { .. }));
    let ten: Vec<String> = (0..10).map(|i| format!("{{\"const\": {i}}}")).collect();
    let any = format!("{{\"anyOf\": [{}]}}", ten.join(","));
    let all = format!("{{\"allOf\": [{}]}}", vec![any; 12].join(","));
    let rules: String = (0..5000).map(|i| format!("a{i}: a{}\n", i + 1)).collect();
    let doubled: String = (0..40).map(|i| format!("a{i}: a{0} a{0}\n", i + 1)).collect();
    for (kind, text) in [
        (ConstraintKind::JsonSchema, all),
        (
            ConstraintKind::JsonSchema,
            "{\"type\": \"string\", \"pattern\": \"^((a{1,900}){1,900}b){1,900}$\"}".into(),
        ),
        (ConstraintKind::Regex, "((((a|b){1000}){1000}){1000}){1000}".into()),
        (ConstraintKind::Lark, format!("start: {}\"a\"{}", "(".repeat(5000), ")".repeat(5000))),
    ] {
        let result = compiler.compile_untried(&source(kind, &text), TESTER);
        let bounded = match &result {
            Ok(_) => true, // a repetition is one state until it is met
            Err(error) => !matches!(error, ConstraintError::Internal(_)),
        };
        assert!(bounded, "{kind}: {result:?}");
    }
    // Without bounds in the compiler: it would take a core for minutes.
    let endless = r"start: X
X: /.*b.{18}/ & /.*c.{17}/ & ~/.*d.{16}/";
    let refused = compiler.compile_untried(&source(ConstraintKind::Lark, endless), TESTER);
    assert!(
        matches!(&refused, Err(ConstraintError::Invalid { reason, .. }) if reason.contains("complement")),
        "{refused:?}"
    );
    compiler.compile_untried(&source(ConstraintKind::Lark, r#"start: "\x7E" /[ab]/{2,5}"#), TESTER).unwrap();
    // Rules that name each other nest as deep as there are rules.
    for text in [format!("start: a0\n{rules}a5000: \"x\""), format!("start: a0\n{doubled}a40: \"x\"")] {
        let result = compiler.compile_untried(&source(ConstraintKind::Lark, &text), TESTER);
        assert!(!matches!(result, Err(ConstraintError::Internal(_))), "{result:?}");
    }
}

/// The compiler's own words advise its setting `limits.initial_lexer_fuel`, which no user can change.
#[test]
fn an_expression_that_takes_too_much_work_is_refused_with_advice_for_users() {
    let words = "lexer precomputation failed; either increase limits.initial_lexer_fuel or disable \
                 limits.precompute_large_lexemes";
    let error = refusal(ConstraintKind::Regex, words);
    assert!(matches!(error, ConstraintError::TooComplex { .. }), "{error:?}");
    assert!(error.to_string().contains("shorter ones") && !error.to_string().contains("limits."), "{error}");
}

/// A cheap expression whose states double with each letter: the bound of states ends it, not the machine's memory.
#[test]
fn a_constraint_that_grows_without_end_fails_with_a_bound() {
    let tokenizer = tokenizer();
    let compiler = tokenizer.constraints().unwrap();
    let mut constraint =
        compiler.compile_untried(&source(ConstraintKind::Regex, "(a|b)*a(a|b){40}c(a|b)*"), TESTER).unwrap();
    let ids = [b'a', b'b'].map(|byte| id(&tokenizer, byte));
    constraint.follow(None).unwrap();
    let mut seed = 1u64;
    for _ in 0..100_000 {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        match constraint.follow(Some(ids[(seed >> 60) as usize % 2])) {
            Ok(_) => {}
            Err(error) => {
                assert!(matches!(error, ConstraintError::TooComplex { .. }), "{error:?}");
                return;
            }
        }
    }
}

#[test]
fn a_refusal_says_what_is_wrong_in_one_line() {
    let several = "at 1(8): regex parse error:\n    (\n    ^\nerror: unclosed group";
    let ConstraintError::Invalid { reason, .. } = refusal(ConstraintKind::Regex, several) else {
        panic!("it is invalid")
    };
    assert_eq!(reason, "at 1(8): regex parse error: ( ^ error: unclosed group");
    assert_eq!(short(&"x y ".repeat(400)).len(), 300);
}

#[test]
fn one_user_compiles_at_most_half_of_what_all_may() {
    let tokenizer = tokenizer();
    let compiler = tokenizer.constraints().unwrap();
    let of = |uid| Taker { uid, privileged: false };
    let held: Vec<_> = std::iter::from_fn(|| COMPILING.take(of(70_001), 1).ok()).collect();
    let new = source(ConstraintKind::Regex, "[k-p]{3}");
    let refused = compiler.compile_untried(&new, of(70_001));
    assert!(matches!(refused, Err(ConstraintError::Busy(_))), "{refused:?}");
    assert!(held.len() as u64 <= COMPILING_MAX / 2);
    compiler.compile_untried(&new, of(70_002)).unwrap();
    drop(held);
    compiler.compile_untried(&source(ConstraintKind::Regex, "[k-p]{4}"), of(70_001)).unwrap();
}

#[test]
fn nobody_learns_from_the_time_that_another_user_asked_for_a_form() {
    let tokenizer = tokenizer();
    let compiler = tokenizer.constraints().unwrap();
    let wanted = source(ConstraintKind::Regex, "[q-t]{3}");
    for (uid, kept) in [(70_004, 1), (70_004, 1), (70_005, 2)] {
        compiler.compile_untried(&wanted, Taker { uid, privileged: false }).unwrap();
        assert_eq!(compiler.cache.size().0, kept, "forms kept after one of {uid}");
    }
}

/// Programs that start together ask for one form together: more than one user may compile at once.
#[test]
fn a_constraint_that_many_ask_for_at_once_is_compiled_once() {
    let tokenizer = tokenizer();
    let compiler = tokenizer.constraints().unwrap();
    let properties: Vec<String> = (0..150).map(|i| format!("\"p{i}\": {{\"type\": \"integer\"}}")).collect();
    let wanted =
        source(ConstraintKind::JsonSchema, &format!("{{\"properties\": {{{}}}}}", properties.join(",")));
    let taker = Taker { uid: 70_003, privileged: false };
    let (asked, start) = (2 * COMPILING_MAX as usize, std::sync::Barrier::new(2 * COMPILING_MAX as usize));
    std::thread::scope(|scope| {
        let ask = || {
            start.wait();
            compiler.compile_untried(&wanted, taker).map(|_| ())
        };
        let answers: Vec<_> = (0..asked).map(|_| scope.spawn(ask)).collect();
        for answer in answers {
            assert_eq!(answer.join().unwrap(), Ok(()));
        }
    });
}
