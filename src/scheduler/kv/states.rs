//! Recurrent states in the ledger. A sequence holds the one after its computed positions, and a spare one that its next step
//! writes. The tree keeps the state of some prefixes: with the pages before it, a later sequence goes on from there.
//!
//! A state counts its bytes as a page does. It may be as large as the pages of a thousand tokens, so a tree keeps few. They are where
//! sequences ended, and where prompts part. `eviction` says which go.

use super::{Held, Kv, Left, States, TreeKey, discharge};
use crate::backend::{KV_PAGE_TOKENS, RECURRENT_PLACES_MAX};
use crate::model::ModelId;

use super::pool::Pool;
use super::tree::NodeId;

/// Least tokens of a prefix for whose state a step ends early: the further step costs a read of the weights.
const SPLIT_LEAST: usize = 4 * KV_PAGE_TOKENS;

impl States {
    /// Counts those of a model's pool.
    pub(super) fn add(&mut self, pool: &Pool) {
        let cached = u64::from(pool.cached());
        self.used += u64::from(pool.used()) - cached;
        self.cached += cached;
        self.cached_bytes += cached * pool.page_bytes;
    }
}

impl Kv {
    /// Recurrent states of a model.
    pub fn states_of(&self, model: ModelId) -> States {
        let mut states = States::default();
        if let Some(pool) = self.states.get(&model) {
            states.add(pool);
        }
        states
    }

    /// Opens a model's pool of states, unless it is open or a state has no bytes.
    pub fn open_states(&mut self, model: ModelId, state_bytes: u64) {
        if state_bytes > 0 {
            let size = self.pool_pages(state_bytes).min(RECURRENT_PLACES_MAX);
            self.states.entry(model).or_insert_with(|| Pool::new(size, state_bytes));
        }
    }

    /// True if a model's sequences have recurrent states.
    pub fn is_recurrent(&self, model: ModelId) -> bool {
        self.states.contains_key(&model)
    }

    /// Takes a state for a sequence, as [`Kv::take`] a page.
    pub fn take_state(&mut self, model: ModelId, uid: u32) -> Option<u32> {
        let bytes = self.states.get(&model)?.page_bytes;
        self.make_room(bytes)?;
        let state = self.states.get_mut(&model)?.take(uid)?;
        self.charge(uid, bytes);
        Some(state)
    }

    /// A sequence holds a state no more.
    pub fn drop_state(&mut self, model: ModelId, uid: u32, state: u32) {
        let Some(pool) = self.states.get_mut(&model) else { return };
        if let Left::Free(uid) = pool.drop(state, uid) {
            discharge(&mut self.charged, &mut self.used_bytes, uid, pool.page_bytes);
        }
    }

    /// A step wrote a sequence's spare state: that one counts from now on.
    pub fn advance_state(&mut self, model: ModelId, uid: u32, held: &mut Held) {
        let Some(pool) = self.states.get(&model) else { return };
        let before = std::mem::replace(&mut held.state, held.spare.take());
        match before {
            Some(before) if pool.is_alone(before) => held.spare = Some(before),
            Some(before) => {
                self.drop_state(model, uid, before);
                self.bound_states();
            }
            None => {}
        }
    }

    /// As [`Kv::attach`], for a model with recurrent states: a prefix is known up to the last state in its path.
    pub(super) fn attach_state(&mut self, key: TreeKey, uid: u32, tokens: &[u32], held: &mut Held) -> u32 {
        let model = key.0;
        let pools = (self.pools.get_mut(&model), self.states.get_mut(&model));
        let (Some(tree), (Some(pages), Some(states))) = (self.trees.get_mut(&key), pools) else { return 0 };
        self.clock += 1;
        let path = tree.find(tokens, self.clock).pages;
        let Some(found) = tree.find_state(tokens, self.clock) else {
            *held = Held { split: split(0, &path), ..Held::default() };
            return 0;
        };
        states.hold(found.state, uid);
        let whole = path.get(..found.whole).unwrap_or_default().to_vec();
        whole.iter().for_each(|page| pages.hold(*page, uid));
        let split = split(found.tokens, &path);
        let state = Some(found.state);
        *held = Held { known: whole.len(), at: found.at, pages: whole, state, split, ..Held::default() };
        if let Some(page) = found.rest {
            // Nobody else writes there: the sequence goes on where the tree's tokens end.
            let alone = !pages.is_held(page);
            pages.hold(page, uid);
            if alone {
                held.pages.push(page);
            } else {
                held.copied = Some(page);
            }
        }
        found.tokens as u32 // at most as many as a prompt has
    }

    /// Gives the tree the state of a sequence after `end` tokens, the last of which a node has. Not if the node has more.
    pub(super) fn keep_state(&mut self, key: TreeKey, node: NodeId, end: usize, held: &Held) {
        let (Some(tree), Some(pool)) = (self.trees.get_mut(&key), self.states.get_mut(&key.0)) else {
            return;
        };
        if let Some(state) = held.state
            && !pool.is_kept(state)
            && tree.len_of(node) == (end - 1) % KV_PAGE_TOKENS + 1
            && tree.set_state(node, state, self.clock)
        {
            pool.keep(state);
        }
    }

    /// Enters a state that was taken and filled into a user's tree, behind `tokens`. False, and the state is free, if no page
    /// of the tree ends there, or if that one has its state.
    pub fn enter_state(&mut self, (model, uid): (ModelId, u32), tokens: &[u32], state: u32) -> bool {
        let key = self.key(model, uid);
        self.clock += 1;
        let mut entered = false;
        if let (Some(tree), Some(pool)) = (self.trees.get_mut(&key), self.states.get_mut(&model))
            && let Some(node) = tree.node_of(tokens)
            && tree.set_state(node, state, self.clock)
        {
            pool.keep(state);
            entered = true;
        }
        self.drop_state(model, uid, state); // the tree alone has it, or nobody
        entered
    }

    /// As [`Kv::adopt`], for the state behind `tokens`, whose pages the tree has. True if it is there then.
    ///
    /// # Errors
    /// That of `fill`.
    pub fn adopt_state<E>(
        &mut self,
        (model, uid): (ModelId, u32),
        tokens: &[u32],
        fill: impl FnOnce(u32) -> Result<(), E>,
    ) -> Result<bool, E> {
        let (page, state) = self.has((model, uid), tokens);
        let Some(pool) = self.states.get(&model).filter(|_| page) else { return Ok(false) };
        let room = self.used_bytes.saturating_add(pool.page_bytes) <= self.room_bytes()
            && self.may_cache_states(pool.page_bytes);
        if state || !room {
            return Ok(state);
        }
        let Some(state) = self.take_state(model, uid) else { return Ok(false) };
        if let Err(error) = fill(state) {
            self.drop_state(model, uid, state);
            return Err(error);
        }
        Ok(self.enter_state((model, uid), tokens, state))
    }

    /// Whether a user's tree has a page that ends with `tokens`, and the state behind it.
    pub fn has(&self, (model, uid): (ModelId, u32), tokens: &[u32]) -> (bool, bool) {
        let Some(tree) = self.trees.get(&self.key(model, uid)) else { return (false, false) };
        let node = tree.node_of(tokens);
        (node.is_some(), node.is_some_and(|node| tree.state_of(node).is_some()))
    }

    /// Counts as a use of the known pages of `tokens`: they are not those that go next.
    pub fn use_pages(&mut self, (model, uid): (ModelId, u32), tokens: &[u32]) {
        let key = self.key(model, uid);
        self.clock += 1;
        if let Some(tree) = self.trees.get_mut(&key) {
            tree.find(tokens, self.clock);
        }
    }

    /// Drops the states of nodes that a tree has lost.
    pub(super) fn drop_gone(&mut self, key: TreeKey) {
        let (Some(tree), Some(pool)) = (self.trees.get_mut(&key), self.states.get_mut(&key.0)) else {
            return;
        };
        for state in tree.take_gone() {
            if let Left::Free(uid) = pool.forget(state) {
                discharge(&mut self.charged, &mut self.used_bytes, uid, pool.page_bytes);
            }
        }
    }

    /// Takes the states whose memory the device must give back now, as [`Kv::take_freed`] pages.
    pub fn take_freed_states(&mut self, may: impl Fn(ModelId) -> bool) -> Vec<(ModelId, Vec<u32>)> {
        let pools = self.states.iter_mut().filter(|(model, _)| may(**model));
        let freed = pools.map(|(model, pool)| (*model, pool.take_freed()));
        freed.filter(|(_, states)| !states.is_empty()).collect()
    }
}

/// The end of a known path, far beyond the tokens that are known with their state. A step ends there, and its state is kept.
fn split(known: usize, path: &[u32]) -> Option<u32> {
    let end = path.len() * KV_PAGE_TOKENS;
    (end >= known + SPLIT_LEAST).then_some(end as u32)
}
