//! Functions that the pages name: each exists, and in a chain each is named by the file of the one before it.

use crate::source::{Source, blank, files, root};

/// Pages whose names are checked.
const PAGES: [&str; 2] = ["ARCHITECTURE.md", "CONTRIBUTING.md"];

/// Most functions of a chain: more are too many to keep in mind.
const HOPS_MAX: usize = 5;

/// A function that a page names as `file::function`.
#[derive(Debug, PartialEq, Eq)]
struct Named<'a> {
    file: &'a str,
    function: &'a str,
}

#[test]
fn pages_name_functions_that_exist_and_chains_that_hold() {
    let mut faults = Vec::new();
    let mut found = 0;
    for page in files().iter().filter(|f| PAGES.contains(&f.path.as_str())) {
        for block in blocks(&page.text) {
            let hops: Vec<Vec<Named<'_>>> = block.split("->").map(named).collect();
            found += hops.iter().map(Vec::len).sum::<usize>();
            let gone = hops.iter().flatten().filter(|named| !exists(files(), named));
            faults.extend(gone.map(|named| format!("{}: there is no {named:?}", page.path)));
            faults.extend(broken(files(), &hops).map(|fault| format!("{}: {fault}", page.path)));
            if hops.iter().filter(|hop| !hop.is_empty()).count() > HOPS_MAX {
                faults.push(format!("{}: more than {HOPS_MAX} hops: {block}", page.path));
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    assert!(found > 40, "only {found} functions are named");
}

#[test]
fn pages_name_items_of_types_that_exist() {
    let code: Vec<String> =
        files().iter().filter(|f| f.path.ends_with(".rs")).map(|f| blank(&f.text)).collect();
    let mut gone = Vec::new();
    for page in files().iter().filter(|f| PAGES.contains(&f.path.as_str())) {
        let of_types = spans(&page.text).filter_map(|span| span.split_once("::"));
        let of_types = of_types.filter(|(owner, item)| {
            owner.starts_with(char::is_uppercase)
                && [owner, item].into_iter().all(|name| name.chars().all(is_word))
        });
        for (owner, item) in of_types {
            if !code.iter().any(|code| has_word(code, owner) && has_word(code, item)) {
                gone.push(format!("{}: {owner}::{item}", page.path));
            }
        }
    }
    assert!(gone.is_empty(), "no file has these: {gone:?}");
}

#[test]
fn paths_and_tests_that_contributors_need_exist() {
    let page = files().iter().find(|f| f.path == "CONTRIBUTING.md").expect("the page is there");
    let is_name = |span: &str| span.chars().all(is_word) && span.matches('_').count() > 2;
    let is_path = |span: &str| {
        let known = ["src/", "client/", "xtask/", "tests/", "kernels/", "fuzz/", "benches/"];
        // Those with a capital stand for any file of a kind.
        known.iter().any(|folder| span.starts_with(folder))
            && !span.contains(|c: char| c.is_uppercase() || "*: ".contains(c))
    };
    let is_there = |path: &str| root().join(path).exists();
    let defines = |f: &Source, name: &str| f.text.contains(&format!("fn {name}("));
    let (names, paths): (Vec<&str>, Vec<&str>) =
        spans(&page.text).filter(|span| is_name(span) || is_path(span)).partition(|span| is_name(span));
    assert!(names.len() > 5 && paths.len() > 30, "too few names were found: {names:?}, {paths:?}");
    let mut gone: Vec<&str> = paths.into_iter().filter(|path| !is_there(path)).collect();
    gone.extend(names.into_iter().filter(|name| !files().iter().any(|f| defines(f, name))));
    assert!(gone.is_empty(), "CONTRIBUTING.md names what does not exist: {gone:?}");
}

#[test]
fn a_missing_function_and_a_broken_chain_are_found() {
    let all = [
        Source::new("src/a.rs", "fn first() { second() }\n// third"),
        Source::new("src/b/mod.rs", "pub fn second() {}\nconst THIRD: u8 = 0;"),
    ];
    let hops = |block: &'static str| block.split("->").map(named).collect::<Vec<_>>();
    let sound = hops("- one: `a.rs::first` -> `b/mod.rs::second`, or `b/mod.rs::THIRD`");
    assert_eq!(sound[0], [Named { file: "a.rs", function: "first" }]);
    assert!(sound.iter().flatten().all(|named| exists(&all, named)));
    assert_eq!(broken(&all, &sound).count(), 1, "src/a.rs does not name THIRD");
    for gone in ["`src/a.rs::second`", "`b.rs::second`", "`a.rs::third`"] {
        assert!(!exists(&all, &named(gone)[0]), "{gone}");
    }
}

/// Paragraphs, items of lists and rows of tables, each as one line.
fn blocks(text: &str) -> Vec<String> {
    let mut all: Vec<String> = vec![String::new()];
    for line in text.lines() {
        let begins =
            line.is_empty() || line.starts_with(['-', '|']) || line.starts_with(|c: char| c.is_ascii_digit());
        match all.last_mut() {
            Some(last) if !begins => {
                last.push(' ');
                last.push_str(line.trim());
            }
            _ => all.push(line.to_owned()),
        }
    }
    all
}

/// Code spans of a text without code blocks.
fn spans(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

/// The functions that a text names as `file::function`.
fn named(text: &str) -> Vec<Named<'_>> {
    let pairs = spans(text)
        .filter_map(|span| span.split_once(".rs::").map(|(file, function)| (span, file, function)));
    pairs.map(|(span, file, function)| Named { file: &span[..file.len() + ".rs".len()], function }).collect()
}

/// The file of that name, from the workspace's root or below `src`.
fn find<'a>(all: &'a [Source], file: &str) -> Option<&'a Source> {
    all.iter().find(|f| f.path == file || f.path.strip_prefix("src/") == Some(file))
}

fn exists(all: &[Source], named: &Named<'_>) -> bool {
    let Some(file) = find(all, named.file) else { return false };
    let kinds = ["fn", "const", "static", "struct", "enum", "trait", "type"];
    let code = blank(&file.text);
    let words: Vec<&str> = code.split(|c| !is_word(c)).filter(|word| !word.is_empty()).collect();
    words.windows(2).any(|two| kinds.contains(&two[0]) && two[1] == named.function)
}

/// For each two hops in order: the files of the first name all functions of the second.
fn broken<'a>(all: &'a [Source], hops: &'a [Vec<Named<'a>>]) -> impl Iterator<Item = String> + 'a {
    hops.windows(2).flat_map(move |two| {
        let from = two[0].iter().filter_map(|named| find(all, named.file));
        let from: Vec<String> = from.map(|file| blank(&file.text)).collect();
        let lacks = move |named: &&Named<'_>| {
            !from.is_empty() && !from.iter().any(|code| has_word(code, named.function))
        };
        let before = &two[0];
        two[1].iter().filter(lacks).map(move |named| format!("{before:?} does not lead to {named:?}"))
    })
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

fn has_word(code: &str, word: &str) -> bool {
    code.split(|c| !is_word(c)).any(|found| found == word)
}
