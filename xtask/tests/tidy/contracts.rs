//! Every kernel file begins with its contract, in the form that `kernels/README.md` defines.

use crate::source::{Source, files, root};

/// Fields of a contract, in their order. Kernels without variants or requirements leave those two out.
const FIELDS: [(&str, Need); 9] = [
    ("Shapes", Need::Always),
    ("Variants", Need::IfAny),
    ("Requires", Need::IfAny),
    ("Launch", Need::Always),
    ("Alignment", Need::Always),
    ("Sums in", Need::Always),
    ("Tolerance", Need::Always),
    (REFERENCE, Need::Always),
    ("Moves", Need::Always),
];

/// The field that names what the kernel's test compares with.
const REFERENCE: &str = "Reference";

/// The beginning of the second line of a kernel file whose contract stands in a header that it includes.
const ELSEWHERE: &str = "// Contract   ";

/// Column of a field's text, counted from 0.
const TEXT_AT: usize = 14;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Need {
    Always,
    IfAny,
}

#[test]
fn every_kernel_begins_with_its_contract() {
    let all = files();
    let kernels: Vec<&Source> = all.iter().filter(|f| name_of(&f.path).is_some()).collect();
    assert!(kernels.len() > 20, "only {} kernel files found", kernels.len());
    let faults: Vec<String> = kernels
        .iter()
        .flat_map(|f| check_file(f, all).into_iter().map(|fault| format!("{}: {fault}", f.path)))
        .collect();
    assert!(faults.is_empty(), "kernels/README.md defines contracts:\n{}", faults.join("\n"));
}

#[test]
fn readme_lists_the_fields_in_their_order() {
    let page = std::fs::read_to_string(root().join("kernels/README.md")).expect("the page can be read");
    let listed = page.lines().filter_map(|line| line.trim_start().strip_prefix("// "));
    let listed: Vec<&str> = listed.filter_map(|line| Some(field_of(line)?.0)).collect();
    assert_eq!(listed, FIELDS.map(|(name, _)| name));
}

/// Name of the kernel file at `path`; `None` for other files.
fn name_of(path: &str) -> Option<&str> {
    path.strip_prefix("kernels/")?.strip_suffix(".hip").filter(|name| !name.contains('/'))
}

/// Faults of a kernel file's contract, here or in the header that it names.
fn check_file(file: &Source, all: &[Source]) -> Vec<String> {
    let name = name_of(&file.path).unwrap_or_default();
    let Some(path) = file.text.lines().nth(1).and_then(|line| line.strip_prefix(ELSEWHERE)) else {
        return check(name, &file.text);
    };
    let mut faults: Vec<String> = title_fault(name, &file.text).into_iter().collect();
    if !file.text.contains(&format!("#include \"{path}\"")) {
        faults.push(format!("names the contract of {path} and does not include it"));
    }
    let stem = path.rsplit('/').next().unwrap_or(path).trim_end_matches(".h");
    match all.iter().find(|f| f.path == format!("kernels/{path}")) {
        Some(header) => {
            faults.extend(check(stem, &header.text).iter().map(|fault| format!("{path}: {fault}")))
        }
        None => faults.push(format!("kernels/{path} does not exist")),
    }
    faults
}

/// Faults of the contract with which `text` begins.
fn check(name: &str, text: &str) -> Vec<String> {
    let mut faults: Vec<String> = title_fault(name, text).into_iter().collect();
    let mut found: Vec<(&str, String)> = Vec::new();
    for line in text.lines().skip(1).take_while(|line| line.starts_with("//")) {
        let comment = line[2..].strip_prefix(' ').unwrap_or(&line[2..]);
        if let Some((field, text)) = field_of(comment) {
            found.push((field, text.to_owned()));
        } else if let Some((_, text)) = found.last_mut() {
            // Lines before the first field say what the formula's names mean; after it each belongs to a field.
            match continuation(comment) {
                Some(more) => *text = format!("{text} {more}"),
                None => faults.push(format!("neither a field nor more of one: `{line}`")),
            }
        }
    }
    let place = |name: &str| FIELDS.iter().position(|field| field.0 == name);
    for two in found.windows(2).filter(|two| place(two[0].0) >= place(two[1].0)) {
        faults.push(format!("{} stands after {}", two[1].0, two[0].0));
    }
    for (field, need) in FIELDS {
        match found.iter().find(|(name, _)| *name == field) {
            Some((_, text)) if text.trim().is_empty() => faults.push(format!("{field} is empty")),
            None if need == Need::Always => faults.push(format!("{field} is missing")),
            _ => {}
        }
    }
    let reference = found.iter().find(|(name, _)| *name == REFERENCE);
    if let Some((_, text)) = reference.filter(|(_, text)| !text.is_empty()) {
        let mut tests =
            text.split([' ', ',', ';', '(', ')']).filter(|word| word.starts_with("tests/")).peekable();
        if tests.peek().is_none() {
            faults.push("Reference names no file of tests/".into());
        }
        faults.extend(
            tests.filter(|path| !root().join(path).exists()).map(|path| format!("{path} does not exist")),
        );
    }
    faults
}

fn title_fault(name: &str, text: &str) -> Option<String> {
    let formula = text.strip_prefix(&format!("// {name}: ")).and_then(|rest| rest.lines().next());
    let says = formula.is_some_and(|formula| !formula.trim().is_empty());
    (!says).then(|| format!("the first line is not `// {name}: ` and a formula"))
}

/// A field and the text beside it, from a line without its `// `.
pub fn field_of(comment: &str) -> Option<(&'static str, &str)> {
    let (name, _) = FIELDS.into_iter().find(|(name, _)| {
        let rest = comment.strip_prefix(name);
        rest.is_some_and(|rest| rest.trim().is_empty() || text_begins(comment, name.len()))
    })?;
    Some((name, comment[name.len()..].trim()))
}

/// The text of a line that goes on with a field, from a line without its `// `.
fn continuation(comment: &str) -> Option<&str> {
    text_begins(comment, 0).then(|| comment.trim())
}

/// Whether between `from` and the column of texts there is nothing but spaces, and a text begins there.
fn text_begins(comment: &str, from: usize) -> bool {
    let at = TEXT_AT - "// ".len();
    let gap = comment.get(from..at).is_some_and(|gap| gap.bytes().all(|b| b == b' '));
    gap && comment[at..].starts_with(|c: char| c != ' ')
}

#[test]
fn a_broken_contract_is_found() {
    let good = "// scale: y = a * x\n//\n// In place.\n\
                // Shapes     x: f32[n]\n//            y: f32[n]\n// Requires   n > 0\n\
                // Launch     grid = n\n// Alignment  4 bytes\n// Sums in    f32\n// Tolerance  0\n\
                // Reference  f64 in tests/kernels/main.rs\n// Moves      8 * n bytes\n#include \"a.h\"\n// Launch\n";
    assert_eq!(check("scale", good), Vec::<String>::new());
    let launch = "// Launch     grid = n\n";
    for (from, to, fault) in [
        ("// scale: y", "// scaled: y", "the first line is not `// scale: ` and a formula"),
        ("y = a * x", "", "the first line is not `// scale: ` and a formula"),
        (launch, "", "Launch is missing"),
        ("// Launch     grid = n", "// Launch", "Launch is empty"),
        ("// Launch     grid = n", "// Launch     ", "Launch is empty"),
        (
            "// Launch     grid",
            "// Launch    grid",
            "neither a field nor more of one: `// Launch    grid = n`",
        ),
        (
            "// Launch     grid",
            "// Waves      grid",
            "neither a field nor more of one: `// Waves      grid = n`",
        ),
        ("// Moves      8", "// Requires   8", "Requires stands after Reference"),
        ("// Sums in    f32", "// Launch     f32", "Launch stands after Alignment"),
        ("// Alignment  4 bytes", "// Shapes     4 bytes", "Shapes stands after Launch"),
        ("tests/kernels/main.rs", "f64", "Reference names no file of tests/"),
        ("tests/kernels/main.rs", "tests/kernels/none.rs", "tests/kernels/none.rs does not exist"),
    ] {
        let text = good.replacen(from, to, 1);
        assert_ne!(text, good, "{from}");
        let found = check("scale", &text);
        assert!(found.iter().any(|f| f == fault), "`{to}` for `{from}`: {found:?} without `{fault}`");
    }
}

#[test]
fn a_contract_elsewhere_is_followed() {
    let kernel = |text: &str| Source::new("kernels/mul_q4.hip", text);
    let header = Source::new("kernels/mul/mul.h", "// mul: y = W x\n// Shapes     x: f32[n]\n#pragma once\n");
    let short = kernel("// mul_q4: y = W x\n// Contract   mul/mul.h\n#include \"mul/mul.h\"\n");
    let found = check_file(&short, &[header]);
    assert!(found.iter().any(|f| f == "mul/mul.h: Launch is missing"), "{found:?}");
    let found = check_file(&short, &[]);
    assert_eq!(found, ["kernels/mul/mul.h does not exist"]);
    let found = check_file(&kernel("// mul_q4: y = W x\n// Contract   mul/mul.h\n"), &[]);
    assert!(found.iter().any(|f| f.ends_with("does not include it")), "{found:?}");
}
