//! Random lives of sequences against a plain account of who holds which page.

use std::collections::{BTreeMap, BTreeSet};

use super::*;

const PAGE: usize = KV_PAGE_TOKENS;
const PAGES: u64 = 24;

/// splitmix64.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % n
    }
}

/// A sequence: its tokens, how many are computed, and its pages.
struct Live {
    model: ModelId,
    uid: u32,
    tokens: Vec<u32>,
    computed: usize,
    held: Held,
}

struct Lives {
    kv: Kv,
    random: Random,
    seed: u64,
    live: Vec<Live>,
    /// The tokens of each page of the device, by position in the page.
    device: BTreeMap<(ModelId, u32), [Option<u32>; PAGE]>,
    /// All tokens that are in each recurrent state of the device.
    states: BTreeMap<u32, Vec<u32>>,
    /// Tokens of the last sequence that ended.
    ended: Vec<u32>,
    /// Tokens that sequences found known with their state.
    known: usize,
}

/// The model with recurrent states.
const RECURRENT: ModelId = ModelId(3);

impl Lives {
    fn new(seed: u64) -> Self {
        let reuse = [Reuse::User, Reuse::User, Reuse::All, Reuse::Off][seed as usize % 4];
        let roomy = if seed % 8 < 4 { 1 } else { 4 };
        let mut kv = Kv::new(PAGES * 100 * roomy, reuse);
        kv.open(ModelId(1), 100);
        kv.open(ModelId(2), 200);
        kv.open(RECURRENT, 20);
        kv.open_states(RECURRENT, 150);
        let (live, device, states, ended) = Default::default();
        Self { kv, random: Random(seed), seed, live, device, states, ended, known: 0 }
    }

    fn begin(&mut self) {
        // Few stems, so that prefixes meet in and between pages.
        let mut tokens: Vec<u32> = Vec::new();
        if self.random.below(3) == 0 {
            tokens.clone_from(&self.ended); // a conversation goes on
        }
        for _ in 0..1 + self.random.below(4) {
            let stem = self.random.below(3) as u32;
            tokens.extend((0..1 + self.random.below(40) as u32).map(|i| stem * 1000 + i));
        }
        let (model, uid) = (ModelId(1 + self.random.below(3)), self.random.below(3) as u32);
        let mut held = Held::default();
        let computed = self.kv.attach(model, uid, &tokens[..tokens.len() - 1], &mut held) as usize;
        assert!(computed < tokens.len(), "seed {}", self.seed);
        let live = Live { model, uid, tokens, computed, held };
        self.check_prefix(&live);
        self.known += if model == RECURRENT { computed } else { 0 };
        self.live.push(live);
    }

    /// The device has the tokens that a sequence was told are there.
    fn check_prefix(&self, live: &Live) {
        for position in 0..live.computed {
            let whole = position / PAGE < live.held.pages.len();
            let page = if whole { live.held.pages[position / PAGE] } else { live.held.copied.unwrap() };
            let there = self.device.get(&(live.model, page)).and_then(|page| page[position % PAGE]);
            assert_eq!(there, Some(live.tokens[position]), "seed {}: position {position}", self.seed);
        }
        if live.model == RECURRENT {
            let state = live.held.state.map(|state| self.states[&state].as_slice());
            let tokens = live.tokens.get(..live.computed).filter(|tokens| !tokens.is_empty());
            assert_eq!(state, tokens, "seed {}: a state of other tokens", self.seed);
        }
    }

    /// Writes the state after `end` tokens of a sequence; false if there is no room for it.
    fn compute_state(&mut self, at: usize, end: usize) -> bool {
        let live = &mut self.live[at];
        if live.held.spare.is_none() {
            live.held.spare = self.kv.take_state(live.model, live.uid);
        }
        let Some(spare) = live.held.spare else { return false };
        let before = live.held.state.map(|state| self.states[&state].clone()).unwrap_or_default();
        assert_eq!(before, live.tokens[..live.computed], "seed {}", self.seed);
        self.states.insert(spare, live.tokens[..end].to_vec());
        self.kv.advance_state(live.model, live.uid, &mut live.held);
        assert_eq!(live.held.state, Some(spare));
        true
    }

    /// Computes some rows of a sequence, as far as there are pages.
    fn compute(&mut self, at: usize) {
        let live = &mut self.live[at];
        let rows = 1 + self.random.below(40) as usize;
        let mut end = (live.computed + rows).min(live.tokens.len());
        if let Some(split) = live.held.split.filter(|split| *split as usize > live.computed) {
            end = end.min(split as usize);
        }
        while live.held.pages.len() * PAGE < end {
            let Some(page) = self.kv.take(live.model, live.uid) else { return self.end(at) };
            live.held.pages.push(page);
        }
        if let Some(from) = live.held.copied {
            let content = self.device[&(live.model, from)];
            self.device.insert((live.model, live.held.pages[live.computed / PAGE]), content);
            self.kv.copied(live.model, live.uid, &mut live.held);
        }
        for position in live.computed..end {
            let page = live.held.pages[position / PAGE];
            self.device.entry((live.model, page)).or_default()[position % PAGE] = Some(live.tokens[position]);
        }
        if live.model == RECURRENT && !self.compute_state(at, end) {
            return self.end(at);
        }
        let live = &mut self.live[at];
        live.computed = end;
        let all = live.computed == live.tokens.len();
        self.kv.keep(live.model, live.uid, &live.tokens[..end], all, &mut live.held);
        if all && self.random.below(3) > 0 {
            let next = self.random.below(4) as u32;
            self.live[at].tokens.push(next);
        }
    }

    /// Writes tokens that are refused behind those of a sequence, where pages are free, and gives these back.
    fn draft(&mut self, at: usize) {
        let live = &mut self.live[at];
        if live.held.copied.is_some() || live.computed == 0 || live.model == RECURRENT {
            return;
        }
        let end = live.computed + 1 + self.random.below(70) as usize;
        while live.held.pages.len() * PAGE < end
            && let Some(page) = self.kv.take(live.model, live.uid)
        {
            live.held.pages.push(page);
        }
        for position in live.computed..end.min(live.held.pages.len() * PAGE) {
            let page = live.held.pages[position / PAGE];
            self.device.entry((live.model, page)).or_default()[position % PAGE] = Some(9999);
        }
        self.kv.shorten(live.model, live.uid, live.computed as u32, &mut live.held);
        assert_eq!(live.held.pages.len(), live.computed.div_ceil(PAGE), "seed {}", self.seed);
    }

    fn end(&mut self, at: usize) {
        let mut live = self.live.swap_remove(at);
        self.kv.keep(live.model, live.uid, &live.tokens[..live.computed], true, &mut live.held);
        self.kv.release(live.model, live.uid, &mut live.held);
        self.ended = live.tokens;
        assert_eq!(live.held, Held::default());
    }

    fn turn(&mut self) {
        let at = (!self.live.is_empty()).then(|| self.random.below(self.live.len() as u64) as usize);
        match (self.random.below(20), at) {
            (0..=3, _) => self.begin(),
            (4..=5, Some(at)) => self.end(at),
            (8..=9, Some(at)) => self.draft(at),
            (6, _) if self.random.below(6) == 0 => self.restart(),
            (6, _) if self.random.below(8) == 0 => {
                let of = [None, Some(ModelId(1)), Some(ModelId(2)), Some(RECURRENT)]
                    [self.random.below(4) as usize];
                self.kv.drop_cached(of);
            }
            (7, _) => {
                for (model, pages) in self.kv.take_freed(|_| true) {
                    for page in pages {
                        self.device.remove(&(model, page));
                    }
                }
                for (_, states) in self.kv.take_freed_states(|_| true) {
                    states.iter().for_each(|state| drop(self.states.remove(state)));
                }
            }
            (_, Some(at)) => self.compute(at),
            _ => {}
        }
        self.check();
    }

    /// Reads all that trees know, drops it, and writes some of it back.
    fn restart(&mut self) {
        let model = [ModelId(1), RECURRENT][self.random.below(2) as usize];
        let most = 1 + self.random.below(60) as usize;
        let known = self.kv.known(model, most);
        let mut kept = Vec::new();
        for (uid, list) in known {
            assert!(list.len() <= most, "seed {}", self.seed);
            let mut prefixes: Vec<Vec<u32>> = Vec::new();
            for (at, page) in list.iter().enumerate() {
                let stem = page.after.map_or(Vec::new(), |after| prefixes[after as usize].clone());
                let (content, whole) = (self.device[&(model, page.page)], [&stem[..], &page.tokens].concat());
                let state = page.state.map(|state| self.states[&state].clone());
                assert!(state.as_ref().is_none_or(|state| *state == whole), "seed {}", self.seed);
                let goes_on = list[at..].iter().any(|other| other.after == Some(at as u32));
                assert!(model != RECURRENT || state.is_some() || goes_on, "a page before no state");
                prefixes.push(whole);
                kept.push((uid, stem, page.tokens.to_vec(), content, state));
            }
        }
        self.kv.drop_cached(Some(model));
        let part = self.random.below(2 * kept.len() as u64 + 1) as usize;
        for (uid, stem, tokens, content, state) in kept.into_iter().take(part) {
            let of = (model, uid.unwrap_or(7));
            let Self { kv, device, states, .. } = self;
            let fill = |page| {
                device.insert((model, page), content);
                Ok::<_, ()>(())
            };
            if kv.adopt(of, &stem, &tokens, fill) == Ok(true)
                && let Some(state) = state
            {
                let whole = [stem, tokens].concat();
                let fill = |to| {
                    states.insert(to, state);
                    Ok::<_, ()>(())
                };
                let adopted = kv.adopt_state(of, &whole, fill).unwrap();
                assert!(!adopted || kv.has(of, &whole) == (true, true), "seed {}", self.seed);
            }
        }
    }

    /// Counts of holders, of pages and of bytes against those that follow from the sequences.
    fn check(&self) {
        let seed = self.seed;
        let (mut used_bytes, mut charged) = (0, BTreeMap::new());
        for (model, pool) in &self.kv.pools {
            let (mut holders, mut of_users) =
                (BTreeMap::<u32, u32>::new(), BTreeMap::<(u32, u32), u32>::new());
            for live in self.live.iter().filter(|live| live.model == *model) {
                for page in live.held.pages.iter().chain(&live.held.copied) {
                    *holders.entry(*page).or_default() += 1;
                    *of_users.entry((*page, live.uid)).or_default() += 1;
                }
            }
            assert_eq!(pool.holders_by_user(), Some(&of_users), "seed {seed}");
            let trees = || self.kv.trees.iter().filter(|(key, _)| key.0 == *model);
            let kept: Vec<u32> = trees().flat_map(|(_, tree)| tree.pages()).collect();
            let distinct: BTreeSet<u32> = kept.iter().copied().collect();
            assert_eq!(kept.len(), distinct.len(), "seed {seed}: a page is in the trees twice");
            assert_eq!(pool.holders(), holders, "seed {seed}");
            let all: BTreeSet<u32> = distinct.iter().chain(holders.keys()).copied().collect();
            assert_eq!(pool.used() as usize, all.len(), "seed {seed}");
            assert_eq!(pool.cached() as usize, distinct.iter().filter(|p| !holders.contains_key(p)).count());
            used_bytes += all.len() as u64 * pool.page_bytes;
            for (uid, bytes) in pool.charged() {
                *charged.entry(uid).or_default() += bytes;
            }
            for (_, tree) in trees() {
                tree.check(|page, tokens| {
                    let there = self.device[&(*model, page)];
                    let equal = tokens.iter().zip(there).all(|(token, there)| Some(*token) == there);
                    assert!(equal, "seed {seed}: page {page} was written over");
                });
            }
        }
        self.check_states(&mut used_bytes, &mut charged);
        assert_eq!((self.kv.used_bytes, &self.kv.charged), (used_bytes, &charged), "seed {seed}");
        assert!(used_bytes <= self.kv.budget_bytes, "seed {seed}");
    }
}

impl Lives {
    /// The same for recurrent states. A tree's state has the tokens of its node and of those before.
    fn check_states(&self, used_bytes: &mut u64, charged: &mut BTreeMap<u32, u64>) {
        let seed = self.seed;
        let pool = &self.kv.states[&RECURRENT];
        let mut holders = BTreeMap::<u32, u32>::new();
        for live in &self.live {
            for state in live.held.state.iter().chain(&live.held.spare) {
                *holders.entry(*state).or_default() += 1;
            }
        }
        assert_eq!(pool.holders(), holders, "seed {seed}");
        let mut kept = BTreeSet::new();
        for (_, tree) in self.kv.trees.iter().filter(|(key, _)| key.0 == RECURRENT) {
            for (state, tokens) in tree.states() {
                assert!(kept.insert(state), "seed {seed}: a state is in the trees twice");
                assert_eq!(self.states[&state], tokens, "seed {seed}: a state was written over");
            }
        }
        let all: BTreeSet<u32> = kept.iter().chain(holders.keys()).copied().collect();
        assert_eq!(pool.used() as usize, all.len(), "seed {seed}");
        *used_bytes += all.len() as u64 * pool.page_bytes;
        for (uid, bytes) in pool.charged() {
            *charged.entry(uid).or_default() += bytes;
        }
    }
}

#[test]
fn every_page_comes_back_and_every_count_is_exact() {
    let mut known = 0;
    for seed in 0..2000 {
        let mut lives = Lives::new(seed);
        for _ in 0..120 {
            lives.turn();
        }
        while !lives.live.is_empty() {
            lives.end(0);
        }
        lives.check();
        assert_eq!(lives.kv.sums().used, 0);
        known += lives.known;
        lives.kv.drop_cached(None);
        assert_eq!((lives.kv.used_bytes, lives.kv.charged.len(), lives.kv.trees.len()), (0, 0, 0));
        lives.check();
    }
    assert!(known > 10_000, "only {known} tokens were known with their state");
}

#[test]
fn a_state_is_kept_where_sequences_end_and_where_prompts_part() {
    let mut kv = Kv::new(1 << 20, Reuse::User);
    kv.open(RECURRENT, 100);
    kv.open_states(RECURRENT, 5000);
    // Returns the tokens that were known, and where a step ends early.
    let run = |kv: &mut Kv, tokens: &[u32]| {
        let mut held = Held::default();
        let known = kv.attach(RECURRENT, 7, &tokens[..tokens.len() - 1], &mut held);
        let split = held.split;
        for end in split.into_iter().chain([tokens.len() as u32 - 1]) {
            while held.pages.len() * PAGE < end as usize {
                held.pages.push(kv.take(RECURRENT, 7).unwrap());
            }
            kv.copied(RECURRENT, 7, &mut held);
            held.spare = held.spare.or_else(|| kv.take_state(RECURRENT, 7));
            kv.advance_state(RECURRENT, 7, &mut held);
            kv.keep(RECURRENT, 7, &tokens[..end as usize], false, &mut held);
        }
        kv.keep(RECURRENT, 7, &tokens[..tokens.len() - 1], true, &mut held);
        kv.release(RECURRENT, 7, &mut held);
        (known, split)
    };
    let stem: Vec<u32> = (0..300).collect();
    let [first, second, third] = [1000, 2000, 3000].map(|from| [&stem[..], &[from; 40]].concat());
    assert_eq!(run(&mut kv, &first), (0, None));
    let longer = [&first[..], &[5; 20]].concat();
    assert_eq!(run(&mut kv, &longer), (339, None), "a conversation goes on behind its last answer");
    assert_eq!(run(&mut kv, &second), (0, Some(288)), "the stem is known without a state");
    assert_eq!(run(&mut kv, &third), (288, None));
    assert_eq!(run(&mut kv, &third), (339, None), "all but the token whose logits are wanted");
    // The state of a page goes before the page, and the longest unused before others.
    let before = kv.used_bytes();
    assert_eq!(kv.drop_first(1, &|_| true), 5000);
    assert_eq!(kv.used_bytes(), before - 5000);
    assert_eq!(run(&mut kv, &third).0, 339);
    kv.drop_cached(None);
    assert_eq!(kv.used_bytes(), 0);
}

/// Leaves a prompt of one page and its state to the tree.
fn leave(kv: &mut Kv, first: u32) {
    let (mut held, tokens) = (Held::default(), [first; PAGE]);
    held.pages.extend(kv.take(RECURRENT, 7));
    held.spare = kv.take_state(RECURRENT, 7);
    assert!(held.pages.len() == 1 && held.spare.is_some());
    kv.advance_state(RECURRENT, 7, &mut held);
    kv.keep(RECURRENT, 7, &tokens, true, &mut held);
    kv.release(RECURRENT, 7, &mut held);
}

/// The prompts that are known with their state, without a use of any.
fn known_states(kv: &Kv) -> Vec<u32> {
    let states = kv.trees.values().flat_map(|tree| tree.states());
    let mut known: Vec<u32> = states.map(|(_, tokens)| tokens[0]).collect();
    known.sort_unstable();
    known
}

#[test]
fn cached_states_have_half_of_the_budget_and_the_latest_stay() {
    let mut kv = Kv::new(100 * 100, Reuse::User);
    kv.open(RECURRENT, 10);
    kv.open_states(RECURRENT, 1000);
    (0..20).for_each(|first| leave(&mut kv, first));
    assert_eq!(known_states(&kv), [15, 16, 17, 18, 19]);
    let sums = kv.sums();
    assert_eq!((sums.states, sums.cached), (States { used: 0, cached: 5, cached_bytes: 5000 }, 20));
    // Those that sequences hold do not count: nine are held, and one more is cached.
    let held: Vec<_> = (0..9).map(|_| kv.take_state(RECURRENT, 8)).collect();
    assert!(held.iter().all(Option::is_some) && kv.sums().states.used == 9);
    assert!(kv.sums().states.cached <= 1 && kv.used_bytes() <= 10_000);
}

#[test]
fn pages_whose_states_are_gone_do_not_fill_the_cache() {
    let mut kv = Kv::new(20 * 150, Reuse::User);
    kv.open(RECURRENT, 100);
    kv.open_states(RECURRENT, 50);
    for first in 0..200 {
        leave(&mut kv, first);
    }
    // Each prompt takes 150 bytes: those of the last ones are there whole, and a step of the next had room.
    let known = known_states(&kv);
    assert!(known.len() >= 18 && known.windows(2).all(|two| two[1] == two[0] + 1), "{known:?}");
    assert_eq!((known.last(), kv.used_bytes() <= 3000), (Some(&199), true));
}

#[test]
fn the_cache_of_the_user_that_holds_most_goes_first() {
    let mut kv = Kv::new(10 * 100, Reuse::User);
    kv.open(ModelId(1), 100);
    let cache = |kv: &mut Kv, uid: u32, first: u32| {
        let (mut held, tokens) = (Held::default(), vec![first; PAGE]);
        held.pages.extend(kv.take(ModelId(1), uid));
        assert_eq!(held.pages.len(), 1);
        kv.keep(ModelId(1), uid, &tokens, true, &mut held);
        kv.release(ModelId(1), uid, &mut held);
    };
    (0..3).for_each(|i| cache(&mut kv, 1, i));
    (0..7).for_each(|i| cache(&mut kv, 2, i));
    let known = |kv: &mut Kv, uid: u32| {
        let known = |first: &u32| {
            let mut held = Held::default();
            let found = kv.attach(ModelId(1), uid, &[*first; PAGE], &mut held) == PAGE as u32;
            kv.release(ModelId(1), uid, &mut held);
            found
        };
        (0..7).filter(known).collect::<Vec<_>>()
    };
    // A third user takes what the second has most of, the oldest first, until both have as much.
    let mut third = Held::default();
    for _ in 0..4 {
        third.pages.extend(kv.take(ModelId(1), 3));
    }
    assert_eq!((known(&mut kv, 1), known(&mut kv, 2)), (vec![0, 1, 2], vec![4, 5, 6]));
    // Now the third holds most, but nothing of it is cached.
    third.pages.extend(kv.take(ModelId(1), 3));
    third.pages.extend(kv.take(ModelId(1), 3));
    assert_eq!((known(&mut kv, 1).len(), known(&mut kv, 2).len()), (2, 2));
    (0..4).for_each(|_| third.pages.extend(kv.take(ModelId(1), 3)));
    assert_eq!((third.pages.len(), kv.take(ModelId(1), 3)), (10, None));
    assert_eq!(kv.take_evicted(), 10);
    kv.release(ModelId(1), 3, &mut third);
    assert_eq!(kv.sums(), Sums { size: 10, ..Sums::default() });
}

#[test]
fn a_shared_page_counts_for_each_user_that_holds_it_and_for_nobody_else() {
    let mut kv = Kv::new(10 * 100, Reuse::All);
    kv.open(ModelId(1), 100);
    let tokens = vec![7; 2 * PAGE];
    let (mut first, mut second, mut third) = (Held::default(), Held::default(), Held::default());
    first.pages.extend((0..2).filter_map(|_| kv.take(ModelId(1), 1)));
    kv.keep(ModelId(1), 1, &tokens, true, &mut first);
    assert_eq!(kv.attach(ModelId(1), 2, &tokens, &mut second), 2 * PAGE as u32);
    assert_eq!(kv.attach(ModelId(1), 2, &tokens[..PAGE], &mut third), PAGE as u32);
    assert_eq!((kv.held_by(1), kv.held_by(2), kv.held_bytes()), (200, 200, 200));
    assert_eq!(kv.own_pages(ModelId(1), 2, &second), [0, 1]);
    assert_eq!(
        (kv.shared_pages(ModelId(1), 2, &tokens), kv.shared_pages(ModelId(1), 3, &tokens)),
        ([2, 2], [2, 0])
    );
    // The one that computed them has left: others' use is not charged to it.
    kv.release(ModelId(1), 1, &mut first);
    assert_eq!((kv.held_by(1), kv.held_by(2), kv.held_bytes()), (0, 200, 200));
    kv.release(ModelId(1), 2, &mut second);
    assert_eq!((kv.held_by(2), kv.held_bytes()), (100, 100));
    kv.release(ModelId(1), 2, &mut third);
    assert_eq!((kv.held_by(2), kv.held_bytes(), kv.sums().cached), (0, 0, 2));
}
