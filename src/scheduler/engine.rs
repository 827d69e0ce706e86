//! The engine thread: takes commands, asks the policy who runs, runs the step, reports.

use std::sync::Arc;
use std::thread::JoinHandle;

use super::handle::Shared;
use super::{EngineHandle, EngineOptions, Event, JobError};
use crate::backend::{Backend, BackendError};
use crate::tensor::DType;

/// Why no engine started.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The device could not be opened.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// The operating system gave no thread.
    #[error("no engine thread: {0}")]
    Thread(#[from] std::io::Error),
}

/// A device and the thread that owns it. Dropping it stops it: what runs then fails with [`JobError::Draining`].
#[derive(Debug)]
pub struct Engine {
    handle: EngineHandle,
    thread: Option<JoinHandle<()>>,
}

impl Engine {
    /// Opens the device and starts its thread.
    ///
    /// `factory` is called here once, and again if the backend's own state is broken by a panic.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn start<F>(options: EngineOptions, factory: F) -> Result<Self, EngineError>
    where
        F: Fn() -> Result<Box<dyn Backend>, BackendError> + Send + 'static,
    {
        let backend = factory()?;
        let supported = (0..64).filter_map(DType::from_ggml).filter(|&d| backend.supports(d)).collect();
        let shared =
            Arc::new(Shared::new(backend.info(), supported, options.queue_max, options.kv_budget_bytes));
        let handle = EngineHandle { shared: Arc::clone(&shared) };
        let thread = std::thread::Builder::new().name("engine".into()).spawn(move || run(&shared))?;
        Ok(Self { handle, thread: Some(thread) })
    }

    /// A handle for sessions.
    pub fn handle(&self) -> EngineHandle {
        self.handle.clone()
    }

    /// Stops at the next step's end and joins the thread. Drain first to let answers finish.
    pub fn stop(mut self) {
        self.halt();
    }

    fn halt(&mut self) {
        self.handle.shared.inbox.lock().stop = true;
        self.handle.shared.wake.notify_one();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.halt();
    }
}

fn run(shared: &Shared) {
    let mut inbox = shared.inbox.lock();
    while !inbox.stop {
        if !inbox.pending() {
            shared.wake.wait(&mut inbox);
        }
        while let Some(job) = inbox.jobs.pop_front() {
            inbox.live.remove(&job.id);
            let _ = job.events.send(Event::Failed(JobError::Draining));
        }
    }
}
