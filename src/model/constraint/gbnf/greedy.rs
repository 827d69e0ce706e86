//! Whether the longest match reads a grammar's lexemes right.
//!
//! The compiler's lexer takes the longest match of all lexemes that may stand at a place. A grammar knows no lexemes: any division of
//! a text counts. Both allow the same texts if no byte that may follow a complete lexeme could also lengthen it. Neither may that
//! byte lengthen the text to one of another lexeme. Characters are told apart by their first bytes.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use super::read::Node;

/// Most lexemes, most states of all their automata, and most pairs of steps that are looked at: some 100 ms. Beyond them, the answer
/// is no.
const LEXEMES_MAX: usize = 200;
const STATES_MAX: usize = 20_000;
const PAIRS_MAX: usize = 10_000_000;

/// The structure above the lexemes.
#[derive(Debug)]
pub(super) enum Above {
    Lexeme(usize),
    Rule(usize),
    Cat(Vec<Above>),
    Alt(Vec<Above>),
    Repeat(Box<Above>, u32, Option<u32>),
}

/// First bytes of characters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Bytes([u64; 4]);

impl Bytes {
    fn add_range(&mut self, (first, last): (char, char)) {
        for byte in lead(first)..=lead(last) {
            self.0[usize::from(byte) / 64] |= 1 << (byte % 64);
        }
    }

    fn meets(&self, other: &Self) -> bool {
        self.0.iter().zip(&other.0).any(|(a, b)| a & b != 0)
    }

    fn add(&mut self, other: &Self) {
        self.0.iter_mut().zip(&other.0).for_each(|(a, b)| *a |= b);
    }
}

fn lead(c: char) -> u8 {
    let mut bytes = [0; 4];
    c.encode_utf8(&mut bytes);
    bytes[0]
}

/// Whether the longest match is right. `lexemes` are regular, with `rules` for the rules that they name; `parts` are the rules
/// above them.
pub(super) fn is_right(lexemes: &[Node], rules: &[Node], parts: &BTreeMap<usize, Above>) -> bool {
    if lexemes.len() > LEXEMES_MAX {
        return false;
    }
    let mut left = STATES_MAX;
    let machine = |node: &Node| {
        let mut machine = Machine::default();
        let first = machine.state();
        machine.last = machine.add(node, rules, first, &mut left)?;
        Some(machine)
    };
    let Some(machines) = lexemes.iter().map(machine).collect::<Option<Vec<_>>>() else { return false };
    let firsts: Vec<Bytes> = machines.iter().map(Machine::first).collect();
    let mut pairs = PAIRS_MAX;
    follows(lexemes.len(), parts).iter().zip(&machines).all(|(follow, machine)| {
        let mut next = Bytes::default();
        follow.iter().for_each(|lexeme| next.add(&firsts[*lexeme]));
        machines
            .iter()
            .all(|other| machine.lengthened(other, &mut pairs).is_some_and(|longer| !longer.meets(&next)))
    })
}

/// Over one character of a class, or over none, to a state.
type Step = (Option<Vec<(char, char)>>, usize);

/// A nondeterministic automaton over characters. State 0 is the first.
#[derive(Default)]
struct Machine {
    /// The steps of each state.
    steps: Vec<Vec<Step>>,
    last: usize,
}

impl Machine {
    fn state(&mut self) -> usize {
        self.steps.push(Vec::new());
        self.steps.len() - 1
    }

    /// Adds a node behind the state `from`; returns the state behind it. Each node takes one of `left`; `None` without one.
    fn add(&mut self, node: &Node, rules: &[Node], from: usize, left: &mut usize) -> Option<usize> {
        *left = left.checked_sub(1)?;
        match node {
            Node::Class(ranges) => {
                let to = self.state();
                self.steps[from].push((Some(ranges.clone()), to));
                Some(to)
            }
            Node::Rule(number) => self.add(rules.get(*number)?, rules, from, left),
            Node::Cat(all) => all.iter().try_fold(from, |at, node| self.add(node, rules, at, left)),
            Node::Alt(all) => {
                let to = self.state();
                for node in all {
                    let begin = self.state();
                    self.steps[from].push((None, begin));
                    let end = self.add(node, rules, begin, left)?;
                    self.steps[end].push((None, to));
                }
                Some(to)
            }
            Node::Repeat(node, min, max) => {
                let at = (0..*min).try_fold(from, |at, _| self.add(node, rules, at, left))?;
                let to = self.state();
                let Some(max) = max else {
                    // A state of its own, so that the loop is not entered from elsewhere.
                    let begin = self.state();
                    self.steps[at].push((None, begin));
                    let end = self.add(node, rules, begin, left)?;
                    self.steps[end].push((None, begin));
                    self.steps[begin].push((None, to));
                    return Some(to);
                };
                let mut at = at;
                for _ in *min..*max {
                    self.steps[at].push((None, to));
                    at = self.add(node, rules, at, left)?;
                }
                self.steps[at].push((None, to));
                Some(to)
            }
        }
    }

    fn first(&self) -> Bytes {
        let mut bytes = Bytes::default();
        let (mut seen, mut open) = (BTreeSet::from([0]), vec![0]);
        while let Some(state) = open.pop() {
            for (class, to) in &self.steps[state] {
                match class {
                    Some(ranges) => ranges.iter().for_each(|range| bytes.add_range(*range)),
                    None if seen.insert(*to) => open.push(*to),
                    None => {}
                }
            }
        }
        bytes
    }

    /// Finds what lengthens a text of this lexeme to a longer beginning of one of the other. `None` when the pairs run out.
    fn lengthened(&self, other: &Self, pairs: &mut usize) -> Option<Bytes> {
        let mut bytes = Bytes::default();
        let (mut seen, mut open) = (HashSet::from([(0, 0)]), vec![(0, 0)]);
        while let Some((mine, its)) = open.pop() {
            *pairs = pairs.checked_sub(1 + self.steps[mine].len() * other.steps[its].len())?;
            let mut to = Vec::new();
            for (class, next) in &self.steps[mine] {
                match class {
                    None => to.push((*next, its)),
                    Some(ranges) => {
                        let both = other.steps[its]
                            .iter()
                            .filter(|(class, _)| class.as_ref().is_some_and(|other| overlap(ranges, other)));
                        to.extend(both.map(|(_, end)| (*next, *end)));
                    }
                }
            }
            for (class, next) in &other.steps[its] {
                match class {
                    None => to.push((mine, *next)),
                    Some(ranges) if mine == self.last => {
                        ranges.iter().for_each(|range| bytes.add_range(*range));
                    }
                    Some(_) => {}
                }
            }
            open.extend(to.into_iter().filter(|pair| seen.insert(*pair)));
        }
        Some(bytes)
    }
}

fn overlap(a: &[(char, char)], b: &[(char, char)]) -> bool {
    let (mut a, mut b) = (a.iter().peekable(), b.iter().peekable());
    while let (Some(x), Some(y)) = (a.peek(), b.peek()) {
        if x.0 <= y.1 && y.0 <= x.1 {
            return true;
        }
        if x.1 < y.1 {
            a.next()
        } else {
            b.next()
        };
    }
    false
}

/// For each lexeme the lexemes that may follow it.
fn follows(lexemes: usize, parts: &BTreeMap<usize, Above>) -> Vec<BTreeSet<usize>> {
    let mut sets = Sets::default();
    loop {
        let before = sets.size();
        for (rule, part) in parts {
            let (empty, first) = sets.first_of(part);
            if empty {
                sets.empty.insert(*rule);
            }
            sets.first.entry(*rule).or_default().extend(first);
        }
        if sets.size() == before {
            break;
        }
    }
    let mut after = vec![BTreeSet::new(); lexemes];
    let mut after_rules: BTreeMap<usize, BTreeSet<usize>> = BTreeMap::new();
    loop {
        let size = |after: &[BTreeSet<usize>], rules: &BTreeMap<usize, BTreeSet<usize>>| {
            after.iter().chain(rules.values()).map(BTreeSet::len).sum::<usize>()
        };
        let before = size(&after, &after_rules);
        for (rule, part) in parts {
            let follow = after_rules.get(rule).cloned().unwrap_or_default();
            sets.follow(part, &follow, &mut after, &mut after_rules);
        }
        if size(&after, &after_rules) == before {
            return after;
        }
    }
}

/// The rules that may be empty, and the lexemes with which rules begin.
#[derive(Default)]
struct Sets {
    empty: BTreeSet<usize>,
    first: BTreeMap<usize, BTreeSet<usize>>,
}

impl Sets {
    fn size(&self) -> usize {
        self.empty.len() + self.first.values().map(BTreeSet::len).sum::<usize>()
    }

    fn first_of(&self, part: &Above) -> (bool, BTreeSet<usize>) {
        match part {
            Above::Lexeme(number) => (false, BTreeSet::from([*number])),
            Above::Rule(number) => {
                (self.empty.contains(number), self.first.get(number).cloned().unwrap_or_default())
            }
            Above::Cat(all) => {
                let mut first = BTreeSet::new();
                for part in all {
                    let (empty, of) = self.first_of(part);
                    first.extend(of);
                    if !empty {
                        return (false, first);
                    }
                }
                (true, first)
            }
            Above::Alt(all) => all.iter().map(|part| self.first_of(part)).fold(
                (false, BTreeSet::new()),
                |(empty, mut first), (other, of)| {
                    first.extend(of);
                    (empty || other, first)
                },
            ),
            Above::Repeat(part, min, _) => {
                let (empty, first) = self.first_of(part);
                (empty || *min == 0, first)
            }
        }
    }

    fn follow(
        &self,
        part: &Above,
        follow: &BTreeSet<usize>,
        after: &mut [BTreeSet<usize>],
        after_rules: &mut BTreeMap<usize, BTreeSet<usize>>,
    ) {
        match part {
            Above::Lexeme(number) => after[*number].extend(follow),
            Above::Rule(number) => after_rules.entry(*number).or_default().extend(follow),
            Above::Cat(all) => {
                let mut follow = follow.clone();
                for part in all.iter().rev() {
                    self.follow(part, &follow, after, after_rules);
                    let (empty, first) = self.first_of(part);
                    if !empty {
                        follow.clear();
                    }
                    follow.extend(first);
                }
            }
            Above::Alt(all) => all.iter().for_each(|part| self.follow(part, follow, after, after_rules)),
            Above::Repeat(part, _, max) => {
                let mut follow = follow.clone();
                if *max != Some(1) {
                    follow.extend(self.first_of(part).1);
                }
                self.follow(part, &follow, after, after_rules);
            }
        }
    }
}
