//! Brings and locks models' pages, a piece at a time, on a thread that lives while there is something to do.
//!
//! Models take turns, so that a small one does not wait for a large one. An unmapped model is not held: at most the piece
//! under way is finished.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};

use super::Model;
use crate::lock::{Mutex, Rank};
use crate::model::pages::{LockBudget, Next, PagesState};

/// Models whose pages are to be worked on.
#[derive(Debug)]
pub(super) struct Keeper {
    queue: Mutex<Queue>,
    pub(super) budget: Arc<LockBudget>,
}

/// As many entries as there are mapped models, or fewer: of each no more than one.
#[derive(Debug, Default)]
struct Queue {
    models: VecDeque<Weak<Model>>,
    /// A thread takes from it.
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

    /// There is something to do for that model.
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
                    tracing::warn!(%error, "no thread to read models ahead: the next request tries again")
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
                    tracing::warn!(model = model.name, "not locked in memory: {refusal}")
                }
                PagesState::Failed(reason) => tracing::warn!(model = model.name, "not read ahead: {reason}"),
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
