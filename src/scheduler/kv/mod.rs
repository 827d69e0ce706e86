//! The ledger of keys and values: who holds which page, and which prefixes are known. Pure.
//!
//! A page has a number in its model's pool. Any number of sequences may read it, and the tree of prefixes may have it
//! too; it is free when nobody does. One sequence at most writes it, at positions that the tree does not claim.
//!
//! A sequence offers its pages to its user's tree: whole ones while it prefills, all when it ends or gives them up. A
//! later sequence takes the longest known prefix of its tokens: whole pages as they are, and the first tokens of one more.
//! If a sequence holds that page, or if it has other tokens after those, the taker gets a copy to write on.
//!
//! Pages that only a tree has are cached. They cost nobody anything. When bytes run short, they go before anyone waits:
//! first those of the user that holds most, of these the longest unused (`eviction`).

use std::collections::BTreeMap;

use crate::backend::KV_PAGE_TOKENS;
use crate::model::ModelId;
use crate::scheduler::prefixes::kept_page_bytes;

mod eviction;
mod pool;
mod states;
mod tree;

use pool::{Left, Pool};
use tree::{Inserted, NodeId, ROOT, Tree};

pub(super) use eviction::{Evicted, Place};
pub(super) use tree::Known;

/// The users whose prefixes a sequence may take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Reuse {
    /// Nobody's: every prompt is computed.
    Off,
    /// Those of the same user.
    #[default]
    User,
    /// Those of all users. The time of an answer then tells whether somebody sent such a prompt lately.
    All,
}

/// The pages of one sequence, in order of position, and how much of them its tree has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Held {
    pub pages: Vec<u32>,
    /// The page whose first tokens the next page must begin with, before a row is written there.
    pub copied: Option<u32>,
    /// The recurrent state after its computed positions.
    pub state: Option<u32>,
    /// The one that its next step writes.
    pub spare: Option<u32>,
    /// Where a step is to end, so that others may go on from the recurrent state there.
    pub split: Option<u32>,
    /// Whole pages that the tree has, and the node of the last one.
    known: usize,
    at: NodeId,
}

impl Held {
    /// Tokens of the whole pages that the tree has.
    pub fn known_tokens(&self) -> usize {
        self.known * KV_PAGE_TOKENS
    }

    /// True if the tree has the same whole pages of both.
    pub fn is_beside(&self, other: &Self) -> bool {
        (self.known, self.at) == (other.known, other.at)
    }
}

/// Pages and bytes of KV cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Sums {
    /// Pages that sequences hold.
    pub used: u64,
    /// Pages that only the trees have.
    pub cached: u64,
    /// Bytes of these, and of recurrent states that only the trees have.
    pub cached_bytes: u64,
    /// Recurrent states.
    pub states: States,
    /// Pages of all open pools.
    pub size: u64,
}

/// Recurrent states.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct States {
    /// Those that sequences hold.
    pub used: u64,
    /// Those that only the trees have.
    pub cached: u64,
    /// Bytes of these.
    pub cached_bytes: u64,
}

/// The tree of a page: of this user, or of all users.
type TreeKey = (ModelId, Option<u32>);

#[derive(Debug)]
pub(super) struct Kv {
    /// Most bytes of all pages in use.
    pub budget_bytes: u64,
    /// Fewer, while the device has no memory for so many.
    room_bytes: u64,
    reuse: Reuse,
    pools: BTreeMap<ModelId, Pool>,
    /// Recurrent states of models that have some.
    states: BTreeMap<ModelId, Pool>,
    trees: BTreeMap<TreeKey, Tree>,
    /// Bytes of all pages and states in use, also by trees alone.
    used_bytes: u64,
    /// The same by user.
    charged: BTreeMap<u32, u64>,
    /// Number of uses of trees: their time.
    clock: u64,
    /// Cached pages that went because bytes ran short.
    evicted: u64,
    /// Whether what is evicted is listed.
    watched: bool,
    evicted_list: Vec<Evicted>,
}

impl Kv {
    pub fn new(budget_bytes: u64, reuse: Reuse) -> Self {
        let (pools, states, trees, charged) = Default::default();
        let room_bytes = u64::MAX;
        let (evicted, watched, evicted_list) = Default::default();
        Self {
            budget_bytes,
            room_bytes,
            reuse,
            pools,
            states,
            trees,
            used_bytes: 0,
            charged,
            clock: 0,
            evicted,
            watched,
            evicted_list,
        }
    }

    /// Pages of a model's pool: the whole budget, because models share it by bytes. Pages that are never written cost
    /// nothing.
    pub fn pool_pages(&self, page_bytes: u64) -> u32 {
        u32::try_from(self.budget_bytes / page_bytes.max(1)).unwrap_or(u32::MAX)
    }

    /// Opens a model's pool, unless it is open.
    pub fn open(&mut self, model: ModelId, page_bytes: u64) {
        let size = self.pool_pages(page_bytes);
        self.pools.entry(model).or_insert_with(|| Pool::new(size, page_bytes));
    }

    /// Drops a model's pool with all its pages, held or not.
    pub fn close(&mut self, model: ModelId) {
        self.trees.retain(|(of, _), _| *of != model);
        for pool in [self.pools.remove(&model), self.states.remove(&model)].into_iter().flatten() {
            for (uid, bytes) in pool.charged() {
                discharge(&mut self.charged, &mut self.used_bytes, uid, bytes);
            }
        }
    }

    /// Drops all pages of a model's open pool.
    pub fn reset(&mut self, model: ModelId) {
        if let Some(page_bytes) = self.pools.get(&model).map(|pool| pool.page_bytes) {
            let state_bytes = self.states.get(&model).map_or(0, |pool| pool.page_bytes);
            self.close(model);
            self.open(model, page_bytes);
            self.open_states(model, state_bytes);
        }
    }

    /// True if sequences take prefixes that others computed.
    pub fn reuses(&self) -> bool {
        self.reuse != Reuse::Off
    }

    /// A number that changes when the tree of a user and model grows.
    pub fn state_of_tree(&self, model: ModelId, uid: u32) -> u64 {
        self.trees.get(&self.key(model, uid)).map_or(0, |tree| tree.grown)
    }

    /// The user of the tree that a user's sequences take from; `None` for that of all users.
    pub fn user_of_tree(&self, uid: u32) -> Option<u32> {
        (self.reuse != Reuse::All).then_some(uid)
    }

    fn key(&self, model: ModelId, uid: u32) -> TreeKey {
        (model, self.user_of_tree(uid))
    }

    /// Takes the longest known prefix of `tokens`, in place of what `held` has of it. Returns how many tokens that is.
    pub fn attach(&mut self, model: ModelId, uid: u32, tokens: &[u32], held: &mut Held) -> u32 {
        self.release(model, uid, held);
        let key = self.key(model, uid);
        if self.is_recurrent(model) {
            return self.attach_state(key, uid, tokens, held);
        }
        let (Some(tree), Some(pool)) = (self.trees.get_mut(&key), self.pools.get_mut(&model)) else {
            return 0;
        };
        self.clock += 1;
        let found = tree.find(tokens, self.clock);
        found.pages.iter().for_each(|page| pool.hold(*page, uid));
        let mut count = (found.pages.len() * KV_PAGE_TOKENS) as u32;
        *held = Held { known: found.pages.len(), at: found.at, pages: found.pages, ..Held::default() };
        if let Some(rest) = found.rest {
            count += rest.tokens;
            // Nobody else writes there: the sequence goes on where the tree's tokens end.
            let alone = rest.all && !pool.is_held(rest.page);
            pool.hold(rest.page, uid);
            if alone {
                held.pages.push(rest.page);
            } else {
                held.copied = Some(rest.page);
            }
        }
        count
    }

    /// Bytes of all pages in use, also by trees alone.
    pub fn used_bytes(&self) -> u64 {
        self.used_bytes
    }

    /// The bytes that pages in use may have now.
    pub fn room_bytes(&self) -> u64 {
        self.room_bytes.min(self.budget_bytes)
    }

    /// Bounds the bytes of pages in use below the budget, as the device has no memory for more; `None` ends that.
    pub fn set_room(&mut self, bytes: Option<u64>) {
        self.room_bytes = bytes.unwrap_or(u64::MAX);
    }

    /// Takes a page for a sequence. Evicts cached pages for it; `None` if sequences hold all bytes that pages may have now.
    pub fn take(&mut self, model: ModelId, uid: u32) -> Option<u32> {
        let bytes = self.pools.get(&model)?.page_bytes;
        self.make_room(bytes)?;
        let page = self.pools.get_mut(&model)?.take(uid)?;
        self.charge(uid, bytes);
        Some(page)
    }

    /// Evicts what is cached until so many bytes more fit; `None` if sequences hold too much.
    fn make_room(&mut self, bytes: u64) -> Option<()> {
        while self.used_bytes.saturating_add(bytes) > self.room_bytes() {
            self.evict(&|_| true)?;
        }
        Some(())
    }

    fn charge(&mut self, uid: u32, bytes: u64) {
        self.used_bytes += bytes;
        *self.charged.entry(uid).or_default() += bytes;
    }

    /// The copy that `held` waited for is done, or no longer wanted.
    pub fn copied(&mut self, model: ModelId, uid: u32, held: &mut Held) {
        if let Some(page) = held.copied.take() {
            self.drop_page(model, uid, page);
        }
    }

    /// Gives all pages and states back that a user's sequence has, without offering them to the tree.
    pub fn release(&mut self, model: ModelId, uid: u32, held: &mut Held) {
        let Held { pages, copied, state, spare, .. } = std::mem::take(held);
        for page in pages.into_iter().chain(copied) {
            self.drop_page(model, uid, page);
        }
        for state in state.into_iter().chain(spare) {
            self.drop_state(model, uid, state);
        }
        self.bound_states();
    }

    /// Gives back the pages that a sequence of so many positions does not need: those of tokens that were refused. The tree has none
    /// of them.
    pub fn shorten(&mut self, model: ModelId, uid: u32, positions: u32, held: &mut Held) {
        let needed = (positions as usize).div_ceil(KV_PAGE_TOKENS).max(held.known);
        while held.pages.len() > needed
            && let Some(page) = held.pages.pop()
        {
            self.drop_page(model, uid, page);
        }
    }

    /// Gives a page back that was taken.
    pub fn drop_page(&mut self, model: ModelId, uid: u32, page: u32) {
        let Some(pool) = self.pools.get_mut(&model) else { return };
        if let Left::Free(uid) = pool.drop(page, uid) {
            discharge(&mut self.charged, &mut self.used_bytes, uid, pool.page_bytes);
        }
    }

    /// Offers the pages of `tokens` to the tree: their keys and values are computed. Without `all`, whole pages only.
    /// Where the tree has a page with the same tokens, the sequence gets that one for its own.
    pub fn keep(&mut self, model: ModelId, uid: u32, tokens: &[u32], all: bool, held: &mut Held) {
        // Before the copy, the tree has all of these tokens, and the page to copy to has none.
        let nothing_new = held.copied.is_some() || tokens.len() <= held.known * KV_PAGE_TOKENS;
        if self.reuse == Reuse::Off || nothing_new {
            return;
        }
        let key = self.key(model, uid);
        let Some(pool) = self.pools.get_mut(&model) else { return };
        self.clock += 1;
        let mut last = None;
        for (index, page) in tokens.chunks(KV_PAGE_TOKENS).enumerate().skip(held.known) {
            let whole = page.len() == KV_PAGE_TOKENS;
            let Some(own) = held.pages.get_mut(index).filter(|_| whole || all) else { break };
            let tree = self.trees.entry(key).or_insert_with(Tree::new);
            let mut gone = None;
            let at = match tree.insert(held.at, page, *own, self.clock) {
                Inserted::Taken { at, instead_of } => {
                    // It may be the same page, with fewer tokens.
                    gone = instead_of.map(|old| (pool.forget(old), pool.page_bytes));
                    pool.keep(*own);
                    at
                }
                Inserted::There { at, page: known } => {
                    if whole && known != *own {
                        pool.hold(known, uid);
                        gone = Some((pool.drop(std::mem::replace(own, known), uid), pool.page_bytes));
                    }
                    at
                }
            };
            if let Some((Left::Free(uid), bytes)) = gone {
                discharge(&mut self.charged, &mut self.used_bytes, uid, bytes);
            }
            if whole {
                (held.known, held.at) = (index + 1, at);
            }
            last = Some((at, index * KV_PAGE_TOKENS + page.len()));
        }
        self.drop_gone(key);
        // Without `all`, the state after a page is kept only where prompts part.
        let wanted = all || held.split == Some(tokens.len() as u32);
        if let Some((node, end)) = last.filter(|(_, end)| wanted && *end == tokens.len()) {
            self.keep_state(key, node, end, held);
        }
    }

    /// The known prefixes of a model by user, at most so many pages in all; those used last before others. With recurrent states,
    /// those that have one: each counts as many pages as have its bytes.
    pub fn known(&self, model: ModelId, most: usize) -> Vec<(Option<u32>, Vec<Known>)> {
        let trees: Vec<_> = self.trees.iter().filter(|((of, _), _)| *of == model).collect();
        let each = most / trees.len().max(1);
        let page_bytes = kept_page_bytes(self.pools.get(&model).map_or(0, |pool| pool.page_bytes));
        let of_state = self.states.get(&model).map(|states| states.page_bytes.div_ceil(page_bytes));
        let latest = |tree: &Tree| match of_state {
            None => tree.latest(each),
            Some(pages) => tree.latest_states(each, usize::try_from(pages).unwrap_or(usize::MAX)),
        };
        trees.into_iter().map(|((_, uid), tree)| (*uid, latest(tree))).collect()
    }

    /// Takes one page into a user's tree that [`Kv::known`] listed once, after the whole pages of `stem`. `fill` writes it.
    /// Nothing is evicted for it. False if there is no room, or if the tree lacks the stem.
    ///
    /// # Errors
    /// That of `fill`.
    pub fn adopt<E>(
        &mut self,
        (model, uid): (ModelId, u32),
        stem: &[u32],
        tokens: &[u32],
        fill: impl FnOnce(u32) -> Result<(), E>,
    ) -> Result<bool, E> {
        let key = self.key(model, uid);
        let node = match self.trees.get(&key) {
            Some(tree) => tree.node_after(stem),
            None => stem.is_empty().then_some(ROOT),
        };
        let Some(pool) = self.pools.get(&model) else { return Ok(false) };
        let room = self.used_bytes.saturating_add(pool.page_bytes) <= self.room_bytes();
        let fits = room && (1..=KV_PAGE_TOKENS).contains(&tokens.len());
        if node.is_none() || !fits {
            return Ok(false);
        }
        let Some(page) = self.take(model, uid) else { return Ok(false) };
        if let Err(error) = fill(page) {
            self.drop_page(model, uid, page);
            return Err(error);
        }
        Ok(self.enter_page((model, uid), stem, tokens, page))
    }

    /// Enters a page that was taken and filled into a user's tree, after the whole pages of `stem`. False, and the page is free,
    /// if the tree lacks the stem.
    pub fn enter_page(
        &mut self,
        (model, uid): (ModelId, u32),
        stem: &[u32],
        tokens: &[u32],
        page: u32,
    ) -> bool {
        let key = self.key(model, uid);
        let node = match self.trees.get(&key) {
            Some(tree) => tree.node_after(stem),
            None => stem.is_empty().then_some(ROOT),
        };
        let Some(at) = node else {
            self.drop_page(model, uid, page);
            return false;
        };
        self.clock += 1;
        let tree = self.trees.entry(key).or_insert_with(Tree::new);
        let inserted = tree.insert(at, tokens, page, self.clock);
        self.drop_gone(key);
        if let (Inserted::Taken { instead_of, .. }, Some(pool)) = (inserted, self.pools.get_mut(&model)) {
            pool.keep(page);
            let gone = instead_of.map(|old| (pool.forget(old), pool.page_bytes));
            if let Some((Left::Free(uid), bytes)) = gone {
                discharge(&mut self.charged, &mut self.used_bytes, uid, bytes);
            }
        }
        self.drop_page(model, uid, page); // the tree alone has it, or nobody
        true
    }

    /// Takes the pages whose memory the device must give back now: those freed of models for which `may` holds.
    pub fn take_freed(&mut self, may: impl Fn(ModelId) -> bool) -> Vec<(ModelId, Vec<u32>)> {
        let pools = self.pools.iter_mut().filter(|(model, _)| may(**model));
        pools
            .map(|(model, pool)| (*model, pool.take_freed()))
            .filter(|(_, pages)| !pages.is_empty())
            .collect()
    }

    /// Pages that a model's pool has; 0 without an open one.
    pub fn pages_max(&self, model: ModelId) -> u64 {
        self.pools.get(&model).map_or(0, |pool| pool.size().into())
    }

    pub fn sums(&self) -> Sums {
        let mut sums = Sums::default();
        for pool in self.pools.values() {
            let cached = u64::from(pool.cached());
            sums.used += u64::from(pool.used()) - cached;
            sums.cached += cached;
            sums.cached_bytes += cached * pool.page_bytes;
            sums.size += u64::from(pool.size());
        }
        for states in self.states.values() {
            sums.states.add(states);
        }
        sums.cached_bytes += sums.states.cached_bytes;
        sums
    }

    /// Bytes of all pages that sequences hold, each counted once.
    pub fn held_bytes(&self) -> u64 {
        let pools = self.pools.values().chain(self.states.values());
        let cached: u64 = pools.map(|pool| u64::from(pool.cached()) * pool.page_bytes).sum();
        self.used_bytes.saturating_sub(cached)
    }

    /// The same of one user. A page that sequences of several users hold counts in full for each of them. So nobody holds
    /// more because another one computed it, or goes on with it.
    pub fn held_by(&self, uid: u32) -> u64 {
        self.pools.values().chain(self.states.values()).map(|pool| pool.held_by(uid)).sum()
    }

    /// Whole pages of the longest known prefix of `tokens` that sequences hold already: any, and those of the same user.
    pub fn shared_pages(&self, model: ModelId, uid: u32, tokens: &[u32]) -> [u32; 2] {
        let (Some(tree), Some(pool)) = (self.trees.get(&self.key(model, uid)), self.pools.get(&model)) else {
            return [0; 2];
        };
        if self.is_recurrent(model) {
            return [0; 2]; // it may go on from an earlier page only
        }
        tree.path(tokens)
            .filter(|page| pool.is_held(*page))
            .fold([0; 2], |[any, own], page| [any + 1, own + u32::from(pool.holders_of_user(page, uid) > 0)])
    }

    /// Pages that no other sequence holds, and those that no other one of the same user does.
    pub fn own_pages(&self, model: ModelId, uid: u32, held: &Held) -> [u32; 2] {
        let Some(pool) = self.pools.get(&model) else { return [0; 2] };
        held.pages.iter().chain(&held.copied).fold([0; 2], |[all, of_user], page| {
            let alone = pool.holders_of(*page) == 1;
            [all + u32::from(alone), of_user + u32::from(pool.holders_of_user(*page, uid) == 1)]
        })
    }

    /// Bytes of a model's cached pages.
    pub fn cached_bytes(&self, model: ModelId) -> u64 {
        let pools = [self.pools.get(&model), self.states.get(&model)].into_iter().flatten();
        pools.map(|pool| u64::from(pool.cached()) * pool.page_bytes).sum()
    }

    /// Lists what is evicted from now on, or no longer.
    pub fn watch_evictions(&mut self, watched: bool) {
        self.watched = watched;
    }

    /// True if what is evicted is listed.
    pub fn watches_evictions(&self) -> bool {
        self.watched
    }

    /// Takes the list of evicted pages and states. Their content is to be read before the next step, and before their memory goes.
    pub fn take_evicted_list(&mut self) -> Vec<Evicted> {
        std::mem::take(&mut self.evicted_list)
    }

    /// Number of cached pages that went because bytes ran short, since the last call.
    pub fn take_evicted(&mut self) -> u64 {
        std::mem::take(&mut self.evicted)
    }
}

fn discharge(charged: &mut BTreeMap<u32, u64>, used_bytes: &mut u64, uid: u32, bytes: u64) {
    *used_bytes = used_bytes.saturating_sub(bytes);
    if let Some(of_user) = charged.get_mut(&uid) {
        *of_user = of_user.saturating_sub(bytes);
        if *of_user == 0 {
            charged.remove(&uid);
        }
    }
}

#[cfg(test)]
mod tests;
