//! Texts of single tokens, asked of the daemon once for all tokens of an item.

use std::collections::HashMap;

use futures_util::future::try_join_all;
use rocmforge_client::asynchronous::{Client, Generation};
use rocmforge_client::wire::{DetokenizeReply, DetokenizeRequest, EACH_TOKENS_MAX};
use rocmforge_client::{ClientError, ProtocolError};

/// A token's text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenText {
    /// The text. Bytes that are no character by themselves show as U+FFFD.
    pub text: String,
    /// The token's bytes; `None` if they are no text by themselves, because the daemon reports texts.
    pub bytes: Option<Vec<u8>>,
}

/// The texts of an answer's tokens.
#[derive(Debug, Default)]
pub struct TokenTexts(HashMap<u32, TokenText>);

impl TokenTexts {
    /// Asks for the texts of tokens that are not known yet, all at once.
    ///
    /// # Errors
    /// Errors of the daemon and of the connection to it.
    pub async fn learn(
        &mut self,
        (client, answer): (&Client, &Generation),
        model: &str,
        ids: Vec<u32>,
    ) -> Result<(), ClientError> {
        let mut unknown = ids;
        unknown.retain(|id| !self.0.contains_key(id));
        unknown.sort_unstable();
        unknown.dedup();
        let asked = unknown.chunks(EACH_TOKENS_MAX).map(|ids| ask(client, answer, model, ids));
        for texts in try_join_all(asked).await? {
            self.0.extend(texts);
        }
        Ok(())
    }

    /// The text of a token that was learnt.
    pub fn of(&self, id: u32) -> TokenText {
        self.0.get(&id).cloned().unwrap_or_default()
    }
}

/// Asks for the text of an answer's tokens. The answer's own connection comes first: a daemon that stops lets the answer finish,
/// and may take no new connection.
///
/// # Errors
/// Errors of the daemon and of the connection to it.
pub async fn detokenize(
    client: &Client,
    answer: &Generation,
    request: &DetokenizeRequest,
) -> Result<DetokenizeReply, ClientError> {
    match answer.connection().call(request).await {
        Err(ClientError::TooManyStreams { .. }) => client.call(request).await,
        reply => reply,
    }
}

/// Asks for the texts of so many tokens at once.
async fn ask(
    client: &Client,
    answer: &Generation,
    model: &str,
    ids: &[u32],
) -> Result<Vec<(u32, TokenText)>, ClientError> {
    let reply = detokenize(client, answer, &DetokenizeRequest::each(model, ids.to_vec())).await?;
    let texts = reply.each().filter(|texts| texts.len() == ids.len());
    let texts = texts.ok_or(ProtocolError::NoTextEnds)?;
    Ok(ids.iter().copied().zip(texts.into_iter().map(of_text)).collect())
}

fn of_text(text: &str) -> TokenText {
    let bytes = (!text.contains(char::REPLACEMENT_CHARACTER)).then(|| text.as_bytes().to_vec());
    TokenText { text: text.to_owned(), bytes }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_a_character_has_no_bytes() {
        assert_eq!(of_text(" word").bytes.as_deref(), Some(&b" word"[..]));
        assert_eq!(of_text("\u{fffd}"), TokenText { text: "\u{fffd}".into(), bytes: None });
    }
}
