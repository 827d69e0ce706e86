//! A model's files: one, or the parts of a split one.
//!
//! `gguf-split` cuts a model between tensors. Each part is a GGUF file of its own that says which part of how many it is
//! (`split.no` from 0, `split.count`, `split.tensors.count`); the first has all metadata.

use std::collections::HashMap;
use std::fs::File;
use std::sync::Arc;

use super::gguf::{Gguf, GgufError, Known, TensorInfo};
use crate::tensor::{LazyTensor, MapError, MappedFile};

/// Most parts of a model. Each takes one of the guard's places for mappings.
pub const PARTS_MAX: usize = 256;

/// Headers and mappings of a model's files, the first part first.
#[derive(Debug)]
pub struct ModelFiles {
    first: Part,
    others: Vec<Part>,
    /// Which of `others` has a tensor; tensors of the first part are looked up there.
    elsewhere: HashMap<Box<str>, usize>,
}

#[derive(Debug)]
struct Part {
    gguf: Gguf,
    file: Arc<MappedFile>,
}

/// Why files are not a model's.
#[derive(Debug, thiserror::Error)]
pub enum FilesError {
    /// The only file, or the first part, is damaged.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// Another part is damaged.
    #[error("part {part} of {parts}: {source}")]
    Part {
        /// Which, from 1.
        part: usize,
        /// Of how many.
        parts: usize,
        /// What is wrong with it.
        source: GgufError,
    },
    /// A part without the others.
    #[error(
        "this is part {part} of {parts} of a split model, and only together are they one: they have to lie in one model \
         directory as NAME-{first:05}-of-{parts:05}.gguf and so on, and are then asked for as NAME; to pass a file, join \
         them first (llama-gguf-split --merge)",
        first = 1
    )]
    Alone {
        /// Which, from 1.
        part: u64,
        /// Of how many.
        parts: u64,
    },
    /// A part says another number of itself than its name.
    #[error("part {part} of {parts}: its {key} says {found}, not {want}: the files are not of one model")]
    Number {
        /// Which, from 1, by its name.
        part: usize,
        /// Of how many, by its name.
        parts: usize,
        /// The key.
        key: &'static str,
        /// What it says; nothing where it is missing.
        found: String,
        /// What it should say.
        want: usize,
    },
    /// More or fewer tensors than were in the model when it was cut.
    #[error(
        "the {parts} parts hold {found} tensors together, split.tensors.count says {want}: one of them is of another model"
    )]
    Tensors {
        /// Parts.
        parts: usize,
        /// What there is.
        found: usize,
        /// What should be there.
        want: u64,
    },
    /// Two parts have a tensor of one name.
    #[error(
        "part {part} of {parts} has tensor {tensor:?}, which a part before it has too: one of them is of another model"
    )]
    Twice {
        /// The later, from 1.
        part: usize,
        /// Of how many.
        parts: usize,
        /// The name.
        tensor: String,
    },
}

impl ModelFiles {
    /// Reads and checks the headers of all parts, in order, and maps them; no weight byte is read.
    ///
    /// # Errors
    /// [`FilesError`].
    pub fn open(files: Vec<File>) -> Result<Self, FilesError> {
        Self::open_beside(files, &|_| Vec::new())
    }

    /// As [`ModelFiles::open`], with metadata that other models have: see [`Gguf::open_beside`].
    ///
    /// # Errors
    /// As [`ModelFiles::open`].
    pub fn open_beside(files: Vec<File>, known: Known<'_>) -> Result<Self, FilesError> {
        let parts = files.len();
        let mut files = files.into_iter();
        let first = match files.next() {
            Some(file) => Part::open(file, known)?,
            None => return Err(GgufError::from(MapError::Empty).into()),
        };
        if parts == 1 {
            return Self::single(first);
        }
        first.check_numbers(0, parts)?;
        let (mut others, mut elsewhere) = (Vec::new(), HashMap::new());
        for (number, file) in (1..).zip(files) {
            let other = Part::open(file, &|_| Vec::new()).map_err(|source| FilesError::Part {
                part: number + 1,
                parts,
                source,
            })?;
            other.check_numbers(number, parts)?;
            for tensor in other.gguf.tensors() {
                let name: Box<str> = tensor.name.as_str().into();
                let twice =
                    first.gguf.tensor(&name).is_some() || elsewhere.insert(name, number - 1).is_some();
                if twice {
                    let tensor = tensor.name.clone();
                    return Err(FilesError::Twice { part: number + 1, parts, tensor });
                }
            }
            others.push(other);
        }
        let found = first.gguf.tensors().len() + elsewhere.len();
        match first.gguf.unsigned("split.tensors.count") {
            Some(want) if want != found as u64 => Err(FilesError::Tensors { parts, found, want }),
            _ => Ok(Self { first, others, elsewhere }),
        }
    }

    /// A model that is whole. Files joined again say that they are 1 part, or 0.
    fn single(first: Part) -> Result<Self, FilesError> {
        match first.gguf.unsigned("split.count") {
            Some(parts) if parts > 1 => {
                let part = first.gguf.unsigned("split.no").unwrap_or(0).saturating_add(1);
                Err(FilesError::Alone { part, parts })
            }
            _ => Ok(Self { first, others: Vec::new(), elsewhere: HashMap::new() }),
        }
    }

    fn parts(&self) -> impl Iterator<Item = &Part> {
        std::iter::once(&self.first).chain(&self.others)
    }

    /// The first part's header: the one with the model's metadata.
    pub fn header(&self) -> &Gguf {
        &self.first.gguf
    }

    /// As [`ModelFiles::header`], for holding values that other headers have too.
    pub(super) fn header_mut(&mut self) -> &mut Gguf {
        &mut self.first.gguf
    }

    /// All files, the first part first.
    pub fn mappings(&self) -> impl Iterator<Item = &Arc<MappedFile>> {
        self.parts().map(|part| &part.file)
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.mappings().map(|file| file.len()).fold(0, u64::saturating_add)
    }

    /// Rows of all tensor tables, in order.
    pub fn tensors(&self) -> impl Iterator<Item = &TensorInfo> {
        self.parts().flat_map(|part| part.gguf.tensors())
    }

    /// A lazy handle on a tensor of any part.
    pub fn lazy(&self, name: &str) -> Option<LazyTensor> {
        let part = match self.elsewhere.get(name) {
            Some(&other) => self.others.get(other)?,
            None => &self.first,
        };
        part.gguf.lazy(name, &part.file)
    }

    /// Fails when any file lost bytes since it was mapped. One atomic load a file.
    ///
    /// # Errors
    /// [`MapError::Poisoned`].
    pub fn check_poison(&self) -> Result<(), MapError> {
        self.mappings().try_for_each(|file| file.check_poison())
    }

    /// Fails when any file's content changed since it was mapped. One `fstat` a file.
    ///
    /// # Errors
    /// As [`MappedFile::check_unchanged`].
    pub fn check_unchanged(&self) -> Result<(), MapError> {
        self.mappings().try_for_each(|file| file.check_unchanged())
    }
}

impl Part {
    fn open(file: File, known: Known<'_>) -> Result<Self, GgufError> {
        let (gguf, file) = Gguf::open_beside(file, known)?;
        Ok(Self { gguf, file })
    }

    /// The file has to be part `number`, from 0, of `parts`.
    fn check_numbers(&self, number: usize, parts: usize) -> Result<(), FilesError> {
        for (key, want) in [("split.count", parts), ("split.no", number)] {
            let found = self.gguf.unsigned(key);
            if found != Some(want as u64) {
                let found = found.map_or_else(|| "nothing".to_owned(), |n| n.to_string());
                return Err(FilesError::Number { part: number + 1, parts, key, found, want });
            }
        }
        Ok(())
    }
}
