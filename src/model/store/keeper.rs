//! Loads and locks models' pages in pieces, on a thread that lives while there is work.
//!
//! Models take turns, so that a small model does not wait for a large one. The queue holds no unmapped model in memory:
//! at most the piece in flight is finished.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};

use super::Model;
use crate::lock::{Mutex, Rank};
use crate::model::pages::{LockBudget, Next, PagesState};

/// The queue of models whose pages need work.
#[derive(Debug)]
pub(super) struct Keeper {
    queue: Mutex<Queue>,
    pub(super) budget: Arc<LockBudget>,
}

/// Holds at most one entry per mapped model.
#[derive(Debug, Default)]
struct Queue {
    models: VecDeque<Weak<Model>>,
    /// True while a thread takes entries.
    running: bool,
}

impl Queue {
    fn add(&mut self, model: Weak<Model>) {
        if !self.models.iter().any(|other| other.ptr_eq(&model)) {
            self.models.push_back(model);
        }
    }
}

impl Keeper {
    pub fn new() -> Arc<Self> {
        let queue = Mutex::new(Rank::PagesQueue, Queue::default());
        Arc::new(Self { queue, budget: LockBudget::new(u64::MAX) })
    }

    /// Queues a model and starts the thread if needed.
    pub fn work_on(self: &Arc<Self>, model: &Arc<Model>) {
        let mut queue = self.queue.lock();
        queue.models.retain(|other| other.strong_count() > 0);
        queue.add(Arc::downgrade(model));
        if !queue.running {
            let keeper = Arc::clone(self);
            let thread = std::thread::Builder::new().name("pages".into());
            match thread.spawn(move || keeper.run()) {
                Ok(_) => queue.running = true,
                Err(error) => {
                    tracing::warn!(%error, "cannot start a thread to read models ahead; the next request tries again")
                }
            }
        }
    }

    fn run(&self) {
        while let Some(entry) = self.next() {
            let Some(model) = entry.upgrade() else { continue };
            if model.pages.step(&model.files, &self.budget) == Next::More {
                self.queue.lock().add(entry);
                continue;
            }
            match model.pages.report().state {
                PagesState::Refused(refusal) => {
                    tracing::warn!(model = model.name, "model not locked in memory: {refusal}")
                }
                PagesState::Failed(reason) => {
                    tracing::warn!(model = model.name, "model not read ahead: {reason}")
                }
                state => tracing::debug!(model = model.name, ?state, "pages"),
            }
        }
    }

    fn next(&self) -> Option<Weak<Model>> {
        let mut queue = self.queue.lock();
        let next = queue.models.pop_front();
        queue.running = next.is_some();
        next
    }
}
