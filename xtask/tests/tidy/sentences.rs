//! Sentences are short and have a subject.

use crate::prose::{blocks, has_contract};
use crate::source::{Source, files};

/// Most words of a sentence. Code and quoted text count as one word, and so does a list of names.
const WORDS_MAX: usize = 25;

/// Words that stand for an unnamed subject where no question mark follows.
const HEADLESS: [&str; 3] = ["What", "Who", "Whose"];

#[test]
fn sentences_are_short_and_name_their_subject() {
    let found: Vec<String> = files().iter().flat_map(faults).collect();
    let count = found.len();
    assert!(found.is_empty(), "{count} sentences to split or to give a subject:\n{}", found.join("\n"));
}

/// Sentences of one file that are too long or begin without a subject.
fn faults(file: &Source) -> Vec<String> {
    let mut faults = Vec::new();
    for block in blocks(file) {
        let text = without_literals(&block.text);
        // Fields of contracts separate their statements by semicolons.
        for sentence in sentences(&text, has_contract(file)) {
            let count = words(sentence);
            let begin = sentence.split_whitespace().next().unwrap_or_default();
            let headless = HEADLESS.contains(&begin) && !sentence.ends_with('?');
            if count > WORDS_MAX {
                faults.push(format!("{}:{}: {count} words: {sentence}", file.path, block.line));
            } else if headless {
                faults.push(format!("{}:{}: no subject: {sentence}", file.path, block.line));
            }
        }
    }
    faults
}

/// Replaces each code span, link target and quotation by one word.
fn without_literals(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find(['`', '"']) {
        let quote = if rest[start..].starts_with('`') { '`' } else { '"' };
        let Some(len) = rest[start + 1..].find(quote) else { break };
        out.push_str(&rest[..start]);
        out.push_str("`x`");
        rest = &rest[start + len + 2..];
    }
    out.push_str(rest);
    out.replace("[`x`]", "`x`")
}

/// The sentences of a block. One ends with a full stop, a question or exclamation mark, if another one begins. The next
/// word then is in upper case, or a name such as `f16`. With `at_semicolons`, it ends there too.
fn sentences(text: &str, at_semicolons: bool) -> Vec<&str> {
    let mut found = Vec::new();
    let mut start = 0;
    for (space, _) in text.match_indices(' ') {
        let (before, after) = (text[start..space].trim_end_matches([')', '*']), &text[space + 1..]);
        let word =
            after.split(' ').next().unwrap_or_default().trim_end_matches(|c: char| !c.is_alphanumeric());
        let is_name = word.contains(|c: char| c.is_numeric() || "-./_".contains(c));
        let begins = is_name || after.starts_with(|c: char| c.is_uppercase() || "`([*".contains(c));
        if before.ends_with(['.', '?', '!']) && begins || at_semicolons && before.ends_with(';') {
            found.push(&text[start..space]);
            start = space + 1;
        }
    }
    found.push(&text[start..]);
    found
}

/// Number of words, with a list of names as one.
fn words(sentence: &str) -> usize {
    let words: Vec<&str> = sentence.split_whitespace().collect();
    let mut count = 0;
    let mut at = 0;
    while at < words.len() {
        count += usize::from(words[at].contains(char::is_alphanumeric));
        at = end_of_call(&words, at).unwrap_or_else(|| end_of_names(&words, at));
    }
    count
}

/// The word after a function with its arguments, `name(a, b, ...)`, that begins at `at`.
fn end_of_call(words: &[&str], at: usize) -> Option<usize> {
    let (name, arguments) = words[at].split_once('(')?;
    let is_call = !name.is_empty() && arguments.ends_with(',');
    let close = words[at..].iter().position(|word| word.contains(')'));
    close.filter(|_| is_call).map(|close| at + close + 1)
}

/// The word after the list of names that begins at `at`; the next word when none does. Names are code spans, which may
/// have an explanation in parentheses, with commas, `and` or `or` between them.
fn end_of_names(words: &[&str], at: usize) -> usize {
    let is_name = |at: usize| words.get(at).is_some_and(|word| word.starts_with("`x`"));
    let mut end = at + 1;
    let mut name = at;
    while is_name(name) {
        let mut next = name + 1;
        if words.get(next).is_some_and(|word| word.starts_with('(')) && !words[name].ends_with(',') {
            let close = words[next..].iter().position(|word| word.contains(')'));
            next += close.map_or(0, |close| close + 1);
        }
        let comma = words[next - 1].ends_with(',');
        let and = words.get(next).is_some_and(|word| ["and", "or"].contains(word));
        if name > at {
            end = next;
        }
        if !comma && !and {
            break;
        }
        name = next + usize::from(and);
    }
    end
}

/// Names of tests that begin as headless sentences do.
#[test]
fn names_of_tests_have_a_subject() {
    let headless = ["what_", "who_", "whose_"].map(|begin| format!("fn {begin}"));
    let of_file = |file: &Source| -> Vec<String> {
        let lines = file.text.lines().enumerate();
        let found = lines.filter(|(_, line)| {
            let line = line.trim_start().trim_start_matches("pub ").trim_start_matches("async ");
            headless.iter().any(|begin| line.starts_with(begin.as_str()))
        });
        found.map(|(number, line)| format!("{}:{}: {}", file.path, number + 1, line.trim())).collect()
    };
    let rust = files().iter().filter(|file| file.path.ends_with(".rs"));
    let found: Vec<String> = rust.flat_map(of_file).collect();
    assert!(found.is_empty(), "{} names without a subject:\n{}", found.len(), found.join("\n"));
}

#[test]
fn words_are_counted_as_a_reader_does() {
    let count = |text: &str| words(&without_literals(text));
    assert_eq!(count("It reads `a b c` and \"two words\" here - twice."), 5);
    assert_eq!(count("Types are `a`, `b` (with a reason), `c` and `d` so far."), 5);
    assert_eq!(count("gemv(w0, w1, rows) multiplies rows."), 3);
    assert_eq!(count("Only `a` (with a reason) is one."), 7);
    assert_eq!(sentences("One. Two? (Three.) four 1.5 it; six. f16 too.", false).len(), 4);
    assert_eq!(sentences("a; b", true).len(), 2);
}

#[test]
fn long_and_headless_sentences_are_found() {
    let found = |text: &str| faults(&Source::new("src/a.rs", text));
    let words = |count: usize| format!("/// A{}.\n", " word".repeat(count - 1));
    assert_eq!(found(&words(25)), Vec::<String>::new());
    assert_eq!(found(&words(26)).len(), 1);
    assert_eq!(found("// What it holds.\nfn f() {}\n/// A line. Who asks. Who asks?\n").len(), 2);
    assert!(found("const A: &str = \"\n// What it holds.\";\n").is_empty());
}
