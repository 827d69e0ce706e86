//! A model's tensors as a device has them: handles by number, and how the parts of its program are resolved.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::backend::{Backend, BackendError, DeviceTensor, Weights};
use crate::cache::{Owner, Part, TensorCache};
use crate::model::Model;
use crate::program::{Residence, TensorId};

/// Handles of one model's tensors on one device. A part that was resolved once costs a comparison, no lookup.
#[derive(Debug)]
pub(super) struct ResidentModel {
    model: Arc<Model>,
    /// By number of the tensor.
    tensors: Vec<Option<DeviceTensor>>,
    parts: Vec<ResidentPart>,
    /// By number of the part: see [`Weights::generations`].
    generations: Vec<u64>,
}

/// What is known of a part's handles.
#[derive(Clone, Copy, Debug)]
struct ResidentPart {
    /// All handles are here but for experts that no row has chosen.
    resolved: bool,
    /// Tensors of experts that are not here.
    absent: usize,
}

/// A number that no part of any model had before.
fn generation() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Loads through the cache, for one part.
pub(super) struct Loader<'a> {
    pub cache: &'a mut TensorCache,
    pub backend: &'a mut dyn Backend,
    pub part: Part,
}

impl ResidentModel {
    pub fn new(model: Arc<Model>) -> Self {
        let program = &model.plan.program;
        let parts = (0..program.part_count())
            .map(|part| ResidentPart { resolved: false, absent: chosen(&model, part).count() });
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

    pub fn owner(&self) -> Owner {
        Owner(self.model.id.0)
    }

    /// True when nothing is left to wait for that a step could be given up over: all was asked for in an earlier step.
    pub fn is_resolved(&self) -> bool {
        // The embedding stays in the file.
        self.parts.iter().skip(1).all(|part| part.resolved && part.absent == 0)
    }

    /// Whether the handles of a part are here.
    pub fn has(&self, part: u32) -> bool {
        self.parts.get(part as usize).is_some_and(|part| part.resolved)
    }

    /// Forgets all handles, so that the cache can let the tensors go.
    pub fn forget(&mut self) {
        (0..self.parts.len() as u32).for_each(|part| self.forget_part(part));
    }

    /// Forgets the handles of a part.
    pub fn forget_part(&mut self, part: u32) {
        let (Some(known), Some(generation_of)) =
            (self.parts.get_mut(part as usize), self.generations.get_mut(part as usize))
        else {
            return;
        };
        *known = ResidentPart { resolved: false, absent: chosen(&self.model, part).count() };
        *generation_of = generation();
        for (id, _) in self.model.plan.program.part_tensors(part) {
            if let Some(tensor) = self.tensors.get_mut(id.0 as usize) {
                *tensor = None;
            }
        }
    }

    /// Resolves a part that is not: its loads begin.
    ///
    /// # Errors
    /// [`BackendError`] of a load; what it had begun stays in the cache.
    pub fn resolve(&mut self, part: u32, loader: &mut Loader<'_>) -> Result<(), BackendError> {
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
        known.ok_or(BackendError::Batch("a part that the model does not have"))?.resolved = true;
        self.changed(part);
        Ok(())
    }

    /// Begins the loads of tensors of a resolved part that rows have chosen.
    ///
    /// # Errors
    /// [`BackendError`] of a load, and for a tensor that the part does not have.
    pub fn resolve_chosen(
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
                tensor.ok_or(BackendError::Batch("an expert was chosen that the layer does not have"))?;
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

    /// What is here.
    pub fn weights(&self) -> Weights<'_> {
        Weights { tensors: &self.tensors, generations: &self.generations }
    }
}

/// Tensors of a part that come when rows choose them.
fn chosen(model: &Model, part: u32) -> impl Iterator<Item = TensorId> {
    let tensors = model.plan.program.part_tensors(part);
    tensors.filter(|(_, tensor)| tensor.residence == Residence::Chosen).map(|(id, _)| id)
}
