//! One file per architecture: which tensors by which names, which metadata.
//!
//! To add one: a file here with a `build` function, and a row in `ARCHITECTURES`.

use std::sync::Arc;

use super::gguf::Gguf;
use super::plan::{ExecutionPlan, PlanError};
use crate::tensor::MappedFile;

mod llama;
mod metadata;
mod tensors;

/// An architecture that can be run.
pub(super) struct Architecture {
    /// `general.architecture` of its files.
    pub name: &'static str,
    /// Builds the plan of a file whose vocabulary has this many tokens.
    pub build: fn(&Gguf, &Arc<MappedFile>, usize) -> Result<ExecutionPlan, PlanError>,
}

/// All that can be run.
pub(super) const ARCHITECTURES: &[Architecture] = &[Architecture { name: "llama", build: llama::build }];

/// Their names.
pub(super) fn supported() -> Vec<&'static str> {
    ARCHITECTURES.iter().map(|a| a.name).collect()
}

#[cfg(test)]
mod tests;
