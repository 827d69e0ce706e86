//! Extension of [`GenerateRequest`]: log-probabilities of the prompt's tokens.

use super::{BadSteering, EXT_CRITICAL, GenerateRequest};
use crate::wire::validate::limits;

/// Key of [`GenerateRequest`]'s `ext`: a byte, the number of alternatives wanted for each token of the prompt.
pub const EXT_GENERATE_SCORES: u16 = EXT_CRITICAL | 6;

impl GenerateRequest {
    /// The same request, whose answer begins with log-probabilities of the prompt's tokens. Items without ids have them, in order
    /// from the second token, each with so many most likely alternatives, at most [`limits::TOP_LOGPROBS_MAX`].
    #[must_use]
    pub fn with_scores(mut self, alternatives: u8) -> Self {
        self.ext.retain(|(key, _)| *key != EXT_GENERATE_SCORES);
        self.ext.push((EXT_GENERATE_SCORES, vec![alternatives]));
        self
    }

    /// The number of alternatives, if log-probabilities of the prompt are wanted.
    ///
    /// # Errors
    /// [`BadSteering`] for bytes that are no such number.
    pub fn scores(&self) -> Result<Option<u8>, BadSteering> {
        match self.bytes_of(EXT_GENERATE_SCORES) {
            None => Ok(None),
            Some([number]) if usize::from(*number) <= limits::TOP_LOGPROBS_MAX => Ok(Some(*number)),
            Some(_) => Err(BadSteering::Scores),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{Prompt, Validate};

    #[test]
    fn alternatives_are_a_number_in_a_byte() {
        let request = GenerateRequest::new("m", Prompt::Text("p".into()));
        assert_eq!(request.scores(), Ok(None));
        let asked = request.clone().with_scores(3).with_scores(20);
        assert_eq!((asked.scores(), asked.validate()), (Ok(Some(20)), Ok(())));
        assert_eq!(request.clone().with_scores(21).scores(), Err(BadSteering::Scores));
        for bytes in [vec![], vec![0, 0]] {
            let mut request = request.clone();
            request.ext.push((EXT_GENERATE_SCORES, bytes));
            assert_eq!(request.scores(), Err(BadSteering::Scores));
        }
    }
}
