//! Text to token ids and back.

use rocmforge_client::wire::{
    self as wire, DetokenizeReply, DetokenizeRequest, ErrorCode, Ext, TokenizeReply, TokenizeRequest, limits,
};

use super::call::{Call, panicked};
use super::error::{Failure, failure, shortage};
use crate::aside::thread_time;
use crate::model::store::Lease;
use crate::model::tokenizer::{EncodeOptions, Tokenizer};

pub(super) async fn tokenize(call: Call, request: TokenizeRequest) -> Result<TokenizeReply, Failure> {
    call.service().refuse_while_draining()?;
    let bytes = request.text.len();
    let TokenizeRequest { model, text, add_special, parse_special, .. } = request;
    let work = move |_: &Call, lease: Lease| {
        let ids = lease.model().tokenizer.encode(&text, EncodeOptions { add_special, parse_special });
        if ids.len() > limits::IDS_MAX {
            let text = format!(
                "the text has {} tokens, a reply holds at most {}: send it in parts",
                ids.len(),
                limits::IDS_MAX
            );
            return Err(failure(ErrorCode::LimitExceeded, &text));
        }
        Ok(TokenizeReply { ids, ext: Ext::new() })
    };
    call.text_work(bytes, move |call| Ok(call.acquire(&model)?.0), work).await
}

/// Also while the daemon stops: clients of running answers ask for the texts of their tokens.
pub(super) async fn detokenize(call: Call, request: DetokenizeRequest) -> Result<DetokenizeReply, Failure> {
    let each = request.is_each();
    let DetokenizeRequest { model, ids, show_special, .. } = request;
    if each && ids.len() > wire::EACH_TOKENS_MAX {
        let (count, max) = (ids.len(), wire::EACH_TOKENS_MAX);
        let text = format!(
            "the texts of {count} tokens are wanted each for itself, at most {max} can be: ask in parts"
        );
        return Err(failure(ErrorCode::LimitExceeded, &text));
    }
    // Writing a token takes about as long as reading four bytes.
    let bytes = ids.len().saturating_mul(4);
    let work = move |_: &Call, lease: Lease| {
        let tokenizer = &lease.model().tokenizer;
        check_ids(&ids, tokenizer.vocab_size())?;
        // Checked before the text is built: a few long tokens, repeated often enough, would make gigabytes.
        let bytes = |id: &u32| tokenizer.token_bytes(*id, true).map_or(0, <[u8]>::len);
        let total: usize = ids.iter().map(bytes).sum();
        // Each byte of invalid UTF-8 becomes three.
        if total > limits::TEXT_BYTES_MAX / 3 {
            let text = format!(
                "the text of {} tokens may not fit into one reply: send the tokens in parts",
                ids.len()
            );
            return Err(failure(ErrorCode::LimitExceeded, &text));
        }
        if each {
            return Ok(each_text(tokenizer, &ids, show_special));
        }
        let text = tokenizer.decode(&ids, show_special);
        let text =
            text.ok_or_else(|| failure(ErrorCode::TokenOutOfRange, "a token id is outside the vocabulary"))?;
        Ok(DetokenizeReply { text, ext: Ext::new() })
    };
    call.text_work(bytes, move |call| Ok(call.acquire(&model)?.0), work).await
}

/// The texts of tokens, each for itself, and where they end.
fn each_text(tokenizer: &Tokenizer, ids: &[u32], show_special: bool) -> DetokenizeReply {
    let (mut text, mut ends) = (String::new(), Vec::with_capacity(4 * ids.len()));
    for id in ids {
        let bytes = tokenizer.token_bytes(*id, show_special).unwrap_or_default();
        text.push_str(&String::from_utf8_lossy(bytes));
        ends.extend(u32::try_from(text.len()).unwrap_or(u32::MAX).to_le_bytes()); // fits: the reply's limit is below
    }
    DetokenizeReply { text, ext: vec![(wire::EXT_TEXT_ENDS, ends)] }
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

impl Call {
    /// Runs `prepare` as [`blocking`](Self::blocking) work, then `work` on its result within the user's allowance of
    /// [`TextTime`](super::text_time::TextTime), or else in the background. `bytes` is the length of the text.
    pub(super) async fn text_work<I: Send + 'static, T: Send + 'static>(
        &self,
        bytes: usize,
        prepare: impl FnOnce(&Call) -> Result<I, Failure> + Send + 'static,
        work: impl FnOnce(&Call, I) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, Failure> {
        let uid = self.peer().uid;
        let begun = self.blocking(move |call| {
            let input = prepare(call)?;
            match call.service().text_time.claim(uid, bytes) {
                Some(_claim) => work(call, input).map(Ok),
                None => Ok(Err((work, input))),
            }
        });
        match begun.await? {
            Ok(done) => Ok(done),
            Err((work, input)) => self.in_background(move |call| work(call, input)).await,
        }
    }

    /// Runs work that opens a passed file, and charges the user for the processor time that it takes. It is less urgent
    /// than the engine: how long a header takes is known only once it was read. For administrators it is
    /// [`blocking`](Self::blocking) work, and they do not pay.
    pub(super) async fn header_work<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Call) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, Failure> {
        let (service, uid) = (self.service(), self.peer().uid);
        if self.peer().administrator {
            return self.blocking(work).await;
        }
        let turn = service.text_time.header_turn(uid).await;
        let call = self.clone();
        let work = move || {
            let begun = thread_time();
            let result = work(&call);
            call.service().text_time.charge(uid, thread_time().saturating_sub(begun));
            result
        };
        match service.text_time.on_nice_thread(turn, work).await {
            Ok(Some(result)) => result,
            Ok(None) => Err(panicked()),
            Err(error) => Err(shortage(&format!("no thread to open the file: {error}"))),
        }
    }

    /// Runs text work beyond the user's allowance.
    async fn in_background<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Call) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, Failure> {
        let call = self.clone();
        match self.service().text_time.in_background(self.peer().uid, move || work(&call)).await {
            Ok(Some(result)) => result,
            Ok(None) => Err(panicked()),
            Err(error) => Err(shortage(&format!("no thread for a long text: {error}"))),
        }
    }
}
