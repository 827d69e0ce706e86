//! The project's files, and Rust text with its comments and literals blanked out.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// A text file of the project.
pub struct Source {
    /// Path below the workspace's root, with `/`.
    pub path: String,
    /// The whole content.
    pub text: String,
    /// The lines that [`Self::code`] found.
    code: OnceLock<Vec<(usize, String)>>,
}

impl Source {
    pub fn new(path: impl Into<String>, text: impl Into<String>) -> Self {
        Self { path: path.into(), text: text.into(), code: OnceLock::new() }
    }

    /// Lines of code outside tests, numbered from 1, with comments and literals blanked. Lines from the first
    /// `#[cfg(test)] mod` on are left out: unit tests come last in a file. Empty for files that hold only tests.
    pub fn code(&self) -> &[(usize, String)] {
        self.code.get_or_init(|| self.find_code())
    }

    fn find_code(&self) -> Vec<(usize, String)> {
        if !self.path.ends_with(".rs") || self.is_test() {
            return Vec::new();
        }
        let code = blank(&self.text);
        let lines: Vec<&str> = code.lines().collect();
        let tests = lines.windows(2).position(|two| {
            two[0].trim_start().starts_with("#[cfg(test)]") && two[1].trim_start().starts_with("mod ")
        });
        let end = tests.unwrap_or(lines.len());
        lines[..end].iter().enumerate().map(|(i, line)| (i + 1, (*line).to_owned())).collect()
    }

    /// True for files that hold only tests.
    pub fn is_test(&self) -> bool {
        let parts: Vec<&str> = self.path.split('/').collect();
        parts.contains(&"tests") || parts.contains(&"benches") || self.path.ends_with("tests.rs")
    }
}

/// The workspace's root.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask is in the workspace")
}

/// Every text file of the project, in order of path. Left out: build output, the corpus, `.git`, files that are
/// not UTF-8.
pub fn files() -> &'static [Source] {
    static FILES: OnceLock<Vec<Source>> = OnceLock::new();
    FILES.get_or_init(read_files)
}

fn read_files() -> Vec<Source> {
    let mut found = Vec::new();
    walk(root(), &mut found);
    let mut files: Vec<Source> = found
        .into_iter()
        .filter_map(|path| {
            let text = fs::read_to_string(&path).ok()?;
            let below = path.strip_prefix(root()).ok()?.to_str()?.to_owned();
            Some(Source::new(below, text))
        })
        .collect();
    files.sort_by(|a, b| a.path.cmp(&b.path));
    assert!(files.len() > 40, "only {} files found below {}", files.len(), root().display());
    files
}

fn walk(dir: &Path, into: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).expect("a directory of the project can be read").flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let skipped = ["target", "corpus"];
        if (name.starts_with('.') && name != ".ci" && name != ".cargo") || skipped.contains(&name.as_str()) {
            continue;
        }
        let kind = entry.file_type().expect("a directory entry has a type");
        if kind.is_dir() {
            walk(&entry.path(), into);
        } else if kind.is_file() {
            into.push(entry.path());
        }
    }
}

/// Replaces comments, strings and character literals by spaces; line breaks stay.
pub fn blank(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut code = 0;
    for literal in literals(text) {
        out.push_str(&text[code..literal.start]);
        out.extend(text[literal.clone()].chars().map(|c| if c == '\n' { c } else { ' ' }));
        code = literal.end;
    }
    out.push_str(&text[code..]);
    out
}

/// The comments, strings and character literals of a Rust text, in their order.
pub fn literals(text: &str) -> Vec<Range<usize>> {
    let bytes = text.as_bytes();
    let mut found = Vec::new();
    let mut i = 0;
    while i < bytes.len() {
        // Bytes that begin a comment or a literal; all other bytes are most of a file.
        let may_start = matches!(bytes[i], b'/' | b'"' | b'\'' | b'r' | b'b' | b'c');
        let end = if may_start { literal_end(text, i) } else { i };
        if end > i {
            found.push(i..end);
        }
        i = end.max(i + 1);
    }
    found
}

/// End of the comment or literal that starts at `i`; `i` when none starts there.
fn literal_end(text: &str, i: usize) -> usize {
    let rest = &text[i..];
    let to_end = |found: Option<usize>| found.map_or(text.len(), |n| i + n);
    if rest.starts_with("//") {
        return to_end(rest.find('\n'));
    }
    if rest.starts_with("/*") {
        let mut depth = 0;
        let mut at = 0;
        loop {
            if rest[at..].starts_with("/*") {
                depth += 1;
                at += 2;
            } else if rest[at..].starts_with("*/") {
                depth -= 1;
                at += 2;
            } else {
                match rest[at..].chars().next() {
                    Some(c) => at += c.len_utf8(),
                    None => return text.len(),
                }
            }
            if depth == 0 {
                return i + at;
            }
        }
    }
    let word_before = text[..i].chars().next_back().is_some_and(|c| c.is_alphanumeric() || c == '_');
    if !word_before {
        let raw = rest.trim_start_matches(['b', 'c']);
        if let Some(after) = raw.strip_prefix('r') {
            let hashes = after.len() - after.trim_start_matches('#').len();
            if after[hashes..].starts_with('"') {
                let close = format!("\"{}", "#".repeat(hashes));
                let open = rest.len() - after.len() + hashes + 1;
                return rest[open..].find(&close).map_or(text.len(), |n| i + open + n + close.len());
            }
        }
    }
    if rest.starts_with('"') {
        return quoted_end(text, i, '"');
    }
    // A quote opens a character literal where a closing quote follows; else it starts a lifetime.
    if let Some(after) = rest.strip_prefix('\'') {
        let mut chars = after.chars();
        match (chars.next(), chars.next()) {
            (Some('\\'), _) => return quoted_end(text, i, '\''),
            (Some(_), Some('\'')) => return quoted_end(text, i, '\''),
            _ => {}
        }
    }
    i
}

fn quoted_end(text: &str, i: usize, quote: char) -> usize {
    let mut escaped = false;
    for (n, c) in text[i..].char_indices().skip(1) {
        if escaped {
            escaped = false;
        } else if c == '\\' {
            escaped = true;
        } else if c == quote {
            return i + n + 1;
        }
    }
    text.len()
}

#[test]
fn comments_and_literals_are_blanked() {
    let cases = [
        ("let a = 1; // unsafe", "let a = 1;          "),
        ("a /* x /* y */ z */ b", "a                   b"),
        (r#"f("a \" b", 'c', '\'')"#, "f(        ,    ,     )"),
        ("fn f<'a>(x: &'a str) {}", "fn f<'a>(x: &'a str) {}"),
        ("r#\"a \" b\"# + br\"c\"", "           +      "),
        ("bar\"x\"", "bar   "),
        ("\"ä\nb\" x", "  \n   x"),
    ];
    for (text, want) in cases {
        assert_eq!(blank(text), want, "{text}");
    }
}
