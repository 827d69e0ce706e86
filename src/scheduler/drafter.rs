//! Keys and values that a draft model has of a sequence. It is a small model that computes tokens which may follow, for the sequence's
//! own model to check.
//!
//! It has keys and values of the sequence's tokens in pages of its own, in its own pool, charged to the sequence's user.

use super::kv::Held;
use crate::model::plan::ExecutionPlan;
use crate::model::{Model, ModelId};

/// The draft model of one sequence, and what it has computed of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Drafter {
    pub model: ModelId,
    /// Bytes of one of its KV pages.
    pub page_bytes: u64,
    /// Both models know the ids below this one.
    pub vocab: u32,
    /// Most positions that it was trained for.
    pub positions: u32,
    /// Its pages in order of position.
    pub kv: Held,
    /// Tokens in them: those of the sequence, and then those of its draft.
    pub computed: u32,
}

impl Drafter {
    /// That of a model with so large KV pages, for a sequence of a model with so large a vocabulary.
    pub fn of(model: &Model, page_bytes: u64, vocab: usize) -> Self {
        let ExecutionPlan { program, context_length, .. } = &model.plan;
        let vocab = u32::try_from(program.vocab().min(vocab)).unwrap_or(u32::MAX);
        Self {
            model: model.id,
            page_bytes,
            vocab,
            positions: *context_length,
            kv: Held::default(),
            computed: 0,
        }
    }

    /// Forgets its pages, which are not given back.
    pub fn forget(&mut self) {
        (self.kv, self.computed) = (Held::default(), 0);
    }

    /// The sequence has so many tokens now, and no draft: positions of tokens that were refused count no longer. The last token is
    /// computed in any case.
    pub fn cut(&mut self, tokens: u32) {
        self.computed = self.computed.min(tokens.saturating_sub(1));
    }
}
