//! Addresses of a part's weights, once their uploads precede the work in the stream.
//!
//! A change of the part's [generation](Weights::generations) makes the addresses stale. They are looked up again unit
//! by unit, so that a unit waits only for its own tensors.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::time::Duration;

use crate::backend::hip::device::wait::Waiter;
use crate::backend::hip::step::bind::{BoundPart, Unit, Work};
use crate::backend::hip::step::expert_tables::{is_there, tables};
use crate::backend::hip::step::run::{self, ExpertTable};
use crate::backend::hip::weights::upload::Uploader;
use crate::backend::hip::weights::waits::LoadWaits;
use crate::backend::hip::weights::{MatrixShape, Weight};
use crate::backend::hip::{Buffer, Device, DevicePtr, Stream};
use crate::backend::{BackendError, DeviceMemory, DeviceTensor, LoadState, Storage, Weights};
use crate::program::Program;

/// The weight behind a load; `None` for another backend's load.
fn own(memory: &Arc<dyn DeviceMemory>) -> Option<Arc<Weight>> {
    let any: Arc<dyn std::any::Any + Send + Sync> = Arc::clone(memory) as _;
    any.downcast().ok()
}

/// Pending loads, and what is needed to wait for them.
#[derive(Clone, Copy)]
pub struct Loads<'a> {
    /// Target of the loads.
    pub device: &'a Device,
    /// The stream that waits for them.
    pub stream: &'a Stream,
    /// The uploader that carries them out.
    pub uploader: &'a Uploader,
    /// Moves the heartbeat and reports a lost device.
    pub waiter: &'a Waiter,
    /// Longest time without any arriving bytes.
    pub patience: Duration,
    /// Set when a weight of the current step was not resident.
    pub waited: &'a Cell<bool>,
    /// Measures how long the stream waits.
    pub waits: &'a RefCell<LoadWaits>,
}

impl Loads<'_> {
    /// The tensor's weight, after ordering the compute stream behind its upload.
    fn weight(&self, tensor: &DeviceTensor) -> Result<Arc<Weight>, BackendError> {
        let foreign =
            || BackendError::Internal(format!("tensor {} is not on this device", tensor.tensor.name()));
        let Storage::Device(memory) = &tensor.storage else { return Err(foreign()) };
        let weight = own(memory).ok_or_else(foreign)?;
        if !weight.arrival().is_ordered() {
            self.waited.set(true);
            if !matches!(weight.state(), LoadState::Resident) {
                self.waits.borrow_mut().enter(self.device, self.stream)?;
                let (arrived, late) = (|| self.arrived_bytes(), || self.late());
                if let Some(event) = weight.arrival().submitted(self.patience, arrived, late)? {
                    self.stream.wait(&event)?;
                }
            }
            weight.arrival().set_ordered();
        }
        Ok(weight)
    }

    /// Device address of a tensor, which must have that type and these sizes.
    fn address(&self, tensor: &DeviceTensor, shape: MatrixShape) -> Result<DevicePtr<u8>, BackendError> {
        let weight = self.weight(tensor)?;
        if weight.shape() != shape {
            let name = tensor.tensor.name();
            return Err(BackendError::Internal(format!("tensor {name} differs from the program's tensor")));
        }
        Ok(weight.buffer().ptr())
    }

    /// Waits until an upload is resident or has failed.
    ///
    /// # Errors
    /// [`BackendError::DeviceLost`] when no load makes progress.
    pub fn decided(&self, load: &Arc<dyn DeviceMemory>) -> Result<(), BackendError> {
        let foreign = || BackendError::Internal("the load belongs to another device".to_owned());
        let (arrived, late) = (|| self.arrived_bytes(), || self.late());
        own(load).ok_or_else(foreign)?.arrival().decided(self.patience, arrived, late)
    }

    /// Bytes of all uploads, for a thread that waits for one. A slow disk or a long queue does not count as a lost
    /// device while other tensors arrive.
    fn arrived_bytes(&self) -> u64 {
        self.waiter.beat();
        self.uploader.counts().read().1
    }

    /// Marks the device as lost because no load makes progress.
    pub fn late(&self) -> BackendError {
        self.waiter.late(self.device, "an upload")
    }
}

/// Addresses that launches of a part read. Recorded launches stay valid as long as none of these addresses changes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Known {
    /// Addresses by operand number.
    operands: Vec<DevicePtr<u8>>,
    /// Expert tables, by number of the expert set. A table keeps its address when the experts in it change.
    experts: Vec<Option<[ExpertTable; 3]>>,
}

/// Addresses of a part's weights.
#[derive(Debug, Default)]
pub struct Addresses {
    /// Generation of the weights.
    generation: Option<u64>,
    known: Known,
    /// Memory of the tables.
    tables: Vec<Option<Buffer>>,
    /// Whether each set of experts has experts that are not resident.
    lacks: Vec<bool>,
}

impl Addresses {
    /// Drops the addresses when the part has a new generation.
    pub fn enter(&mut self, part: &BoundPart, weights: &Weights<'_>, generation: u64) {
        if self.generation == Some(generation) {
            return;
        }
        self.generation = Some(generation);
        self.known.operands.clear();
        self.known.experts = vec![None; part.experts.len()];
        self.tables.resize_with(part.experts.len(), || None);
        self.lacks.clear();
        for set in &part.experts {
            let there = (0..set.range.count).all(|expert| is_there(set, weights, expert));
            self.lacks.push(!there);
        }
    }

    /// The known addresses.
    pub fn known(&self) -> &Known {
        &self.known
    }

    /// Whether some experts of a set are not resident.
    pub fn lacks(&self, set: usize) -> bool {
        self.lacks.get(set).copied().unwrap_or(false)
    }

    /// Whether some experts of the part are not resident.
    pub fn lacks_any(&self) -> bool {
        self.lacks.contains(&true)
    }

    /// The addresses in the form that launches take.
    pub fn weights(&self) -> run::Weights<'_> {
        run::Weights { operands: &self.known.operands, experts: &self.known.experts }
    }

    /// Looks up the missing addresses that a unit of the part uses.
    ///
    /// # Errors
    /// [`BackendError`] of a load, [`BackendError::Internal`] for an unknown tensor.
    pub fn look_up(
        &mut self,
        loads: &Loads<'_>,
        program: &Program,
        part: &BoundPart,
        unit: &Unit,
        weights: &Weights<'_>,
    ) -> Result<(), BackendError> {
        let (known, needed) = (self.known.operands.len(), unit.operands as usize);
        for id in part.operands.get(known..needed).unwrap_or_default() {
            let tensor = program.tensor(*id).map(|tensor| &tensor.lazy);
            let tensor =
                tensor.ok_or_else(|| BackendError::Internal(format!("there is no tensor {}", id.0)))?;
            let shape = tensor.shape();
            // Binding has checked that these sizes fit.
            let form =
                MatrixShape { dtype: tensor.dtype(), rows: shape.rows() as u32, cols: shape.cols() as u32 };
            self.known.operands.push(loads.address(weights.tensor(*id)?, form)?);
        }
        if let Work::Experts(experts) = &unit.work {
            self.make_tables(loads, part, experts.set, weights)?;
        }
        Ok(())
    }

    fn make_tables(
        &mut self,
        loads: &Loads<'_>,
        part: &BoundPart,
        number: usize,
        weights: &Weights<'_>,
    ) -> Result<(), BackendError> {
        let set = part.experts.get(number);
        let (Some(set), Some(slot @ None), Some(kept)) =
            (set, self.known.experts.get_mut(number), self.tables.get_mut(number))
        else {
            return Ok(());
        };
        let weight = |tensor: &DeviceTensor, form| Ok(loads.address(tensor, form)?.address());
        let (made, buffer) = tables(loads.device, loads.stream, set, weights, kept.take(), weight)?;
        (*slot, *kept) = (Some(made), Some(buffer));
        Ok(())
    }
}
