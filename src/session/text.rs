//! Text to token ids and back.

use rocmforge_client::wire::{
    DetokenizeReply, DetokenizeRequest, ErrorCode, Ext, TokenizeReply, TokenizeRequest, limits,
};

use super::Call;
use super::error::{Failure, failure};
use crate::model::tokenizer::EncodeOptions;

pub(super) async fn tokenize(call: Call, request: TokenizeRequest) -> Result<TokenizeReply, Failure> {
    call.service().admit()?;
    call.blocking(move |call| {
        let (lease, _) = call.acquire(&request.model)?;
        let options =
            EncodeOptions { add_special: request.add_special, parse_special: request.parse_special };
        let ids = lease.model().tokenizer.encode(&request.text, options);
        if ids.len() > limits::IDS_MAX {
            let text = format!(
                "the text has {} tokens, a reply holds at most {}: send it in parts",
                ids.len(),
                limits::IDS_MAX
            );
            return Err(failure(ErrorCode::LimitExceeded, &text));
        }
        Ok(TokenizeReply { ids, ext: Ext::new() })
    })
    .await
}

pub(super) async fn detokenize(call: Call, request: DetokenizeRequest) -> Result<DetokenizeReply, Failure> {
    call.service().admit()?;
    call.blocking(move |call| {
        let (lease, _) = call.acquire(&request.model)?;
        let tokenizer = &lease.model().tokenizer;
        check_ids(&request.ids, tokenizer.vocab_size())?;
        // Checked before the text is built: a few long tokens, repeated often enough, would make gigabytes.
        let bytes = |id: &u32| tokenizer.token_bytes(*id, true).map_or(0, <[u8]>::len);
        let total: usize = request.ids.iter().map(bytes).sum();
        // Each byte of invalid UTF-8 becomes three.
        if total > limits::TEXT_BYTES_MAX / 3 {
            let text = format!(
                "the text of {} tokens may not fit into one reply: send the tokens in parts",
                request.ids.len()
            );
            return Err(failure(ErrorCode::LimitExceeded, &text));
        }
        let text = tokenizer.decode(&request.ids, request.show_special);
        let text =
            text.ok_or_else(|| failure(ErrorCode::TokenOutOfRange, "a token id is outside the vocabulary"))?;
        Ok(DetokenizeReply { text, ext: Ext::new() })
    })
    .await
}

/// Refuses ids outside the vocabulary; the message names the first one.
pub(super) fn check_ids(ids: &[u32], vocab: usize) -> Result<(), Failure> {
    match ids.iter().position(|id| *id as usize >= vocab) {
        None => Ok(()),
        Some(index) => {
            let text = format!(
                "token id {} at index {index} is outside the vocabulary of {vocab} tokens",
                ids[index]
            );
            Err(failure(ErrorCode::TokenOutOfRange, &text))
        }
    }
}
