//! Embeddings of texts: the normed rows of the last layer, made one.

use std::sync::Arc;

use super::Model;
use crate::program::{LastRows, NormKind, TensorId};
use crate::tensor::DType;

/// How the rows of a text's tokens become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// Their mean.
    Mean,
    /// The row of the last token.
    Last,
}

impl Pooling {
    /// The pooling of a file's `pooling_type`; `None` for 0, which states none, and for those that are not computed.
    pub fn of_file(number: u64) -> Option<Self> {
        match number {
            1 => Some(Self::Mean),
            3 => Some(Self::Last),
            _ => None,
        }
    }
}

/// Why a model has no embeddings.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EmbeddingError {
    /// The program's head does not begin with a norm of the last layer's rows.
    #[error("the model's head does not begin with a norm, so it has no embeddings: take another model")]
    NoNorm,
    /// The norm has weights of another type.
    #[error("{tensor} has type {dtype}, and embeddings need it in F32: convert the model's file")]
    Type {
        /// The tensor.
        tensor: String,
        /// Its type.
        dtype: DType,
    },
}

/// Turns rows of the last layer into an embedding. Costs a few operations per number of a row.
#[derive(Clone, Debug, PartialEq)]
pub struct Pooler {
    /// How rows become one.
    pub pooling: Pooling,
    /// Whether the result has the Euclidean length 1.
    pub normalise: bool,
    kind: NormKind,
    eps: f32,
    /// As wide as a row.
    weight: Vec<f32>,
    /// As wide as a row, or empty.
    bias: Vec<f32>,
}

impl Pooler {
    /// Reads the norm's weights from the mapped file: the caller may wait for its disk.
    ///
    /// # Errors
    /// [`EmbeddingError`].
    pub fn new(model: &Model, pooling: Option<Pooling>, normalise: bool) -> Result<Self, EmbeddingError> {
        let program = &model.plan.program;
        let LastRows { kind, eps, weight, bias, .. } = program.last_rows().ok_or(EmbeddingError::NoNorm)?;
        let read = |id: TensorId| {
            let tensor = &program.tensor(id).ok_or(EmbeddingError::NoNorm)?.lazy;
            if tensor.dtype() != DType::F32 {
                let (tensor, dtype) = (tensor.name().to_owned(), tensor.dtype());
                return Err(EmbeddingError::Type { tensor, dtype });
            }
            let number = |bytes: &[u8]| bytes.try_into().map_or(f32::NAN, f32::from_le_bytes);
            Ok(tensor.bytes().chunks_exact(4).map(number).collect::<Vec<f32>>())
        };
        Ok(Self {
            pooling: pooling.or(model.plan.pooling).unwrap_or(Pooling::Last),
            normalise,
            kind,
            eps,
            weight: read(weight)?,
            bias: bias.map_or_else(|| Ok(Vec::new()), read)?,
        })
    }

    /// Numbers of a row, and of the embedding.
    pub fn width(&self) -> usize {
        self.weight.len()
    }

    /// Adds the norm of a row to the sum.
    fn add(&self, row: &[f32], sum: &mut [f64]) {
        let width = row.len().max(1) as f64;
        let numbers = || row.iter().copied().map(f64::from);
        let centre = if self.kind == NormKind::Layer { numbers().sum::<f64>() / width } else { 0.0 };
        let squares: f64 = numbers().map(|x| (x - centre).powi(2)).sum();
        let scale = 1.0 / (squares / width + f64::from(self.eps)).sqrt();
        for ((sum, x), weight) in sum.iter_mut().zip(numbers()).zip(&self.weight) {
            *sum += (x - centre) * scale * f64::from(*weight);
        }
        for (sum, bias) in sum.iter_mut().zip(&self.bias) {
            *sum += f64::from(*bias);
        }
    }
}

/// The rows of a text so far.
#[derive(Clone, Debug)]
pub struct Pooled {
    pooler: Arc<Pooler>,
    sum: Vec<f64>,
    rows: u32,
}

impl Pooled {
    /// No row yet.
    pub fn new(pooler: Arc<Pooler>) -> Self {
        Self { sum: vec![0.0; pooler.width()], rows: 0, pooler }
    }

    /// Adds rows of the last layer, one after the other.
    pub fn add(&mut self, rows: &[f32]) {
        for row in rows.chunks_exact(self.pooler.width().max(1)) {
            self.pooler.add(row, &mut self.sum);
            self.rows = self.rows.saturating_add(1);
        }
    }

    /// The embedding; `None` if it is not finite. A normalised one of zeros stays zeros.
    pub fn embedding(&self) -> Option<Vec<f32>> {
        let mean = self.sum.iter().map(|x| x / f64::from(self.rows.max(1)));
        let length = mean.clone().map(|x| x * x).sum::<f64>().sqrt();
        let by = if self.pooler.normalise && length > 0.0 { 1.0 / length } else { 1.0 };
        let embedding: Vec<f32> = mean.map(|x| (x * by) as f32).collect();
        embedding.iter().all(|x| x.is_finite()).then_some(embedding)
    }
}
