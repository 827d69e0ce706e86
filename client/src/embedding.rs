//! The embedding of a text, as a client gets it.

use crate::error::{ClientError, ProtocolError};
use crate::wire::{EmbeddingOptions, GenerateEnd, GenerateItem, GenerateRequest, Message as _};

/// The embedding of a prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct Embedding {
    /// The prompt's tokens.
    pub prompt_ids: Vec<u32>,
    /// As many numbers as the model is wide.
    pub values: Vec<f32>,
    /// Counts and times of the request.
    pub end: GenerateEnd,
}

impl Embedding {
    /// The request, which asks for an embedding: a normalised one with the file's pooling, unless it says otherwise.
    pub(crate) fn request(request: &GenerateRequest) -> GenerateRequest {
        match request.embedding() {
            Ok(None) => request.clone().with_embedding(EmbeddingOptions::default()),
            // Bytes that are no options are refused by the daemon, in its own words.
            Ok(Some(_)) | Err(_) => request.clone(),
        }
    }

    /// Puts together what a stream brought.
    pub(crate) fn of(items: Vec<GenerateItem>, end: Option<&GenerateEnd>) -> Result<Self, ClientError> {
        let values = end.and_then(|end| Some((end.clone(), end.embedding()?)));
        let (end, values) =
            values.ok_or(ProtocolError::Lacks { message: GenerateEnd::NAME, what: "the embedding" })?;
        Ok(Self { prompt_ids: items.into_iter().flat_map(|item| item.prompt_ids).collect(), values, end })
    }
}
