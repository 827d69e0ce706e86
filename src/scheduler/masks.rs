//! Masks of next tokens, computed while the device computes the step.
//!
//! A sequence with a constraint has a [`Masking`]. The engine thread hands each accepted token to threads of their own.
//! It takes the mask only when the step's logits are there. The state follows the tokens of the answer and nothing else: pages,
//! positions and parked sequences do not matter to it. The queue holds each sequence at most once.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use crate::aside::panic_text;
use crate::backend::TokenMask;
use crate::lock::{self, Condvar, Mutex, Rank};
use crate::model::constraint::{Allowed, Constraint, ConstraintError};

/// Longest wait of the engine for one mask. Work for a token is bounded far below.
const WAIT_MAX: Duration = Duration::from_secs(5);

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
    result: Option<Masked>,
}

/// The tokens that may follow the answer so far.
#[derive(Clone, Debug)]
pub(super) enum Masked {
    /// One of these tokens.
    Tokens(Arc<TokenMask>),
    /// Nothing: the answer is complete.
    Complete,
    /// The constraint failed.
    Failed(ConstraintError),
}

impl Masking {
    /// For a constraint at the beginning of its answer.
    pub fn new(constraint: Constraint) -> Arc<Self> {
        let state = State { constraint: Some(constraint), token: None, result: None };
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
        let (constraint, token) = {
            let mut state = self.state.lock();
            (state.constraint.take(), state.token.take())
        };
        let lost = || Masked::Failed(ConstraintError::Internal("the constraint is lost".to_owned()));
        let computed = constraint.map(|mut constraint| {
            let followed =
                std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| constraint.follow(token)));
            match followed {
                Ok(Ok(Allowed::Tokens(mask))) => (Some(constraint), Masked::Tokens(mask)),
                Ok(Ok(Allowed::Complete)) => (None, Masked::Complete),
                Ok(Err(error)) => (None, Masked::Failed(error)),
                Err(panic) => {
                    (None, Masked::Failed(ConstraintError::Internal(panic_text(&*panic).to_owned())))
                }
            }
        });
        let (constraint, result) = computed.unwrap_or_else(|| (None, lost()));
        let mut state = self.state.lock();
        state.constraint = constraint;
        state.result.get_or_insert(result); // one that came too late has failed already
        self.done.notify_all();
    }
}

impl MaskPool {
    /// A pool without threads yet.
    pub fn new(wake: Wake) -> Self {
        Self { wake, queue: None, threads: Vec::new() }
    }

    /// Whether there was a constraint yet.
    pub fn is_used(&self) -> bool {
        self.queue.is_some()
    }

    /// Has the sequence's mask computed: the first one, or after a token that its last mask allowed.
    pub fn compute(&mut self, masking: &Arc<Masking>, token: Option<u32>) {
        {
            let mut state = masking.state.lock();
            (state.token, state.result) = (token, None);
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
        queue.waiting.lock().sequences.push_back(Arc::clone(masking));
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
