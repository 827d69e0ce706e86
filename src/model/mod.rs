//! Models: from the bytes of a GGUF file to a tokenizer, a template and a plan of what to run.
//!
//! A model's life: `Registered` (a name and a file) -> `Mapped` ([`Model`]: header checked, tokenizer and plan built, no
//! weight byte read) -> `Draining` -> gone; `Poisoned` from anywhere.

use std::sync::Arc;

use crate::tensor::{FileIdentity, MappedFile};

pub mod arch;
pub mod gguf;
pub mod plan;
pub mod store;
pub mod template;
pub mod tokenizer;

/// Number of a mapped model, unique while the daemon runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ModelId(pub u64);

/// A mapped model: everything about it but the weights, which stay in the file until a step needs them.
#[derive(Debug)]
pub struct Model {
    /// Its number.
    pub id: ModelId,
    /// The name it was first mapped under: the file's name without `.gguf`. For logs; names are the store's business.
    pub name: String,
    /// The mapping; all tensors of `plan` point into it.
    pub file: Arc<MappedFile>,
    /// Metadata and tensor table of the file.
    pub gguf: gguf::Gguf,
    /// Text to tokens and back.
    pub tokenizer: tokenizer::Tokenizer,
    /// Chat template source (`tokenizer.chat_template`), at most 256 KiB, not yet compiled.
    pub chat_template: Option<String>,
    /// What to run.
    pub plan: plan::ExecutionPlan,
    /// Context length the file states, in tokens.
    pub context_length: u32,
}

/// Why a file did not become a [`Model`].
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The header or tensor table is broken.
    #[error(transparent)]
    Gguf(#[from] gguf::GgufError),
    /// The vocabulary is broken or of an unknown kind.
    #[error(transparent)]
    Tokenizer(#[from] tokenizer::TokenizerError),
    /// The architecture is unknown, or tensors are missing or misshapen.
    #[error(transparent)]
    Plan(#[from] plan::PlanError),
    /// The file could not be mapped.
    #[error(transparent)]
    Map(#[from] crate::tensor::MapError),
}

impl Model {
    /// Identity of the mapped file.
    pub fn identity(&self) -> FileIdentity {
        self.file.identity()
    }

    /// Maps `file`, checks it and builds tokenizer and plan. Reads the header by pread, no weight byte.
    ///
    /// Blocks for 10-35 ms with a vocabulary of 150,000 tokens: call it off the runtime threads.
    ///
    /// # Errors
    /// [`ModelError`].
    pub fn open(id: ModelId, name: &str, file: std::fs::File) -> Result<Self, ModelError> {
        let (gguf, file) = gguf::Gguf::open(file)?;
        let tokenizer = tokenizer::Tokenizer::from_gguf(&gguf)?;
        let plan = plan::ExecutionPlan::build(&gguf, &file, tokenizer.vocab_size())?;
        let chat_template = gguf.string("tokenizer.chat_template").map(str::to_owned);
        let context_length = plan.context_length;
        Ok(Self { id, name: name.to_owned(), file, gguf, tokenizer, chat_template, plan, context_length })
    }
}
