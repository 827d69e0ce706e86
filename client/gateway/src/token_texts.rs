//! Texts of single tokens, asked of the daemon once for each token of an answer.

use std::collections::HashMap;

use futures_util::future::try_join_all;
use rocmforge_client::ClientError;
use rocmforge_client::asynchronous::Client;
use rocmforge_client::wire::DetokenizeRequest;

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
    pub async fn learn(&mut self, client: &Client, model: &str, ids: Vec<u32>) -> Result<(), ClientError> {
        let mut unknown = ids;
        unknown.retain(|id| !self.0.contains_key(id));
        unknown.sort_unstable();
        unknown.dedup();
        let asked: Vec<_> = unknown.into_iter().map(|id| ask(client, model, id)).collect();
        self.0.extend(try_join_all(asked).await?);
        Ok(())
    }

    /// The text of a token that was learnt.
    pub fn of(&self, id: u32) -> TokenText {
        self.0.get(&id).cloned().unwrap_or_default()
    }
}

/// Asks for one token twice, because some tokenizers leave out the first space of a text.
async fn ask(client: &Client, model: &str, id: u32) -> Result<(u32, TokenText), ClientError> {
    let request =
        DetokenizeRequest { model: model.to_owned(), ids: vec![id, id], show_special: true, ext: vec![] };
    Ok((id, of_twice(&client.call(&request).await?.text)))
}

/// A token's text from the text of the token twice, whose first space may be missing.
fn of_twice(twice: &str) -> TokenText {
    let half = twice.len() / 2;
    let text = match (twice.get(..half), twice.get(half..)) {
        (Some(first), Some(second)) if first == second => first,
        (Some(first), Some(second)) if second.strip_prefix(' ') == Some(first) => second,
        _ => twice,
    };
    let bytes = (!text.contains(char::REPLACEMENT_CHARACTER)).then(|| text.as_bytes().to_vec());
    TokenText { text: text.to_owned(), bytes }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_space_before_a_word_is_part_of_its_token() {
        for (twice, text) in
            [("wordword", "word"), ("word word", " word"), (" ", " "), ("  ", " "), ("\n\n", "\n"), ("", "")]
        {
            assert_eq!(of_twice(twice).text, text, "{twice:?}");
        }
        assert_eq!(of_twice("\u{fffd}\u{fffd}"), TokenText { text: "\u{fffd}".into(), bytes: None });
    }
}
