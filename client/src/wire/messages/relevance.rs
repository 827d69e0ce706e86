//! Extensions of [`GenerateRequest`] and [`GenerateEnd`]: how relevant a document is to a query.

use super::{BadSteering, EXT_CRITICAL, GenerateEnd, GenerateRequest};

/// Key of [`GenerateRequest`]'s `ext`: a document, as text. The prompt is then a query.
pub const EXT_GENERATE_DOCUMENT: u16 = EXT_CRITICAL | 8;

/// Key of [`GenerateEnd`]'s `ext`: f32 little-endian, the document's relevance to the query.
pub const EXT_END_RELEVANCE: u16 = 7;

impl GenerateRequest {
    /// The same request, whose prompt is a query: it computes how relevant the document is to it, and no answer.
    /// [`GenerateEnd::relevance`] has that.
    #[must_use]
    pub fn with_document(mut self, document: &str) -> Self {
        self.ext.retain(|(key, _)| *key != EXT_GENERATE_DOCUMENT);
        self.ext.push((EXT_GENERATE_DOCUMENT, document.as_bytes().to_vec()));
        self
    }

    /// The document whose relevance is wanted, if one is.
    ///
    /// # Errors
    /// [`BadSteering`] for bytes that are no text.
    pub fn document(&self) -> Result<Option<&str>, BadSteering> {
        let bytes = self.bytes_of(EXT_GENERATE_DOCUMENT);
        bytes.map(|bytes| std::str::from_utf8(bytes).map_err(|_| BadSteering::Document)).transpose()
    }
}

impl GenerateEnd {
    /// The document's relevance, for a request that wants it: higher is more relevant. Models differ in its range.
    pub fn relevance(&self) -> Option<f32> {
        let (_, bytes) = self.ext.iter().find(|(key, _)| *key == EXT_END_RELEVANCE)?;
        bytes.as_slice().try_into().ok().map(f32::from_le_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{Prompt, Validate, Violation, limits};

    #[test]
    fn a_document_is_text_of_bounded_length() {
        let request = GenerateRequest::new("m", Prompt::Text("query".into()));
        assert_eq!(request.document(), Ok(None));
        let of = |length: usize| request.clone().with_document("old").with_document(&"a".repeat(length));
        let longest = of(limits::DOCUMENT_BYTES_MAX);
        assert_eq!(longest.validate(), Ok(()));
        assert_eq!(longest.document().unwrap().unwrap().len(), limits::DOCUMENT_BYTES_MAX);
        let longer = of(limits::DOCUMENT_BYTES_MAX + 1).validate();
        assert!(matches!(longer, Err(Violation::TooLong { .. })), "{longer:?}");
        let mut bad = request;
        bad.ext.push((EXT_GENERATE_DOCUMENT, vec![0xff]));
        assert_eq!(bad.document(), Err(BadSteering::Document));
    }
}
