//! Masks of next tokens, computed while the device computes the step.
//!
//! A sequence with a constraint has a [`Masking`]. The engine thread hands each accepted token to threads of their own.
//! It takes the mask only when the step's logits are there. The state follows the tokens of the answer and nothing else: pages,
//! positions and parked sequences do not matter to it. A queue holds each sequence at most once for each step, and forgets one that
//! ended.
//!
//! For drafted tokens, a copy of the constraint follows them, and gives a mask behind each that it allows. So nothing but the
//! answer's tokens changes the state.
//!
//! A step waits for the masks of all its sequences. A hostile constraint takes 160 ms for each, so nobody waits for long. A sequence
//! is late if its mask would take more than a moment, or an unknown time. It stays out of steps with other users' rows until its mask
//! is there. If a mask does not come in time nevertheless, no token is drawn. The last row is computed again once the mask is there.
//! Masks that may be slow have threads of their own, of low priority. Users take turns there, and none has all threads.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::SequenceId;
use crate::aside::{panic_text, thread_time};
use crate::backend::TokenMask;
use crate::lock::{self, Condvar, Mutex, Rank};
use crate::model::constraint::{Allowed, Constraint, ConstraintError};

mod lanes;

use lanes::Lane;

/// Taken for the time of a mask that nobody knows.
const UNKNOWN: Duration = Duration::from_secs(5);

/// Longest wait of a step for masks if its sequences are those of one user: another user may come meanwhile.
pub(super) const WAIT_ALONE: Duration = Duration::from_millis(20);

/// Longest wait of the engine for whether an answer is complete. That takes 10 us, and a thread.
const WAIT_AT_END: Duration = Duration::from_millis(100);

/// A mask that took so long is slow. Most take 10 us, 99 of 100 less than 0.4 ms, and a few of an honest constraint 25 ms. The masks
/// of all of a user's sequences together may make a step with others wait as long.
pub(super) const SLOW: Duration = Duration::from_millis(2);

/// If the mask before took longer, a thread of low priority computes the next one. So it does the first one of a sequence.
const QUICK: Duration = Duration::from_micros(500);

/// The niceness of these threads: those that compute get ten times as much time.
const NICE: i32 = 10;

/// How long a user's sequences wait for their masks before they join a step with others, after a slow one.
const SLOW_FOR: Duration = Duration::from_secs(10);

/// Most threads of each priority.
const THREADS_MAX: usize = 4;

/// Fewest threads for masks that may be slow: one user has at most all but one of them.
const SLOW_THREADS_MIN: usize = 2;

/// Wakes the engine thread.
type Wake = Arc<dyn Fn() + Send + Sync>;

/// Threads that compute masks. They start with the first constraint.
pub(super) struct MaskPool {
    /// Called when an answer is complete or failed: a sequence without credit is in no step that would notice.
    wake: Wake,
    lanes: Option<Lanes>,
    /// Users of a slow mask, until when.
    slow: BTreeMap<u32, Instant>,
}

/// Masks that are to be computed, by how long they take, and answers that end.
struct Lanes {
    quick: Lane,
    slow: Lane,
    ends: Lane,
}

/// The constraint of one sequence.
#[derive(Debug)]
pub(super) struct Masking {
    uid: u32,
    state: Mutex<State>,
    done: Condvar,
}

#[derive(Debug)]
struct State {
    /// `None` while a thread works with it, and after a panic.
    constraint: Option<Constraint>,
    /// The answer's tokens of the last step, until a thread has taken them.
    tokens: Vec<u32>,
    /// The last of `tokens` is the last one that the request allows: no mask is wanted after it.
    last: bool,
    result: Option<Masked>,
    /// The mask before, whose memory the next one takes.
    spare: Option<Arc<TokenMask>>,
    /// Drafted tokens that may follow.
    ahead: Vec<u32>,
    /// The tokens that may follow each of them, as far as they are known.
    masks_ahead: Vec<Arc<TokenMask>>,
    /// How often the answer got tokens.
    turn: u64,
    /// How much processor time the last mask took; `None` before the first one.
    took: Option<Duration>,
    /// A step did not wait for the mask that is being computed.
    missed: bool,
    /// The first mask was asked for.
    begun: bool,
}

/// Sequences whose masks are not there yet.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Late {
    /// They should stay out of steps with rows of other users.
    pub beside_others: BTreeSet<SequenceId>,
    /// They should stay out of all steps.
    pub missed: BTreeSet<SequenceId>,
}

/// The tokens that may follow the answer so far.
#[derive(Clone, Debug)]
pub(super) enum Masked {
    /// One of these tokens.
    Tokens(Arc<TokenMask>),
    /// Nothing: the answer is complete.
    Complete,
    /// Nothing: the request allows no more tokens, and the answer is not complete.
    Cut,
    /// The constraint failed.
    Failed(ConstraintError),
}

impl Masking {
    /// For a user's constraint at the beginning of its answer.
    pub fn new(constraint: Constraint, uid: u32) -> Arc<Self> {
        Arc::new(Self::of(State::new(Some(constraint), None), uid))
    }

    fn of(state: State, uid: u32) -> Self {
        Self { uid, state: Mutex::new(Rank::Mask, state), done: Condvar::new() }
    }

    /// True until the first mask is asked for.
    pub fn is_new(&self) -> bool {
        !self.state.lock().begun
    }

    /// The tokens that may follow, if they are known.
    pub fn known(&self) -> Option<Masked> {
        self.state.lock().result.clone()
    }

    /// The tokens that may follow, if they come in time. If not, no step waits for them again.
    pub fn wait_until(&self, until: Instant) -> Option<Masked> {
        let mut state = self.state.lock();
        loop {
            if let Some(result) = &state.result {
                return Some(result.clone());
            }
            if self.done.wait_until(&mut state, until) && state.result.is_none() {
                state.missed = true;
                return None;
            }
        }
    }

    /// The tokens that may follow so many drafted ones, at least one, if they are known already.
    pub fn ahead(&self, drafted: u32) -> Option<Arc<TokenMask>> {
        self.state.lock().masks_ahead.get(drafted.checked_sub(1)? as usize).cloned()
    }

    /// Takes what the next mask is computed from. True if the one before was quick.
    fn prepare(&self, tokens: &[u32], ahead: &[u32], last: bool) -> bool {
        let mut state = self.state.lock();
        if let Some(Masked::Tokens(mask)) = state.result.take() {
            state.spare = Some(mask);
        }
        (state.last, state.turn) = (last, state.turn.wrapping_add(1));
        (state.tokens, state.ahead) = (tokens.to_vec(), ahead.to_vec());
        state.masks_ahead.clear();
        (state.missed, state.begun) = (false, true);
        state.took.is_some_and(|took| took < QUICK)
    }

    /// Computes what may follow, and what may follow drafted tokens. Tells `wake` where the engine does not wait for it.
    fn compute(&self, wake: &Wake) {
        #[cfg(test)]
        super::tests::masks::held::wait(self.uid);
        let begun = thread_time();
        let (constraint, tokens, last, ahead, turn, spare) = {
            let mut state = self.state.lock();
            let (tokens, ahead) = (std::mem::take(&mut state.tokens), std::mem::take(&mut state.ahead));
            (state.constraint.take(), tokens, state.last, ahead, state.turn, state.spare.take())
        };
        let lost = || Masked::Failed(ConstraintError::Internal("the constraint is lost".to_owned()));
        let computed = constraint.map(|mut constraint| {
            let follow = || {
                let masked = following(&mut constraint, &tokens, last, spare)?;
                let goes_on = !ahead.is_empty() && matches!(masked, Masked::Tokens(_));
                Ok((masked, goes_on.then(|| constraint.copy())))
            };
            match std::panic::catch_unwind(std::panic::AssertUnwindSafe(follow)) {
                Ok(Ok((tokens @ Masked::Tokens(_), copy))) => (Some(constraint), tokens, copy),
                Ok(Ok((none, _))) => (None, none, None),
                Ok(Err(error)) => (None, Masked::Failed(error), None),
                Err(panic) => {
                    let error = ConstraintError::Internal(panic_text(&*panic).to_owned());
                    (None, Masked::Failed(error), None)
                }
            }
        });
        let (constraint, result, copy) = computed.unwrap_or_else(|| (None, lost(), None));
        let ends = !matches!(result, Masked::Tokens(_));
        let missed = {
            let mut state = self.state.lock();
            state.constraint = constraint;
            state.took = Some(thread_time().saturating_sub(begun));
            state.result = Some(result);
            self.done.notify_all();
            state.missed
        };
        if ends || missed {
            wake();
        }
        if let Some(copy) = copy {
            self.look_ahead(copy, &ahead, turn);
        }
    }

    /// Finds what may follow drafted tokens, until the answer gets others or the form forbids one.
    fn look_ahead(&self, mut copy: Constraint, ahead: &[u32], turn: u64) {
        for &token in ahead {
            let follow = || copy.follow(Some(token));
            let followed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(follow));
            let Ok(Ok(Allowed::Tokens(mask))) = followed else { return };
            let mut state = self.state.lock();
            if state.turn != turn {
                return;
            }
            state.masks_ahead.push(mask);
        }
    }
}

impl State {
    fn new(constraint: Option<Constraint>, result: Option<Masked>) -> Self {
        let (tokens, spare, ahead, masks_ahead, took) = Default::default();
        Self {
            constraint,
            tokens,
            last: false,
            result,
            spare,
            ahead,
            masks_ahead,
            turn: 0,
            took,
            missed: false,
            begun: false,
        }
    }
}

/// Takes the tokens of a step, and finds what may follow the last one.
fn following(
    constraint: &mut Constraint,
    tokens: &[u32],
    last: bool,
    spare: Option<Arc<TokenMask>>,
) -> Result<Masked, ConstraintError> {
    let Some((token, before)) = tokens.split_last() else {
        return constraint.follow_in(None, spare).map(Masked::of);
    };
    for token in before {
        if constraint.completes(*token)? {
            return Ok(Masked::Complete);
        }
    }
    match last {
        true => Ok(if constraint.completes(*token)? { Masked::Complete } else { Masked::Cut }),
        false => constraint.follow_in(Some(*token), spare).map(Masked::of),
    }
}

impl Masked {
    fn of(allowed: Allowed) -> Self {
        match allowed {
            Allowed::Tokens(mask) => Self::Tokens(mask),
            Allowed::Complete => Self::Complete,
        }
    }
}

impl MaskPool {
    /// A pool without threads yet.
    pub fn new(wake: Wake) -> Self {
        Self { wake, lanes: None, slow: BTreeMap::new() }
    }

    /// Whether there was a constraint yet.
    pub fn is_used(&self) -> bool {
        self.lanes.is_some()
    }

    /// The sequences that should stay out of a step with other users' rows. Their masks are not there yet, and may take too long. These
    /// are first ones, and all of a user that had a slow one not long ago. Of others, a user may have as many as take a moment
    /// together. Sequences that a step missed stay out of all steps.
    pub fn late<'a>(&mut self, all: impl Iterator<Item = (SequenceId, &'a Masking)>, now: Instant) -> Late {
        let mut pending: BTreeMap<u32, Vec<(Duration, SequenceId)>> = BTreeMap::new();
        let mut late = Late::default();
        for (id, masking) in all {
            let state = masking.state.lock();
            if state.took.is_some_and(|took| took >= SLOW) {
                self.slow.insert(masking.uid, now + SLOW_FOR);
            }
            match (&state.result, state.missed) {
                (Some(_), _) => {}
                (None, true) => drop(late.missed.insert(id)),
                (None, false) => {
                    pending.entry(masking.uid).or_default().push((state.took.unwrap_or(UNKNOWN), id))
                }
            }
        }
        self.slow.retain(|_, until| *until > now);
        let threads = self.lanes.as_ref().map_or(1, |lanes| lanes.quick.threads.len().max(1)) as u32;
        for (uid, mut of_user) in pending {
            of_user.sort_unstable();
            let most = if self.slow.contains_key(&uid) { Duration::ZERO } else { SLOW };
            let mut together = Duration::ZERO;
            late.beside_others.extend(of_user.into_iter().filter_map(|(took, id)| {
                together += took / threads;
                (together >= most).then_some(id)
            }));
        }
        late
    }

    /// Has the sequence's mask computed, from [`MaskPool::start`] on: the first one, or after tokens that its masks allowed. The masks
    /// behind the tokens that may follow, `ahead`, come later.
    pub fn compute(&mut self, masking: &Arc<Masking>, tokens: &[u32], ahead: &[u32]) {
        let quick = masking.prepare(tokens, ahead, false);
        let lanes = self.lanes();
        let lane = if quick { &mut lanes.quick } else { &mut lanes.slow };
        if lane.threads.is_empty() {
            return masking.compute(&self.wake); // no thread could start: slower, but right
        }
        lane.queue.put(masking);
        lane.is_untold = true;
    }

    /// Tells a thread of the sequences that were handed over, once for all of a step. It wakes the next one if there are more:
    /// each call takes some 5 us, which the engine's thread does not have.
    pub fn start(&mut self) {
        let Some(lanes) = &mut self.lanes else { return };
        for lane in [&mut lanes.quick, &mut lanes.slow] {
            if std::mem::take(&mut lane.is_untold) {
                lane.queue.wanted.notify_one();
            }
        }
    }

    /// Whether the answer is complete with these tokens, the last of which is the last one that its request allows. Waits for a
    /// thread that does nothing else, but for no mask. False if that takes too long.
    pub fn completes(&mut self, masking: &Arc<Masking>, tokens: &[u32]) -> bool {
        masking.prepare(tokens, &[], true);
        let lane = &self.lanes().ends;
        if lane.threads.is_empty() {
            masking.compute(&self.wake);
        } else {
            lane.queue.put(masking);
            lane.queue.wanted.notify_one();
        }
        matches!(masking.wait_until(lock::now() + WAIT_AT_END), Some(Masked::Complete))
    }

    fn lanes(&mut self) -> &mut Lanes {
        let wake = &self.wake;
        self.lanes.get_or_insert_with(|| {
            let processors = std::thread::available_parallelism().map_or(1, usize::from);
            let count = processors.div_ceil(2).min(THREADS_MAX);
            let slow = count.max(SLOW_THREADS_MIN);
            Lanes {
                quick: Lane::start(count, count, 0, wake),
                slow: Lane::start(slow, slow - 1, NICE, wake),
                ends: Lane::start(1, 1, 0, wake),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::constraint::tests::{TESTER, id, tokenizer};
    use crate::model::constraint::{ConstraintKind, ConstraintSource};
    use crate::model::tokenizer::SharedTokenizer;

    pub(super) fn masking(uid: u32, took: Duration, result: Option<Masked>) -> Masking {
        Masking::of(State { took: Some(took), ..State::new(None, result) }, uid)
    }

    fn patient(masking: &Masking) -> Masked {
        masking.wait_until(lock::now() + UNKNOWN).expect("a thread computes it")
    }

    /// The tokens of a text, one for each byte.
    fn ids(tokenizer: &SharedTokenizer, text: &str) -> Vec<u32> {
        text.bytes().map(|byte| id(tokenizer, byte)).collect()
    }

    /// The mask after a text, by a constraint that follows it token by token.
    fn alone(constraint: &Constraint, tokens: &[u32]) -> Option<Arc<TokenMask>> {
        let mut constraint = constraint.copy();
        let mut allowed = constraint.follow(None).unwrap();
        for token in tokens {
            allowed = constraint.follow(Some(*token)).unwrap();
        }
        match allowed {
            Allowed::Tokens(mask) => Some(mask),
            Allowed::Complete => None,
        }
    }

    #[test]
    fn masks_behind_drafted_tokens_are_those_of_the_tokens_and_change_nothing() {
        let tokenizer = tokenizer();
        let source = ConstraintSource { kind: ConstraintKind::Regex, text: "(ab|cd){3}e".to_owned() };
        let fresh = tokenizer.constraints().unwrap().compile_untried(&source, TESTER).unwrap();
        let text = ids(&tokenizer, "abcdabe");
        // (taken at once, drafted behind them, of which the form allows so many).
        let cases = [("ab", "cdab", 4), ("abc", "b", 0), ("abcd", "abe", 2), ("ab", "cx", 1), ("", "ab", 2)];
        for (taken, drafted, allowed) in cases {
            let masking = Masking::new(fresh.copy(), 7);
            let (taken, drafted) = (ids(&tokenizer, taken), ids(&tokenizer, drafted));
            let mut pool = MaskPool::new(Arc::new(|| ()));
            pool.compute(&masking, &[], &[]);
            pool.start();
            patient(&masking);
            pool.compute(&masking, &taken, &drafted);
            pool.start();
            let known = |masking: &Masking| match patient(masking) {
                Masked::Tokens(mask) => Some(mask),
                _ => None,
            };
            assert_eq!(known(&masking), alone(&fresh, &taken));
            let until = lock::now() + UNKNOWN;
            while masking.ahead(allowed).is_none() && allowed > 0 && lock::now() < until {
                std::thread::yield_now();
            }
            for count in 1..=allowed {
                let tokens = [&taken[..], &drafted[..count as usize]].concat();
                assert_eq!(masking.ahead(count), alone(&fresh, &tokens), "{count} of {drafted:?}");
            }
            assert_eq!((masking.ahead(0), masking.ahead(allowed + 1)), (None, None));
            // Drafted tokens count for nothing: the answer goes on after those that were taken.
            let rest = &text[taken.len()..];
            assert!(pool.completes(&masking, rest), "{rest:?}");
            assert_eq!(masking.ahead(1), None);
        }
    }

    /// The sequences that stay out of steps with others.
    fn late(pool: &mut MaskPool, all: &[(u64, &Masking)], now: Instant) -> Vec<u64> {
        let late = pool.late(all.iter().map(|(id, masking)| (SequenceId(*id), *masking)), now);
        assert_eq!(late.missed, BTreeSet::new());
        late.beside_others.into_iter().map(|id| id.0).collect()
    }

    #[test]
    fn masks_of_one_user_make_a_step_wait_little_together() {
        let (mut pool, now) = (MaskPool::new(Arc::new(|| ())), lock::now());
        let first = Masking::of(State::new(None, None), 11);
        let [a, b, c, d] = [10, 10, 10, 11].map(|uid| masking(uid, SLOW * 2 / 5, None));
        let all = [(1, &a), (2, &b), (3, &c), (4, &d), (5, &first)];
        assert_eq!(late(&mut pool, &all, now), [3, 5], "the third of a user, and one of an unknown time");
        assert!(d.wait_until(now).is_none(), "nobody computes it");
        let missed = Late { missed: BTreeSet::from([SequenceId(4)]), ..Late::default() };
        assert_eq!(pool.late([(SequenceId(4), &d)].into_iter(), now), missed);
    }

    #[test]
    fn users_of_slow_masks_stay_out_of_steps_until_their_masks_are_there() {
        let (mut pool, now) = (MaskPool::new(Arc::new(|| ())), lock::now());
        let there = || Some(Masked::Complete);
        let slow = masking(10, SLOW, there());
        let (same, other) = (masking(10, Duration::ZERO, None), masking(11, SLOW / 2, None));
        assert_eq!(late(&mut pool, &[(1, &slow), (2, &same), (3, &other)], now), [2]);
        assert_eq!(late(&mut pool, &[(2, &same), (3, &other)], now + SLOW_FOR / 2), [2]);
        assert_eq!(late(&mut pool, &[(2, &same), (3, &other)], now + SLOW_FOR), [0; 0], "forgiven");
        assert!(pool.slow.is_empty());
    }
}
