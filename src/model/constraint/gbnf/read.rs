//! Reads GBNF, llama.cpp's form of grammars, into rules.

use std::collections::BTreeMap;

/// Most rules of a grammar, and most elements of all rules together.
const RULES_MAX: usize = 4096;
const NODES_MAX: usize = 100_000;

/// Most repetitions that a grammar may count, as in llama.cpp.
const REPETITIONS_MAX: u32 = 2000;

/// Deepest nesting of brackets.
const DEPTH_MAX: usize = 200;

/// Most bytes of a message's piece of the grammar.
const SHOWN_BYTES: usize = 20;

/// A part of a rule.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Node {
    /// One character within one of these ranges of scalar values; both ends belong to them.
    Class(Vec<(char, char)>),
    /// A rule, by its number.
    Rule(usize),
    /// One after the other.
    Cat(Vec<Node>),
    /// One of them.
    Alt(Vec<Node>),
    /// So many of it, at least and at most.
    Repeat(Box<Node>, u32, Option<u32>),
}

/// A grammar's rules by number, and the number of `root`.
#[derive(Debug)]
pub(super) struct Grammar {
    pub rules: Vec<Node>,
    pub root: usize,
}

/// Reads a grammar.
///
/// # Errors
/// The fault in words, with the number of its line.
pub(super) fn read(text: &str) -> Result<Grammar, String> {
    let mut reader = Reader { text, at: 0, names: BTreeMap::new(), rules: Vec::new(), nodes: 0 };
    reader.space(true);
    while reader.at < text.len() {
        reader.rule()?;
    }
    let Reader { names, rules, .. } = reader;
    let named = |number: usize| names.iter().find(|(_, of)| **of == number).map_or("", |(name, _)| *name);
    let root = *names.get("root").ok_or("it has no rule `root`")?;
    let defined = rules.into_iter().enumerate().map(|(number, rule)| {
        rule.ok_or_else(|| format!("the rule `{}` is used but nowhere defined", named(number)))
    });
    Ok(Grammar { rules: defined.collect::<Result<_, _>>()?, root })
}

struct Reader<'a> {
    text: &'a str,
    at: usize,
    names: BTreeMap<&'a str, usize>,
    rules: Vec<Option<Node>>,
    nodes: usize,
}

impl<'a> Reader<'a> {
    fn rest(&self) -> &'a str {
        self.text.get(self.at..).unwrap_or_default()
    }

    fn peek(&self) -> Option<char> {
        self.rest().chars().next()
    }

    fn next(&mut self) -> Option<char> {
        let next = self.peek()?;
        self.at += next.len_utf8();
        Some(next)
    }

    fn takes(&mut self, token: &str) -> bool {
        let there = self.rest().starts_with(token);
        if there {
            self.at += token.len();
        }
        there
    }

    fn wrong(&self, why: &str) -> String {
        let line = self.text.get(..self.at).unwrap_or_default().matches('\n').count() + 1;
        let mut end = self.rest().len().min(SHOWN_BYTES);
        while !self.rest().is_char_boundary(end) {
            end -= 1;
        }
        let shown = self.rest().get(..end).unwrap_or_default();
        format!("line {line}, at {shown:?}: {why}")
    }

    fn expect(&mut self, token: &str) -> Result<(), String> {
        if self.takes(token) { Ok(()) } else { Err(self.wrong(&format!("`{token}` is missing"))) }
    }

    /// Skips spaces and comments, and with `lines` the ends of lines.
    fn space(&mut self, lines: bool) {
        while let Some(next) = self.peek() {
            match next {
                ' ' | '\t' => self.at += 1,
                '\r' | '\n' if lines => self.at += 1,
                '#' => self.at += self.rest().find(['\r', '\n']).unwrap_or(self.rest().len()),
                _ => return,
            }
        }
    }

    fn name(&mut self) -> Result<usize, String> {
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        let end = self.rest().find(|c| !is_name(c)).unwrap_or(self.rest().len());
        let name = self.rest().get(..end).filter(|name| !name.is_empty());
        let name = name.ok_or_else(|| self.wrong("the name of a rule is missing"))?;
        if let Some(number) = self.names.get(name) {
            self.at += end;
            return Ok(*number);
        }
        if self.rules.len() >= RULES_MAX {
            return Err(self.wrong(&format!("too many rules: at most {RULES_MAX} are taken")));
        }
        self.at += end;
        self.names.insert(name, self.rules.len());
        self.rules.push(None);
        Ok(self.rules.len() - 1)
    }

    fn rule(&mut self) -> Result<(), String> {
        let number = self.name()?;
        self.space(false);
        self.expect("::=")?;
        self.space(true);
        let node = self.alternatives(0)?;
        if !matches!(self.peek(), None | Some('\r' | '\n')) {
            return Err(self.wrong("the end of the line is missing"));
        }
        self.space(true);
        // The last definition of a name counts.
        if let Some(rule) = self.rules.get_mut(number) {
            *rule = Some(node);
        }
        Ok(())
    }

    fn alternatives(&mut self, depth: usize) -> Result<Node, String> {
        if depth > DEPTH_MAX {
            return Err(self.wrong(&format!("brackets are too deeply nested: at most {DEPTH_MAX} deep")));
        }
        let mut all = vec![self.sequence(depth)?];
        while self.takes("|") {
            self.space(true);
            all.push(self.sequence(depth)?);
        }
        Ok(if all.len() == 1 { all.swap_remove(0) } else { Node::Alt(all) })
    }

    fn sequence(&mut self, depth: usize) -> Result<Node, String> {
        let mut all = Vec::new();
        while let Some(next) = self.peek() {
            self.nodes += 1;
            if self.nodes > NODES_MAX {
                return Err(self.wrong(&format!("too many elements: at most {NODES_MAX} are taken")));
            }
            let node = match next {
                '"' => self.literal()?,
                '[' => self.class()?,
                '.' => {
                    self.at += 1;
                    Node::Class(vec![('\0', char::MAX)])
                }
                '(' => {
                    self.at += 1;
                    self.space(true);
                    let inside = self.alternatives(depth + 1)?;
                    self.expect(")")?;
                    inside
                }
                '<' | '!' => return Err(self.wrong("tokens in a grammar are not supported")),
                c if c.is_ascii_alphanumeric() || c == '-' || c == '_' => Node::Rule(self.name()?),
                _ => break,
            };
            self.space(depth > 0);
            let node = self.repeated(node, depth)?;
            all.push(node);
        }
        Ok(if all.len() == 1 { all.swap_remove(0) } else { Node::Cat(all) })
    }

    fn repeated(&mut self, mut node: Node, depth: usize) -> Result<Node, String> {
        while let Some(next @ ('*' | '+' | '?' | '{')) = self.peek() {
            self.at += 1;
            let (min, max) = match next {
                '*' => (0, None),
                '+' => (1, None),
                '?' => (0, Some(1)),
                _ => self.counts()?,
            };
            self.nodes += 1;
            node = match max {
                Some(0) => Node::Cat(Vec::new()),
                _ => Node::Repeat(Box::new(node), min, max),
            };
            self.space(depth > 0);
        }
        Ok(node)
    }

    /// The counts of a repetition, behind its `{`.
    fn counts(&mut self) -> Result<(u32, Option<u32>), String> {
        self.space(true);
        let min = self.number()?;
        self.space(true);
        let max = if self.takes(",") {
            self.space(true);
            if self.peek() == Some('}') { None } else { Some(self.number()?) }
        } else {
            Some(min)
        };
        self.space(true);
        self.expect("}")?;
        if max.is_some_and(|max| max < min) {
            return Err(self.wrong("a repetition ends before it begins"));
        }
        Ok((min, max))
    }

    fn number(&mut self) -> Result<u32, String> {
        let end = self.rest().find(|c: char| !c.is_ascii_digit()).unwrap_or(self.rest().len());
        let digits = self.rest().get(..end).unwrap_or_default();
        match digits.parse() {
            Ok(number) if number <= REPETITIONS_MAX => {
                self.at += end;
                Ok(number)
            }
            Ok(_) => Err(self.wrong(&format!("too many repetitions: at most {REPETITIONS_MAX} are taken"))),
            Err(_) => Err(self.wrong("a number is missing")),
        }
    }

    fn literal(&mut self) -> Result<Node, String> {
        self.at += 1;
        let mut all = Vec::new();
        while !self.takes("\"") {
            let c = self.character()?;
            all.push(Node::Class(vec![(c, c)]));
            self.nodes += 1;
        }
        Ok(if all.len() == 1 { all.swap_remove(0) } else { Node::Cat(all) })
    }

    fn class(&mut self) -> Result<Node, String> {
        self.at += 1;
        let negated = self.takes("^");
        let mut ranges = Vec::new();
        while !self.takes("]") {
            let first = self.character()?;
            let dash = self.rest().starts_with('-') && !self.rest().starts_with("-]");
            let last = if dash {
                self.at += 1;
                self.character()?
            } else {
                first
            };
            if last < first {
                return Err(self.wrong("a range of characters ends before it begins"));
            }
            self.nodes += 1;
            ranges.push((first, last));
        }
        let ranges = union(ranges);
        Ok(Node::Class(if negated { complement(&ranges) } else { ranges }))
    }

    /// A character of a literal or a class, also an escaped one.
    fn character(&mut self) -> Result<char, String> {
        let missing = self.wrong("the end of a text or of a set of characters is missing");
        let first = self.next().ok_or(&missing)?;
        if first != '\\' {
            return Ok(first);
        }
        let escaped = self.next().ok_or(&missing)?;
        let digits = match escaped {
            'x' => 2,
            'u' => 4,
            'U' => 8,
            't' => return Ok('\t'),
            'r' => return Ok('\r'),
            'n' => return Ok('\n'),
            '\\' | '"' | '[' | ']' | '-' | '^' | '/' => return Ok(escaped),
            _ => return Err(self.wrong(&format!("the escape `\\{escaped}` is unknown"))),
        };
        let hex = self.rest().get(..digits).filter(|hex| hex.bytes().all(|b| b.is_ascii_hexdigit()));
        let value = hex.and_then(|hex| u32::from_str_radix(hex, 16).ok()).and_then(char::from_u32);
        let value = value
            .ok_or_else(|| self.wrong(&format!("`\\{escaped}` needs {digits} digits of a character")))?;
        self.at += digits;
        Ok(value)
    }
}

/// Sorted ranges that do not touch each other.
fn union(mut ranges: Vec<(char, char)>) -> Vec<(char, char)> {
    ranges.sort_unstable();
    let mut all: Vec<(char, char)> = Vec::with_capacity(ranges.len());
    for (first, last) in ranges {
        match all.last_mut() {
            Some(before) if first <= after(before.1).unwrap_or(char::MAX) => before.1 = before.1.max(last),
            _ => all.push((first, last)),
        }
    }
    all
}

fn complement(ranges: &[(char, char)]) -> Vec<(char, char)> {
    let (mut next, mut all) = (Some('\0'), Vec::with_capacity(ranges.len() + 1));
    for (first, last) in ranges {
        if let (Some(from), Some(to)) = (next, before(*first))
            && from <= to
        {
            all.push((from, to));
        }
        next = after(*last);
    }
    all.extend(next.map(|from| (from, char::MAX)));
    all
}

fn after(c: char) -> Option<char> {
    ((c as u32 + 1)..=char::MAX as u32).find_map(char::from_u32)
}

fn before(c: char) -> Option<char> {
    (0..c as u32).rev().find_map(char::from_u32)
}
