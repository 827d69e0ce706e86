//! Finding an architecture's tensors: collects what is missing, checks shapes, notices what has no place.

use std::collections::HashSet;
use std::sync::Arc;

use crate::model::gguf::Gguf;
use crate::model::plan::{LazyProjection, MissingTensor, PlanError};
use crate::tensor::{DType, LazyTensor, MappedFile};

/// Shape that a role's tensor has to have.
#[derive(Clone, Copy)]
pub(super) enum Want {
    /// `[len]`, F32.
    Vector(usize),
    /// `rows` outputs of `cols` inputs.
    Matrix { rows: usize, cols: usize },
}

/// Looks tensors up by role. A missing one is remembered, so that all are reported at once by [`Tensors::finish`].
pub(super) struct Tensors<'a> {
    gguf: &'a Gguf,
    file: &'a Arc<MappedFile>,
    used: HashSet<String>,
    missing: Vec<MissingTensor>,
    fault: Option<PlanError>,
}

impl<'a> Tensors<'a> {
    pub fn new(gguf: &'a Gguf, file: &'a Arc<MappedFile>) -> Self {
        Self { gguf, file, used: HashSet::new(), missing: Vec::new(), fault: None }
    }

    /// The tensor of `role` under `name`, where the file has it.
    pub fn optional(&mut self, role: &'static str, name: &str, want: Want) -> Option<LazyTensor> {
        let tensor = self.gguf.lazy(name, self.file)?;
        self.used.insert(name.to_owned());
        if let Err(fault) = check(role, &tensor, want) {
            self.fault.get_or_insert(fault);
        }
        Some(tensor)
    }

    /// The tensor of `role` under `name`; `None` is remembered as missing.
    pub fn required(&mut self, role: &'static str, name: &str, want: Want) -> Option<LazyTensor> {
        let found = self.optional(role, name, want);
        if found.is_none() {
            self.missing.push(MissingTensor { role, tried: vec![name.to_owned()] });
        }
        found
    }

    /// The matrix `STEM.weight`, required, and the bias `STEM.bias` where the file has it.
    pub fn projection(
        &mut self,
        role: &'static str,
        stem: &str,
        rows: usize,
        cols: usize,
    ) -> Option<LazyProjection> {
        let weight = self.required(role, &format!("{stem}.weight"), Want::Matrix { rows, cols });
        let bias = self.optional(role, &format!("{stem}.bias"), Want::Vector(rows));
        Some(LazyProjection { weight: weight?, bias })
    }

    /// What was found wrong: first all that is missing, then the first misshapen, then what has no place.
    pub fn finish(self, architecture: &str) -> Result<(), PlanError> {
        if !self.missing.is_empty() {
            return Err(PlanError::MissingTensors { missing: self.missing });
        }
        if let Some(fault) = self.fault {
            return Err(fault);
        }
        let mut unknown = self.gguf.tensors().iter().filter(|t| !self.used.contains(t.name.as_str()));
        let Some(first) = unknown.next() else { return Ok(()) };
        Err(PlanError::UnknownTensors {
            architecture: architecture.to_owned(),
            count: 1 + unknown.count(),
            first: first.name.clone(),
        })
    }
}

fn check(role: &'static str, tensor: &LazyTensor, want: Want) -> Result<(), PlanError> {
    let (rows, cols, text) = match want {
        Want::Vector(len) => (1, len, format!("[{len}]")),
        Want::Matrix { rows, cols } => (rows, cols, format!("[{cols}, {rows}]")),
    };
    let shape = tensor.shape();
    if (shape.cols(), shape.rows()) != (cols as u64, rows as u64) {
        return Err(PlanError::Shape {
            tensor: tensor.name().to_owned(),
            role,
            shape: shape.to_string(),
            want: text,
        });
    }
    if matches!(want, Want::Vector(_)) && tensor.dtype() != DType::F32 {
        return Err(PlanError::VectorType { tensor: tensor.name().to_owned(), role, dtype: tensor.dtype() });
    }
    Ok(())
}
