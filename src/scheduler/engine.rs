//! The engine's life: opens the device, starts the thread that owns it, stops and joins it.

use std::sync::Arc;
use std::thread::JoinHandle;

use super::core::Core;
use super::handle::Shared;
use super::{EngineHandle, EngineOptions};
use crate::backend::{Backend, BackendError};

/// Why the engine did not start.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The device could not be opened.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// The operating system refused to start a thread.
    #[error("the engine thread did not start: {0}")]
    Thread(#[from] std::io::Error),
}

/// Opens a device. The engine calls it again when a panic may have broken the backend's own state.
pub(super) type Factory = Box<dyn Fn() -> Result<Box<dyn Backend>, BackendError> + Send>;

/// A device and the thread that owns it. Dropping it stops the engine; running requests then fail with
/// [`JobError::Draining`](super::JobError::Draining).
#[derive(Debug)]
pub struct Engine {
    handle: EngineHandle,
    thread: Option<JoinHandle<()>>,
}

impl Engine {
    /// Opens the device and starts its thread.
    ///
    /// `factory` runs once here, on the caller's thread. It runs again on the engine thread if a panic breaks the
    /// backend or the device is lost.
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

    /// Returns a handle for sessions.
    pub fn handle(&self) -> EngineHandle {
        self.handle.clone()
    }

    /// Stops the engine after the step in progress and joins the thread. Call [drain](EngineHandle::drain) first to let
    /// answers finish.
    pub fn stop(mut self) {
        self.halt();
    }

    fn halt(&mut self) {
        self.handle.shared.inbox.lock().stop = true;
        self.handle.shared.wake.notify_one();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // the thread catches panics itself; there is no caller left to report one to
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.halt();
    }
}
