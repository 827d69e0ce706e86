//! What comes of asking an engine to bring weights to its device.

use tokio::sync::watch;

use super::JobError;
use crate::program::{FIRST_PART, Program};

/// What is to be brought.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum LoadTarget {
    /// One tensor, by name.
    Tensor(String),
    /// Parts of the program, by number.
    Parts(Vec<u32>),
}

/// Which of a model's weights to bring to a device before a step needs them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Preload {
    /// The embedding, the head and the first layer: what every answer begins and ends with.
    Critical,
    /// The embedding and so many first layers; all there are where there are fewer.
    First(u32),
    /// These layers, counted from 0.
    Layers(Vec<u32>),
    /// Everything a step uses.
    All,
}

impl Preload {
    /// Numbers of the parts, rising.
    ///
    /// # Errors
    /// The first layer that the model does not have.
    pub(super) fn parts(&self, program: &Program) -> Result<Vec<u32>, u32> {
        let layers = program.layer_count();
        let first = |count: u32| FIRST_PART..=count.min(layers);
        let mut parts: Vec<u32> = match self {
            Self::Critical => first(1).chain([program.head_part()]).collect(),
            Self::First(count) => first(*count).collect(),
            Self::Layers(list) => match list.iter().find(|layer| **layer >= layers) {
                Some(none) => return Err(*none),
                None => list.iter().map(|layer| program.layer_part(*layer)).collect(),
            },
            Self::All => (FIRST_PART..program.part_count()).collect(),
        };
        parts.sort_unstable();
        parts.dedup();
        Ok(parts)
    }
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
    /// Bytes that all of them will take of it, once the engine has looked.
    pub bytes_total: u64,
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
