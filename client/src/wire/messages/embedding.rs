//! Extensions of [`GenerateRequest`] and [`GenerateEnd`]: the embedding of a prompt.

use super::{BadSteering, EXT_CRITICAL, GenerateEnd, GenerateRequest};

/// Key of [`GenerateRequest`]'s `ext`: two bytes, how rows become one (a [`Pooling`], or 0) and whether the result is normalised.
pub const EXT_GENERATE_EMBEDDING: u16 = EXT_CRITICAL | 7;

/// Key of [`GenerateEnd`]'s `ext`: the embedding, f32 little-endian, as many as the model is wide.
pub const EXT_END_EMBEDDING: u16 = 4;

/// How the rows of a text's tokens become one. The numbers are those of a file's `pooling_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Pooling {
    /// The mean of all rows.
    Mean = 1,
    /// The row of the first token.
    First = 2,
    /// The row of the last token.
    Last = 3,
}

/// Options of the embedding that a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EmbeddingOptions {
    /// `None`: as the model's file says. If it says nothing, the mean for an encoder, the last row for a decoder.
    pub pooling: Option<Pooling>,
    /// Divides the embedding by its Euclidean length.
    pub normalise: bool,
}

impl Default for EmbeddingOptions {
    fn default() -> Self {
        Self { pooling: None, normalise: true }
    }
}

impl GenerateRequest {
    /// The same request, which computes the prompt's embedding and no answer. [`GenerateEnd::embedding`] has it.
    #[must_use]
    pub fn with_embedding(mut self, options: EmbeddingOptions) -> Self {
        let pooling = options.pooling.map_or(0, |pooling| pooling as u8);
        self.ext.retain(|(key, _)| *key != EXT_GENERATE_EMBEDDING);
        self.ext.push((EXT_GENERATE_EMBEDDING, vec![pooling, u8::from(options.normalise)]));
        self
    }

    /// The embedding that is wanted, if one is.
    ///
    /// # Errors
    /// [`BadSteering`] for bytes that are no such options.
    pub fn embedding(&self) -> Result<Option<EmbeddingOptions>, BadSteering> {
        let Some(bytes) = self.bytes_of(EXT_GENERATE_EMBEDDING) else { return Ok(None) };
        let &[pooling, normalise @ (0 | 1)] = bytes else { return Err(BadSteering::Embedding) };
        let pooling = match pooling {
            0 => None,
            1 => Some(Pooling::Mean),
            2 => Some(Pooling::First),
            3 => Some(Pooling::Last),
            _ => return Err(BadSteering::Embedding),
        };
        Ok(Some(EmbeddingOptions { pooling, normalise: normalise == 1 }))
    }
}

impl GenerateEnd {
    /// The prompt's embedding, for a request that wants it.
    pub fn embedding(&self) -> Option<Vec<f32>> {
        let (_, bytes) = self.ext.iter().find(|(key, _)| *key == EXT_END_EMBEDDING)?;
        let numbers =
            bytes.chunks_exact(4).filter_map(|bytes| Some(f32::from_le_bytes(bytes.try_into().ok()?)));
        bytes.len().is_multiple_of(4).then(|| numbers.collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{Prompt, Validate};

    #[test]
    fn options_are_two_bytes() {
        let request = GenerateRequest::new("m", Prompt::Text("p".into()));
        assert_eq!(request.embedding(), Ok(None));
        for pooling in [None, Some(Pooling::Mean), Some(Pooling::First), Some(Pooling::Last)] {
            for normalise in [false, true] {
                let options = EmbeddingOptions { pooling, normalise };
                let asked =
                    request.clone().with_embedding(EmbeddingOptions::default()).with_embedding(options);
                assert_eq!((asked.embedding(), asked.validate()), (Ok(Some(options)), Ok(())));
            }
        }
        for bytes in [vec![], vec![1], vec![5, 1], vec![0, 2], vec![4, 0], vec![0, 0, 0]] {
            let mut request = request.clone();
            request.ext.push((EXT_GENERATE_EMBEDDING, bytes));
            assert_eq!(request.embedding(), Err(BadSteering::Embedding));
        }
    }
}
