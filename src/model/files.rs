//! A model's files: a single file, or the parts of a split model.
//!
//! `gguf-split` cuts a model between tensors. Each part is a GGUF file that states its number and the number of parts
//! (`split.no` from 0, `split.count`, `split.tensors.count`). The first part has all metadata.

use std::collections::HashMap;
use std::fs::File;
use std::sync::Arc;

use super::gguf::{Gguf, GgufError, Known, TensorInfo};
use crate::share::Charge;
use crate::tensor::{LazyTensor, MapError, MappedFile};

/// Most parts of a model. Each part takes one slot of the SIGBUS guard's table.
pub const PARTS_MAX: usize = 256;

/// Headers and mappings of a model's files, the first part first.
#[derive(Debug)]
pub struct ModelFiles {
    first: Shard,
    others: Vec<Shard>,
    /// Index in `others` of the part that holds a tensor. Tensors of the first part are looked up in `first`.
    elsewhere: HashMap<Box<str>, usize>,
    /// For a passed model.
    charge: Option<PassedCharge>,
}

/// A passed model's part of its user's shares; given back when the mapping goes.
#[derive(Debug)]
pub struct PassedCharge {
    /// Heap bytes for its header.
    pub header: Charge,
    /// Bytes of address space. A file may be far larger than what it has on disk.
    pub mapped: Charge,
    /// Descriptors that stay open.
    pub descriptors: Charge,
}

#[derive(Debug)]
struct Shard {
    gguf: Gguf,
    file: Arc<MappedFile>,
}

/// Why files do not form a model.
#[derive(Debug, thiserror::Error)]
pub enum FilesError {
    /// The only file, or the first part, is damaged.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// Another part is damaged.
    #[error("part {part} of {parts}: {source}")]
    Part {
        /// Number of the part, from 1.
        part: usize,
        /// Number of parts.
        parts: usize,
        /// The part's error.
        source: GgufError,
    },
    /// A single part was passed or opened without the others.
    #[error(
        "this is part {part} of {parts} of a split model and cannot be used alone: put all parts in one model \
         directory as NAME-{first:05}-of-{parts:05}.gguf and so on, then request NAME; to pass a file, join \
         the parts first (llama-gguf-split --merge)",
        first = 1
    )]
    Alone {
        /// Number of the part, from 1.
        part: u64,
        /// Number of parts.
        parts: u64,
    },
    /// A part's header disagrees with its file name.
    #[error("part {part} of {parts}: its {key} is {found}, not {want}: the files do not belong to one model")]
    Number {
        /// Number of the part, from 1, by its file name.
        part: usize,
        /// Number of parts, by its file name.
        parts: usize,
        /// Metadata key.
        key: &'static str,
        /// Value in the file; "nothing" when the key is missing.
        found: String,
        /// Value that the file name requires.
        want: usize,
    },
    /// The number of tensors differs from that of the original model.
    #[error(
        "the {parts} parts hold {found} tensors, but split.tensors.count is {want}: a part belongs to another model"
    )]
    Tensors {
        /// Number of parts.
        parts: usize,
        /// Tensors in all parts.
        found: usize,
        /// Value of `split.tensors.count`.
        want: u64,
    },
    /// Two parts have a tensor of the same name.
    #[error(
        "part {part} of {parts} repeats tensor {tensor:?} of an earlier part: one of them belongs to another model"
    )]
    Twice {
        /// Number of the later part, from 1.
        part: usize,
        /// Number of parts.
        parts: usize,
        /// Name of the tensor.
        tensor: String,
    },
}

impl ModelFiles {
    /// Reads and checks the headers of all parts, in order, and maps them. Reads no weight byte.
    ///
    /// # Errors
    /// [`FilesError`].
    pub fn open(files: Vec<File>) -> Result<Self, FilesError> {
        Self::open_beside(files, &|_| Vec::new(), None)
    }

    /// As [`ModelFiles::open`], and shares metadata with other models: see [`Gguf::open_charged`]. That of the header is for
    /// the first file: only single files are passed.
    ///
    /// # Errors
    /// As [`ModelFiles::open`].
    pub fn open_beside(
        files: Vec<File>,
        known: Known<'_>,
        charge: Option<PassedCharge>,
    ) -> Result<Self, FilesError> {
        let (header, rest) = match charge {
            Some(PassedCharge { header, mapped, descriptors }) => (Some(header), Some((mapped, descriptors))),
            None => (None, None),
        };
        let parts = files.len();
        let mut files = files.into_iter();
        let (first, header) = match files.next() {
            Some(file) => Shard::open(file, known, header)?,
            None => return Err(GgufError::from(MapError::Empty).into()),
        };
        let both = header.zip(rest);
        let charge = both.map(|(header, (mapped, descriptors))| PassedCharge { header, mapped, descriptors });
        if parts == 1 {
            return Self::single(first, charge);
        }
        first.check_numbers(0, parts)?;
        let (mut others, mut elsewhere) = (Vec::new(), HashMap::new());
        for (number, file) in (1..).zip(files) {
            let opened = Shard::open(file, &|_| Vec::new(), None);
            let (other, _) = opened.map_err(|source| FilesError::Part { part: number + 1, parts, source })?;
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
            _ => Ok(Self { first, others, elsewhere, charge }),
        }
    }

    /// A model of one file. A joined file may state 1 part or 0.
    fn single(first: Shard, charge: Option<PassedCharge>) -> Result<Self, FilesError> {
        match first.gguf.unsigned("split.count") {
            Some(parts) if parts > 1 => {
                let part = first.gguf.unsigned("split.no").unwrap_or(0).saturating_add(1);
                Err(FilesError::Alone { part, parts })
            }
            _ => Ok(Self { first, others: Vec::new(), elsewhere: HashMap::new(), charge }),
        }
    }

    /// A charge of nothing yet to the share that pays for a passed model's header. It may grow by what is made of the header later.
    /// `None` for a model of a directory, which belongs to nobody.
    pub fn room(&self) -> Option<Charge> {
        self.charge.as_ref().and_then(|charge| charge.header.another(0).ok()) // nothing is never refused
    }

    fn parts(&self) -> impl Iterator<Item = &Shard> {
        std::iter::once(&self.first).chain(&self.others)
    }

    /// The first part's header, which holds the model's metadata.
    pub fn header(&self) -> &Gguf {
        &self.first.gguf
    }

    /// As [`ModelFiles::header`], to replace values by those that other headers share.
    pub(super) fn header_mut(&mut self) -> &mut Gguf {
        &mut self.first.gguf
    }

    /// All files, the first part first.
    pub fn mappings(&self) -> impl Iterator<Item = &Arc<MappedFile>> {
        self.parts().map(|part| &part.file)
    }

    /// Total size of all files in bytes.
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

    /// Fails when any file lost bytes since it was mapped. Costs one atomic load per file.
    ///
    /// # Errors
    /// [`MapError::Poisoned`].
    pub fn check_poison(&self) -> Result<(), MapError> {
        self.mappings().try_for_each(|file| file.check_poison())
    }

    /// Fails when any file's content changed since it was mapped. Costs one `fstat` per file.
    ///
    /// # Errors
    /// As [`MappedFile::check_unchanged`].
    pub fn check_unchanged(&self) -> Result<(), MapError> {
        self.mappings().try_for_each(|file| file.check_unchanged())
    }

    /// Fails when any file's content may have changed since it was mapped, whatever its modification time says.
    ///
    /// # Errors
    /// As [`MappedFile::check_untouched`].
    pub fn check_untouched(&self) -> Result<(), MapError> {
        self.mappings().try_for_each(|file| file.check_untouched())
    }

    /// True if all files are whole, and all that a look at each one tells is as it was. Costs one `fstat` per file, and waits
    /// for nothing: mapped files are local, or copies in memory. A changed link count or permission makes it false too.
    pub fn are_as_mapped(&self) -> bool {
        self.mappings().all(|file| file.is_as_mapped())
    }
}

impl Shard {
    fn open(
        file: File,
        known: Known<'_>,
        charge: Option<Charge>,
    ) -> Result<(Self, Option<Charge>), GgufError> {
        let (gguf, file, charge) = Gguf::open_charged(file, known, charge)?;
        Ok((Self { gguf, file }, charge))
    }

    /// Checks that the file is part `number`, from 0, of `parts`.
    fn check_numbers(&self, number: usize, parts: usize) -> Result<(), FilesError> {
        for (key, want) in [("split.count", parts), ("split.no", number)] {
            let found = self.gguf.unsigned(key);
            if found != Some(want as u64) {
                let found = found.map_or_else(|| "missing".to_owned(), |n| n.to_string());
                return Err(FilesError::Number { part: number + 1, parts, key, found, want });
            }
        }
        Ok(())
    }
}
