//! The prose of a file: comments of Rust and of kernels, and pages, cut into blocks that hold whole sentences.

use crate::contracts;
use crate::source::{Source, literals};

/// Sentences that belong together: a paragraph, or an item of a list.
pub struct Block {
    /// Number of its first line, from 1.
    pub line: usize,
    /// Its lines, joined by spaces.
    pub text: String,
}

/// The blocks of a file; none for files that hold no prose in a known form. Tables, headings and code are left out.
pub fn blocks(file: &Source) -> Vec<Block> {
    let mut blocks = Blocks::default();
    if file.path.ends_with(".md") {
        for (number, line) in file.text.lines().enumerate() {
            blocks.add(number + 1, Some(line));
        }
    } else if file.path.ends_with(".rs") {
        let mut last = (0, "");
        for (number, kind, line) in comments(&file.text) {
            if (number, kind) != (last.0 + 1, last.1) {
                blocks.add(number, None);
            }
            blocks.add(number, Some(line));
            last = (number, kind);
        }
    } else if has_contract(file) {
        for (number, line) in file.text.lines().enumerate() {
            let comment = line.trim_start().strip_prefix("//");
            let comment = comment.map(|comment| comment.strip_prefix(' ').unwrap_or(comment));
            match comment.and_then(contracts::field_of) {
                Some((_, text)) => {
                    blocks.add(number + 1, None);
                    blocks.add(number + 1, Some(text));
                }
                None => blocks.add(number + 1, comment),
            }
        }
    }
    blocks.end();
    blocks.all
}

/// True for kernel files, and for headers that hold the contract of several.
pub fn has_contract(file: &Source) -> bool {
    let kernels = file.path.starts_with("kernels/") && !file.path.ends_with(".md");
    kernels && file.text.lines().any(|line| line.starts_with("// Launch "))
}

/// Line comments that begin their line: number, kind (`//`, `///`, `//!`), text.
fn comments(text: &str) -> Vec<(usize, &'static str, &str)> {
    let (mut number, mut at) = (1, 0);
    let mut found = Vec::new();
    for literal in literals(text) {
        number += text[at..literal.start].matches('\n').count();
        at = literal.start;
        let comment = &text[literal];
        let before = text[..at].rsplit('\n').next().unwrap_or_default();
        if before.trim().is_empty()
            && let Some(kind) = ["///", "//!", "//"].into_iter().find(|kind| comment.starts_with(kind))
        {
            let line = &comment[kind.len()..];
            found.push((number, kind, line.strip_prefix(' ').unwrap_or(line)));
        }
    }
    found
}

#[derive(Default)]
struct Blocks {
    all: Vec<Block>,
    open: Option<Block>,
    in_code: bool,
}

impl Blocks {
    /// Adds a line to the open block, or begins another one. `None` is a line without prose.
    fn add(&mut self, number: usize, line: Option<&str>) {
        let Some(line) = line else { return self.end() };
        let trimmed = line.trim();
        if trimmed.starts_with("```") {
            self.in_code = !self.in_code;
            return self.end();
        }
        let indented = line.starts_with("    ") && self.open.is_none();
        if self.in_code || indented || trimmed.is_empty() || trimmed.starts_with(['|', '#']) {
            return self.end();
        }
        let item = list_item(trimmed);
        if item.is_some() {
            self.end();
        }
        let text = item.unwrap_or(trimmed);
        match &mut self.open {
            Some(block) => {
                block.text.push(' ');
                block.text.push_str(text);
            }
            None => self.open = Some(Block { line: number, text: text.to_owned() }),
        }
    }

    fn end(&mut self) {
        self.all.extend(self.open.take());
    }
}

/// The text of an item of a list: after `- `, `* ` or a number, or a line that explains `name: `, `name, name: ` or
/// `name(argument, ...)`.
fn list_item(line: &str) -> Option<&str> {
    let numbered = line.trim_start_matches(|c: char| c.is_ascii_digit());
    let marks = [line.strip_prefix("- "), line.strip_prefix("* ")];
    let numbered = numbered.strip_prefix(". ").filter(|_| numbered.len() < line.len());
    let marked = marks.into_iter().flatten().next().or(numbered);
    let names = || {
        let (names, _) = line.split_once(": ")?;
        let is_name = |name: &str| !name.is_empty() && !name.contains(' ') && name.to_lowercase() == name;
        names.split(", ").all(is_name).then_some(line)
    };
    let call = || line.split(' ').next().is_some_and(|word| word.contains('(') && word.ends_with(','));
    marked.or_else(names).or_else(|| call().then_some(line))
}

#[test]
fn blocks_are_paragraphs_and_items() {
    let texts = |path: &str, text: &str| -> Vec<(usize, String)> {
        let blocks = blocks(&Source::new(path, text));
        blocks.into_iter().map(|block| (block.line, block.text)).collect()
    };
    let rust = "//! One\n//! two.\n//!\n//! - three\n//!   four\n//! ```\n//! code\n//! ```\n// five\nf(\"\n// no\");\n";
    let want = [(1, "One two."), (4, "three four"), (9, "five")].map(|(line, text)| (line, text.to_owned()));
    assert_eq!(texts("a.rs", rust), want);
    let page = "# A b\n\nOne\ntwo\n1. three\n\n| a |\n\n    code\n";
    let want = [(3, "One two"), (5, "three")].map(|(line, text)| (line, text.to_owned()));
    assert_eq!(texts("a.md", page), want);
    let kernel =
        "// a: b\n// Shapes     x: f32\n//            y: f32\n//            and more\n// Launch     1\n";
    let want = [(1, "a: b"), (2, "x: f32"), (3, "y: f32 and more"), (5, "1")]
        .map(|(line, text)| (line, text.to_owned()));
    assert_eq!(texts("kernels/a.hip", kernel), want);
}
