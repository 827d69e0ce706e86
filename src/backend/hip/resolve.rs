//! Where a part's weights are to kernels: addresses, once their uploads stand before the work in the stream.
//!
//! They are looked up anew when the part's [generation](Weights::generations) is another, unit by unit, so that a unit waits for
//! no tensor but its own.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::time::Duration;

use super::experts::{is_there, tables};
use super::run::{self, ExpertTable};
use super::step::bind::{BoundPart, Unit, Work};
use super::upload::Uploader;
use super::wait::Waiter;
use super::waits::LoadWaits;
use super::weights::{Form, Weight};
use super::{Buffer, Device, DevicePtr, Stream};
use crate::backend::{BackendError, DeviceMemory, DeviceTensor, LoadState, Storage, Weights};
use crate::program::Program;

/// A load of this backend.
fn own(memory: &Arc<dyn DeviceMemory>) -> Option<Arc<Weight>> {
    let any: Arc<dyn std::any::Any + Send + Sync> = Arc::clone(memory) as _;
    any.downcast().ok()
}

/// Loads on their way to the device.
#[derive(Clone, Copy)]
pub struct Loads<'a> {
    /// Where they go.
    pub device: &'a Device,
    /// What waits for them.
    pub stream: &'a Stream,
    /// What brings them.
    pub uploader: &'a Uploader,
    /// Knows for how long to wait.
    pub waiter: &'a Waiter,
    /// Nothing may arrive for this long.
    pub patience: Duration,
    /// A weight of the step at hand was not there yet.
    pub waited: &'a Cell<bool>,
    /// How long the stream waits.
    pub waits: &'a RefCell<LoadWaits>,
}

impl Loads<'_> {
    /// A tensor on this device whose upload the compute stream is ordered behind.
    fn weight(&self, tensor: &DeviceTensor) -> Result<Arc<Weight>, BackendError> {
        let foreign = || BackendError::Internal(format!("{} is not on this device", tensor.tensor.name()));
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

    /// Where a tensor that kernels take for `form` lies.
    fn address(&self, tensor: &DeviceTensor, form: Form) -> Result<DevicePtr<u8>, BackendError> {
        let weight = self.weight(tensor)?;
        if weight.form() != form {
            let name = tensor.tensor.name();
            return Err(BackendError::Internal(format!("{name} is another tensor than the program's")));
        }
        Ok(weight.buffer().ptr())
    }

    /// Waits until an upload is decided.
    ///
    /// # Errors
    /// [`BackendError::DeviceLost`] when nothing arrives any more.
    pub fn decided(&self, load: &Arc<dyn DeviceMemory>) -> Result<(), BackendError> {
        let foreign = || BackendError::Internal("a load of another device".to_owned());
        let (arrived, late) = (|| self.arrived_bytes(), || self.late());
        own(load).ok_or_else(foreign)?.arrival().decided(self.patience, arrived, late)
    }

    /// Bytes of all uploads, for who waits for one: a slow disk, or many tensors before it, and the device is not late while others
    /// arrive.
    fn arrived_bytes(&self) -> u64 {
        self.waiter.beat();
        self.uploader.counts().read().1
    }

    /// Nothing arrives any more: the device counts as lost.
    pub fn late(&self) -> BackendError {
        self.waiter.late(self.device, "an upload")
    }
}

/// Addresses of a part's weights.
#[derive(Debug, Default)]
pub struct Addresses {
    /// Of which generation they are.
    generation: Option<u64>,
    /// Those that are known, by number of the operand.
    operands: Vec<DevicePtr<u8>>,
    /// By number of the set of experts.
    experts: Vec<Option<[ExpertTable; 3]>>,
    /// Memory of tables: older ones are kept until newer ones are there.
    tables: Vec<Option<Buffer>>,
    /// Sets of experts of which some are not there.
    lacks: Vec<bool>,
}

impl Addresses {
    /// Forgets addresses of another generation of the part.
    pub fn enter(&mut self, part: &BoundPart, weights: &Weights<'_>, generation: u64) {
        if self.generation == Some(generation) {
            return;
        }
        self.generation = Some(generation);
        self.operands.clear();
        self.experts = vec![None; part.experts.len()];
        self.tables.resize_with(part.experts.len(), || None);
        self.lacks.clear();
        for set in &part.experts {
            let there = (0..set.range.count).all(|expert| is_there(set, weights, expert));
            self.lacks.push(!there);
        }
    }

    /// Of which generation they are.
    pub fn generation(&self) -> Option<u64> {
        self.generation
    }

    /// Whether some experts of a set are not there.
    pub fn lacks(&self, set: usize) -> bool {
        self.lacks.get(set).copied().unwrap_or(false)
    }

    /// Whether some experts of the part are not there.
    pub fn lacks_any(&self) -> bool {
        self.lacks.contains(&true)
    }

    /// As kernels are told.
    pub fn weights(&self) -> run::Weights<'_> {
        run::Weights { operands: &self.operands, experts: &self.experts }
    }

    /// Looks up what a unit of the part uses, as far as it is not known.
    ///
    /// # Errors
    /// [`BackendError`] of a load, [`BackendError::Internal`] for a tensor that is not there.
    pub fn look_up(
        &mut self,
        loads: &Loads<'_>,
        program: &Program,
        part: &BoundPart,
        unit: &Unit,
        weights: &Weights<'_>,
    ) -> Result<(), BackendError> {
        let (known, needed) = (self.operands.len(), unit.operands as usize);
        for id in part.operands.get(known..needed).unwrap_or_default() {
            let tensor = program.tensor(*id).map(|tensor| &tensor.lazy);
            let tensor = tensor.ok_or_else(|| BackendError::Internal(format!("no tensor {}", id.0)))?;
            let shape = tensor.shape();
            // Sizes of a bound program fit.
            let form = Form { dtype: tensor.dtype(), rows: shape.rows() as u32, cols: shape.cols() as u32 };
            self.operands.push(loads.address(weights.tensor(*id)?, form)?);
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
        let (Some(set), Some(slot @ None)) = (set, self.experts.get_mut(number)) else { return Ok(()) };
        let weight = |tensor: &DeviceTensor, form| Ok(loads.address(tensor, form)?.address());
        let (made, buffer) = tables(loads.device, loads.stream, set, weights, weight)?;
        *slot = Some(made);
        if let Some(kept) = self.tables.get_mut(number) {
            *kept = Some(buffer);
        }
        Ok(())
    }
}
