//! GBNF, the form of llama.cpp's grammars, written again in the compiler's own form.
//!
//! A grammar without recursion becomes one lexeme. In others, lexemes are as long as the longest match reads them right. They are all
//! neighbours without recursion together, or else each element alone, or else each character. Long lexemes are compiled to automata
//! and cost little. Single characters are always right, but each of them is a step of the parser. A grammar that needs too many of
//! these steps for one token is refused as too complex when it does.

mod greedy;
mod read;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Write;

use greedy::Above;
use read::{Grammar, Node};

/// The grammar in Lark's syntax.
///
/// # Errors
/// The fault, in words.
pub(super) fn to_lark(text: &str) -> Result<String, String> {
    let grammar = read::read(text)?;
    let (recursive, empty) = (recursive(&grammar), empty_rules(&grammar));
    if !recursive.contains(&grammar.root) {
        let mut lark = format!("start: T0{}\n", if empty.contains(&grammar.root) { "?" } else { "" });
        write_terminals(&mut lark, &grammar, &empty, &[Node::Rule(grammar.root)]);
        return Ok(lark);
    }
    let divide = |size| {
        let divider = Divider { recursive: &recursive, empty: &empty, size, numbers: HashMap::new() };
        divider.divided(&grammar)
    };
    let mut divided = None;
    for size in [Size::Neighbours, Size::Elements] {
        let found = divide(size);
        if greedy::is_right(&found.lexemes, &grammar.rules, &found.parts) {
            divided = Some(found);
            break;
        }
    }
    let divided = divided.unwrap_or_else(|| divide(Size::Characters));
    let mut lark = format!("start: r{}\n", grammar.root);
    for (number, part) in &divided.parts {
        let _ = write!(lark, "r{number}: "); // writing to a string cannot fail
        write_part(&mut lark, part);
        lark.push('\n');
    }
    write_terminals(&mut lark, &grammar, &empty, &divided.lexemes);
    Ok(lark)
}

/// The rules from which a rule can be reached that names itself, at once or by others.
fn recursive(grammar: &Grammar) -> BTreeSet<usize> {
    let named: Vec<BTreeSet<usize>> = grammar.rules.iter().map(names).collect();
    // Rules whose names all end somewhere: from the leaves up.
    let mut ends = BTreeSet::new();
    loop {
        let before = ends.len();
        let more = (0..named.len()).filter(|rule| named[*rule].iter().all(|of| ends.contains(of)));
        let more: Vec<usize> = more.collect();
        ends.extend(more);
        if ends.len() == before {
            return (0..named.len()).filter(|rule| !ends.contains(rule)).collect();
        }
    }
}

/// The rules that a node names.
fn names(node: &Node) -> BTreeSet<usize> {
    let mut all = BTreeSet::new();
    let mut open = vec![node];
    while let Some(node) = open.pop() {
        match node {
            Node::Class(_) => {}
            Node::Rule(number) => {
                all.insert(*number);
            }
            Node::Cat(nodes) | Node::Alt(nodes) => open.extend(nodes),
            Node::Repeat(node, ..) => open.push(node),
        }
    }
    all
}

/// The rules that may be empty.
fn empty_rules(grammar: &Grammar) -> BTreeSet<usize> {
    let mut empty = BTreeSet::new();
    loop {
        let before = empty.len();
        for (number, rule) in grammar.rules.iter().enumerate() {
            if is_empty(rule, &empty) {
                empty.insert(number);
            }
        }
        if empty.len() == before {
            return empty;
        }
    }
}

/// Whether a node may be empty, if these rules may.
fn is_empty(node: &Node, empty: &BTreeSet<usize>) -> bool {
    match node {
        Node::Class(_) => false,
        Node::Rule(number) => empty.contains(number),
        Node::Cat(all) => all.iter().all(|node| is_empty(node, empty)),
        Node::Alt(all) => all.iter().any(|node| is_empty(node, empty)),
        Node::Repeat(node, min, _) => *min == 0 || is_empty(node, empty),
    }
}

/// How long lexemes are.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Size {
    /// All neighbours without recursion.
    Neighbours,
    /// Each element of a rule.
    Elements,
    /// Each character.
    Characters,
}

/// A grammar's lexemes, and its rules above them.
struct Divided {
    lexemes: Vec<Node>,
    parts: BTreeMap<usize, Above>,
}

/// Divides a grammar into lexemes of that size.
struct Divider<'a> {
    recursive: &'a BTreeSet<usize>,
    empty: &'a BTreeSet<usize>,
    size: Size,
    numbers: HashMap<Node, usize>,
}

impl Divider<'_> {
    fn divided(mut self, grammar: &Grammar) -> Divided {
        let mut parts = BTreeMap::new();
        for (number, rule) in grammar.rules.iter().enumerate() {
            if self.size == Size::Characters || self.recursive.contains(&number) {
                parts.insert(number, self.part(rule));
            }
        }
        let mut lexemes: Vec<(Node, usize)> = self.numbers.into_iter().collect();
        lexemes.sort_unstable_by_key(|(_, number)| *number);
        Divided { lexemes: lexemes.into_iter().map(|(node, _)| node).collect(), parts }
    }

    fn part(&mut self, node: &Node) -> Above {
        let is_regular = |node: &Node| names(node).is_disjoint(self.recursive);
        if self.size != Size::Characters && is_regular(node) {
            return self.lexeme(node);
        }
        match node {
            Node::Cat(all) if self.size == Size::Neighbours => {
                let regular: Vec<bool> = all.iter().map(is_regular).collect();
                let mut parts = Vec::new();
                let mut at = 0;
                for same in regular.chunk_by(|a, b| *a && *b) {
                    let some = &all[at..at + same.len()];
                    at += same.len();
                    parts.push(match some {
                        [one] => self.part(one),
                        some => self.lexeme(&Node::Cat(some.to_vec())),
                    });
                }
                Above::Cat(parts)
            }
            Node::Cat(all) => Above::Cat(all.iter().map(|node| self.part(node)).collect()),
            Node::Alt(all) => Above::Alt(all.iter().map(|node| self.part(node)).collect()),
            Node::Repeat(node, min, max) => Above::Repeat(Box::new(self.part(node)), *min, *max),
            Node::Rule(number) => Above::Rule(*number),
            Node::Class(_) => self.lexeme(node),
        }
    }

    /// A lexeme is not empty: one that may be is optional instead.
    fn lexeme(&mut self, node: &Node) -> Above {
        let next = self.numbers.len();
        let lexeme = Above::Lexeme(*self.numbers.entry(node.clone()).or_insert(next));
        match is_empty(node, self.empty) {
            true => Above::Repeat(Box::new(lexeme), 0, Some(1)),
            false => lexeme,
        }
    }
}

/// Terminals `T0` and so on of the lexemes, none of which may be empty, and `R0` and so on of the rules that they name.
fn write_terminals(lark: &mut String, grammar: &Grammar, empty: &BTreeSet<usize>, lexemes: &[Node]) {
    let mut wanted = BTreeSet::new();
    for (number, lexeme) in lexemes.iter().enumerate() {
        let _ = write!(lark, "T{number}: ");
        let may_be_empty = is_empty(lexeme, empty);
        lark.push_str(if may_be_empty { "(" } else { "" });
        write_terminal(lark, lexeme);
        lark.push_str(if may_be_empty { ") & /(?s:.+)/\n" } else { "\n" });
        wanted.extend(names(lexeme));
    }
    let (mut open, mut done): (Vec<usize>, _) = (wanted.into_iter().collect(), BTreeSet::new());
    while let Some(number) = open.pop() {
        let Some(rule) = grammar.rules.get(number).filter(|_| done.insert(number)) else { continue };
        let _ = write!(lark, "R{number}: ");
        write_terminal(lark, rule);
        lark.push('\n');
        open.extend(names(rule));
    }
}

fn write_terminal(lark: &mut String, node: &Node) {
    match node {
        Node::Class(ranges) => write_class(lark, ranges),
        Node::Rule(number) => {
            let _ = write!(lark, "R{number}");
        }
        Node::Cat(all) => write_all(lark, all, " ", write_terminal),
        Node::Alt(all) => write_all(lark, all, " | ", write_terminal),
        Node::Repeat(node, min, max) => {
            write_all(lark, std::slice::from_ref(node.as_ref()), "", write_terminal);
            write_counts(lark, *min, *max);
        }
    }
}

fn write_part(lark: &mut String, part: &Above) {
    match part {
        Above::Lexeme(number) => {
            let _ = write!(lark, "T{number}");
        }
        Above::Rule(number) => {
            let _ = write!(lark, "r{number}");
        }
        Above::Cat(all) => write_all(lark, all, " ", write_part),
        Above::Alt(all) => write_all(lark, all, " | ", write_part),
        Above::Repeat(part, min, max) => {
            write_all(lark, std::slice::from_ref(part.as_ref()), "", write_part);
            write_counts(lark, *min, *max);
        }
    }
}

fn write_all<T>(lark: &mut String, all: &[T], between: &str, write_one: fn(&mut String, &T)) {
    if all.is_empty() {
        return lark.push_str("\"\"");
    }
    lark.push('(');
    for (index, one) in all.iter().enumerate() {
        lark.push_str(if index > 0 { between } else { "" });
        write_one(lark, one);
    }
    lark.push(')');
}

fn write_counts(lark: &mut String, min: u32, max: Option<u32>) {
    let _ = match (min, max) {
        (0, None) => write!(lark, "*"),
        (1, None) => write!(lark, "+"),
        (0, Some(1)) => write!(lark, "?"),
        (min, None) => write!(lark, "{{{min},}}"),
        (min, Some(max)) => write!(lark, "{{{min},{max}}}"),
    };
}

/// A class as a regular expression.
fn write_class(lark: &mut String, ranges: &[(char, char)]) {
    lark.push_str("/[");
    if ranges.is_empty() {
        // No character at all.
        lark.push_str("^\\x{0}-\\x{10ffff}");
    }
    for (first, last) in ranges {
        let (first, last) = (u32::from(*first), u32::from(*last));
        let _ = if first == last {
            write!(lark, "\\x{{{first:x}}}")
        } else {
            write!(lark, "\\x{{{first:x}}}-\\x{{{last:x}}}")
        };
    }
    lark.push_str("]/");
}

#[cfg(test)]
mod tests;
