use super::super::tests::{TESTER, followed, id, tokenizer};
use super::super::{Constraint, ConstraintError, ConstraintKind, ConstraintSource};
use super::to_lark;

fn compile(text: &str) -> Result<Constraint, ConstraintError> {
    let source = ConstraintSource { kind: ConstraintKind::Gbnf, text: text.to_owned() };
    tokenizer().constraints().unwrap().compile_untried(&source, TESTER)
}

/// Texts of the grammar's language, and others, which are no answers as a whole.
fn check(grammar: &str, right: &[&str], wrong: &[&str]) {
    let tokenizer = tokenizer();
    let source = ConstraintSource { kind: ConstraintKind::Gbnf, text: grammar.to_owned() };
    let compiler = tokenizer.constraints().unwrap();
    let whole = |text: &str| {
        let mut constraint = compiler.compile_untried(&source, TESTER).unwrap();
        followed(&mut constraint, &tokenizer, text) == (text.len(), true)
    };
    right
        .iter()
        .for_each(|text| assert!(whole(text), "{text:?} of {grammar}\n{}", to_lark(grammar).unwrap()));
    wrong
        .iter()
        .for_each(|text| assert!(!whole(text), "{text:?} of {grammar}\n{}", to_lark(grammar).unwrap()));
}

#[test]
fn grammars_without_recursion_take_their_texts_and_no_others() {
    check("root ::= \"a\" | \"bc\"", &["a", "bc"], &["", "b", "ab", "abc"]);
    check("root ::= [a-c]+ [^a-c\\]]? .", &["abx", "ax]", "cß"], &["a", "x", "ax]]", "abxyz"]);
    check("root ::= \"\"", &[], &["a"]);
    check("root ::= (\"x\" | \"\") \"y\"?", &["x", "y", "xy"], &["yx", "xx"]);
    check(
        "root ::= \"a\"{2} \"b\"{1,} \"c\"{0,2} \"d\"{0}",
        &["aab", "aabbbcc"],
        &["ab", "aac", "aabccc", "aabd"],
    );
    check(
        r#"root ::= "\x41\u00e4\U0001F600\n\t\"\\\[" [\]\-]"#,
        &["Aä😀\n\t\"\\[]", "Aä😀\n\t\"\\[-"],
        &["Aä"],
    );
    check(
        "# a comment\nroot ::= # and one here\n  word (\n \" \" word # inside\n )*\nword ::= [a-z]+\n",
        &["one two"],
        &["one "],
    );
    check("root ::= a |\n  b\na ::= \"a\"\nb ::= \"b\"", &["a", "b"], &["ab"]);
    check("root ::= digits\ndigits ::= [0-9]+ \"0\"", &["10", "000"], &["0", "1", "101"]);
    check("root ::= \"a\"\nroot ::= \"b\"", &["b"], &["a"]);
    check("root ::= list-1_x\nlist-1_x ::= \"- \" [^\\r\\n]+ \"\\n\"", &["- milk\n"], &["- milk", "- \n"]);
}

/// Nested lists in the manner of JSON.
const NESTED: &str = r#"
root ::= value
value ::= list | text | number ws | ("true" | "null") ws
list ::= "[" ws (value ("," ws value)*)? "]" ws
text ::= "\"" ([^"\\\x00-\x1F] | "\\" ["\\bn])* "\"" ws
number ::= "-"? ([0-9] | [1-9] [0-9]{0,15}) ("." [0-9]+)?
ws ::= | " " | "\n" [ \t]{0,20}
"#;

#[test]
fn grammars_with_recursion_take_their_texts_and_no_others() {
    check(
        NESTED,
        &["[]", "[1, -2.5 ,[true,\n  null]] ", "\"a \\\" ß\"", "[[[[[]]]]]", "0"],
        &["[", "[1,]", "[1 2]", "\"a", "01", "[tru]", "-"],
    );
    let sums = "root ::= (sum \"=\" ws term \"\\n\")+\nsum ::= term ([-+*/] term)*\n\
        term ::= name | number | \"(\" ws sum \")\" ws\nname ::= [a-z] [a-z0-9_]* ws\nnumber ::= [0-9]+ ws\nws ::= [ \\t\\n]*";
    check(sums, &["a=1\n\n", "(x +12) *y_1 = (7)\n\n"], &["a=1", "(x=1\n\n", "=1\n\n", "a b=1\n\n"]);
    let calls = "root ::= call\ncall ::= name ws \"(\" (arg (\",\" ws arg)*)? \")\"\narg ::= [0-9]+ | name | call\n\
        name ::= [a-z_] [a-z0-9_]*\nws ::= [ \\t\\n]?";
    check(calls, &["f()", "f(x, g (1),2)", "f(g(h(x1)))"], &["f", "f(", "f(x y)", "f(,)", "f(x))"]);
    check("root ::= \"a\" root \"b\" | \"\"", &["ab", "aaabbb"], &["a", "aab", "abb"]);
    check("root ::= root \"+\" [0-9] | [0-9]", &["1", "1+2+3"], &["+", "1+", "1+22"]);
    check("root ::= (\"(\" root{1,2} \")\")? \"x\"", &["x", "(x)x", "(xx)x", "((x)xx)x"], &["()x", "(xxx)x"]);
}

#[test]
fn lexemes_that_the_longest_match_would_misread_are_divided() {
    // The longest match of [a-z]+ would take the "end" too.
    let ends = "root ::= \"<\" root \">\" | [a-z]+ \"end\"";
    check(ends, &["aend", "<endend>", "<<xend>>"], &["end", "<end>", "xen"]);
    // "a" begins "ab", behind which "b" may follow as well.
    let short = "root ::= \"(\" root \")\" | item root?\nitem ::= \"a\" | \"ab\" | \"ba\"";
    check(short, &["aba", "abba", "a(aa)", "aab"], &["b", "(b)", "abb"]);
    let characters = |grammar: &str| {
        let lark = to_lark(grammar).unwrap();
        !lark.lines().any(|line| line.starts_with('R') || line.contains("]+/"))
    };
    assert!(characters(short), "{}", to_lark(short).unwrap());
    assert!(!characters(NESTED), "{}", to_lark(NESTED).unwrap());
}

#[test]
fn faults_are_told_with_their_line() {
    for (grammar, fault) in [
        ("", "no rule `root`"),
        ("rot ::= \"a\"", "no rule `root`"),
        ("root ::= word", "the rule `word` is used but nowhere defined"),
        ("root ::= \"a\n", "line 2"),
        ("root ::= [a", "the end of a text or of a set"),
        ("root ::= [z-a]", "ends before it begins"),
        ("root ::= \"a\" )", "the end of the line is missing"),
        ("root ::= (\"a\"", "`)` is missing"),
        ("root = \"a\"", "`::=` is missing"),
        ("root ::= \"a\"\n* ::= \"b\"", "line 2"),
        ("root ::= \"a\"{3,2}", "ends before it begins"),
        ("root ::= \"a\"{x}", "a number is missing"),
        ("root ::= \"\\q\"", "`\\q` is unknown"),
        ("root ::= \"\\xg0\"", "needs 2 digits"),
        ("root ::= \"\\ud800\"", "needs 4 digits"),
        ("root ::= <think> \"a\"", "tokens in a grammar are not supported"),
        ("root ::= !<[3]>", "tokens in a grammar are not supported"),
    ] {
        let error = compile(grammar).unwrap_err();
        assert!(matches!(error, ConstraintError::Invalid { .. }), "{error}");
        assert!(error.to_string().contains(fault), "{error}");
    }
}

#[test]
fn grammars_that_explode_are_refused_within_the_bounds() {
    let doubling: String = (0..60).map(|i| format!("r{i} ::= r{} r{}\n", i + 1, i + 1)).collect();
    let nothing = format!("root ::= r0 | \"(\" root \")\"\n{doubling}r60 ::= \"\"\n");
    check(&nothing, &["()", "(())"], &["(", "a"]);
    let exploding = [
        format!("root ::= {}\"a\"{}", "(".repeat(300), ")".repeat(300)),
        "root ::= \"a\"{2001}".to_owned(),
        (0..4200).map(|i| format!("r{i}::=.\n")).collect(),
    ];
    for grammar in &exploding {
        let error = compile(grammar).unwrap_err();
        assert!(matches!(error, ConstraintError::TooComplex { .. }), "{error}");
    }
    // The compiler may take these: then they stay within its bounds, or fail with one.
    let long = [
        format!("root ::= {}\"a\"{}", "(".repeat(8), "){2000}".repeat(8)),
        format!("root ::= (\"a\" | [b-z]) r0 \"b\" | root \"c\"\n{doubling}r60 ::= [a-z] \"b\"*\n"),
        "root ::= ([a-z]* \"a\" [a-z]{200} | [a-z]* \"b\" [a-z]{300}) | root root".to_owned(),
        format!("root ::= {}", "root? ".repeat(2000)) + "\"a\"",
    ];
    let tokenizer = tokenizer();
    for grammar in &long {
        let begun = std::time::Instant::now();
        match compile(grammar) {
            Ok(mut constraint) => {
                let followed = (0..40).try_for_each(|step| {
                    let token = (step > 0).then(|| id(&tokenizer, b'a'));
                    constraint.follow(token).map(|_| ())
                });
                let bound = |error| {
                    matches!(error, &ConstraintError::TooComplex { .. } | &ConstraintError::Invalid { .. })
                };
                assert!(followed.as_ref().err().is_none_or(bound), "{followed:?}");
            }
            Err(error) => {
                let bound =
                    matches!(error, ConstraintError::TooComplex { .. } | ConstraintError::TooSlow { .. });
                assert!(bound, "{error}");
            }
        }
        let took = begun.elapsed();
        assert!(took.as_secs() < 20, "{took:?} {}", &grammar[..60]);
    }
    // A rule without a first text fails, or allows nothing.
    let endless = compile("root ::= root").map(|mut constraint| constraint.follow(None));
    assert!(!matches!(endless, Ok(Ok(super::super::Allowed::Tokens(_)))), "{endless:?}");
}
