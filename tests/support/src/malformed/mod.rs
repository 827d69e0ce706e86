//! Malformed model files by class, after what has broken other engines, and the error code that each must cause.
//!
//! All cases start from one good file of a whole small model, so that only the fault decides. Each call gives the same
//! bytes.

mod counts;
mod files;
mod meaning;
mod numbers;
mod tables;
mod templates;

use std::path::{Path, PathBuf};

use rocmforge_client::wire::ErrorCode;

use crate::forge::{Forge, tiny_llama};
pub use numbers::{Numbers, numbers};
pub use templates::templates;

/// Content of a directory entry.
#[derive(Clone, Debug)]
pub enum Content {
    Bytes(Vec<u8>),
    /// `start`, then a hole up to `length`.
    Sparse {
        start: Vec<u8>,
        length: u64,
    },
    /// A symbolic link to this path.
    Link(PathBuf),
    /// A symbolic link to itself.
    Loop,
    Directory,
    Fifo,
}

/// A model's files, by the suffix of their names: `.gguf`, or a part number.
pub type Files = Vec<(String, Content)>;

/// A model, and the error code that opening it must give.
#[derive(Clone, Debug)]
pub struct Case {
    /// 1 header, 2 counts, 3 metadata, 4 tensors, 5 meaning, 7 sizes and parts, 8 not a file.
    pub class: u8,
    pub what: String,
    pub files: Files,
    /// `None` for a good model: an extreme that is allowed.
    pub code: Option<ErrorCode>,
}

impl Case {
    /// A case of one file that opens; its fault shows later.
    pub fn whole(class: u8, what: &str, forge: &Forge) -> Self {
        let files = vec![(".gguf".into(), Content::Bytes(forge.build().bytes))];
        Self { class, what: what.to_owned(), files, code: None }
    }

    /// Writes the files into `dir`, as the model `name`.
    pub fn write(&self, dir: &Path, name: &str) {
        for (ending, content) in &self.files {
            write(&dir.join(format!("{name}{ending}")), content);
        }
    }

    /// The bytes, if the case is one plain file.
    pub fn bytes(&self) -> Option<&[u8]> {
        match &self.files[..] {
            [(_, Content::Bytes(bytes))] => Some(bytes),
            _ => None,
        }
    }
}

fn write(path: &Path, content: &Content) {
    match content {
        Content::Bytes(bytes) => std::fs::write(path, bytes).unwrap(),
        Content::Sparse { start, length } => {
            std::fs::write(path, start).unwrap();
            std::fs::File::options().write(true).open(path).unwrap().set_len(*length).unwrap();
        }
        Content::Link(to) => std::os::unix::fs::symlink(to, path).unwrap(),
        Content::Loop => std::os::unix::fs::symlink(path, path).unwrap(),
        Content::Directory => std::fs::create_dir(path).unwrap(),
        Content::Fifo => rustix::fs::mknodat(
            rustix::fs::CWD,
            path,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::from_raw_mode(0o600),
            0,
        )
        .unwrap(),
    }
}

/// All cases except those that show only in an answer: [`templates()`], [`numbers()`].
pub fn cases() -> Vec<Case> {
    let mut all = Cases(Vec::new());
    counts::add(&mut all);
    tables::add(&mut all);
    meaning::add(&mut all);
    files::add(&mut all);
    all.0
}

const CORRUPT: ErrorCode = ErrorCode::ModelCorrupt;
const UNSUPPORTED: ErrorCode = ErrorCode::ModelUnsupported;
const NO_MODEL: ErrorCode = ErrorCode::NotAModelFile;

struct Cases(Vec<Case>);

impl Cases {
    fn files(&mut self, class: u8, what: impl Into<String>, code: Option<ErrorCode>, files: Files) {
        self.0.push(Case { class, what: what.into(), files, code });
    }

    fn one(&mut self, class: u8, what: impl Into<String>, code: ErrorCode, content: Content) {
        self.files(class, what, Some(code), vec![(".gguf".into(), content)]);
    }

    fn bytes(&mut self, class: u8, what: impl Into<String>, code: ErrorCode, bytes: Vec<u8>) {
        self.one(class, what, code, Content::Bytes(bytes));
    }

    fn forge(&mut self, class: u8, what: impl Into<String>, code: ErrorCode, forge: &Forge) {
        self.bytes(class, what, code, forge.build().bytes);
    }

    /// Adds an extreme that is allowed.
    fn good(&mut self, class: u8, what: impl Into<String>, forge: &Forge) {
        self.0.push(Case::whole(class, &what.into(), forge));
    }
}

/// The good file.
fn good() -> Forge {
    tiny_llama(7)
}
