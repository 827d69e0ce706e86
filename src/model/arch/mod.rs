//! One file per architecture: what its files hold and how its layers compute.
//!
//! To add one that is a decoder of the usual kind: a file here that says what it has, and a row in `ARCHITECTURES`.
//! Keys and tensor names: ggml `docs/gguf.md` and llama.cpp `src/llama-arch.cpp`.

mod decoder;
mod experts;
mod llama;
mod metadata;
mod qwen2;
mod qwen3;
mod qwen3moe;
mod rope;
mod tensors;

use decoder::Decoder;

use super::files::ModelFiles;
use super::plan::{ExecutionPlan, PlanError, excerpt};

/// All that can be run.
const ARCHITECTURES: [Decoder; 4] = [llama::LLAMA, qwen2::QWEN2, qwen3::QWEN3, qwen3moe::QWEN3MOE];

/// The plan of a model whose vocabulary has `vocab` tokens.
pub(super) fn plan(files: &ModelFiles, vocab: usize) -> Result<ExecutionPlan, PlanError> {
    let name = files.header().string("general.architecture").ok_or(PlanError::NoArchitecture)?;
    match ARCHITECTURES.iter().find(|a| a.name == name) {
        Some(architecture) => architecture.plan(files, vocab),
        None => Err(PlanError::Architecture {
            found: excerpt(name),
            supported: ARCHITECTURES.iter().map(|a| a.name).collect(),
        }),
    }
}

#[cfg(test)]
mod tests;
