//! Decides which rows the next step takes.
//!
//! The user with the least device time chooses the model. Others join the step, so that weights are read once for all.
//! Those on the same model do whose time is not far ahead. Others of no smaller share do with rows that cost next to
//! nothing. Where several users have work, a step is short. It takes as many rows as fit into [`QUANTUM`], or into the
//! time that reading the weights takes anyway. Users share these rows equally. Of a user, decoding sequences go before
//! prompts, and those of the connection with the least device time before others. Higher priorities lead.
//! A user alone has long steps where another one can run beside them.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use super::{Schedule, StepPlan, Work};
use crate::model::ModelId;
use crate::scheduler::SequenceId;
use crate::scheduler::costs::Estimate;
use crate::scheduler::sequence::{Request, Sequence};

/// Time for the rows of one step where several users have work.
pub(in crate::scheduler) const QUANTUM: Duration = Duration::from_millis(40);
/// The same for a user alone, where a step makes way for others that come.
const QUANTUM_ALONE: Duration = Duration::from_secs(1);
/// The same where it cannot: another user waits for all of it.
pub(super) const QUANTUM_WHOLE: Duration = Duration::from_millis(100);
/// Rows of a user alone may take this many times as long as reading the weights: they then cost 3 % of a long prompt.
const WEIGHTS_READS_ALONE: f64 = 30.0;
/// The same where a step cannot make way: a model that streams through its device would take a row at a time.
const WEIGHTS_READS_WHOLE: f64 = 3.0;
/// Users whose time is ahead still join a step with rows that make it this much longer than reading the weights alone.
pub(super) const FREE_PART: f64 = 0.125;
/// A step may be so many times as long as if all users wanted as little as one of them. Or it may take this long: a shorter one would
/// be mostly its own overhead. With 2, a short answer took twice as long beside a user with many requests as beside one with a single
/// request. All else that such a user does came on top.
const EXCESS: f64 = 1.6;
const EXCESS_LEAST: Duration = Duration::from_millis(1);
/// A prompt that comes in may make a step so many times as long as its decoding sequences alone, or as long as this.
pub(super) const MIXED: f64 = 2.0;
const MIXED_LEAST: Duration = Duration::from_millis(10);
/// The same where several users have work.
const MIXED_OF_SEVERAL: f64 = EXCESS;
const MIXED_LEAST_OF_SEVERAL: Duration = Duration::from_millis(6);
/// With more users than this, none takes a whole [`QUANTUM`] for itself.
const SHORT_TURNS: u32 = 4;
/// Rows of a contended model's first step.
const FIRST_ROWS: u32 = 16;
/// How long steps stay short after a second user's last sequence.
const CONTENDED: Duration = Duration::from_secs(10);

/// Turns of users and models that are remembered beyond those of live sequences.
const TURNS_KEPT: usize = 64;

impl<A> Schedule<A> {
    /// Plans the next step and assigns pages to its rows, or returns a suspended one; `None` when no sequence can run.
    pub fn next_step(&mut self, now: Instant) -> Option<StepPlan> {
        self.look_at_users(now);
        let leader = self.choose_leader()?;
        let model = self.next_turn(leader, now)?;
        self.look_at_connections();
        let switched = self.turn.replace(model) != Some(model);
        let beside = self.set_aside(leader, model);
        if !beside && self.is_suspended(model) {
            return self.resume(leader, model, switched);
        }
        let joins = |at: &usize| self.running[*at].request.model == model && self.joins(&self.running[*at]);
        for at in (0..self.running.len()).filter(joins).collect::<Vec<_>>() {
            self.attach(at); // another sequence may have computed more of its prompt meanwhile
        }
        let (mut rows, goal) = self.rows_of_users(model, now);
        self.steps += 1;
        self.turns.insert((leader, model), self.steps);
        let mut work: Vec<Work> = Vec::new();
        let parked = self.preempted;
        for id in self.in_order(model, &rows) {
            // It may have given its pages up for one before it.
            let Some(at) = self.running.iter().position(|s| s.request.id == id) else { continue };
            let uid = self.running[at].request.uid;
            let left = rows.get(&uid).copied().unwrap_or(0);
            let Some(most) = self.most_rows(&self.running[at], left, &work) else { continue };
            self.split_for_others(at);
            if let Some(planned) = self.plan_rows(id, most, &mut work, now) {
                rows.insert(uid, left.saturating_sub(planned.rows));
                work.push(planned);
            }
        }
        if work.is_empty() && beside {
            return self.resume(leader, model, switched);
        }
        if work.is_empty() && self.preempted > parked {
            return self.next_step(now); // fewer sequences are left, and they have room
        }
        if !beside {
            self.add_drafts(model, &mut work, now);
        }
        let bytes = self.bytes_of(model, &work);
        // Work is empty only if the last sequence went to the queue.
        let step = (!work.is_empty()).then_some(StepPlan::of(model, work, switched, goal));
        step.map(|step| StepPlan { beside, bytes, ..step })
    }

    /// The user with the least device time among those that can run. Users that wait for their own masks earn nothing meanwhile.
    fn choose_leader(&mut self) -> Option<u32> {
        let runnable = self.running.iter().filter(|s| self.can_run(s)).map(|s| s.request.uid);
        let runnable: BTreeSet<u32> = runnable.collect();
        let late = self.running.iter().filter(|s| self.late.contains(&s.request.id)).map(|s| s.request.uid);
        let late = late.filter(|uid| !runnable.contains(uid)).collect();
        self.accounts.choose_beside(runnable, &late)
    }

    /// Goes on with the suspended step of a model: first with the one that is beside another.
    fn resume(&mut self, leader: u32, model: ModelId, switched: bool) -> Option<StepPlan> {
        self.turns.insert((leader, model), self.steps);
        let step = self.suspended_beside.remove(&model).or_else(|| self.suspended.remove(&model))?;
        Some(StepPlan { switched, resumed: true, ..step })
    }

    /// Most rows of a sequence in this step, of the `left` that its user has; `None` if it waits for another step. A text of an
    /// encoder is never cut: the first one of a step has all its rows, others have them if they fit.
    fn most_rows(&self, sequence: &Sequence<A>, left: u32, work: &[Work]) -> Option<u32> {
        if left == 0 || self.is_computed_by(work, sequence) {
            return None;
        }
        if !sequence.request.whole || work.is_empty() {
            return Some(if sequence.request.whole { sequence.pending() } else { left });
        }
        let planned: u32 = work.iter().map(|work| work.rows).sum();
        let most = self.rows_max_of(sequence.request.model);
        let fits = sequence.pending() <= left && planned.saturating_add(sequence.pending()) <= most;
        fits.then_some(left)
    }

    /// Notes whether several users have work, and forgets the accounts of those that left.
    fn look_at_users(&mut self, now: Instant) {
        let live = self.users();
        if live.len() > 1 {
            self.contended = now.checked_add(CONTENDED);
        }
        self.accounts.forget_except(&live);
        self.uses.forget_except(&live);
        let _ = self.uses.choose(live.clone()); // admissions choose by these accounts
        self.admissions.retain(|uid, _| live.contains(uid));
        self.connections.retain(|uid, _| live.contains(uid));
        if self.turns.len() > 2 * (self.running.len() + self.queue.len()) + TURNS_KEPT {
            let live: BTreeSet<(u32, ModelId)> =
                self.all().map(|s| (s.request.uid, s.request.model)).collect();
            self.turns.retain(|turn, _| live.contains(turn));
        }
    }

    /// Notes which connections of each user can run, and forgets those that have no live sequence.
    fn look_at_connections(&mut self) {
        let mut runnable: BTreeMap<u32, BTreeSet<u64>> = BTreeMap::new();
        let mut live: BTreeMap<u32, BTreeSet<u64>> = BTreeMap::new();
        for sequence in &self.running {
            let Request { uid, connection, .. } = sequence.request;
            live.entry(uid).or_default().insert(connection);
            if sequence.is_runnable() {
                runnable.entry(uid).or_default().insert(connection);
            }
        }
        for (uid, connections) in runnable {
            let accounts = self.connections.entry(uid).or_default();
            accounts.choose(connections);
            if let Some(live) = live.get(&uid) {
                accounts.forget_except(live);
            }
        }
    }

    /// Device time of a sequence's connection, to be compared with that of other connections of its user.
    pub(super) fn time_of_connection(&self, request: &Request) -> Duration {
        self.connections.get(&request.uid).map_or(Duration::ZERO, |accounts| accounts.of(request.connection))
    }

    /// The model of the next step: the one whose turn is kept, or that of the leader that was served longest ago.
    fn next_turn(&self, leader: u32, now: Instant) -> Option<ModelId> {
        let runnable = || self.running.iter().filter(|s| self.can_run(s));
        if self.turn_kept.is_some_and(|until| now < until)
            && let Some(same) = runnable().map(|s| s.request.model).find(|m| self.turn == Some(*m))
        {
            return Some(same);
        }
        let models = runnable().filter(|s| s.request.uid == leader).map(|s| s.request.model);
        models.min_by_key(|model| (self.turns.get(&(leader, *model)).copied().unwrap_or(0), *model))
    }

    /// Rows of each user in the next step of a model, and the time that a prompt may make it take beside answers.
    fn rows_of_users(&self, model: ModelId, now: Instant) -> (BTreeMap<u32, u32>, Option<Duration>) {
        let mut wanted: BTreeMap<u32, u32> = BTreeMap::new();
        let mut answers: BTreeMap<u32, (u32, u32)> = BTreeMap::new();
        for sequence in self.running.iter().filter(|s| s.request.model == model && self.joins(s)) {
            let rows = wanted.entry(sequence.request.uid).or_default();
            *rows = rows.saturating_add(sequence.pending());
            let (decoding, waiting) = answers.entry(sequence.request.uid).or_default();
            *(if sequence.decodes() { decoding } else { waiting }) += 1;
        }
        let decoding: u32 = answers.values().map(|(decoding, _)| decoding).sum();
        let estimate = self.costs.get(&model).and_then(super::Cost::estimate);
        let least = wanted.keys().map(|uid| self.accounts.of(*uid)).min().unwrap_or_default();
        let reads = estimate.map_or(Duration::ZERO, |e| Duration::from_secs_f64(2.0 * e.fixed));
        let users = wanted.len().max(1) as u32;
        let slack = least.saturating_add(reads.max(QUANTUM / users));
        let (near, mut ahead): (BTreeMap<u32, u32>, BTreeMap<u32, u32>) =
            wanted.into_iter().partition(|(uid, _)| self.accounts.of(*uid) <= slack);
        // Rows that cost next to nothing would give users of different shares the same tokens.
        let largest = near.keys().map(|uid| self.accounts.share(*uid)).max().unwrap_or(0);
        ahead.retain(|uid, _| self.accounts.share(*uid) >= largest);
        // A step beside a suspended one is short: the two take turns.
        let contended = self.contended.is_some_and(|until| now < until) || !self.aside.is_empty();
        let mut near = near;
        if let Some(e) = estimate.filter(|_| users > SHORT_TURNS) {
            // A turn is short beside a user's share of ten seconds, which is 300 ms among 32 users.
            let turn = (QUANTUM * SHORT_TURNS / users).as_secs_f64().max(e.fixed);
            near.values_mut().for_each(|rows| *rows = (*rows).min(e.rows_in(turn)));
        }
        let cost = self.costs.get(&model);
        let goal = mixed_goal(estimate, cost.and_then(|cost| cost.answers(decoding)), decoding, users > 1);
        let longer = crowd(answers.into_values());
        let goal = goal.map(|goal| Duration::try_from_secs_f64(goal.as_secs_f64() * longer).unwrap_or(goal));
        // One row of a prompt at least: without, no step would tell that prompts take less time now.
        let mixed = goal.and_then(|goal| cost?.rows_mixed(goal)).map(|rows| rows.max(decoding + 1));
        let tried =
            cost.filter(|_| contended).map(|cost| cost.rows_tried(QUANTUM.as_secs_f64()).max(FIRST_ROWS));
        let rows_max = self.rows_max_of(model);
        let limit = row_limit(estimate, contended, self.limits.suspends)
            .min(tried.unwrap_or(u32::MAX))
            .min(excess_limit(estimate, &near))
            .min(mixed.unwrap_or(u32::MAX))
            .min(rows_max);
        let mut rows = share_rows(self.least_served(near, limit), limit);
        let taken: u32 = rows.values().sum();
        let free = estimate.map_or(0, |e| e.rows_within(FREE_PART * e.fixed));
        let free = free.min(rows_max.saturating_sub(taken));
        rows.extend(share_rows(self.least_served(ahead, free), free));
        (rows, goal)
    }

    /// Most rows of a decoder's step of a model with running sequences. Their values fit beside those of suspended steps.
    pub(super) fn rows_max_of(&self, model: ModelId) -> u32 {
        let of_model = self.running.iter().find(|s| s.request.model == model);
        let Some(Request { rows_max, row_bytes, .. }) = of_model.map(|s| &s.request) else { return 1 };
        let room = self.room_for_values(0).checked_div(*row_bytes);
        let room = room.map_or(u32::MAX, |rows| u32::try_from(rows).unwrap_or(u32::MAX));
        self.limits.rows_max.min(*rows_max).min(room).max(1)
    }

    /// At most `most` of these users, those with the least device time. Rows that do not suffice for all would go to the same
    /// users in every step otherwise.
    fn least_served(&self, wanted: BTreeMap<u32, u32>, most: u32) -> BTreeMap<u32, u32> {
        let mut users: Vec<(u32, u32)> = wanted.into_iter().collect();
        users.sort_by_key(|(uid, _)| self.accounts.of(*uid));
        users.into_iter().take(most as usize).collect()
    }

    /// A model's runnable sequences in the order in which their user's rows go to them. Decoding sequences
    /// come first, then prompts; those of the connection with the least device time lead. If a user has fewer rows than
    /// decoding sequences, its connections take turns, and of a connection those that were served longest ago go first.
    fn in_order(&self, model: ModelId, rows: &BTreeMap<u32, u32>) -> Vec<SequenceId> {
        let of_model = |s: &Sequence<A>| s.request.model == model && self.joins(s);
        let mut decoding: BTreeMap<u32, u32> = BTreeMap::new();
        for sequence in self.running.iter().filter(|s| of_model(s) && s.decodes()) {
            *decoding.entry(sequence.request.uid).or_default() += 1;
        }
        let short =
            |uid: u32| decoding.get(&uid).is_some_and(|n| rows.get(&uid).is_some_and(|rows| rows <= n));
        let mut order: Vec<usize> =
            (0..self.running.len()).filter(|at| of_model(&self.running[*at])).collect();
        order.sort_by_key(|at| {
            let sequence = &self.running[*at];
            let time = self.time_of_connection(&sequence.request);
            let turn =
                if short(sequence.request.uid) { (time, sequence.served) } else { (Duration::ZERO, 0) };
            (turn, !sequence.decodes(), time, *at)
        });
        let order: Vec<&Sequence<A>> = order.into_iter().map(|at| &self.running[at]).collect();
        ranked(order).into_iter().map(|sequence| sequence.request.id).collect()
    }

    /// Charges a step, or a stretch of one, to its users and sequences. The time of the weights counts equally for all
    /// users, the rest by rows. Returns what each user is charged.
    pub fn charge(&mut self, step: &StepPlan, time: Duration) -> BTreeMap<u32, Duration> {
        let rows = f64::from(step.rows().max(1));
        let mut users: BTreeMap<u32, u32> = BTreeMap::new();
        for work in &step.work {
            *users.entry(work.uid).or_default() += 1;
        }
        let estimate = self.costs.get(&step.model).and_then(super::Cost::estimate);
        if let Some(suspended) = self.suspended.get_mut(&step.model).filter(|_| step.beside) {
            suspended.turns.beside = suspended.turns.beside.saturating_add(time);
        }
        let mut charged = BTreeMap::new();
        let fixed = estimate.map_or(0.0, |e| e.fixed / (e.fixed + e.row * rows).max(1e-9)).clamp(0.0, 1.0);
        for work in &step.work {
            let sequences = f64::from(users.get(&work.uid).copied().unwrap_or(1));
            let of_weights = fixed / (users.len() as f64 * sequences);
            let of_rows = (1.0 - fixed) * f64::from(work.rows) / rows;
            let part = time.mul_f64((of_weights + of_rows).clamp(0.0, 1.0));
            self.accounts.charge(work.uid, part);
            self.uses.charge(work.uid, part);
            *charged.entry(work.uid).or_insert(Duration::ZERO) += part;
            self.connections.entry(work.uid).or_default().charge(work.connection, part);
            if let Some(sequence) = self.get_mut(work.id) {
                sequence.device_time = sequence.device_time.saturating_add(part);
            }
        }
        charged
    }

    /// Records how long a whole step over resident weights took.
    pub fn observe(&mut self, step: &StepPlan, time: Duration) {
        let cost = self.costs.entry(step.model).or_default();
        cost.observe(step.rows(), time);
        match (step.goal, step.work.iter().all(|work| work.decode)) {
            (_, true) => cost.observe_answers(step.rows(), time),
            (Some(goal), false) => cost.observe_mixed(step.rows(), goal, time),
            (None, false) => {}
        }
    }

    /// True if a step in progress should make way after this time. Then another sequence has more right to the device, or one
    /// waits for a place. A step beside a suspended one makes way for other models alone.
    pub fn is_due(&self, step: &StepPlan, time: Duration) -> bool {
        let spent =
            step.work.iter().map(|work| self.accounts.after(work.uid, time)).min().unwrap_or_default();
        let own = step.turns.own.saturating_add(time);
        let mut others = self.running.iter().filter(|s| {
            let beside = s.request.model == step.model;
            if beside {
                !step.beside && self.goes_beside(step, own, s)
            } else {
                self.can_run(s) && self.has_room(s, step.bytes)
            }
        });
        let of_step = |uid: u32| step.work.iter().any(|work| work.uid == uid);
        let has_right = |s: &Sequence<A>| match of_step(s.request.uid) {
            true => s.request.model == step.model && step.turns.beside <= own,
            false => self.accounts.of(s.request.uid) < spent,
        };
        others.any(has_right) || !self.queue.is_empty()
    }
}

/// Lets the sequences of a user's higher priorities take the first of its places in an order. Other users keep theirs.
fn ranked<A>(order: Vec<&Sequence<A>>) -> Vec<&Sequence<A>> {
    let mut of_users: BTreeMap<u32, Vec<&Sequence<A>>> = BTreeMap::new();
    for sequence in &order {
        of_users.entry(sequence.request.uid).or_default().push(sequence);
    }
    let mut of_users: BTreeMap<u32, _> = of_users
        .into_iter()
        .map(|(uid, mut of_user)| {
            of_user.sort_by_key(|s| Reverse(s.request.priority));
            (uid, of_user.into_iter())
        })
        .collect();
    order.iter().filter_map(|s| of_users.get_mut(&s.request.uid)?.next()).collect()
}

/// Most rows of a step. `suspends`: it makes way for others.
pub(super) fn row_limit(estimate: Option<Estimate>, contended: bool, suspends: bool) -> u32 {
    let (quantum, reads) = match suspends {
        true => (QUANTUM_ALONE, WEIGHTS_READS_ALONE),
        false => (QUANTUM_WHOLE, WEIGHTS_READS_WHOLE),
    };
    match (estimate, contended) {
        (None, true) => FIRST_ROWS,
        (Some(e), true) => e.rows_in(QUANTUM.as_secs_f64().max(e.fixed)),
        (Some(e), false) if e.certain => e.rows_in(quantum.as_secs_f64().max(reads * e.fixed)),
        (_, false) => u32::MAX,
    }
}

/// Most rows of a step for users of which some want less than others. A user with one short answer is not slowed down
/// much by another's long prompt.
fn excess_limit(estimate: Option<Estimate>, wanted: &BTreeMap<u32, u32>) -> u32 {
    let (Some(e), Some(least)) = (estimate, wanted.values().min()) else { return u32::MAX };
    if wanted.len() < 2 {
        return u32::MAX;
    }
    let rows = f64::from(*least) * wanted.len() as f64;
    let time = EXCESS * (e.fixed + e.row * rows) - e.fixed;
    e.rows_in(time.max(EXCESS_LEAST.as_secs_f64()))
}

/// The time of a step with so many decoding sequences, whoever's they are, and rows of prompts. `several`: of several users.
fn mixed_goal(
    estimate: Option<Estimate>,
    measured: Option<f64>,
    decoding: u32,
    several: bool,
) -> Option<Duration> {
    let e = estimate.filter(|_| decoding > 0)?;
    let (times, least) = match several {
        true => (MIXED_OF_SEVERAL, MIXED_LEAST_OF_SEVERAL),
        false => (MIXED, MIXED_LEAST),
    };
    let estimated = e.fixed + e.row * f64::from(decoding);
    let time = times * measured.map_or(estimated, |measured| measured.min(estimated));
    Some(Duration::try_from_secs_f64(time).unwrap_or(least).max(least))
}

/// How many times as long such a step may be, because more of each user's sequences wait for their first token than decode.
/// Short steps would make all of them wait longer: a row of a prompt costs twice as much there. `users`: sequences of each
/// that decode, and that wait. A user with answers alone keeps the step short for all.
fn crowd(users: impl Iterator<Item = (u32, u32)>) -> f64 {
    let answering = users.filter(|(decoding, _)| *decoding > 0);
    let parts = answering.map(|(decoding, waiting)| f64::from(waiting) / f64::from(decoding));
    parts.reduce(f64::min).unwrap_or(1.0).max(1.0)
}

/// Gives each user an equal number of rows, and what some do not want to the others. Each gets at least one while there
/// are enough.
pub(super) fn share_rows(wanted: BTreeMap<u32, u32>, limit: u32) -> BTreeMap<u32, u32> {
    let mut by_need: Vec<(u32, u32)> = wanted.into_iter().collect();
    by_need.sort_by_key(|(uid, rows)| (*rows, *uid));
    let (mut left, mut users) = (limit, by_need.len() as u32);
    let mut shares = BTreeMap::new();
    for (uid, rows) in by_need {
        let share = rows.min(left.div_ceil(users.max(1)));
        shares.insert(uid, share);
        left -= share;
        users -= 1;
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_shared_equally_and_none_is_left() {
        let share = |wanted: &[(u32, u32)], limit| {
            share_rows(wanted.iter().copied().collect(), limit).into_iter().collect::<Vec<_>>()
        };
        assert_eq!(share(&[(1, 1), (2, 300)], 64), [(1, 1), (2, 63)]);
        assert_eq!(share(&[(1, 300), (2, 300), (3, 5)], 65), [(1, 30), (2, 30), (3, 5)]);
        assert_eq!(share(&[(1, 9)], 4), [(1, 4)]);
        assert_eq!(share(&[(1, 9), (2, 9), (3, 9)], 2).iter().map(|s| s.1).sum::<u32>(), 2);
    }

    #[test]
    fn a_long_prompt_makes_anothers_step_little_longer() {
        let limit = |e, wanted: &[(u32, u32)]| excess_limit(Some(e), &wanted.iter().copied().collect());
        let e = Estimate { fixed: 0.010, row: 0.002, certain: true };
        // 14 ms for a row of each; 22.4 ms are the fixed 10 and six rows.
        assert_eq!(limit(e, &[(1, 1), (2, 500)]), 6);
        assert_eq!(limit(e, &[(1, 8), (2, 500)]), 28);
        assert_eq!(
            (limit(e, &[(1, 500)]), excess_limit(None, &BTreeMap::from([(1, 1), (2, 2)]))),
            (u32::MAX, u32::MAX)
        );
        let tiny = Estimate { fixed: 0.0001, row: 0.0001, certain: true };
        assert_eq!(limit(tiny, &[(1, 1), (2, 500)]), 10, "1 ms");
    }

    #[test]
    fn a_prompt_beside_answers_may_double_their_time() {
        let e = Some(Estimate { fixed: 0.010, row: 0.002, certain: true });
        let goal = |measured, decoding| mixed_goal(e, measured, decoding, false).map(|goal| goal.as_millis());
        assert_eq!((goal(None, 0), mixed_goal(None, None, 3, false)), (None, None));
        assert_eq!((goal(None, 2), goal(None, 16)), (Some(28), Some(84)));
        assert_eq!((goal(Some(0.010), 2), goal(Some(0.100), 2)), (Some(20), Some(28)));
        assert_eq!(goal(Some(0.002), 2), Some(10), "the least");
        let of_several = |measured| mixed_goal(e, measured, 2, true).map(|goal| goal.as_micros());
        assert_eq!((of_several(None), of_several(Some(0.002))), (Some(22_400), Some(6_000)));
        let crowd = |users: &[(u32, u32)]| crowd(users.iter().copied());
        assert_eq!([crowd(&[(8, 8)]), crowd(&[(8, 56)]), crowd(&[])], [1.0, 7.0, 1.0]);
        assert_eq!(
            [crowd(&[(8, 56), (1, 0)]), crowd(&[(8, 56), (0, 9)])],
            [1.0, 7.0],
            "another user's answer"
        );
    }

    #[test]
    fn a_contended_step_is_short_and_one_alone_is_not() {
        let slow = Estimate { fixed: 0.36, row: 0.15, certain: true };
        let limits = |e| [(true, true), (false, true), (false, false)].map(|(c, s)| row_limit(e, c, s));
        assert_eq!(limits(Some(slow)), [2, 72, 7]);
        let fast = Estimate { fixed: 0.008, row: 0.0001, certain: true };
        assert_eq!(limits(Some(fast)), [400, 10_000, 1000], "a step that no other interrupts takes 100 ms");
        assert_eq!(limits(None), [FIRST_ROWS, u32::MAX, u32::MAX]);
    }
}
