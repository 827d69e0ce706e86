//! The text in which a reranker's file wants a query and a document (`tokenizer.chat_template.rerank`).
//!
//! It is no program: `{query}` and `{document}` stand in it once each, so a prompt is at most as long as all three texts.

use super::Model;
use super::tokenizer::EncodeOptions;

/// Most bytes of a file's text; Qwen 3's have about 500.
pub const SOURCE_BYTES_MAX: usize = 4096;

const QUERY: &str = "{query}";
const DOCUMENT: &str = "{document}";

/// A file's text for pairs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PairTemplate {
    /// The file has none: both texts stand between the vocabulary's tokens for that.
    Absent,
    /// Can be filled.
    Text(PairText),
    /// Too long, or it does not have both places once.
    Unusable(String),
}

/// The parts of a file's text around a query and a document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PairText {
    before: String,
    between: String,
    after: String,
    query_first: bool,
}

/// A file whose text for pairs cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the model's tokenizer.chat_template.rerank cannot be filled: {why}. Take another file of the model")]
pub struct PairError {
    why: String,
}

impl Model {
    /// Token ids of a query and a document as one text. Special tokens are parsed where the file has a text for pairs.
    ///
    /// # Errors
    /// [`PairError`].
    pub fn encode_pair(&self, query: &str, document: &str) -> Result<Vec<u32>, PairError> {
        match &self.pair_template {
            PairTemplate::Absent => Ok(self.tokenizer.encode_pair(query, document)),
            PairTemplate::Text(text) => {
                let options = EncodeOptions { add_special: false, parse_special: true };
                Ok(self.tokenizer.encode(&text.filled(query, document), options))
            }
            PairTemplate::Unusable(why) => Err(PairError { why: why.clone() }),
        }
    }
}

impl PairTemplate {
    /// Reads the text of a file.
    pub fn of(source: Option<&str>) -> Self {
        let Some(source) = source else { return Self::Absent };
        if source.len() > SOURCE_BYTES_MAX {
            let length = source.len();
            return Self::Unusable(format!("it has {length} bytes; allowed: {SOURCE_BYTES_MAX}"));
        }
        PairText::of(source).map_or_else(
            || {
                let [queries, documents] = [QUERY, DOCUMENT].map(|place| source.matches(place).count());
                Self::Unusable(format!("it has {QUERY} {queries} times and {DOCUMENT} {documents} times; both must stand in it once"))
            },
            Self::Text,
        )
    }
}

impl PairText {
    fn of(source: &str) -> Option<Self> {
        let once = |place: &str| source.split_once(place).filter(|(_, after)| !after.contains(place));
        let [(before_query, _), (before_document, _)] = [once(QUERY)?, once(DOCUMENT)?];
        let query_first = before_query.len() < before_document.len();
        let [first, second] = if query_first { [QUERY, DOCUMENT] } else { [DOCUMENT, QUERY] };
        let (before, rest) = source.split_once(first)?;
        let (between, after) = rest.split_once(second)?;
        Some(Self { before: before.into(), between: between.into(), after: after.into(), query_first })
    }

    /// The text with both in their places.
    pub fn filled(&self, query: &str, document: &str) -> String {
        let [first, second] = if self.query_first { [query, document] } else { [document, query] };
        [&self.before, first, &self.between, second, &self.after].concat()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(source: &str, query: &str, document: &str) -> String {
        match PairTemplate::of(Some(source)) {
            PairTemplate::Text(text) => text.filled(query, document),
            other => panic!("{source}: {other:?}"),
        }
    }

    #[test]
    fn each_text_stands_in_its_place() {
        assert_eq!(filled("a {query}, b {document}.", "Q", "D"), "a Q, b D.");
        assert_eq!(filled("{document}{query}", "Q", "D"), "DQ");
        assert_eq!(filled("{query}{document}", "", ""), "");
    }

    #[test]
    fn a_query_that_names_a_place_stays_as_it_is() {
        assert_eq!(filled("<{query}|{document}>", "{document}", "{query}"), "<{document}|{query}>");
    }

    #[test]
    fn a_text_without_both_places_once_is_unusable() {
        assert_eq!(PairTemplate::of(None), PairTemplate::Absent);
        for source in ["", "{query}", "{document}", "{query}{query}{document}", "{query}{document}{document}"]
        {
            let PairTemplate::Unusable(why) = PairTemplate::of(Some(source)) else { panic!("{source}") };
            assert!(why.contains("must stand in it once"), "{why}");
        }
        let long = format!("{{query}}{{document}}{}", "x".repeat(SOURCE_BYTES_MAX));
        let PairTemplate::Unusable(why) = PairTemplate::of(Some(&long)) else { panic!("a long one") };
        assert!(why.contains("4113 bytes"), "{why}");
    }
}
