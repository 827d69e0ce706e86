//! Decides which cached pages and states go, and drops them.

use super::pool::Left;
use super::tree::{NodeId, Tree};
use super::{EvictedPage, Kv, TreeKey, discharge};
use crate::model::ModelId;

/// One thing that a tree drops.
#[derive(Clone, Copy, Debug)]
enum Oldest {
    /// A recurrent state of this node.
    State(NodeId),
    /// This leaf.
    Leaf(NodeId),
}

impl Kv {
    /// Drops a cached page or state of models for which `may` holds: of the user that holds most, the longest unused. Returns
    /// its bytes.
    pub(super) fn evict(&mut self, may: &dyn Fn(ModelId) -> bool) -> Option<u64> {
        let mut first: Option<(u64, std::cmp::Reverse<u64>, TreeKey, bool)> = None;
        for (key, tree) in self.trees.iter().filter(|(key, _)| may(key.0)) {
            let Some((used, oldest)) = self.oldest(*key, tree) else { continue };
            let most = key.1.map_or(0, |uid| self.charged.get(&uid).copied().unwrap_or(0));
            let place = (most, std::cmp::Reverse(used), *key, matches!(oldest, Oldest::Leaf(_)));
            if first.is_none_or(|first| (first.0, first.1) < (place.0, place.1)) {
                first = Some(place);
            }
        }
        let (.., key, is_page) = first?;
        self.evicted += u64::from(is_page);
        self.drop_oldest(key)
    }

    /// The thing that a tree is to drop first, and the time of its last use: a state, or a leaf with its page.
    fn oldest(&self, key: TreeKey, tree: &Tree) -> Option<(u64, Oldest)> {
        let states = self.states.get(&key.0);
        let state = states.and_then(|pool| tree.oldest_state(|state| !pool.is_held(state)));
        if let Some((used, node)) = state {
            return Some((used, Oldest::State(node)));
        }
        let pool = self.pools.get(&key.0)?;
        tree.oldest(|page| !pool.is_held(page)).map(|(used, leaf)| (used, Oldest::Leaf(leaf)))
    }

    /// Drops that. Returns its bytes; `None` if sequences hold all that the tree has.
    fn drop_oldest(&mut self, key: TreeKey) -> Option<u64> {
        let before = self.used_bytes;
        match self.oldest(key, self.trees.get(&key)?)?.1 {
            Oldest::State(node) => {
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
        let (Some(tree), Some(pool)) = (self.trees.get_mut(&key), self.pools.get_mut(&key.0)) else { return };
        if self.watched
            && !self.states.contains_key(&key.0)
            && let Some((tokens, page)) = tree.whole_prefix(leaf)
        {
            let (model, uid) = key;
            self.evicted_pages.push(EvictedPage { model, uid, page, page_bytes: pool.page_bytes, tokens });
        }
        let page = tree.remove(leaf);
        if let Left::Free(uid) = pool.forget(page) {
            discharge(&mut self.charged, &mut self.used_bytes, uid, pool.page_bytes);
        }
        self.drop_gone(key);
        if self.trees.get(&key).is_some_and(Tree::is_empty) {
            self.trees.remove(&key);
        }
    }

    /// Drops the cached pages of a model, or of all; those that sequences read stay. True if any went.
    pub fn drop_cached(&mut self, of: Option<ModelId>) -> bool {
        let keys: Vec<TreeKey> =
            self.trees.keys().filter(|key| of.is_none_or(|of| of == key.0)).copied().collect();
        let mut dropped = false;
        for key in keys {
            while self.drop_oldest(key).is_some() {
                dropped = true;
            }
        }
        dropped
    }
}
