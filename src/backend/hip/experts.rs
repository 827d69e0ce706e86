//! Tables of addresses by which kernels find a layer's experts.

use std::collections::HashMap;

use super::run::ExpertMatrices;
use super::weights::Form;
use super::{Buffer, Device, Owner, Stream};
use crate::backend::{BackendError, DeviceTensor, Expert, Experts};

/// Parts of an expert: gate, up, down.
const PARTS: usize = 3;

/// The tables of a model's layers.
#[derive(Debug, Default)]
pub struct ExpertTables {
    layers: HashMap<u32, Layer>,
}

#[derive(Debug)]
struct Layer {
    version: u64,
    parts: [ExpertMatrices; PARTS],
    /// Keeps the tables' memory.
    _tables: Buffer,
}

impl ExpertTables {
    /// A layer's parts, the tables made anew when other experts are loaded than before. `weight` gives where a loaded tensor
    /// lies, once the compute stream may use it.
    ///
    /// # Errors
    /// [`BackendError`] of `weight` and of the device; [`BackendError::Dims`] for experts that are not alike.
    pub fn parts(
        &mut self,
        device: &Device,
        stream: &Stream,
        layer: u32,
        experts: &Experts<'_>,
        weight: impl Fn(&DeviceTensor) -> Result<(u64, Form), BackendError>,
    ) -> Result<[ExpertMatrices; PARTS], BackendError> {
        if let Some(made) = self.layers.get(&layer).filter(|made| made.version == experts.version) {
            return Ok(made.parts);
        }
        let count = experts.loaded.len();
        let mut addresses = vec![0u64; PARTS * count];
        let mut forms: [Option<Form>; PARTS] = [None; PARTS];
        for (number, expert) in experts.loaded.iter().enumerate() {
            let Some(Expert { gate, up, down }) = expert else { continue };
            for (part, tensor) in [gate, up, down].into_iter().enumerate() {
                let (address, form) = weight(tensor)?;
                if let (Some(slot), Some(known)) =
                    (addresses.get_mut(part * count + number), forms.get_mut(part))
                {
                    *slot = address;
                    if *known.get_or_insert(form) != form {
                        return Err(BackendError::Dims("experts of a layer differ in type or size"));
                    }
                }
            }
        }
        let tables = device.take(addresses.len() * size_of::<u64>(), Owner::Scratch)?;
        stream.upload(tables.all(), addresses.as_slice())?; // waits: nothing uses the old tables any more
        let mut parts = Vec::with_capacity(PARTS);
        for (part, form) in forms.into_iter().enumerate() {
            let form = form.ok_or(BackendError::Batch("a layer of experts of which none is loaded"))?;
            let table = tables.ptr_at(part * count * size_of::<u64>())?;
            parts.push(ExpertMatrices { table, dtype: form.dtype, rows: form.rows, cols: form.cols });
        }
        let parts: [ExpertMatrices; PARTS] =
            parts.try_into().map_err(|_| BackendError::Batch("an expert has three parts"))?;
        self.layers.insert(layer, Layer { version: experts.version, parts, _tables: tables });
        Ok(parts)
    }
}
