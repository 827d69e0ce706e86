//! Requests to load weights to a device, and their progress.

use tokio::sync::watch;

use super::JobError;
use crate::program::{FIRST_PART, Program};

/// The weights of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum LoadTarget {
    /// One tensor, by name.
    Tensor(String),
    /// Parts of the program, by number.
    Parts(Vec<u32>),
}

/// Selects the weights of a model to load to a device before a step needs them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Preload {
    /// The embedding, the head and the first layer: every step begins and ends with them.
    Critical,
    /// The embedding and this many first layers, or all layers if the model has fewer.
    First(u32),
    /// These layers, counted from 0.
    Layers(Vec<u32>),
    /// Everything a step uses.
    All,
}

impl Preload {
    /// Part numbers in rising order.
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

/// Progress of a load.
#[derive(Clone, Debug, Default)]
pub struct LoadProgress {
    /// Tensors that are resident.
    pub tensors: usize,
    /// Tensors of the request; 0 until the engine has read the request.
    pub tensors_total: usize,
    /// Device bytes of the resident tensors; 0 where weights are read in place.
    pub bytes: u64,
    /// Device bytes of all tensors of the request; 0 until the engine has read the request.
    pub bytes_total: u64,
    /// The tensor that arrived last.
    pub last: Option<LoadedTensor>,
    /// Result of the load once it has ended.
    pub ended: Option<Result<(), JobError>>,
}

/// A tensor on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadedTensor {
    /// Device address; 0 where the tensor is read in place.
    pub address: u64,
    /// Device bytes; 0 where the tensor is read in place.
    pub bytes: u64,
}

/// A load in progress. Dropping it abandons the tensors whose load has not begun.
#[derive(Debug)]
pub struct Loading {
    pub(super) progress: watch::Receiver<LoadProgress>,
}

impl Loading {
    /// The progress so far.
    pub fn progress(&self) -> LoadProgress {
        self.progress.borrow().clone()
    }

    /// Waits for the next progress.
    ///
    /// # Errors
    /// [`JobError::Draining`] when the engine has ended.
    pub async fn changed(&mut self) -> Result<LoadProgress, JobError> {
        self.progress.changed().await.map_err(|_| JobError::Draining)?;
        Ok(self.progress.borrow_and_update().clone())
    }

    /// Waits until all tensors are resident.
    ///
    /// # Errors
    /// [`JobError`] of the load that failed. Tensors that arrived before it stay resident.
    pub async fn wait(mut self) -> Result<LoadProgress, JobError> {
        let ended = self.progress.wait_for(|progress| progress.ended.is_some()).await;
        let reached = ended.map(|reached| reached.clone()).map_err(|_| JobError::Draining)?;
        match &reached.ended {
            Some(Err(error)) => Err(error.clone()),
            _ => Ok(reached),
        }
    }
}
