//! Decides which cached pages and states go, and drops them.
//!
//! Pages and states of a tree go by their last use: neither is of use without the other. If all states went before the first
//! page, pages whose states are gone would fill the cache one day. Each request leaves a state, which may be as large as the pages of a
//! thousand tokens. So those that only trees have get half of the budget: they would take all of it.

use super::pool::{Left, Pool};
use super::tree::{NodeId, Tree};
use super::{KV_PAGE_TOKENS, Kv, TreeKey, discharge};
use crate::model::ModelId;

/// A page or state that a tree has dropped. Its content is there until something else is written to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::scheduler) struct Evicted {
    pub model: ModelId,
    /// The user of the tree; `None` for that of all users.
    pub uid: Option<u32>,
    pub place: Place,
    pub bytes: u64,
    /// The prefix that ends there.
    pub tokens: Vec<u32>,
}

/// A page or a recurrent state, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::scheduler) enum Place {
    Page(u32),
    State(u32),
}

/// One thing that a tree drops.
#[derive(Clone, Copy, Debug)]
enum Oldest {
    /// A recurrent state of this node.
    State(NodeId),
    /// This leaf.
    Leaf(NodeId),
}

/// States that only trees have take at most one part in so many of the budget.
const STATES_PART: u64 = 2;

/// The things that may go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    All,
    States,
}

impl Kv {
    /// Drops a cached page or state of models for which `may` holds: of the user that holds most, the longest unused. Returns
    /// its bytes.
    pub(super) fn evict(&mut self, may: &dyn Fn(ModelId) -> bool) -> Option<u64> {
        self.evict_of(What::All, may)
    }

    /// Drops cached states until they have their part of the budget at most.
    pub(super) fn bound_states(&mut self) {
        while !self.may_cache_states(0) && self.evict_of(What::States, &|_| true).is_some() {}
    }

    /// True if states of so many bytes more may be cached.
    pub(super) fn may_cache_states(&self, bytes: u64) -> bool {
        let cached = |pool: &Pool| u64::from(pool.cached()) * pool.page_bytes;
        let all = self.states.values().map(cached).fold(bytes, u64::saturating_add);
        all <= self.budget_bytes / STATES_PART
    }

    fn evict_of(&mut self, what: What, may: &dyn Fn(ModelId) -> bool) -> Option<u64> {
        let mut first: Option<(u64, std::cmp::Reverse<u64>, TreeKey, Oldest)> = None;
        for (key, tree) in self.trees.iter().filter(|(key, _)| may(key.0)) {
            let Some((used, oldest)) = self.oldest(*key, tree, what) else { continue };
            let most = key.1.map_or(0, |uid| self.charged.get(&uid).copied().unwrap_or(0));
            let place = (most, std::cmp::Reverse(used), *key, oldest);
            if first.is_none_or(|first| (first.0, first.1) < (place.0, place.1)) {
                first = Some(place);
            }
        }
        let (.., key, oldest) = first?;
        self.evicted += u64::from(matches!(oldest, Oldest::Leaf(_)));
        self.drop_one(key, oldest)
    }

    /// The thing that a tree is to drop first, and the time of its last use: a state, or a leaf with its page. Of the same time, the
    /// state goes first: the pages before it serve others.
    fn oldest(&self, key: TreeKey, tree: &Tree, what: What) -> Option<(u64, Oldest)> {
        let states = self.states.get(&key.0);
        let state = states.and_then(|pool| tree.oldest_state(|state| !pool.is_held(state)));
        let state = state.map(|(used, node)| (used, Oldest::State(node)));
        if what == What::States {
            return state;
        }
        let pool = self.pools.get(&key.0)?;
        let leaf = tree.oldest(|page| !pool.is_held(page)).map(|(used, leaf)| (used, Oldest::Leaf(leaf)));
        state.into_iter().chain(leaf).min_by_key(|(used, _)| *used)
    }

    /// Drops that. Returns its bytes.
    fn drop_one(&mut self, key: TreeKey, oldest: Oldest) -> Option<u64> {
        let before = self.used_bytes;
        match oldest {
            Oldest::State(node) => {
                self.list_state(key, node);
                self.trees.get_mut(&key)?.remove_state(node);
                self.drop_gone(key);
            }
            Oldest::Leaf(leaf) => self.forget(key, leaf),
        }
        Some(before.saturating_sub(self.used_bytes))
    }

    /// Drops the cached pages of such models that are to go first, until they have so many bytes. Returns how many they
    /// have.
    pub fn drop_first(&mut self, bytes: u64, may: &dyn Fn(ModelId) -> bool) -> u64 {
        let mut gone = 0u64;
        while gone < bytes
            && let Some(of_page) = self.evict(may)
        {
            gone = gone.saturating_add(of_page);
        }
        gone
    }

    fn forget(&mut self, key: TreeKey, leaf: NodeId) {
        self.list_state(key, leaf);
        let (Some(tree), Some(pool)) = (self.trees.get_mut(&key), self.pools.get_mut(&key.0)) else { return };
        let tokens = if self.watched { tree.prefix(leaf) } else { Vec::new() };
        let page = tree.remove(leaf);
        // To compute the tokens of a page that is not whole is as fast as to copy it, unless a state ends in it.
        let is_wanted = self.states.contains_key(&key.0) || tokens.len().is_multiple_of(KV_PAGE_TOKENS);
        if self.watched && is_wanted {
            let ((model, uid), bytes, place) = (key, pool.page_bytes, Place::Page(page));
            self.evicted_list.push(Evicted { model, uid, place, bytes, tokens });
        }
        if let Left::Free(uid) = pool.forget(page) {
            discharge(&mut self.charged, &mut self.used_bytes, uid, pool.page_bytes);
        }
        self.drop_gone(key);
        if self.trees.get(&key).is_some_and(Tree::is_empty) {
            self.trees.remove(&key);
        }
    }

    /// Lists the state of a node that is to go, if it has one that no sequence holds.
    fn list_state(&mut self, key: TreeKey, node: NodeId) {
        if !self.watched {
            return;
        }
        let (Some(tree), Some(pool)) = (self.trees.get(&key), self.states.get(&key.0)) else { return };
        let Some(state) = tree.state_of(node).filter(|state| !pool.is_held(*state)) else { return };
        let ((model, uid), tokens) = (key, tree.prefix(node));
        let (bytes, place) = (pool.page_bytes, Place::State(state));
        self.evicted_list.push(Evicted { model, uid, place, bytes, tokens });
    }

    /// Drops the cached pages of a model, or of all; those that sequences read stay. True if any went.
    pub fn drop_cached(&mut self, of: Option<ModelId>) -> bool {
        let keys: Vec<TreeKey> =
            self.trees.keys().filter(|key| of.is_none_or(|of| of == key.0)).copied().collect();
        let mut dropped = false;
        for key in keys {
            while let Some((_, oldest)) =
                self.trees.get(&key).and_then(|tree| self.oldest(key, tree, What::All))
                && self.drop_one(key, oldest).is_some()
            {
                dropped = true;
            }
        }
        dropped
    }
}
