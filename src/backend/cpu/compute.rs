//! Parts that all units share: kernels, threads, and the phases built on them.

use std::ops::Range;

use super::Kernels;
use super::activations::ActivationBuffer;
use super::attention::AttentionScratch;
use super::grid::{Block, Grid};
use super::matmul::{MatmulError, MatmulScratch, MatrixView};
use super::pool::Pool;
use super::quant::{self, GroupKind};
use super::row_ops;
use super::scratch::Plane;
use super::simd::Level;
use super::slices::{Cuttable, Slices, Stretch};
use crate::backend::{ActivationType, BackendError, DeviceTensor};
use crate::program::Activation;
use crate::tensor::{DType, LazyTensor};

/// Phases over fewer values run serially: the work (1 us of vector code) is not worth a phase.
pub(super) const SERIAL_VALUES_MAX: usize = 8192;

/// Chunks that a worker's share would be, if all were as narrow as a product's last ones. The slowest worker is late by less than an
/// eighth of its share, unless its first chunk makes it later (see [`wide_cols`]).
const CHUNKS_PER_WORKER: usize = 8;

/// Columns of a block are a multiple of this: whole vectors.
const COLUMNS: usize = 16;

/// Values of a chunk's products, in f32: half of a 512 KiB second-level cache.
const TILE_VALUES_MAX: usize = 64 * 1024;

/// State of one worker thread.
#[derive(Default)]
pub struct Worker {
    /// Sums of attention.
    pub attention: AttentionScratch,
    matmul: MatmulScratch,
    tile: Vec<f32>,
    error: Option<MatmulError>,
}

/// A matrix and its bias: `out = W x + b`.
#[derive(Clone, Copy)]
pub struct Projection<'a> {
    /// Shape `[outputs, inputs]`.
    pub weight: &'a DeviceTensor,
    /// Shape `[outputs]`.
    pub bias: Option<&'a DeviceTensor>,
}

/// A run of activation rows, and the weights that only these rows meet.
pub struct Run<'a, const N: usize> {
    /// The rows; not empty.
    pub rows: Range<usize>,
    /// Weights of these rows.
    pub weights: [MatrixView<'a>; N],
    /// Factors of the products.
    pub factors: [f32; N],
    /// Biases beside the weights, as bytes of f32; empty without.
    pub biases: [&'a [[u8; 4]]; N],
}

/// Kernels and threads of the backend.
pub struct Compute {
    /// Matmul kernels.
    pub kernels: Kernels,
    /// Instruction set of all other code.
    pub level: Level,
    /// Form of the activations that quantised weights meet.
    pub mode: ActivationType,
    /// Worker threads.
    pub pool: Pool,
    /// State of each worker.
    pub workers: Vec<Worker>,
    /// Biases of the current product, as f32.
    pub bias: Vec<f32>,
    /// How units are cut.
    pub slices: Slices,
}

/// How a product is stored.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Store {
    /// Overwrites the old values.
    Replace,
    /// Adds to the old values.
    Add,
}

impl Compute {
    /// Whether a phase over this many values uses the pool.
    pub fn is_parallel(&self, values: usize) -> bool {
        self.pool.threads() > 1 && values > SERIAL_VALUES_MAX
    }

    /// Whether a matrix of `dtype` takes 8-bit activations.
    fn takes_codes(&self, dtype: DType) -> bool {
        self.mode == ActivationType::Int8 && GroupKind::of(dtype).is_some()
    }

    /// Fills `rows` rows of `cols` activations by `fill(row, values)`, in each form that `weights` take. `fine_above`
    /// is passed to [`ActivationRow::quantize`](super::activations::ActivationRow::quantize).
    pub fn activate(
        &mut self,
        acts: &mut ActivationBuffer,
        rows: usize,
        cols: usize,
        weights: &[&DeviceTensor],
        fine_above: f32,
        fill: impl Fn(usize, &mut [f32]) + Sync,
    ) {
        acts.reset(rows, cols);
        let codes = weights.iter().any(|w| self.takes_codes(w.dtype()));
        let kernels = self.kernels;
        if self.is_parallel(rows * cols) {
            let mut rows: Vec<_> = acts.rows_mut().collect();
            self.pool.run_items(&mut rows, |index, row| {
                fill(index, row.values_mut());
                if codes {
                    row.quantize(kernels, fine_above);
                }
            });
        } else {
            for (index, mut row) in acts.rows_mut().enumerate() {
                fill(index, row.values_mut());
                if codes {
                    row.quantize(kernels, fine_above);
                }
            }
        }
    }

    /// `out[m][..] (+)= [W0 x + b0, W1 x + b1, ...]` for each activation row m, the products side by side.
    /// Returns the first column that the stretch left, if any.
    ///
    /// The caller has checked the shapes.
    ///
    /// # Errors
    /// [`BackendError::Internal`] if they do not match.
    pub fn project(
        &mut self,
        parts: &[Projection<'_>],
        acts: &ActivationBuffer,
        store: Store,
        out: &mut Plane,
        stretch: Stretch,
    ) -> Result<Option<usize>, BackendError> {
        let views = parts.iter().map(|p| matrix(p.weight)).collect::<Result<Vec<_>, _>>()?;
        let cols: usize = views.iter().map(MatrixView::rows).sum();
        self.read_biases(parts)?;
        let has_bias = parts.iter().any(|p| p.bias.is_some());
        let acts = acts.view();
        let m = acts.rows();
        let whole = 0..m;
        let grid = Grid {
            stride: out.cols(),
            rows: std::slice::from_ref(&whole),
            cols: 0..cols,
            block_cols: cached_cols(m),
            wide_cols: 0,
        };
        let (kernels, mode, bias) = (self.kernels, self.mode, &self.bias);
        let phase = Phase { pool: &mut self.pool, workers: &mut self.workers, slices: self.slices, stretch };
        let left = phase.run(grid, m * acts.cols(), out.values_mut(), |worker, mut block| {
            let (cols, width) = (block.cols(), block.cols().len());
            grow(&mut worker.tile, m * width);
            let mut first = 0;
            for view in &views {
                let (start, end) = (cols.start.max(first), cols.end.min(first + view.rows()));
                if start < end {
                    let out = &mut worker.tile[start - cols.start..m * width];
                    let rows = start - first..end - first;
                    let done = kernels.matmul_rows(view, rows, &acts, mode, &mut worker.matmul, out, width);
                    worker.error = done.err().or(worker.error.take());
                }
                first += view.rows();
            }
            for (row, product) in worker.tile.chunks_exact_mut(width).take(m).enumerate() {
                if has_bias {
                    product.iter_mut().zip(&bias[cols.clone()]).for_each(|(y, b)| *y += b);
                }
                let out = block.row(row);
                match store {
                    Store::Replace => out.copy_from_slice(product),
                    Store::Add => out.iter_mut().zip(product).for_each(|(y, p)| *y += *p),
                }
            }
        });
        self.check_workers()?;
        Ok(left)
    }

    /// The columns of each head of `out` are the head's matrix times its activations. `weight` has the matrices of all heads
    /// one after the other, and `acts` the rows of the first head, then of the second, ... Returns the first column that the
    /// stretch left, if any.
    ///
    /// # Errors
    /// As [`project`](Self::project).
    pub fn project_heads(
        &mut self,
        weight: &DeviceTensor,
        heads: usize,
        acts: &ActivationBuffer,
        out: &mut Plane,
        stretch: Stretch,
    ) -> Result<Option<usize>, BackendError> {
        let view = matrix(weight)?;
        let (heads, acts) = (heads.max(1), acts.view());
        let (m, of_head) = (acts.rows() / heads, (view.rows() / heads).max(1));
        let whole = 0..m;
        let grid = Grid {
            stride: out.cols(),
            rows: std::slice::from_ref(&whole),
            cols: 0..view.rows(),
            block_cols: cached_cols(m),
            wide_cols: 0,
        };
        let (kernels, mode) = (self.kernels, self.mode);
        let phase = Phase { pool: &mut self.pool, workers: &mut self.workers, slices: self.slices, stretch };
        let left = phase.run(grid, m * acts.cols(), out.values_mut(), |worker, mut block| {
            let cols = block.cols();
            let mut start = cols.start;
            while start < cols.end {
                let head = start / of_head;
                let end = cols.end.min((head + 1) * of_head);
                let (width, acts) = (end - start, acts.rows_from(head * m, m));
                grow(&mut worker.tile, m * width);
                let tile = &mut worker.tile[..m * width];
                let done =
                    kernels.matmul_rows(&view, start..end, &acts, mode, &mut worker.matmul, tile, width);
                worker.error = done.err().or(worker.error.take());
                for (row, product) in tile.chunks_exact(width).enumerate() {
                    block.row(row)[start - cols.start..][..width].copy_from_slice(product);
                }
                start = end;
            }
        });
        self.check_workers()?;
        Ok(left)
    }

    /// `out[m][i] = activation(gate x + bias) * (up x + bias)` for each activation row m; `parts` are gate and up.
    /// Returns the first column that the stretch left, if any.
    ///
    /// # Errors
    /// As [`project`](Self::project).
    pub fn project_gated(
        &mut self,
        parts: [Projection<'_>; 2],
        activation: Activation,
        acts: &ActivationBuffer,
        out: &mut Plane,
        stretch: Stretch,
    ) -> Result<Option<usize>, BackendError> {
        let views = [matrix(parts[0].weight)?, matrix(parts[1].weight)?];
        let cols = views[0].rows();
        self.read_biases(&parts)?;
        let has_bias = parts.iter().any(|p| p.bias.is_some());
        let acts = acts.view();
        let m = acts.rows();
        let whole = 0..m;
        let grid = Grid {
            stride: out.cols(),
            rows: std::slice::from_ref(&whole),
            cols: 0..cols,
            block_cols: cached_cols(2 * m),
            wide_cols: 0,
        };
        let (kernels, level, mode, bias) = (self.kernels, self.level, self.mode, &self.bias);
        let phase = Phase { pool: &mut self.pool, workers: &mut self.workers, slices: self.slices, stretch };
        let left = phase.run(grid, 2 * m * acts.cols(), out.values_mut(), |worker, mut block| {
            let (cols, width) = (block.cols(), block.cols().len());
            grow(&mut worker.tile, 2 * m * width);
            let (gates, ups) = worker.tile[..2 * m * width].split_at_mut(m * width);
            for (view, out) in views.iter().zip([&mut *gates, &mut *ups]) {
                let done =
                    kernels.matmul_rows(view, cols.clone(), &acts, mode, &mut worker.matmul, out, width);
                worker.error = done.err().or(worker.error.take());
            }
            let rows = gates.chunks_exact_mut(width).zip(ups.chunks_exact_mut(width));
            for (row, (gate, up)) in rows.enumerate() {
                if has_bias {
                    let (gate_bias, up_bias) = bias.split_at(views[0].rows());
                    gate.iter_mut().zip(&gate_bias[cols.clone()]).for_each(|(y, b)| *y += b);
                    up.iter_mut().zip(&up_bias[cols.clone()]).for_each(|(y, b)| *y += b);
                }
                row_ops::activate(level, activation, gate, up, block.row(row));
            }
        });
        self.check_workers()?;
        Ok(left)
    }

    /// Reads the biases of `parts` side by side, with zeros for a part that has none. Does nothing if no part has
    /// one.
    fn read_biases(&mut self, parts: &[Projection<'_>]) -> Result<(), BackendError> {
        if parts.iter().all(|p| p.bias.is_none()) {
            return Ok(());
        }
        self.bias.clear();
        for part in parts {
            let end = self.bias.len() + part.weight.rows();
            if let Some(bias) = part.bias {
                append_values(&bias.tensor, &mut self.bias)?;
            }
            self.bias.resize(end, 0.0);
        }
        Ok(())
    }

    /// Multiplies runs of activation rows with their own weights, all runs in one phase. Row m of `runs[i].rows` meets the
    /// weights of `runs[i]`; `finish(run, products, row)` then computes row m of `out` from the products. All weights
    /// at one index of `weights` have `cols` rows. Returns the first column that the stretch left, if any.
    ///
    /// # Errors
    /// As [`project`](Self::project).
    pub fn project_runs<const N: usize>(
        &mut self,
        runs: &[Run<'_, N>],
        acts: &ActivationBuffer,
        cols: usize,
        out: &mut Plane,
        stretch: Stretch,
        finish: impl Fn([&mut [f32]; N], &mut [f32]) + Sync,
    ) -> Result<Option<usize>, BackendError> {
        let rows: Vec<_> = runs.iter().map(|run| run.rows.clone()).collect();
        let most = rows.iter().map(ExactSizeIterator::len).max().unwrap_or(0);
        let block_cols = cached_cols(N * most);
        let grid = Grid { stride: out.cols(), rows: &rows, cols: 0..cols, block_cols, wide_cols: 0 };
        let (kernels, mode, acts) = (self.kernels, self.mode, acts.view());
        let phase = Phase { pool: &mut self.pool, workers: &mut self.workers, slices: self.slices, stretch };
        let left = phase.run(grid, N * acts.rows() * acts.cols(), out.values_mut(), |worker, mut block| {
            let (cols, width, rows) = (block.cols(), block.cols().len(), block.rows());
            let run = runs.partition_point(|run| run.rows.end <= rows.start);
            let Some(run) = runs.get(run) else { return };
            let size = rows.len() * width;
            grow(&mut worker.tile, N * size);
            let acts = acts.rows_from(rows.start, rows.len());
            for (weight, out) in run.weights.iter().zip(worker.tile.chunks_exact_mut(size)) {
                let done =
                    kernels.matmul_rows(weight, cols.clone(), &acts, mode, &mut worker.matmul, out, width);
                worker.error = done.err().or(worker.error.take());
            }
            for (&factor, out) in run.factors.iter().zip(worker.tile.chunks_exact_mut(size)) {
                if factor != 1.0 {
                    out.iter_mut().for_each(|y| *y *= factor);
                }
            }
            for (bias, out) in run.biases.iter().zip(worker.tile.chunks_exact_mut(size)) {
                if let Some(bias) = bias.get(cols.clone()) {
                    let add = |(y, b): (&mut f32, &[u8; 4])| *y += f32::from_le_bytes(*b);
                    out.chunks_exact_mut(width).for_each(|row| row.iter_mut().zip(bias).for_each(add));
                }
            }
            for (index, row) in rows.enumerate() {
                let mut products = worker.tile.chunks_exact_mut(size);
                let products =
                    [(); N].map(|()| &mut products.next().unwrap_or_default()[index * width..][..width]);
                finish(products, block.row(row));
            }
        });
        self.check_workers()?;
        Ok(left)
    }

    /// Returns the first error of a product and clears all of them, so that none fails the next product.
    fn check_workers(&mut self) -> Result<(), BackendError> {
        match self.workers.iter_mut().fold(None, |first, worker| first.or(worker.error.take())) {
            None => Ok(()),
            Some(error) => Err(BackendError::Internal(error.to_string())),
        }
    }
}

/// Threads that compute a stretch of a product.
struct Phase<'a> {
    pool: &'a mut Pool,
    workers: &'a mut [Worker],
    slices: Slices,
    stretch: Stretch,
}

impl Phase<'_> {
    /// Calls `work` for each block of the stretch's columns. `grid` has all columns, and the most columns of a block. The
    /// blocks of a slice are narrower if there would be too few to share evenly. A column takes `work_of_column`
    /// multiplications.
    fn run(
        self,
        grid: Grid<'_>,
        work_of_column: usize,
        out: &mut [f32],
        work: impl Fn(&mut Worker, Block<'_>) + Sync,
    ) -> Option<usize> {
        let Self { pool, workers, slices, stretch } = self;
        let chunks = (pool.threads() * CHUNKS_PER_WORKER).div_ceil(grid.rows.len().max(1));
        let columns = Cuttable { count: grid.cols.end, multiple: COLUMNS, work: work_of_column };
        slices.run(stretch, columns, |cols| {
            let block_cols = cols.len().div_ceil(chunks).min(grid.block_cols).next_multiple_of(COLUMNS);
            // Runs of rows beside each other are shared evenly without wide blocks.
            let wide_cols =
                if grid.rows.len() == 1 { wide_cols(cols.len(), pool.threads(), grid.block_cols) } else { 0 };
            Grid { cols, block_cols, wide_cols, ..grid }.run(pool, workers, out, &work);
        })
    }
}

/// Columns of the first blocks, one for each worker: five eighths of its share, and not more than `most`. Where a block begins,
/// nothing has asked for its weights, and where it ends, nothing asks for more. With eight equal blocks each, a 1B model decodes 4 %
/// more slowly. A worker of less than five eighths of the mean speed is late with its block, which no other can take.
fn wide_cols(cols: usize, workers: usize, most: usize) -> usize {
    (cols * 5 / 8 / workers.max(1)).min(most) / COLUMNS * COLUMNS
}

/// Most columns per block of a product with `m` rows, so that the tile stays in cache. Results do not depend on it.
fn cached_cols(m: usize) -> usize {
    (TILE_VALUES_MAX / m.max(1)).max(COLUMNS)
}

/// Makes `tile` at least `len` long; contents are unspecified.
fn grow(tile: &mut Vec<f32>, len: usize) {
    if tile.len() < len {
        tile.resize(len, 0.0);
    }
}

/// A tensor's bytes as a matrix.
pub fn matrix(tensor: &DeviceTensor) -> Result<MatrixView<'_>, BackendError> {
    let bytes = tensor.tensor.bytes();
    MatrixView::new(tensor.dtype(), tensor.rows(), tensor.cols(), bytes)
        .map_err(|error| BackendError::Internal(error.to_string()))
}

/// Appends all values of a small tensor as f32.
///
/// # Errors
/// [`BackendError::Internal`] for an unsupported type, which `load_tensor` refuses.
pub fn append_values(tensor: &LazyTensor, out: &mut Vec<f32>) -> Result<(), BackendError> {
    let bytes = tensor.bytes();
    if tensor.dtype() == DType::F32 {
        // The usual case; it compiles to a copy.
        out.extend(bytes.as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b)));
        return Ok(());
    }
    let start = out.len();
    out.resize(start + tensor.shape().elements() as usize, 0.0);
    quant::dequantize_row(tensor.dtype(), bytes, &mut out[start..])
        .map_err(|error| BackendError::Internal(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::super::{CpuBackend, CpuOptions};
    use super::*;

    #[test]
    fn errors_of_one_product_are_not_those_of_the_next() {
        let mut compute = CpuBackend::with_exact_threads(CpuOptions::default(), 3).unwrap().compute;
        compute.check_workers().unwrap();
        for (worker, dtype) in compute.workers.iter_mut().zip([DType::F16, DType::F32, DType::Q4_0]) {
            worker.error = Some(MatmulError::Unsupported(dtype));
        }
        let error = compute.check_workers().unwrap_err().to_string();
        assert!(error.contains("F16"), "the first: {error}");
        compute.check_workers().unwrap();
    }
}
