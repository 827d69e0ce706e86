//! The engine's life: opens the device, starts the thread that owns it, stops and joins it.

use std::sync::Arc;
use std::thread::JoinHandle;

use super::core::Core;
use super::handle::Shared;
use super::{EngineHandle, EngineOptions};
use crate::backend::{Backend, BackendError};

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

/// Opens a device; called again when a panic may have broken the backend's own state.
pub(super) type Factory = Box<dyn Fn() -> Result<Box<dyn Backend>, BackendError> + Send>;

/// A device and the thread that owns it. Dropping it stops it: what runs then fails with
/// [`JobError::Draining`](super::JobError::Draining).
#[derive(Debug)]
pub struct Engine {
    handle: EngineHandle,
    thread: Option<JoinHandle<()>>,
}

impl Engine {
    /// Opens the device and starts its thread.
    ///
    /// `factory` is called once here, on the caller's thread, and again on the engine's if a panic broke the backend.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn start<F>(options: EngineOptions, factory: F) -> Result<Self, EngineError>
    where
        F: Fn() -> Result<Box<dyn Backend>, BackendError> + Send + 'static,
    {
        let mut backend = factory()?;
        let shared = Arc::new(Shared::new(backend.as_ref(), &options));
        backend.set_heartbeat(Arc::clone(&shared.heartbeat));
        let handle = EngineHandle { shared: Arc::clone(&shared) };
        let core = Core::new(options, shared, backend, Box::new(factory));
        let thread = std::thread::Builder::new().name("engine".into()).spawn(move || core.run())?;
        Ok(Self { handle, thread: Some(thread) })
    }

    /// A handle for sessions.
    pub fn handle(&self) -> EngineHandle {
        self.handle.clone()
    }

    /// Stops at the end of the step that is under way and joins the thread. [Drain](EngineHandle::drain) first to let
    /// answers finish.
    pub fn stop(mut self) {
        self.halt();
    }

    fn halt(&mut self) {
        self.handle.shared.inbox.lock().stop = true;
        self.handle.shared.wake.notify_one();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // the thread catches panics itself; one here has nobody left to hear of it
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.halt();
    }
}
