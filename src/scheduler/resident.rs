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
        self.adopt(part, loader.cache);
        Ok(())
    }

    /// Takes handles of a complete part's experts that the cache has, because a client asked for them and no row has chosen
    /// them yet. A GPU would run a step again for each that a row chooses: 6 ms on an H200.
    pub fn adopt(&mut self, part: u32, cache: &TensorCache) {
        let program = Arc::clone(&self.model.plan.program);
        let Some(known) = self.parts.get_mut(part as usize).filter(|part| part.complete && part.absent > 0)
        else {
            return;
        };
        let mut adopted = 0;
        for (id, tensor) in program.part_tensors(part) {
            if let Some(handle @ None) = self.tensors.get_mut(id.0 as usize) {
                *handle = cache.resident(tensor);
                adopted += usize::from(handle.is_some());
            }
        }
        known.absent = known.absent.saturating_sub(adopted);
        if adopted > 0 {
            self.changed(part);
        }
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

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::backend::cpu::{CpuBackend, CpuOptions};
    use crate::model::ModelId;

    /// A layer of experts is the first part after the embedding.
    const LAYER: u32 = 1;

    struct Rig {
        resident: ResidentModel,
        cache: TensorCache,
        backend: CpuBackend,
    }

    impl Rig {
        fn new() -> Self {
            let mut forged = rocmforge_test_support::forge::decoders();
            let (_, forge) =
                forged.swap_remove(forged.iter().position(|(name, _)| *name == "qwen3moe").unwrap());
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(&forge.build().bytes).unwrap();
            let reopened = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
            let file = std::fs::File::open(reopened).unwrap();
            let model = Arc::new(Model::open(ModelId(1), "experts", vec![file]).unwrap());
            let backend = CpuBackend::new(CpuOptions::default()).unwrap();
            Self { resident: ResidentModel::new(model), cache: TensorCache::new(), backend }
        }

        fn begin(&mut self) {
            let part = PartId { model: ModelId(1), part: LAYER };
            let mut loader = Loader { cache: &mut self.cache, backend: &mut self.backend, part };
            self.resident.begin_loads(LAYER, &mut loader).unwrap();
        }

        /// Loads all experts of the layer, as for a client.
        fn preload(&mut self) {
            let model = Arc::clone(self.resident.model());
            let part = PartId { model: ModelId(1), part: LAYER };
            for id in chosen(&model, LAYER) {
                let tensor = model.plan.program.tensor(id).unwrap();
                self.cache.load(&mut self.backend, tensor, part).unwrap();
            }
        }

        /// Experts' tensors with and without a handle.
        fn experts(&self) -> [usize; 2] {
            let (with, without): (Vec<_>, Vec<_>) =
                chosen(self.resident.model(), LAYER).partition(|id| self.resident.weights().has(*id));
            assert_eq!(self.resident.parts[LAYER as usize].absent, without.len());
            [with.len(), without.len()]
        }
    }

    #[test]
    fn experts_that_a_client_loaded_need_not_be_chosen_first() {
        let mut rig = Rig::new();
        rig.begin();
        let [none, all] = rig.experts();
        assert!(none == 0 && all > 0, "{none} {all}");
        let before = rig.resident.generations[LAYER as usize];
        rig.resident.adopt(LAYER, &rig.cache);
        assert_eq!((rig.experts(), rig.resident.generations[LAYER as usize]), ([0, all], before));
        rig.preload();
        let loads = rig.cache.counters().loads;
        rig.resident.adopt(LAYER, &rig.cache);
        let adopted = rig.resident.generations[LAYER as usize];
        assert!(rig.experts() == [all, 0] && adopted != before);
        rig.resident.adopt(LAYER, &rig.cache);
        assert_eq!(rig.resident.generations[LAYER as usize], adopted, "nothing changed");
        // The same before the layer's own loads.
        rig.resident.forget_part(LAYER);
        rig.resident.adopt(LAYER, &rig.cache);
        assert_eq!(rig.experts(), [0, all], "no handles before the part's own");
        rig.begin();
        assert_eq!((rig.experts(), rig.cache.counters().loads), ([all, 0], loads), "nothing is loaded again");
    }
}
