//! Masks of next tokens, computed while the device computes the step.
//!
//! A sequence with a constraint has a [`Masking`]. The engine thread hands each accepted token to threads of their own.
//! It takes the mask only when the step's logits are there. The state follows the tokens of the answer and nothing else: pages,
//! positions and parked sequences do not matter to it. The queue holds each sequence at most once for each step.
//!
//! For drafted tokens, a copy of the constraint follows them, and gives a mask behind each that it allows. So nothing but the
//! answer's tokens changes the state.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::SequenceId;
use crate::aside::panic_text;
use crate::backend::TokenMask;
use crate::lock::{self, Condvar, Mutex, Rank};
use crate::model::constraint::{Allowed, Constraint, ConstraintError};

/// Longest wait of the engine for one mask. Work for a token is bounded far below.
const WAIT_MAX: Duration = Duration::from_secs(5);

/// A mask that took so long is slow. Most take 10 us, 99 of 100 less than 0.4 ms, and a few of an honest constraint 25 ms.
const SLOW: Duration = Duration::from_millis(2);

/// How long a user's sequences wait for their masks before they join a step with others, after a slow one.
const SLOW_FOR: Duration = Duration::from_secs(10);

/// Most threads.
const THREADS_MAX: usize = 4;

/// Stack of a thread: expressions of a constraint may nest deep.
const STACK: usize = 64 << 20;

/// Wakes the engine thread.
type Wake = Arc<dyn Fn() + Send + Sync>;

/// Threads that compute masks. They start with the first constraint.
pub(super) struct MaskPool {
    /// Called when an answer is complete or failed: a sequence without credit is in no step that would notice.
    wake: Wake,
    queue: Option<Arc<Queue>>,
    threads: Vec<JoinHandle<()>>,
    /// Users of a slow mask, until when.
    slow: BTreeMap<u32, Instant>,
    /// The queue has sequences of which no thread was told.
    is_untold: bool,
}

#[derive(Debug)]
struct Queue {
    waiting: Mutex<Waiting>,
    wanted: Condvar,
}

#[derive(Debug, Default)]
struct Waiting {
    sequences: VecDeque<Arc<Masking>>,
    closed: bool,
}

/// The constraint of one sequence.
#[derive(Debug)]
pub(super) struct Masking {
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
    /// How long the last mask took.
    took: Duration,
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
    /// For a constraint at the beginning of its answer.
    pub fn new(constraint: Constraint) -> Arc<Self> {
        Arc::new(Self::of(State::new(Some(constraint), None)))
    }

    fn of(state: State) -> Self {
        Self { state: Mutex::new(Rank::Mask, state), done: Condvar::new() }
    }

    /// The tokens that may follow, if they are known.
    pub fn known(&self) -> Option<Masked> {
        self.state.lock().result.clone()
    }

    /// The tokens that may follow. Waits for them at most [`WAIT_MAX`].
    pub fn wait(&self) -> Masked {
        let until = lock::now() + WAIT_MAX;
        let mut state = self.state.lock();
        loop {
            if let Some(result) = &state.result {
                return result.clone();
            }
            if self.done.wait_until(&mut state, until) {
                let late = format!("no mask came within {} s", WAIT_MAX.as_secs());
                state.result = Some(Masked::Failed(ConstraintError::Internal(late)));
            }
        }
    }

    /// The tokens that may follow so many drafted ones, at least one, if they are known already.
    pub fn ahead(&self, drafted: u32) -> Option<Arc<TokenMask>> {
        self.state.lock().masks_ahead.get(drafted.checked_sub(1)? as usize).cloned()
    }

    /// Computes what may follow, and what may follow drafted tokens.
    fn compute(&self) {
        let begun = lock::now();
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
        {
            let mut state = self.state.lock();
            state.constraint = constraint;
            state.took = lock::now().saturating_duration_since(begun);
            state.result.get_or_insert(result); // one that came too late has failed already
            self.done.notify_all();
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
        Self { constraint, tokens, last: false, result, spare, ahead, masks_ahead, turn: 0, took }
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
        Self { wake, queue: None, threads: Vec::new(), slow: BTreeMap::new(), is_untold: false }
    }

    /// Whether there was a constraint yet.
    pub fn is_used(&self) -> bool {
        self.queue.is_some()
    }

    /// The sequences that should stay out of a step with other users' rows, because a step waits for the masks of all. Their
    /// masks are not there yet, and their user had a slow one not long ago.
    pub fn late<'a>(
        &mut self,
        all: impl Iterator<Item = (SequenceId, u32, &'a Masking)>,
        now: Instant,
    ) -> BTreeSet<SequenceId> {
        let mut pending = Vec::new();
        for (id, uid, masking) in all {
            let state = masking.state.lock();
            if state.took >= SLOW {
                self.slow.insert(uid, now + SLOW_FOR);
            }
            if state.result.is_none() {
                pending.push((id, uid));
            }
        }
        self.slow.retain(|_, until| *until > now);
        pending.into_iter().filter(|(_, uid)| self.slow.contains_key(uid)).map(|(id, _)| id).collect()
    }

    /// Has the sequence's mask computed, from [`MaskPool::start`] on: the first one, or after tokens that its masks allowed. The masks
    /// behind the tokens that may follow, `ahead`, come later.
    pub fn compute(&mut self, masking: &Arc<Masking>, tokens: &[u32], ahead: &[u32]) {
        self.hand_over(masking, tokens, ahead, false);
    }

    /// Tells a thread of the sequences that were handed over, once for all of a step. It wakes the next one if there are more:
    /// each call takes some 5 us, which the engine's thread does not have.
    pub fn start(&mut self) {
        if std::mem::take(&mut self.is_untold)
            && let Some(queue) = &self.queue
        {
            queue.wanted.notify_one();
        }
    }

    /// Whether the answer is complete with these tokens, the last of which is the last one that its request allows. Waits for a
    /// thread, but for no mask.
    pub fn completes(&mut self, masking: &Arc<Masking>, tokens: &[u32]) -> bool {
        self.hand_over(masking, tokens, &[], true);
        matches!(masking.wait(), Masked::Complete)
    }

    /// Gives a thread the sequence. One that ends goes first, because the engine waits for it.
    fn hand_over(&mut self, masking: &Arc<Masking>, tokens: &[u32], ahead: &[u32], last: bool) {
        {
            let mut state = masking.state.lock();
            if let Some(Masked::Tokens(mask)) = state.result.take() {
                state.spare = Some(mask);
            }
            (state.last, state.turn) = (last, state.turn.wrapping_add(1));
            (state.tokens, state.ahead) = (tokens.to_vec(), ahead.to_vec());
            state.masks_ahead.clear();
        }
        let queue = Arc::clone(self.queue.get_or_insert_with(|| {
            let waiting = Mutex::new(Rank::MaskQueue, Waiting::default());
            Arc::new(Queue { waiting, wanted: Condvar::new() })
        }));
        if self.threads.is_empty() {
            let processors = std::thread::available_parallelism().map_or(1, usize::from);
            let count = processors.div_ceil(2).min(THREADS_MAX);
            self.threads.extend((0..count).filter_map(|_| start(&queue, &self.wake)));
        }
        if self.threads.is_empty() {
            return masking.compute(); // no thread could start: slower, but right
        }
        {
            let mut waiting = queue.waiting.lock();
            if last {
                waiting.sequences.push_front(Arc::clone(masking));
            } else {
                waiting.sequences.push_back(Arc::clone(masking));
                self.is_untold = true;
            }
        }
        if last {
            queue.wanted.notify_one();
        }
    }
}

impl Drop for MaskPool {
    fn drop(&mut self) {
        let Some(queue) = &self.queue else { return };
        queue.waiting.lock().closed = true;
        queue.wanted.notify_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join(); // panics were caught
        }
    }
}

fn start(queue: &Arc<Queue>, wake: &Wake) -> Option<JoinHandle<()>> {
    let (queue, wake) = (Arc::clone(queue), Arc::clone(wake));
    let work = move || {
        while let Some(masking) = queue.next() {
            masking.compute();
            if !matches!(masking.known(), Some(Masked::Tokens(_))) {
                wake();
            }
        }
    };
    std::thread::Builder::new().name("mask".into()).stack_size(STACK).spawn(work).ok()
}

impl Queue {
    /// The next sequence; `None` once the pool is closed.
    fn next(&self) -> Option<Arc<Masking>> {
        let mut waiting = self.waiting.lock();
        loop {
            if waiting.closed {
                return None;
            }
            let next = waiting.sequences.pop_front();
            if !waiting.sequences.is_empty() {
                self.wanted.notify_one(); // one that sleeps, if any
            }
            match next {
                Some(masking) => return Some(masking),
                None => self.wanted.wait(&mut waiting),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::constraint::tests::{TESTER, id, tokenizer};
    use crate::model::constraint::{ConstraintKind, ConstraintSource};
    use crate::model::tokenizer::SharedTokenizer;

    fn masking(took: Duration, result: Option<Masked>) -> Masking {
        Masking::of(State { took, ..State::new(None, result) })
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
        let fresh = tokenizer.constraints().unwrap().compile(&source, TESTER).unwrap();
        let text = ids(&tokenizer, "abcdabe");
        // (taken at once, drafted behind them, of which the form allows so many).
        let cases = [("ab", "cdab", 4), ("abc", "b", 0), ("abcd", "abe", 2), ("ab", "cx", 1), ("", "ab", 2)];
        for (taken, drafted, allowed) in cases {
            let masking = Masking::new(fresh.copy());
            let (taken, drafted) = (ids(&tokenizer, taken), ids(&tokenizer, drafted));
            let mut pool = MaskPool::new(Arc::new(|| ()));
            pool.compute(&masking, &[], &[]);
            pool.start();
            masking.wait();
            pool.compute(&masking, &taken, &drafted);
            pool.start();
            let known = |masking: &Masking| match masking.wait() {
                Masked::Tokens(mask) => Some(mask),
                _ => None,
            };
            assert_eq!(known(&masking), alone(&fresh, &taken));
            let until = lock::now() + WAIT_MAX;
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

    #[test]
    fn users_of_slow_masks_stay_out_of_steps_until_their_masks_are_there() {
        let (mut pool, now) = (MaskPool::new(Arc::new(|| ())), lock::now());
        let there = || Some(Masked::Complete);
        let all = [
            (SequenceId(1), 10, masking(SLOW, there())),
            (SequenceId(2), 10, masking(Duration::ZERO, None)),
            (SequenceId(3), 11, masking(SLOW / 2, None)),
        ];
        let all = all.each_ref().map(|(id, uid, masking)| (*id, *uid, masking));
        assert_eq!(pool.late(all.into_iter(), now), BTreeSet::from([SequenceId(2)]));
        let [_, later @ ..] = all;
        assert_eq!(pool.late(later.into_iter(), now + SLOW_FOR / 2), BTreeSet::from([SequenceId(2)]));
        assert_eq!(pool.late(later.into_iter(), now + SLOW_FOR), BTreeSet::new(), "forgiven");
        assert!(pool.slow.is_empty());
    }
}
