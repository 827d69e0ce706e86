//! Chooses the weights to evict when a device needs room. Pure: no clock, no device; time is counted in turns.
//!
//! A turn begins whenever a model other than the last one is used. The model with the soonest next use stays; the guess
//! is based on the turns between the model's uses so far. With this, three models that take turns in room for one and a
//! half cost as much as the best possible order. Least-recently-used costs a third more: it evicts the model that comes
//! next. A model that clients stopped using falls back with every turn that it is overdue.
//!
//! Within a model, the part used last in a step is evicted first. Then the first parts of the next step are resident
//! when it begins, and the rest loads while they are computed.

use std::collections::HashMap;

use crate::program::ModelId;

/// Weight of the newest interval in the estimate.
const NEWEST: f64 = 0.5;

/// A model whose parts may be evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// The model.
    pub model: ModelId,
    /// Models of a lower priority are evicted first, whatever their use.
    pub priority: u8,
}

#[derive(Clone, Copy, Debug)]
struct Uses {
    last: u64,
    /// Estimated turns from one use to the next; `None` before the second use.
    interval: Option<f64>,
}

/// Use history of models, in turns.
#[derive(Clone, Debug, Default)]
pub struct Eviction {
    turn: u64,
    current: Option<ModelId>,
    uses: HashMap<ModelId, Uses>,
}

impl Eviction {
    /// Records a use of the model. Cheap if it is also the last one used.
    pub fn used(&mut self, model: ModelId) {
        if self.current == Some(model) {
            return;
        }
        self.current = Some(model);
        self.turn += 1;
        let turn = self.turn;
        let uses = self.uses.entry(model).or_insert(Uses { last: turn, interval: None });
        if uses.last < turn {
            let newest = (turn - uses.last) as f64;
            uses.interval = Some(uses.interval.map_or(newest, |old| old + NEWEST * (newest - old)));
            uses.last = turn;
        }
    }

    /// Forgets a model that no longer exists.
    pub fn forget(&mut self, model: ModelId) {
        self.uses.remove(&model);
        if self.current == Some(model) {
            self.current = None;
        }
    }

    /// Estimated turns until the model's next use: the rest of its interval, or, past that, as many turns as it is
    /// overdue. Infinite for a model that was used once or never.
    pub fn turns_left(&self, model: ModelId) -> f64 {
        let Some(uses) = self.uses.get(&model) else { return f64::INFINITY };
        let idle = (self.turn - uses.last) as f64;
        uses.interval.map_or(f64::INFINITY, |interval| (interval - idle).abs())
    }

    /// Turns since the model's last use; `u64::MAX` if it was never used.
    fn idle(&self, model: ModelId) -> u64 {
        self.uses.get(&model).map_or(u64::MAX, |uses| self.turn - uses.last)
    }

    /// Sorts candidates into eviction order: lowest priority first, then the latest expected next use, then the longest
    /// unused.
    pub fn order(&self, candidates: &mut [Candidate]) {
        candidates.sort_by(|a, b| {
            let left = |c: &Candidate| self.turns_left(c.model);
            let idle = |c: &Candidate| self.idle(c.model);
            a.priority
                .cmp(&b.priority)
                .then(left(b).total_cmp(&left(a)))
                .then(idle(b).cmp(&idle(a)))
                .then(a.model.cmp(&b.model))
        });
    }
}

/// The part of a model with the latest next use. Parts are used in a circle and `at` is the current one, so that is the
/// part used last. The head (number `head`) is as large as several others, so it is chosen only if no other part
/// remains.
pub fn used_again_last(parts: impl Iterator<Item = u32>, at: u32, head: u32) -> Option<u32> {
    let turn = |part: u32| (part + head + 1 - at.min(head)) % (head + 1);
    parts.max_by_key(|part| (*part != head, turn(*part)))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Layers of each model in these tests; all of one size.
    const LAYERS: u32 = 32;

    /// Layers loaded when these models are used in this order in `room`; each model is whole while it runs.
    fn moved(order: &[u64], room: usize) -> usize {
        let (mut eviction, mut there) = (Eviction::default(), BTreeSet::new());
        let mut moved = 0;
        for &model in order {
            eviction.used(ModelId(model));
            for layer in 0..LAYERS {
                if !there.insert((model, layer)) {
                    continue;
                }
                moved += 1;
                if there.len() > room {
                    let others: BTreeSet<u64> = there.iter().map(|(other, _)| *other).collect();
                    let mut candidates: Vec<_> = others
                        .into_iter()
                        .filter(|other| *other != model)
                        .map(|other| Candidate { model: ModelId(other), priority: 0 })
                        .collect();
                    eviction.order(&mut candidates);
                    let first = candidates[0].model.0;
                    let last = there.iter().rfind(|(other, _)| *other == first).copied().unwrap();
                    there.remove(&last);
                }
            }
        }
        moved
    }

    /// The same with the order known in advance: evicts the layer with the latest next use (Belady).
    fn best(order: &[u64], room: usize) -> usize {
        let mut there: BTreeSet<(u64, u32)> = BTreeSet::new();
        let mut moved = 0;
        for (now, &model) in order.iter().enumerate() {
            for layer in 0..LAYERS {
                if !there.insert((model, layer)) {
                    continue;
                }
                moved += 1;
                if there.len() > room {
                    let next =
                        |model: u64| order[now..].iter().position(|m| *m == model).unwrap_or(usize::MAX);
                    let others = there.iter().filter(|(other, _)| *other != model);
                    let gone = *others.max_by_key(|(other, layer)| (next(*other), *layer)).unwrap();
                    there.remove(&gone);
                }
            }
        }
        moved
    }

    fn ratio(order: &[u64], room: usize) -> f64 {
        moved(order, room) as f64 / best(order, room) as f64
    }

    #[test]
    fn three_models_in_turn_move_what_the_best_order_moves() {
        let order: Vec<u64> = (0..300).map(|i| i % 3).collect();
        let ratio = ratio(&order, LAYERS as usize * 3 / 2);
        assert!(ratio < 1.02, "{ratio:.3} times the best possible");
    }

    #[test]
    fn no_pattern_moves_much_more_than_the_best_order() {
        let mut random = 9u64;
        let mut next = move |below: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) % below
        };
        let jitter: Vec<u64> = (0..300).map(|i| if next(10) == 0 { next(3) } else { i % 3 }).collect();
        let two_of_three: Vec<u64> = (0..300).map(|i| if i < 30 { i % 3 } else { i % 2 }).collect();
        let favourite: Vec<u64> = (0..300).map(|i| if i % 2 == 0 { 0 } else { 1 + next(3) }).collect();
        let four: Vec<u64> = (0..400).map(|i| i % 4).collect();
        for (name, order, room, most) in [
            ("in turn, with a tenth at random", jitter, 48, 1.2),
            ("two go on, one stays away", two_of_three, 48, 1.05),
            ("one between others", favourite, 48, 1.2),
            ("four in turn, room for two and a half", four, 80, 1.2),
        ] {
            let ratio = ratio(&order, room);
            println!("{name}: {ratio:.3} times the best possible");
            assert!(ratio <= most, "{name}: {ratio:.3} times the best possible");
        }
    }

    #[test]
    fn a_model_of_twice_the_room_moves_little_more_than_its_other_half() {
        const HEAD: u32 = 81;
        let (room, ahead, steps) = (40, 2, 20);
        let mut there: BTreeSet<u32> = BTreeSet::new();
        let mut moved = 0;
        for _ in 0..steps {
            for at in 1..=HEAD {
                for part in at..=HEAD.min(at + ahead) {
                    if there.insert(part) {
                        moved += 1;
                    }
                    if there.len() > room {
                        let may_go = there.iter().copied().filter(|p| !(at - 1..=at + ahead).contains(p));
                        let gone = used_again_last(may_go, at, HEAD).unwrap();
                        there.remove(&gone);
                    }
                }
            }
        }
        // Half of the parts stay from step to step; each of the others is loaded once per step.
        let best = steps * (HEAD - room as u32);
        let ratio = f64::from(moved) / f64::from(best);
        assert!(ratio < 1.1, "{ratio:.3} times what has no room");
    }

    #[test]
    fn two_models_that_fit_move_nothing_more() {
        let order: Vec<u64> = (0..100).map(|i| i % 2).collect();
        assert_eq!(moved(&order, 2 * LAYERS as usize), 2 * LAYERS as usize);
    }

    #[test]
    fn priority_comes_before_use() {
        let mut eviction = Eviction::default();
        [1, 2, 1, 2, 3].into_iter().for_each(|model| eviction.used(ModelId(model)));
        let candidate = |model, priority| Candidate { model: ModelId(model), priority };
        let mut candidates = [candidate(1, 1), candidate(2, 0), candidate(7, 1)];
        eviction.order(&mut candidates);
        assert_eq!(candidates.map(|c| c.model.0), [2, 7, 1], "the lower priority, then the one never used");
        eviction.forget(ModelId(1));
        assert!(eviction.turns_left(ModelId(1)).is_infinite());
    }
}
