//! Wrappers of a trait forward all of its methods. A method with a default body compiles without a forward, and
//! tests would then run the default.

use std::collections::BTreeSet;

use crate::source::{blank, files};

/// A file and the trait in it; a file and the implementation in it that must forward every method.
const WRAPPED: [(&str, &str, &str, &str); 1] =
    [("src/backend/mod.rs", "pub trait Backend", "tests/common/hooked.rs", "impl Backend for Hooked")];

#[test]
fn wrappers_forward_every_method() {
    let files = files();
    let methods = |path: &str, head: &str| {
        let file = files.iter().find(|file| file.path == path);
        let found = methods(&file.unwrap_or_else(|| panic!("{path} does not exist")).text, head);
        assert!(found.len() > 1, "{path}: {} methods in `{head}`", found.len());
        found
    };
    for (path, head, wrapper, block) in WRAPPED {
        let (all, forwarded) = (methods(path, head), methods(wrapper, block));
        let forgotten: Vec<_> = all.difference(&forwarded).collect();
        assert!(forgotten.is_empty(), "{wrapper} does not forward {forgotten:?} of {path}");
    }
}

/// Names of the functions in the block after `head`.
fn methods(text: &str, head: &str) -> BTreeSet<String> {
    let code = blank(text);
    let start = code.find(head).unwrap_or(code.len());
    let mut names = BTreeSet::new();
    // The block ends at a closing brace at the start of a line.
    for line in code[start..].lines().take_while(|line| !line.starts_with('}')) {
        // Four spaces: functions that are indented deeper lie within functions.
        if let Some(name) = line.strip_prefix("    fn ") {
            names.insert(name.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect());
        }
    }
    names
}

#[test]
fn a_forgotten_method_is_found() {
    let text = "pub trait T {\n    fn a(&self);\n    // fn c();\n    fn b(&self) {\n        fn d() {}\n    }\n}\n\
                impl T for W {\n    fn a(&self) {}\n}\n";
    assert_eq!(methods(text, "pub trait T"), BTreeSet::from(["a".to_owned(), "b".to_owned()]));
    assert_eq!(methods(text, "impl T for W"), BTreeSet::from(["a".to_owned()]));
}
