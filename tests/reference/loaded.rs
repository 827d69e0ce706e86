//! A backend with a program open and its weights loaded.

#![allow(dead_code)] // each user needs a part

use std::sync::Arc;

use rocmforge::backend::cpu::CpuBackend;
use rocmforge::backend::hip::HipBackend;
use rocmforge::backend::{
    Backend, BackendError, DeviceTensor, ModelSlot, Progress, StepLimits, Storage, Weights,
};
use rocmforge::program::{FIRST_PART, Program, Residence, TensorId};

/// An owner of a backend.
pub trait Device {
    fn get(&mut self) -> &mut dyn Backend;
}

impl Device for CpuBackend {
    fn get(&mut self) -> &mut dyn Backend {
        self
    }
}

impl Device for HipBackend {
    fn get(&mut self) -> &mut dyn Backend {
        self
    }
}

impl Device for Box<dyn Backend> {
    fn get(&mut self) -> &mut dyn Backend {
        self.as_mut()
    }
}

/// A backend with one program open and its weights loaded.
pub struct Loaded<B> {
    pub backend: B,
    pub slot: ModelSlot,
    pub program: Arc<Program>,
    tensors: Vec<Option<DeviceTensor>>,
    generations: Vec<u64>,
    /// How often a part paused.
    pub pauses: u32,
}

impl<B: Device> Loaded<B> {
    /// Opens a program and loads all tensors except chosen experts.
    pub fn new(program: Program, mut backend: B, limits: StepLimits, pages: u32) -> Self {
        let program = Arc::new(program);
        let slot = backend.get().open_model(&program, limits, pages).expect("a small model does not open");
        let mut tensors = Vec::new();
        for tensor in program.tensors() {
            let in_place = || DeviceTensor { tensor: tensor.lazy.clone(), storage: Storage::InPlace };
            tensors.push(match tensor.residence {
                Residence::Host => Some(in_place()),
                Residence::Device => Some(
                    backend
                        .get()
                        .load_tensor(&tensor.lazy)
                        .expect("a tensor of a supported type does not load"),
                ),
                Residence::Chosen => None,
            });
        }
        let generations = vec![0; program.parts().len()];
        Self { backend, slot, program, tensors, generations, pauses: 0 }
    }

    /// Runs a part of the current step; loads experts as rows choose them.
    pub fn run(&mut self, part: u32) {
        loop {
            match self.try_run(part).expect("a part failed") {
                Progress::Done => return,
                Progress::Needs(chosen) => self.load(part, &chosen),
                Progress::Paused => unreachable!("the part was run on"),
                Progress::Again => return (FIRST_PART..=part).for_each(|part| self.run(part)),
            }
        }
    }

    /// Runs a part of the current step until it pauses, or has chosen experts. True at its end.
    pub fn stretch(&mut self, part: u32) -> bool {
        let weights = Weights { tensors: &self.tensors, generations: &self.generations };
        match self.backend.get().run(part, &weights).expect("a part failed") {
            Progress::Done => return true,
            Progress::Needs(chosen) => self.load(part, &chosen),
            Progress::Paused => self.pauses += 1,
            Progress::Again => unreachable!("the head ran"),
        }
        false
    }

    /// Runs a part of the current step with the tensors that are loaded.
    pub fn try_run(&mut self, part: u32) -> Result<Progress, BackendError> {
        loop {
            let weights = Weights { tensors: &self.tensors, generations: &self.generations };
            match self.backend.get().run(part, &weights)? {
                Progress::Paused => self.pauses += 1,
                progress => return Ok(progress),
            }
        }
    }

    /// Loads chosen experts of a part.
    pub fn load(&mut self, part: u32, chosen: &[TensorId]) {
        assert!(!chosen.is_empty(), "a part stopped and named no expert to load");
        for id in chosen {
            let tensor = &self.program.tensors()[id.0 as usize];
            assert_eq!(tensor.residence, Residence::Chosen);
            let there =
                self.tensors[id.0 as usize].replace(self.backend.get().load_tensor(&tensor.lazy).unwrap());
            assert!(there.is_none(), "a part requested a tensor that is already loaded");
        }
        self.generations[part as usize] += 1;
    }

    /// Drops the chosen experts, as an eviction would.
    pub fn forget_chosen(&mut self) {
        for (tensor, slot) in self.program.tensors().iter().zip(&mut self.tensors) {
            if tensor.residence == Residence::Chosen {
                *slot = None;
            }
        }
        self.generations.iter_mut().for_each(|generation| *generation += 1);
    }
}
