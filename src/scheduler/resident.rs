//! Handles of a model's tensors on a device, by number, and how the parts of its program get them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::backend::{Backend, BackendError, DeviceTensor, Weights};
use crate::cache::TensorCache;
use crate::model::Model;
use crate::program::{PartId, Residence, TensorId};

/// Handles of one model's tensors on one device. After a part is complete, each use costs one comparison and no lookup.
#[derive(Debug)]
pub(super) struct ResidentModel {
    model: Arc<Model>,
    /// By tensor number.
    tensors: Vec<Option<DeviceTensor>>,
    parts: Vec<ResidentPart>,
    /// By part number: see [`Weights::generations`].
    generations: Vec<u64>,
}

/// State of a part's handles.
#[derive(Clone, Copy, Debug)]
struct ResidentPart {
    /// All handles are present, except those of experts that no row has chosen.
    complete: bool,
    /// Expert tensors without a handle.
    absent: usize,
}

/// A number that no part of any model had before.
fn generation() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Access to the cache for the loads of one part.
pub(super) struct Loader<'a> {
    pub cache: &'a mut TensorCache,
    pub backend: &'a mut dyn Backend,
    pub part: PartId,
}

impl ResidentModel {
    pub fn new(model: Arc<Model>) -> Self {
        let program = &model.plan.program;
        let parts = (0..program.part_count())
            .map(|part| ResidentPart { complete: false, absent: chosen(&model, part).count() });
        Self {
            tensors: vec![None; program.tensors().len()],
            parts: parts.collect(),
            generations: program.parts().iter().map(|_| generation()).collect(),
            model,
        }
    }

    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// True when all tensors have handles from an earlier step. A step then has no load to wait for, and no reason to
    /// be abandoned.
    pub fn has_all(&self) -> bool {
        // The embedding stays in the file, so part 0 is skipped.
        self.parts.iter().skip(1).all(|part| part.complete && part.absent == 0)
    }

    /// True when a part is complete.
    pub fn has(&self, part: u32) -> bool {
        self.parts.get(part as usize).is_some_and(|part| part.complete)
    }

    /// Drops all handles, so that the cache can evict the tensors.
    pub fn forget(&mut self) {
        (0..self.parts.len() as u32).for_each(|part| self.forget_part(part));
    }

    /// Drops the handles of a part.
    pub fn forget_part(&mut self, part: u32) {
        let (Some(known), Some(generation_of)) =
            (self.parts.get_mut(part as usize), self.generations.get_mut(part as usize))
        else {
            return;
        };
        *known = ResidentPart { complete: false, absent: chosen(&self.model, part).count() };
        *generation_of = generation();
        for (id, _) in self.model.plan.program.part_tensors(part) {
            if let Some(tensor) = self.tensors.get_mut(id.0 as usize) {
                *tensor = None;
            }
        }
    }

    /// Begins the loads of a part, unless it is complete.
    ///
    /// # Errors
    /// [`BackendError`] of a load. Loads that began before it stay in the cache.
    pub fn begin_loads(&mut self, part: u32, loader: &mut Loader<'_>) -> Result<(), BackendError> {
        if self.has(part) {
            return Ok(());
        }
        let program = &self.model.plan.program;
        let wanted = program.part_tensors(part).filter(|(_, tensor)| tensor.residence != Residence::Chosen);
        let loaded = wanted
            .map(|(id, tensor)| Ok((id, loader.cache.load(loader.backend, tensor, loader.part)?)))
            .collect::<Result<Vec<_>, BackendError>>()?;
        loaded.into_iter().for_each(|(id, tensor)| self.set(id, tensor));
        let known = self.parts.get_mut(part as usize);
        known.ok_or(BackendError::Absent("a part that the model does not have"))?.complete = true;
        self.changed(part);
        Ok(())
    }

    /// Begins the loads of the expert tensors that rows chose in a complete part.
    ///
    /// # Errors
    /// [`BackendError`] of a load, or [`BackendError::Absent`] for a tensor that the part does not have.
    pub fn begin_chosen_loads(
        &mut self,
        part: u32,
        chosen: &[TensorId],
        loader: &mut Loader<'_>,
    ) -> Result<(), BackendError> {
        let program = Arc::clone(&self.model.plan.program);
        for id in chosen {
            if self.tensors.get(id.0 as usize).is_some_and(Option::is_some) {
                continue;
            }
            let of_part = program.parts().get(part as usize).is_some_and(|part| part.tensors.contains(&id.0));
            let tensor = program.tensor(*id).filter(|_| of_part);
            let tensor =
                tensor.ok_or(BackendError::Absent("an expert was chosen that the layer does not have"))?;
            let loaded = loader.cache.load(loader.backend, tensor, loader.part)?;
            self.set(*id, loaded);
            if let Some(known) = self.parts.get_mut(part as usize) {
                known.absent = known.absent.saturating_sub(1);
            }
            self.changed(part);
        }
        Ok(())
    }

    fn set(&mut self, id: TensorId, loaded: DeviceTensor) {
        if let Some(tensor) = self.tensors.get_mut(id.0 as usize) {
            *tensor = Some(loaded);
        }
    }

    fn changed(&mut self, part: u32) {
        if let Some(known) = self.generations.get_mut(part as usize) {
            *known = generation();
        }
    }

    /// All handles.
    pub fn weights(&self) -> Weights<'_> {
        Weights { tensors: &self.tensors, generations: &self.generations }
    }
}

/// Tensors of a part that are loaded only when rows choose them.
fn chosen(model: &Model, part: u32) -> impl Iterator<Item = TensorId> {
    let tensors = model.plan.program.part_tensors(part);
    tensors.filter(|(_, tensor)| tensor.residence == Residence::Chosen).map(|(id, _)| id)
}
