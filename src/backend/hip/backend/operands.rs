//! What units' weights are to kernels: addresses, once their uploads stand before the work in the stream.

use std::sync::Arc;

use super::HipBackend;
use crate::backend::hip::DevicePtr;
use crate::backend::hip::run::{ExpertMatrices, Matrix};
use crate::backend::hip::weights::{Form, Weight};
use crate::backend::{BackendError, DeviceMemory, DeviceTensor, Experts, LoadState, Projection, Storage};
use crate::tensor::DType;

/// A load of this backend.
fn own(memory: &Arc<dyn DeviceMemory>) -> Option<Arc<Weight>> {
    let any: Arc<dyn std::any::Any + Send + Sync> = Arc::clone(memory) as _;
    any.downcast().ok()
}

impl HipBackend {
    /// A tensor on this device whose upload the compute stream is ordered behind.
    pub(super) fn weight(&self, tensor: &DeviceTensor) -> Result<Arc<Weight>, BackendError> {
        let foreign = || BackendError::Internal(format!("{} is not on this device", tensor.tensor.name()));
        let Storage::Device(memory) = &tensor.storage else { return Err(foreign()) };
        let weight = own(memory).ok_or_else(foreign)?;
        if !weight.arrival().is_ordered() {
            self.waited.set(true);
            if !matches!(weight.state(), LoadState::Resident) {
                self.load_waits.borrow_mut().enter(&self.device, &self.stream)?;
                let (arrived, late) = (|| self.arrived_bytes(), || self.late_upload());
                if let Some(event) = weight.arrival().submitted(self.options.patience, arrived, late)? {
                    self.stream.wait(&event)?;
                }
            }
            weight.arrival().set_ordered();
        }
        Ok(weight)
    }

    /// Waits until an upload is decided.
    pub(super) fn upload_decided(&self, load: &Arc<dyn DeviceMemory>) -> Result<(), BackendError> {
        let foreign = || BackendError::Internal("a load of another device".to_owned());
        let (arrived, late) = (|| self.arrived_bytes(), || self.late_upload());
        own(load).ok_or_else(foreign)?.arrival().decided(self.options.patience, arrived, late)
    }

    /// Bytes of all uploads, for who waits for one: a slow disk, or many tensors before it, and the device is not late while others
    /// arrive.
    fn arrived_bytes(&self) -> u64 {
        self.waiter.beat();
        self.uploader.counts().read().1
    }

    pub(super) fn late_upload(&self) -> BackendError {
        self.waiter.late(&self.device, "an upload")
    }

    pub(super) fn vector(&self, tensor: &DeviceTensor, len: usize) -> Result<DevicePtr<f32>, BackendError> {
        tensor.want(1, len)?;
        if tensor.dtype() != DType::F32 {
            let (tensor, dtype) = (tensor.tensor.name().to_owned(), tensor.dtype());
            return Err(BackendError::Unsupported { tensor, dtype, backend: "hip" });
        }
        Ok(self.weight(tensor)?.buffer().ptr())
    }

    pub(super) fn optional(
        &self,
        tensor: Option<&DeviceTensor>,
        len: usize,
    ) -> Result<DevicePtr<f32>, BackendError> {
        tensor.map_or(Ok(DevicePtr::NULL), |tensor| self.vector(tensor, len))
    }

    pub(super) fn matrix(
        &self,
        part: &Projection<'_>,
        rows: usize,
        cols: usize,
    ) -> Result<Matrix, BackendError> {
        part.want(rows, cols)?;
        let weight = self.weight(part.weight)?;
        let Form { dtype, rows, cols } = weight.form();
        let bias = self.optional(part.bias, rows as usize)?;
        Ok(Matrix { at: weight.buffer().ptr(), dtype, rows, cols, bias })
    }

    /// A layer's experts by their tables.
    pub(super) fn expert_parts(
        &mut self,
        layer: u32,
        experts: &Experts<'_>,
    ) -> Result<[ExpertMatrices; 3], BackendError> {
        let slot = self.current.ok_or(BackendError::Batch("no step was begun"))?;
        let mut tables = match self.models.get_mut(&slot) {
            Some(model) => std::mem::take(&mut model.experts),
            None => return Err(BackendError::Batch("no step was begun")),
        };
        let weight = |tensor: &DeviceTensor| {
            let weight = self.weight(tensor)?;
            Ok((weight.buffer().ptr::<u8>().address(), weight.form()))
        };
        let parts = tables.parts(&self.device, &self.stream, layer, experts, weight);
        if let Some(model) = self.models.get_mut(&slot) {
            model.experts = tables;
        }
        parts
    }

    /// The rotary table, long enough for the step at hand.
    pub(super) fn angles(&mut self, factors: Option<&DeviceTensor>) -> Result<DevicePtr<f32>, BackendError> {
        let (device, stream) = (&self.device, &self.stream);
        let model = self.current.and_then(|slot| self.models.get_mut(&slot));
        let model = model.ok_or(BackendError::Batch("no step was begun"))?;
        let spec = &model.dims.rope;
        if let Some(factors) = factors {
            factors.want(1, spec.dims / 2)?;
        }
        let factors = factors.map(|factors| &factors.tensor);
        let (table, _) = model.rope.cover(device, stream, spec, model.step.positions, factors)?;
        Ok(table.ptr())
    }
}
