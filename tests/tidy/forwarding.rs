//! What forwards a trait's calls forwards all of them: a method with a default body compiles without, and then the tests
//! run on the default.

use std::collections::BTreeSet;

use crate::source::{blank, files};

/// A trait, and what stands around another of its kind.
const WRAPPED: [(&str, &str, &str, &str); 1] =
    [("src/backend/mod.rs", "pub trait Backend", "tests/common/hooked.rs", "impl Backend for Hooked")];

#[test]
fn wrappers_forward_every_method() {
    let files = files();
    let methods = |path: &str, head: &str| {
        let file = files.iter().find(|file| file.path == path);
        let found = methods(&file.unwrap_or_else(|| panic!("{path} is not there")).text, head);
        assert!(found.len() > 1, "{path}: {} methods in `{head}`", found.len());
        found
    };
    for (path, head, wrapper, block) in WRAPPED {
        let (all, forwarded) = (methods(path, head), methods(wrapper, block));
        let forgotten: Vec<_> = all.difference(&forwarded).collect();
        assert!(forgotten.is_empty(), "{wrapper} does not forward {forgotten:?} of {path}");
    }
}

/// Names of the functions that stand in the block after `head`.
fn methods(text: &str, head: &str) -> BTreeSet<String> {
    let code = blank(text);
    let start = code.find(head).unwrap_or(code.len());
    let mut names = BTreeSet::new();
    // The block ends where its brace closes at a line's start.
    for line in code[start..].lines().take_while(|line| !line.starts_with('}')) {
        // Four spaces: what lies deeper are functions within functions.
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
