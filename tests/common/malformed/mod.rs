//! Model files that are wrong, class by class of what has broken other engines, and the error code that each has to meet.
//!
//! All start from one good file of a whole small model, so that nothing but the fault decides. The same bytes on each call.

#![allow(dead_code, unused_imports)] // each binary uses its own part

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

/// What lies under a name of a directory.
#[derive(Clone, Debug)]
pub enum Content {
    Bytes(Vec<u8>),
    /// Bytes in front of a hole that ends at `length`.
    Sparse {
        start: Vec<u8>,
        length: u64,
    },
    /// A link to this path.
    Link(PathBuf),
    /// A link to itself.
    Loop,
    Directory,
    Fifo,
}

/// A model's files by what follows its name: `.gguf`, or a part's number.
pub type Files = Vec<(String, Content)>;

/// A model, and what opening it has to say.
#[derive(Clone, Debug)]
pub struct Case {
    /// 1 header, 2 counts, 3 metadata, 4 tensors, 5 meaning, 7 sizes and parts, 8 no files.
    pub class: u8,
    pub what: String,
    pub files: Files,
    /// None where it is good after all: extremes that are allowed.
    pub code: Option<ErrorCode>,
}

impl Case {
    /// One file that opens; what is wrong with it shows later.
    pub fn whole(class: u8, what: &str, forge: &Forge) -> Self {
        let files = vec![(".gguf".into(), Content::Bytes(forge.build().bytes))];
        Self { class, what: what.to_owned(), files, code: None }
    }

    /// Writes its files below `dir`, as the model `name`.
    pub fn write(&self, dir: &Path, name: &str) {
        for (ending, content) in &self.files {
            write(&dir.join(format!("{name}{ending}")), content);
        }
    }

    /// The bytes of a case of one plain file.
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

/// All cases but those that show only in an answer: [`templates()`], [`numbers()`].
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

    /// An extreme that is allowed.
    fn good(&mut self, class: u8, what: impl Into<String>, forge: &Forge) {
        self.0.push(Case::whole(class, &what.into(), forge));
    }
}

/// The good file.
fn good() -> Forge {
    tiny_llama(7)
}
