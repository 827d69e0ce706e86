//! The prefixes of one user and model whose keys and values are there: a tree of token ids.
//!
//! A node is one page: the tokens of a whole page, or the first tokens of one as a leaf. The path from the root spells a
//! prefix. No child's tokens begin with those of another child of the same node. So the child that shares most tokens
//! with a prefix is next to it in the order of tokens.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::sync::Arc;

use crate::backend::KV_PAGE_TOKENS;

/// Number of a node.
pub(in crate::scheduler) type NodeId = u32;

/// The node above all others; it has no page.
pub(in crate::scheduler) const ROOT: NodeId = 0;

#[derive(Debug)]
struct Node {
    page: u32,
    /// Tokens whose keys and values the page holds, from its first one on.
    tokens: Arc<[u32]>,
    parent: NodeId,
    children: BTreeMap<Arc<[u32]>, NodeId>,
    /// Time of the last use.
    used: u64,
    /// The recurrent state after the node's tokens, and the time of its last use.
    state: Option<(u32, u64)>,
}

/// The last state in the path of some tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FoundState {
    pub state: u32,
    /// Tokens before it.
    pub tokens: usize,
    /// Whole pages before it, and the node of the last one.
    pub whole: usize,
    pub at: NodeId,
    /// The page with the tokens after these.
    pub rest: Option<u32>,
}

/// The longest known prefix of some tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Found {
    /// Whole pages in order of position.
    pub pages: Vec<u32>,
    /// Node of the last whole page.
    pub at: NodeId,
    /// The page of which the first tokens go on, if any do.
    pub rest: Option<Rest>,
}

/// A page of which the first tokens match.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rest {
    pub page: u32,
    /// How many match; at least 1, and fewer than a page's.
    pub tokens: u32,
    /// The tree knows of no more tokens in that page.
    pub all: bool,
}

/// The end of a page that [`Tree::insert`] was offered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Inserted {
    /// The tree took it, in place of a page with fewer of its tokens.
    Taken { at: NodeId, instead_of: Option<u32> },
    /// The tree has a page with these tokens, and perhaps more.
    There { at: NodeId, page: u32 },
}

/// A page that [`Tree::latest`] lists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::scheduler) struct Known {
    /// Index of the page that it continues; `None` at the start of prompts.
    pub after: Option<u32>,
    pub tokens: Arc<[u32]>,
    pub page: u32,
    /// The recurrent state after its tokens.
    pub state: Option<u32>,
}

/// Pages that were listed, and the place of each node among them.
#[derive(Debug, Default)]
struct List {
    places: BTreeMap<NodeId, u32>,
    known: Vec<Known>,
}

/// A child's tokens and its number.
type Child<'a> = (&'a [u32], NodeId);

#[derive(Debug)]
pub(super) struct Tree {
    nodes: Vec<Node>,
    free: Vec<NodeId>,
    /// Nodes without children by their last use.
    leaves: BTreeSet<(u64, NodeId)>,
    /// Time of the last growth.
    pub grown: u64,
    /// Nodes with a state by its last use.
    states: BTreeSet<(u64, NodeId)>,
    /// States of nodes that went.
    gone: Vec<u32>,
}

impl Tree {
    pub fn new() -> Self {
        let (parent, children, used) = (ROOT, BTreeMap::new(), 0);
        let root = Node { page: u32::MAX, tokens: Arc::default(), parent, children, used, state: None };
        let (leaves, states) = Default::default();
        Self { nodes: vec![root], free: Vec::new(), leaves, grown: 0, states, gone: Vec::new() }
    }

    pub fn is_empty(&self) -> bool {
        self.leaves.is_empty()
    }

    fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id as usize]
    }

    /// Finds the longest known prefix of `tokens`, which counts as a use at `now`.
    pub fn find(&mut self, tokens: &[u32], now: u64) -> Found {
        let mut found = Found { pages: Vec::new(), at: ROOT, rest: None };
        let mut pages = tokens.chunks(KV_PAGE_TOKENS);
        for page in pages.by_ref() {
            match self.node(found.at).children.get(page) {
                Some(&child) if page.len() == KV_PAGE_TOKENS => {
                    self.touch(child, now);
                    found.pages.push(self.node(child).page);
                    found.at = child;
                }
                _ => {
                    found.rest = self.rest(found.at, page, now);
                    break;
                }
            }
        }
        found
    }

    /// The node of the last of the whole pages of `tokens`, if all are known. No use.
    pub fn node_after(&self, tokens: &[u32]) -> Option<NodeId> {
        let pages = tokens.chunks_exact(KV_PAGE_TOKENS);
        let whole = pages.remainder().is_empty();
        let mut pages = pages.filter(|_| whole);
        let known = |at: NodeId, page| self.node(at).children.get(page).copied();
        whole.then(|| pages.try_fold(ROOT, known)).flatten()
    }

    /// Whole pages of the longest known prefix of `tokens`, in order of position. No use.
    pub fn path(&self, tokens: &[u32]) -> impl Iterator<Item = u32> {
        let mut at = ROOT;
        tokens.chunks_exact(KV_PAGE_TOKENS).map_while(move |page| {
            at = *self.node(at).children.get(page)?;
            Some(self.node(at).page)
        })
    }

    /// The child whose tokens share the most with `page`, if any.
    fn rest(&mut self, at: NodeId, page: &[u32], now: u64) -> Option<Rest> {
        let [before, after] = self.neighbours(at, page);
        let shared = |(tokens, child): Child<'_>| {
            let shared = tokens.iter().zip(page).take_while(|(a, b)| a == b).count();
            (shared, shared == tokens.len(), child)
        };
        let most = [before, after].into_iter().flatten().map(shared).max_by_key(|(shared, ..)| *shared);
        let (shared, all, child) = most.filter(|(shared, ..)| *shared > 0)?;
        self.touch(child, now);
        Some(Rest { page: self.node(child).page, tokens: shared as u32, all })
    }

    /// The children before and after `page` in the order of tokens; an equal one counts as after it.
    fn neighbours(&self, at: NodeId, page: &[u32]) -> [Option<Child<'_>>; 2] {
        let children = &self.node(at).children;
        let before = children.range::<[u32], _>((Bound::Unbounded, Bound::Excluded(page))).next_back();
        let after = children.range::<[u32], _>((Bound::Included(page), Bound::Unbounded)).next();
        [before, after].map(|child| child.map(|(tokens, id)| (&**tokens, *id)))
    }

    fn touch(&mut self, id: NodeId, now: u64) {
        let before = std::mem::replace(&mut self.nodes[id as usize].used, now);
        if self.leaves.remove(&(before, id)) {
            self.leaves.insert((now, id));
        }
    }

    /// Offers a page that continues `at` and holds `tokens`: at least one, at most a page's.
    pub fn insert(&mut self, at: NodeId, tokens: &[u32], page: u32, now: u64) -> Inserted {
        let [before, after] = self.neighbours(at, tokens);
        let before = before.filter(|(known, _)| tokens.starts_with(known)).map(|(_, id)| id);
        if let Some((_, id)) = after.filter(|(known, _)| known.starts_with(tokens)) {
            self.touch(id, now);
            return Inserted::There { at: id, page: self.node(id).page };
        }
        self.grown = now;
        let instead_of = before.map(|id| self.remove(id));
        let tokens: Arc<[u32]> = tokens.into();
        let node = Node {
            page,
            tokens: Arc::clone(&tokens),
            parent: at,
            children: BTreeMap::new(),
            used: now,
            state: None,
        };
        let id = match self.free.pop() {
            Some(id) => {
                self.nodes[id as usize] = node;
                id
            }
            None => {
                self.nodes.push(node);
                self.nodes.len() as NodeId - 1
            }
        };
        let parent = &mut self.nodes[at as usize];
        parent.children.insert(tokens, id);
        let used = parent.used;
        self.leaves.remove(&(used, at));
        self.leaves.insert((now, id));
        Inserted::Taken { at: id, instead_of }
    }

    /// At most so many pages, those used last before others, each with its tokens after the one that it continues.
    pub fn latest(&self, most: usize) -> Vec<Known> {
        let mut list = List::default();
        for (_, leaf) in self.leaves.iter().rev() {
            let mut path = self.path_to(*leaf, &list);
            path.truncate(most - list.known.len());
            self.add_path(path, &mut list);
            if list.known.len() >= most {
                break;
            }
        }
        list.known
    }

    /// As [`Tree::latest`], for paths to states alone. Each state counts as so many pages.
    pub fn latest_states(&self, most: usize, of_state: usize) -> Vec<Known> {
        let (mut list, mut count) = (List::default(), 0usize);
        for (_, id) in self.states.iter().rev() {
            let path = self.path_to(*id, &list);
            count = count.saturating_add(path.len()).saturating_add(of_state);
            if count > most {
                break;
            }
            self.add_path(path, &mut list);
            if let Some(at) = list.places.get(id) {
                list.known[*at as usize].state = self.state_of(*id);
            }
        }
        list.known
    }

    /// Nodes up to this one that are not listed yet, in order of position.
    fn path_to(&self, id: NodeId, list: &List) -> Vec<NodeId> {
        let (mut path, mut at) = (Vec::new(), id);
        while at != ROOT && !list.places.contains_key(&at) {
            path.push(at);
            at = self.node(at).parent;
        }
        path.reverse();
        path
    }

    fn add_path(&self, path: Vec<NodeId>, List { places, known }: &mut List) {
        for id in path {
            let node = self.node(id);
            places.insert(id, known.len() as u32);
            let (after, tokens) = (places.get(&node.parent).copied(), Arc::clone(&node.tokens));
            known.push(Known { after, tokens, page: node.page, state: None });
        }
    }

    /// The leaf used longest ago for whose page `may_go` holds, and the time of its use. Leaves of live sequences are
    /// looked at in vain: each has at most two, used lately.
    pub fn oldest(&self, may_go: impl Fn(u32) -> bool) -> Option<(u64, NodeId)> {
        self.leaves.iter().copied().find(|(_, id)| may_go(self.node(*id).page))
    }

    /// The tokens up to a node's end.
    pub fn prefix(&self, id: NodeId) -> Vec<u32> {
        let path = self.path_to(id, &List::default());
        path.into_iter().flat_map(|id| self.node(id).tokens.iter().copied()).collect()
    }

    /// The node that ends with `tokens`. No use.
    pub fn node_of(&self, tokens: &[u32]) -> Option<NodeId> {
        let (stem, rest) = tokens.split_at(tokens.len() - tokens.len() % KV_PAGE_TOKENS);
        let at = self.node_after(stem)?;
        let node = if rest.is_empty() { Some(at) } else { self.node(at).children.get(rest).copied() };
        node.filter(|node| *node != ROOT)
    }

    /// The state after a node's tokens, if it has one.
    pub fn state_of(&self, id: NodeId) -> Option<u32> {
        self.node(id).state.map(|(state, _)| state)
    }

    /// Finds the last state in the path of `tokens`, which counts as a use of it at `now`.
    pub fn find_state(&mut self, tokens: &[u32], now: u64) -> Option<FoundState> {
        let (mut at, mut whole, mut last) = (ROOT, 0, None);
        for page in tokens.chunks(KV_PAGE_TOKENS) {
            let child = self.node(at).children.get(page).copied().filter(|_| page.len() == KV_PAGE_TOKENS);
            let Some(child) = child else {
                let [before, after] = self.neighbours(at, page);
                let begins = |(known, _): &Child<'_>| page.starts_with(known);
                let leaf = [before, after].into_iter().flatten().find(begins).map(|(_, id)| id);
                last = leaf.filter(|id| self.node(*id).state.is_some()).map(|id| (id, whole, at)).or(last);
                break;
            };
            whole += 1;
            at = child;
            if self.node(child).state.is_some() {
                last = Some((child, whole, child));
            }
        }
        let (id, whole, at) = last?;
        let node = &mut self.nodes[id as usize];
        let (state, used) =
            node.state.as_mut().map(|(state, used)| (*state, std::mem::replace(used, now)))?;
        self.states.remove(&(used, id));
        self.states.insert((now, id));
        let node = self.node(id);
        let rest = (node.tokens.len() < KV_PAGE_TOKENS).then_some(node);
        let tokens = whole * KV_PAGE_TOKENS + rest.map_or(0, |node| node.tokens.len());
        Some(FoundState { state, tokens, whole, at, rest: rest.map(|node| node.page) })
    }

    /// Keeps the state after a node's tokens. False if it has one.
    pub fn set_state(&mut self, id: NodeId, state: u32, now: u64) -> bool {
        let node = &mut self.nodes[id as usize];
        if id == ROOT || node.state.is_some() {
            return false;
        }
        node.state = Some((state, now));
        self.grown = now;
        self.states.insert((now, id));
        true
    }

    /// Number of tokens of a node.
    pub fn len_of(&self, id: NodeId) -> usize {
        self.node(id).tokens.len()
    }

    /// The node whose state was used longest ago, of those for whose state `may_go` holds, and the time of that use.
    pub fn oldest_state(&self, may_go: impl Fn(u32) -> bool) -> Option<(u64, NodeId)> {
        self.states.iter().copied().find(|(_, id)| self.state_of(*id).is_some_and(&may_go))
    }

    /// Removes a node's state; [`Tree::take_gone`] lists it.
    pub fn remove_state(&mut self, id: NodeId) {
        if let Some((state, used)) = self.nodes[id as usize].state.take() {
            self.states.remove(&(used, id));
            self.gone.push(state);
        }
    }

    /// Takes the list of states whose nodes went, or that were removed.
    pub fn take_gone(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.gone)
    }

    /// Removes a leaf and returns its page. Its state goes too.
    pub fn remove(&mut self, leaf: NodeId) -> u32 {
        self.remove_state(leaf);
        let (used, parent, page) = (self.node(leaf).used, self.node(leaf).parent, self.node(leaf).page);
        debug_assert!(self.node(leaf).children.is_empty() && leaf != ROOT, "only leaves are removed");
        self.leaves.remove(&(used, leaf));
        let tokens = std::mem::take(&mut self.nodes[leaf as usize].tokens);
        let above = &mut self.nodes[parent as usize];
        above.children.remove(&tokens);
        above.used = above.used.max(used); // a use of a page is one of those before it
        if above.children.is_empty() && parent != ROOT {
            self.leaves.insert((above.used, parent));
        }
        self.free.push(leaf);
        page
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Tree {
        /// Pages of all nodes.
        pub fn pages(&self) -> Vec<u32> {
            let live = self.nodes.iter().zip(0..).filter(|(_, id)| *id != ROOT && !self.free.contains(id));
            live.map(|(node, _)| node.page).collect()
        }

        /// All states, each with the tokens before it.
        pub fn states(&self) -> Vec<(u32, Vec<u32>)> {
            let live = (0..).zip(&self.nodes).filter(|(id, _)| !self.free.contains(id));
            let states = live.filter_map(|(id, node)| Some((id, node.state?)));
            let states: Vec<_> = states.collect();
            let listed: BTreeSet<_> = states.iter().map(|(id, (_, used))| (*used, *id)).collect();
            assert_eq!(listed, self.states);
            states.into_iter().map(|(id, (state, _))| (state, self.prefix(id))).collect()
        }

        /// Checks the order of the tree, and each page with its tokens.
        pub fn check(&self, page: impl Fn(u32, &[u32])) {
            let mut leaves = BTreeSet::new();
            for (node, id) in self.nodes.iter().zip(0..).filter(|(_, id)| !self.free.contains(id)) {
                let keys: Vec<&Arc<[u32]>> = node.children.keys().collect();
                assert!(keys.windows(2).all(|two| !two[1].starts_with(two[0])), "one begins with another");
                for (tokens, child) in &node.children {
                    let child = self.node(*child);
                    assert!(child.parent == id && child.tokens == *tokens && !tokens.is_empty());
                    assert!(tokens.len() == KV_PAGE_TOKENS || child.children.is_empty());
                    page(child.page, tokens);
                }
                if id != ROOT && node.children.is_empty() {
                    leaves.insert((node.used, id));
                }
            }
            assert_eq!(leaves, self.leaves);
        }
    }

    const PAGE: usize = KV_PAGE_TOKENS;

    fn tokens(count: usize, from: u32) -> Vec<u32> {
        (from..).take(count).collect()
    }

    #[test]
    fn the_longest_prefix_is_found_to_the_token() {
        let mut tree = Tree::new();
        let long = tokens(PAGE + 20, 0);
        let Inserted::Taken { at, instead_of: None } = tree.insert(ROOT, &long[..PAGE], 7, 1) else {
            panic!("an empty tree has nothing instead")
        };
        tree.insert(at, &long[PAGE..], 8, 2);
        let found = |tree: &mut Tree, tokens: &[u32]| {
            let found = tree.find(tokens, 3);
            (found.pages, found.rest.map(|rest| (rest.page, rest.tokens, rest.all)))
        };
        assert_eq!(found(&mut tree, &long), (vec![7], Some((8, 20, true))));
        assert_eq!(found(&mut tree, &long[..PAGE + 5]), (vec![7], Some((8, 5, false))));
        assert_eq!(found(&mut tree, &long[..PAGE]), (vec![7], None));
        assert_eq!(found(&mut tree, &long[..PAGE - 1]), (vec![], Some((7, PAGE as u32 - 1, false))));
        let mut other = long.clone();
        other[3] = 99;
        assert_eq!(found(&mut tree, &other), (vec![], Some((7, 3, false))));
        other[0] = 99;
        assert_eq!(found(&mut tree, &other), (vec![], None));
        assert_eq!(found(&mut tree, &[]), (vec![], None));
    }

    #[test]
    fn of_many_children_the_one_that_shares_most_is_found() {
        let mut tree = Tree::new();
        // All words of three letters out of four, as starts of pages.
        let words: Vec<Vec<u32>> = (0..64u32).map(|i| vec![i / 16, i / 4 % 4, i % 4, 1000 + i]).collect();
        for (i, word) in words.iter().enumerate() {
            tree.insert(ROOT, word, i as u32, 1);
        }
        for (i, word) in words.iter().enumerate() {
            for shared in 0..4 {
                let mut asked = word.clone();
                asked[shared..].fill(7);
                let rest = tree.find(&asked, 2).rest;
                assert_eq!(rest.map_or(0, |rest| rest.tokens), shared as u32, "{word:?}");
                let of = rest.map_or(i, |rest| rest.page as usize);
                assert_eq!(words[of][..shared], word[..shared]);
            }
        }
    }

    #[test]
    fn a_page_with_more_tokens_takes_the_place_of_one_with_fewer() {
        let mut tree = Tree::new();
        let all = tokens(PAGE, 0);
        tree.insert(ROOT, &all[..5], 1, 1);
        assert_eq!(tree.insert(ROOT, &all[..9], 2, 2), Inserted::Taken { at: 1, instead_of: Some(1) });
        assert!(matches!(tree.insert(ROOT, &all[..7], 3, 3), Inserted::There { page: 2, .. }));
        let mut other = all[..9].to_vec();
        other[8] = 77;
        assert!(matches!(tree.insert(ROOT, &other, 4, 4), Inserted::Taken { instead_of: None, .. }));
        assert_eq!(tree.insert(ROOT, &all, 5, 5), Inserted::Taken { at: 1, instead_of: Some(2) });
        assert!(matches!(tree.insert(ROOT, &all, 6, 6), Inserted::There { page: 5, .. }));
    }

    #[test]
    fn leaves_go_first_and_the_longest_unused_before_others() {
        let mut tree = Tree::new();
        let at = |inserted| match inserted {
            Inserted::Taken { at, .. } => at,
            Inserted::There { .. } => panic!("taken"),
        };
        let (a, b, c) = (tokens(PAGE, 0), tokens(PAGE, 100), tokens(PAGE, 200));
        let root_a = at(tree.insert(ROOT, &a, 0, 1));
        let below_a = at(tree.insert(root_a, &b, 1, 2));
        let root_c = at(tree.insert(ROOT, &c, 2, 3));
        assert_eq!(tree.oldest(|_| true), Some((2, below_a)));
        assert_eq!(tree.oldest(|page| page == 2), Some((3, root_c)));
        tree.find(&[&a[..], &b[..]].concat(), 4);
        assert_eq!(tree.oldest(|_| true), Some((3, root_c)));
        assert_eq!((tree.remove(root_c), tree.remove(below_a)), (2, 1));
        assert_eq!(tree.oldest(|_| true), Some((4, root_a)));
        assert_eq!(tree.remove(root_a), 0);
        assert!(tree.is_empty() && tree.oldest(|_| true).is_none());
        assert_eq!(at(tree.insert(ROOT, &a, 9, 5)), root_a, "numbers are used again");
    }
}
