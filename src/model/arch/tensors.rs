//! Finds an architecture's tensors: collects missing ones, checks shapes, and reports unknown tensors.

use std::collections::HashSet;

use super::writer::Presence;
use crate::model::files::ModelFiles;
use crate::model::plan::{MissingTensor, PlanError};
use crate::tensor::{DType, LazyTensor};

/// Required shape of a role's tensor.
#[derive(Clone, Copy)]
pub(super) enum Want {
    /// `[len]`, F32.
    Vector(usize),
    /// `count` vectors of `len`, one after the other, F32.
    Vectors { count: usize, len: usize },
    /// `rows` outputs of `cols` inputs.
    Matrix { rows: usize, cols: usize },
    /// `count` matrices, one after the other.
    Matrices { count: usize, rows: usize, cols: usize },
}

/// Looks up tensors by role. Records missing tensors, so that [`Tensors::finish`] reports them all at once.
pub(super) struct Tensors<'a> {
    files: &'a ModelFiles,
    used: HashSet<String>,
    unused_prefixes: Vec<String>,
    missing: Vec<MissingTensor>,
    fault: Option<PlanError>,
}

impl<'a> Tensors<'a> {
    pub fn new(files: &'a ModelFiles) -> Self {
        Self { files, used: HashSet::new(), unused_prefixes: Vec::new(), missing: Vec::new(), fault: None }
    }

    /// True when any file has the tensor.
    pub fn has(&self, name: &str) -> bool {
        self.files.lazy(name).is_some()
    }

    /// Rows of the tensor, if any file has it.
    pub fn rows(&self, name: &str) -> Option<u64> {
        self.files.lazy(name).map(|tensor| tensor.shape().rows())
    }

    /// Allows a tensor that is never read.
    pub fn unused(&mut self, name: &str) {
        self.used.insert(name.to_owned());
    }

    /// Allows tensors with this name prefix that are never read.
    pub fn unused_prefix(&mut self, prefix: &str) {
        self.unused_prefixes.push(prefix.to_owned());
    }

    /// The tensor of `role` under `name`, if the file has it.
    pub fn optional(&mut self, role: &'static str, name: &str, want: Want) -> Option<LazyTensor> {
        let tensor = self.files.lazy(name)?;
        self.used.insert(name.to_owned());
        if let Err(fault) = check(role, &tensor, want) {
            self.fault.get_or_insert(fault);
        }
        Some(tensor)
    }

    /// The tensor of `role` under `name`. A missing tensor gives `None` and is recorded.
    pub fn required(&mut self, role: &'static str, name: &str, want: Want) -> Option<LazyTensor> {
        let found = self.optional(role, name, want);
        if found.is_none() {
            self.missing.push(MissingTensor { role, tried: vec![name.to_owned()] });
        }
        found
    }

    /// The tensor of `role`, as `presence` demands.
    pub fn present(
        &mut self,
        role: &'static str,
        name: &str,
        want: Want,
        presence: Presence,
    ) -> Option<LazyTensor> {
        match presence {
            Presence::Never => None,
            Presence::Optional => self.optional(role, name, want),
            Presence::Required => self.required(role, name, want),
        }
    }

    /// Reports the first kind of fault: all missing tensors, then the first misshapen one, then unknown ones.
    pub fn finish(self, architecture: &str) -> Result<(), PlanError> {
        if !self.missing.is_empty() {
            return Err(PlanError::MissingTensors { missing: self.missing });
        }
        if let Some(fault) = self.fault {
            return Err(fault);
        }
        let known = |name: &str| {
            self.used.contains(name) || self.unused_prefixes.iter().any(|prefix| name.starts_with(prefix))
        };
        let mut unknown = self.files.tensors().filter(|t| !known(&t.name));
        let Some(first) = unknown.next() else { return Ok(()) };
        Err(PlanError::UnknownTensors {
            architecture: architecture.to_owned(),
            count: 1 + unknown.count(),
            first: first.name.clone(),
        })
    }
}

impl Want {
    /// Dimensions in file order, fastest first.
    fn dims(self) -> Vec<u64> {
        match self {
            Self::Vector(len) => vec![len as u64],
            Self::Vectors { count, len } => vec![len as u64, count as u64],
            Self::Matrix { rows, cols } => vec![cols as u64, rows as u64],
            Self::Matrices { count, rows, cols } => vec![cols as u64, rows as u64, count as u64],
        }
    }
}

fn check(role: &'static str, tensor: &LazyTensor, want: Want) -> Result<(), PlanError> {
    let (found, wanted) = (tensor.shape(), want.dims());
    // A file may omit trailing dimensions of 1 or write them out.
    let plain = |dims: &[u64]| dims.iter().rposition(|&d| d != 1).map_or(0, |last| last + 1);
    if found.dims()[..plain(found.dims())] != wanted[..plain(&wanted)] {
        let texts: Vec<String> = wanted.iter().map(u64::to_string).collect();
        return Err(PlanError::Shape {
            tensor: tensor.name().to_owned(),
            role,
            shape: found.to_string(),
            want: format!("[{}]", texts.join(", ")),
        });
    }
    if matches!(want, Want::Vector(_) | Want::Vectors { .. }) && tensor.dtype() != DType::F32 {
        return Err(PlanError::VectorType { tensor: tensor.name().to_owned(), role, dtype: tensor.dtype() });
    }
    Ok(())
}
