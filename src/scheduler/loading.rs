//! What comes of asking an engine to bring weights to its device.

use tokio::sync::watch;

use super::JobError;

/// What is to be brought.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum LoadTarget {
    /// One tensor, by name.
    Tensor(String),
    /// All that a step needs.
    All,
}

/// How far a load is.
#[derive(Clone, Debug, Default)]
pub struct LoadProgress {
    /// Tensors that are there.
    pub tensors: usize,
    /// Tensors in all, once the engine has looked.
    pub tensors_total: usize,
    /// Bytes that they take of the device; none where weights are read in place.
    pub bytes: u64,
    /// The last that arrived.
    pub last: Option<LoadedTensor>,
    /// How it ended, once it has.
    pub ended: Option<Result<(), JobError>>,
}

/// A tensor on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadedTensor {
    /// Where; 0 where it is read in place.
    pub address: u64,
    /// Bytes that it takes of the device.
    pub bytes: u64,
}

/// A load that goes on as long as this lives.
#[derive(Debug)]
pub struct Loading {
    pub(super) progress: watch::Receiver<LoadProgress>,
}

impl Loading {
    /// How far it is.
    pub fn progress(&self) -> LoadProgress {
        self.progress.borrow().clone()
    }

    /// Waits until it is further.
    ///
    /// # Errors
    /// [`JobError::Draining`] when the engine has ended and says no more.
    pub async fn changed(&mut self) -> Result<LoadProgress, JobError> {
        self.progress.changed().await.map_err(|_| JobError::Draining)?;
        Ok(self.progress.borrow_and_update().clone())
    }

    /// Waits until all is there.
    ///
    /// # Errors
    /// [`JobError`] of the load that failed; what arrived before stays.
    pub async fn wait(mut self) -> Result<LoadProgress, JobError> {
        let ended = self.progress.wait_for(|progress| progress.ended.is_some()).await;
        let reached = ended.map(|reached| reached.clone()).map_err(|_| JobError::Draining)?;
        match &reached.ended {
            Some(Err(error)) => Err(error.clone()),
            _ => Ok(reached),
        }
    }
}
