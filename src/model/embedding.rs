//! Embeddings of texts: the rows of the last layer, made one. Those of a decoder are normed first.

use std::f64::consts::PI;
use std::sync::Arc;

use super::Model;
use crate::backend::{BackendError, host_values};
use crate::program::{Classifier, Dense, LastRows, Linear, NormKind, Program, RowNorm, Squash, TensorId};
use crate::tensor::DType;

/// How the rows of a text's tokens become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// Their mean.
    Mean,
    /// The row of the first token.
    First,
    /// The row of the last token.
    Last,
}

impl Pooling {
    /// The pooling of a file's `pooling_type`; `None` for 0, which states none, and for those that are not computed.
    pub fn of_file(number: u64) -> Option<Self> {
        match number {
            1 => Some(Self::Mean),
            2 => Some(Self::First),
            3 => Some(Self::Last),
            _ => None,
        }
    }
}

/// Why a model has no embeddings.
#[derive(Clone, Debug, thiserror::Error)]
pub enum EmbeddingError {
    /// The program's head does not begin with a norm of the last layer's rows.
    #[error("the model's head does not begin with a norm, so it has no embeddings: take another model")]
    NoNorm,
    /// The model has no classifier.
    #[error("the model has no classifier, so it ranks no documents: take a reranker")]
    NoClassifier,
    /// A tensor of the classifier cannot be decoded.
    #[error(transparent)]
    Classifier(#[from] BackendError),
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
    /// Numbers of a row.
    width: usize,
    norm: Option<Norm>,
    scorer: Option<Scorer>,
}

/// A classifier with its weights. Of several outputs, the first one's share of their softmax is the score.
#[derive(Clone, Debug, PartialEq)]
struct Scorer {
    hidden: Option<Hidden>,
    output: Layer,
    squash: Option<Squash>,
}

/// The classifier's first layer with its weights.
#[derive(Clone, Debug, PartialEq)]
struct Hidden {
    layer: Layer,
    squash: Squash,
    norm: Option<Norm>,
}

impl Hidden {
    fn read(program: &Program, Dense { linear, squash, norm }: Dense) -> Result<Self, EmbeddingError> {
        let norm = norm.map(|norm| Norm::read(program, norm)).transpose()?;
        Ok(Self { layer: Layer::read(program, linear)?, squash, norm })
    }

    fn apply(&self, row: &[f64]) -> Vec<f64> {
        let squashed: Vec<f64> = self.layer.apply(row).into_iter().map(|x| squash(self.squash, x)).collect();
        let Some(norm) = &self.norm else { return squashed };
        let mut normed = vec![0.0; squashed.len()];
        norm.add(squashed.iter().copied(), &mut normed);
        normed
    }
}

fn squash(by: Squash, x: f64) -> f64 {
    match by {
        Squash::Tanh => x.tanh(),
        Squash::Gelu => 0.5 * x * (1.0 + ((2.0 / PI).sqrt() * (x + 0.044_715 * x.powi(3))).tanh()),
    }
}

/// A matrix of the classifier, row after row, and what is added to its products; none for 0.
#[derive(Clone, Debug, PartialEq)]
struct Layer {
    weight: Vec<f32>,
    bias: Vec<f32>,
}

impl Layer {
    fn read(program: &Program, Linear { weight, bias }: Linear) -> Result<Self, EmbeddingError> {
        let read = |id: TensorId| {
            let tensor = program.tensor(id).ok_or(EmbeddingError::NoClassifier)?;
            Ok::<_, EmbeddingError>(host_values(&tensor.lazy)?)
        };
        Ok(Self { weight: read(weight)?, bias: bias.map_or_else(|| Ok(Vec::new()), read)? })
    }

    fn apply(&self, row: &[f64]) -> Vec<f64> {
        let biases = self.bias.iter().copied().chain(std::iter::repeat(0.0));
        let product = |weights: &[f32]| weights.iter().zip(row).map(|(w, x)| f64::from(*w) * x).sum::<f64>();
        let rows = self.weight.chunks_exact(row.len().max(1)).zip(biases);
        rows.map(|(weights, bias)| product(weights) + f64::from(bias)).collect()
    }
}

impl Scorer {
    fn read(
        program: &Program,
        Classifier { dense, output, squash, .. }: Classifier,
    ) -> Result<Self, EmbeddingError> {
        let hidden = dense.map(|dense| Hidden::read(program, dense)).transpose()?;
        Ok(Self { hidden, output: Layer::read(program, output)?, squash })
    }

    /// The score of a row; a few operations for each weight.
    fn score(&self, row: Vec<f64>) -> Option<f32> {
        let hidden = match &self.hidden {
            Some(hidden) => hidden.apply(&row),
            None => row,
        };
        let mut outputs = self.output.apply(&hidden);
        if let Some(by) = self.squash {
            outputs.iter_mut().for_each(|x| *x = squash(by, *x));
        }
        let first = *outputs.first()?;
        let score = match outputs.len() {
            1 => first,
            _ => 1.0 / outputs.iter().map(|other| (other - first).exp()).sum::<f64>(),
        } as f32;
        score.is_finite().then_some(score)
    }
}

/// A norm with its weights.
#[derive(Clone, Debug, PartialEq)]
struct Norm {
    kind: NormKind,
    eps: f32,
    /// As wide as a row.
    weight: Vec<f32>,
    /// As wide as a row, or empty.
    bias: Vec<f32>,
}

impl Norm {
    fn read(program: &Program, norm: RowNorm) -> Result<Self, EmbeddingError> {
        let read = |id: TensorId| {
            let tensor = &program.tensor(id).ok_or(EmbeddingError::NoNorm)?.lazy;
            if tensor.dtype() != DType::F32 {
                let (tensor, dtype) = (tensor.name().to_owned(), tensor.dtype());
                return Err(EmbeddingError::Type { tensor, dtype });
            }
            let number = |bytes: &[u8]| bytes.try_into().map_or(f32::NAN, f32::from_le_bytes);
            Ok(tensor.bytes().chunks_exact(4).map(number).collect::<Vec<f32>>())
        };
        let RowNorm { kind, eps, weight, bias } = norm;
        let bias = bias.map_or_else(|| Ok(Vec::new()), read)?;
        Ok(Self { kind, eps, weight: read(weight)?, bias })
    }

    /// Adds the norm of a row to the sum.
    fn add(&self, row: impl ExactSizeIterator<Item = f64> + Clone, sum: &mut [f64]) {
        let width = row.len().max(1) as f64;
        let numbers = || row.clone();
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

impl Pooler {
    /// Reads the norm's weights from the mapped file: the caller may wait for its disk.
    ///
    /// # Errors
    /// [`EmbeddingError`].
    pub fn new(model: &Model, pooling: Option<Pooling>, normalise: bool) -> Result<Self, EmbeddingError> {
        let program = &model.plan.program;
        let LastRows { value, norm } = program.last_rows().ok_or(EmbeddingError::NoNorm)?;
        let width = program.values().get(value.0 as usize).map_or(0, |value| value.width as usize);
        let usual = if program.encoder().is_some() { Pooling::Mean } else { Pooling::Last };
        Ok(Self {
            pooling: pooling.or(model.plan.pooling).unwrap_or(usual),
            normalise,
            width,
            norm: norm.map(|norm| Norm::read(program, norm)).transpose()?,
            scorer: None,
        })
    }

    /// As [`Pooler::new`], for the score of a text as its only number.
    ///
    /// # Errors
    /// [`EmbeddingError`].
    pub fn scoring(model: &Model) -> Result<Self, EmbeddingError> {
        let program = &model.plan.program;
        let classifier = program.classifier().ok_or(EmbeddingError::NoClassifier)?;
        let scorer = Scorer::read(program, classifier)?;
        let row = match program.encoder() {
            Some(_) if classifier.of_mean => Pooling::Mean,
            Some(_) => Pooling::First,
            None => Pooling::Last,
        };
        Ok(Self { scorer: Some(scorer), ..Self::new(model, Some(row), false)? })
    }

    /// Numbers of a row, and of the embedding.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Adds a row to the sum, as its norm if there is one.
    fn add(&self, row: &[f32], sum: &mut [f64]) {
        match &self.norm {
            Some(norm) => norm.add(row.iter().copied().map(f64::from), sum),
            None => sum.iter_mut().zip(row).for_each(|(sum, x)| *sum += f64::from(*x)),
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

    /// Adds rows of the last layer, one after the other. Those after the first row count only if all do.
    pub fn add(&mut self, rows: &[f32]) {
        for row in rows.chunks_exact(self.pooler.width().max(1)) {
            if self.pooler.pooling == Pooling::First && self.rows > 0 {
                return;
            }
            self.pooler.add(row, &mut self.sum);
            self.rows = self.rows.saturating_add(1);
        }
    }

    /// The embedding; `None` if it is not finite. A normalised one of zeros stays zeros. The score alone, if that is wanted.
    pub fn embedding(&self) -> Option<Vec<f32>> {
        let mean = self.sum.iter().map(|x| x / f64::from(self.rows.max(1)));
        if let Some(scorer) = &self.pooler.scorer {
            return Some(vec![scorer.score(mean.collect())?]);
        }
        let length = mean.clone().map(|x| x * x).sum::<f64>().sqrt();
        let by = if self.pooler.normalise && length > 0.0 { 1.0 / length } else { 1.0 };
        let embedding: Vec<f32> = mean.map(|x| (x * by) as f32).collect();
        embedding.iter().all(|x| x.is_finite()).then_some(embedding)
    }
}
