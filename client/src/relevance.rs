//! The relevance of a document, as a client gets it.

use crate::error::{ClientError, ProtocolError};
use crate::wire::{GenerateEnd, GenerateItem, Message as _};

/// How relevant a document is to a query.
#[derive(Clone, Debug, PartialEq)]
pub struct Relevance {
    /// Tokens of both, as the model read them.
    pub prompt_ids: Vec<u32>,
    /// Higher is more relevant. Models differ in its range.
    pub value: f32,
    /// Counts and times of the request.
    pub end: GenerateEnd,
}

impl Relevance {
    /// Puts together what a stream brought.
    pub(crate) fn of(items: Vec<GenerateItem>, end: Option<&GenerateEnd>) -> Result<Self, ClientError> {
        let value = end.and_then(|end| Some((end.clone(), end.relevance()?)));
        let (end, value) =
            value.ok_or(ProtocolError::Lacks { message: GenerateEnd::NAME, what: "the relevance" })?;
        Ok(Self { prompt_ids: items.into_iter().flat_map(|item| item.prompt_ids).collect(), value, end })
    }
}
