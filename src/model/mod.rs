//! Models: from the bytes of a GGUF file to a tokenizer, a template and an execution plan.
//!
//! States of a model: `Registered` (a name and a file) -> `Mapped` (a [`Model`]) -> `Draining` -> freed; `Poisoned`
//! from any state. For a mapped model, the header is checked, tokenizer and plan are built, and no weight byte is read.

use std::sync::OnceLock;

use crate::tensor::is_shortage;

pub mod arch;
pub mod constraint;
pub mod embedding;
pub mod files;
pub mod gguf;
pub mod pages;
pub mod pair;
pub mod plan;
pub mod store;
pub mod template;
pub mod tokenizer;

pub use crate::program::ModelId;

/// A mapped model without its weights. The weights stay in the file until a step needs them.
#[derive(Debug)]
pub struct Model {
    /// Number of this mapping.
    pub id: ModelId,
    /// The name of the first mapping: the file's name without `.gguf`. For logs only; the store resolves names.
    pub name: String,
    /// The mapped files; all tensors of `plan` point into them.
    pub files: files::ModelFiles,
    /// Residency of the files' pages in memory.
    pub pages: pages::Pages,
    /// Text to tokens and back; models of the same vocabulary share it.
    pub tokenizer: tokenizer::SharedTokenizer,
    /// Chat template, not yet compiled.
    pub chat_template: ChatTemplate,
    /// The text in which it reads a query and a document.
    pub pair_template: pair::PairTemplate,
    /// The variable of the chat template that turns reasoning on and off. Set by the first who asks the template.
    pub thinking: OnceLock<Option<String>>,
    /// A model with which its vocabulary was compared, and whether ids mean the same in both. Set by the first who asks.
    pub compared: OnceLock<(ModelId, bool)>,
    /// The program and sizes of the model.
    pub plan: plan::ExecutionPlan,
    /// Set if not the file is mapped but a copy of it.
    pub copied: Option<Copied>,
}

/// A model's file whose pages may never come, because its file system's server may hang. It is served from memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Copied {
    /// Type of the file system, as the kernel names it.
    pub file_system: String,
    /// Bytes in memory.
    pub bytes: u64,
}

/// Chat template of a file (`tokenizer.chat_template`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChatTemplate {
    /// The file has none.
    Absent,
    /// Jinja source.
    Source(String),
    /// A template above [`template::SOURCE_BYTES_MAX`] bytes. It is dropped: chats fail, everything else works.
    TooLong {
        /// Length of the template in bytes.
        bytes: usize,
    },
}

impl ChatTemplate {
    fn of(source: Option<&str>) -> Self {
        match source {
            None => Self::Absent,
            Some(source) if source.len() > template::SOURCE_BYTES_MAX => {
                Self::TooLong { bytes: source.len() }
            }
            Some(source) => Self::Source(source.to_owned()),
        }
    }
}

/// Why a file did not become a [`Model`].
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The header or tensor table is broken, or the parts do not belong together.
    #[error(transparent)]
    Files(#[from] files::FilesError),
    /// The vocabulary is broken or of an unknown kind.
    #[error(transparent)]
    Tokenizer(#[from] tokenizer::TokenizerError),
    /// The architecture is unknown, or tensors are missing or misshapen.
    #[error(transparent)]
    Plan(#[from] plan::PlanError),
}

impl ModelError {
    /// True when the daemon lacks resources and the file is sound: see [`is_shortage`].
    pub fn is_shortage(&self) -> bool {
        use files::FilesError::{Gguf, Part};
        use gguf::GgufError;
        let Self::Files(Gguf(error) | Part { source: error, .. }) = self else { return false };
        match error {
            GgufError::Map(error) => error.is_shortage(),
            GgufError::Read { source, .. } => is_shortage(source),
            _ => false,
        }
    }
}

impl Model {
    /// True if each id that both vocabularies have is the same token in both. One may have more of them: files are padded in
    /// different ways. Compares 150,000 tokens in some 3 ms, once for the first model that it is asked about.
    pub fn shares_ids(&self, other: &Self) -> bool {
        if let Some(shares) = self.known_to_share_ids(other) {
            return shares;
        }
        let (own, others) = (&self.tokenizer, &other.tokenizer);
        let ids = 0..own.vocab_size().min(others.vocab_size()) as u32; // a vocabulary's size fits
        let shares =
            ids.map(|id| (own.token_bytes(id, true), others.token_bytes(id, true))).all(|(a, b)| a == b);
        let _ = self.compared.set((other.id, shares)); // the first one stays
        shares
    }

    /// The same without a comparison; `None` if it needs one.
    pub fn known_to_share_ids(&self, other: &Self) -> Option<bool> {
        if std::ptr::eq(&*self.tokenizer, &*other.tokenizer) {
            return Some(true);
        }
        self.compared.get().filter(|(of, _)| *of == other.id).map(|(_, shares)| *shares)
    }

    /// As [`Model::open_beside`] with a tokenizer of its own.
    ///
    /// # Errors
    /// [`ModelError`].
    pub fn open(id: ModelId, name: &str, files: Vec<std::fs::File>) -> Result<Self, ModelError> {
        Self::open_beside(id, name, files, &tokenizer::Tokenizers::default(), None)
    }

    /// Maps the model's files, the first part first, checks them and builds the plan. Builds a tokenizer unless
    /// `tokenizers` holds one of the same vocabulary. Reads headers by pread, no weight byte. `charge` grows by what the
    /// header takes, and is held as long as the model.
    ///
    /// Blocks for 10-35 ms with a vocabulary of 150,000 tokens, or about 3 ms where a mapped model has the same one.
    /// Call it off the runtime threads.
    ///
    /// # Errors
    /// [`ModelError`].
    pub fn open_beside(
        id: ModelId,
        name: &str,
        files: Vec<std::fs::File>,
        tokenizers: &tokenizer::Tokenizers,
        charge: Option<files::PassedCharge>,
    ) -> Result<Self, ModelError> {
        let mut files = files::ModelFiles::open_beside(files, &tokenizers.known(), charge)?;
        let tokenizer = tokenizers.of(files.header())?;
        files.header_mut().share(tokenizer.entries());
        let header = files.header();
        let plan = plan::ExecutionPlan::build(&files, tokenizer.vocab_size())?;
        let chat_template = ChatTemplate::of(header.string("tokenizer.chat_template"));
        let pair_template = pair::PairTemplate::of(header.string("tokenizer.chat_template.rerank"));
        let pages = pages::Pages::default();
        let name = name.to_owned();
        Ok(Self {
            id,
            name,
            files,
            pages,
            tokenizer,
            chat_template,
            pair_template,
            thinking: OnceLock::new(),
            compared: OnceLock::new(),
            plan,
            copied: None,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Seek, Write};

    use super::*;

    /// The small model with a chat template of `bytes` bytes. The inserted bytes must keep the data's alignment of 32.
    fn with_template(bytes: usize) -> Model {
        const KEY: &[u8] = b"tokenizer.chat_template";
        const STRING: u32 = 8;
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/models/tinystories-260k-f32.gguf");
        let old = std::fs::read(path).unwrap();
        let entries = u64::from_le_bytes(old[16..24].try_into().unwrap()) + 1;
        let mut new = [&old[..16], &entries.to_le_bytes(), &(KEY.len() as u64).to_le_bytes(), KEY].concat();
        new.extend_from_slice(&STRING.to_le_bytes());
        new.extend_from_slice(&(bytes as u64).to_le_bytes());
        new.resize(new.len() + bytes, b'x');
        assert_eq!((new.len() - 24) % 32, 0);
        new.extend_from_slice(&old[24..]);
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&new).unwrap();
        file.rewind().unwrap();
        Model::open(ModelId(1), "long", vec![std::fs::File::open(file.path()).unwrap()]).unwrap()
    }

    #[test]
    fn a_chat_template_past_the_limit_is_not_kept_and_the_model_opens() {
        let kept = template::SOURCE_BYTES_MAX - 11;
        assert_eq!(with_template(kept).chat_template, ChatTemplate::Source("x".repeat(kept)));
        let bytes = template::SOURCE_BYTES_MAX + 21;
        assert_eq!(with_template(bytes).chat_template, ChatTemplate::TooLong { bytes });
        let longest = "x".repeat(template::SOURCE_BYTES_MAX);
        assert_eq!(ChatTemplate::of(Some(&longest)), ChatTemplate::Source(longest.clone()));
    }
}
