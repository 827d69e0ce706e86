//! Masks of next tokens, computed while the device computes the step.
//!
//! A sequence with a constraint has a [`Masking`]. The engine thread hands each accepted token to threads of their own.
//! It takes the mask only when the step's logits are there. The state follows the tokens of the answer and nothing else: pages,
//! positions and parked sequences do not matter to it. The queue holds each sequence at most once.

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
    /// The answer's last token, until a thread has taken it.
    token: Option<u32>,
    /// `token` is the last one that the request allows: no mask is wanted after it.
    last: bool,
    result: Option<Masked>,
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
        let state = State {
            constraint: Some(constraint),
            token: None,
            last: false,
            result: None,
            took: Duration::ZERO,
        };
        Arc::new(Self { state: Mutex::new(Rank::Mask, state), done: Condvar::new() })
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

    /// Computes what may follow.
    fn compute(&self) {
        let begun = lock::now();
        let (constraint, token, last) = {
            let mut state = self.state.lock();
            (state.constraint.take(), state.token.take(), state.last)
        };
        let lost = || Masked::Failed(ConstraintError::Internal("the constraint is lost".to_owned()));
        let computed = constraint.map(|mut constraint| {
            let follow = || match token.filter(|_| last) {
                Some(token) => constraint.completes(token).map(|complete| match complete {
                    true => Masked::Complete,
                    false => Masked::Cut,
                }),
                None => constraint.follow(token).map(|allowed| match allowed {
                    Allowed::Tokens(mask) => Masked::Tokens(mask),
                    Allowed::Complete => Masked::Complete,
                }),
            };
            match std::panic::catch_unwind(std::panic::AssertUnwindSafe(follow)) {
                Ok(Ok(tokens @ Masked::Tokens(_))) => (Some(constraint), tokens),
                Ok(Ok(none)) => (None, none),
                Ok(Err(error)) => (None, Masked::Failed(error)),
                Err(panic) => {
                    (None, Masked::Failed(ConstraintError::Internal(panic_text(&*panic).to_owned())))
                }
            }
        });
        let (constraint, result) = computed.unwrap_or_else(|| (None, lost()));
        let mut state = self.state.lock();
        state.constraint = constraint;
        state.took = lock::now().saturating_duration_since(begun);
        state.result.get_or_insert(result); // one that came too late has failed already
        self.done.notify_all();
    }
}

impl MaskPool {
    /// A pool without threads yet.
    pub fn new(wake: Wake) -> Self {
        Self { wake, queue: None, threads: Vec::new(), slow: BTreeMap::new() }
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

    /// Has the sequence's mask computed: the first one, or after a token that its last mask allowed.
    pub fn compute(&mut self, masking: &Arc<Masking>, token: Option<u32>) {
        self.hand_over(masking, token, false);
    }

    /// Whether the answer is complete with the last token that its request allows. Waits for a thread, but for no mask.
    pub fn completes(&mut self, masking: &Arc<Masking>, token: u32) -> bool {
        self.hand_over(masking, Some(token), true);
        matches!(masking.wait(), Masked::Complete)
    }

    /// Gives a thread the sequence. One that ends goes first, because the engine waits for it.
    fn hand_over(&mut self, masking: &Arc<Masking>, token: Option<u32>, last: bool) {
        {
            let mut state = masking.state.lock();
            (state.token, state.last, state.result) = (token, last, None);
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
            }
        }
        queue.wanted.notify_one();
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
            match waiting.sequences.pop_front() {
                Some(masking) => return Some(masking),
                None => self.wanted.wait(&mut waiting),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn masking(took: Duration, result: Option<Masked>) -> Masking {
        let state = State { constraint: None, token: None, last: false, result, took };
        Masking { state: Mutex::new(Rank::Mask, state), done: Condvar::new() }
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
