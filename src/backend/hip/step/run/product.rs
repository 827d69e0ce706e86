//! Matrix products: choice of the kernel and of the matrices per launch.

use super::forms::A8;
use super::{Matrix, Run, Weights, no_kernel};
use crate::backend::BackendError;
use crate::backend::hip::kernels::MatrixUnit;
use crate::backend::hip::kernels::matmul::{
    Dequant, GemmCluster, GemmF16, GemmQuant, GemmWide, GemvA8, GemvF32, choice,
};
use crate::backend::hip::kernels::thresholds::{Family, Order, WIDE_ROWS};
use crate::backend::hip::step::bind::{Home, Products};
use crate::backend::hip::step::scratch::SLAB_BYTES;
use crate::backend::hip::{DevicePtr, Grid};
use crate::tensor::DType;

/// Most matrices per launch.
const TOGETHER: usize = 3;

/// Up to [`TOGETHER`] matrices of one type and width, times the same rows. The third may be of another type.
struct Task<'a> {
    group: &'a [Matrix],
    dtype: DType,
    last: DType,
    cols: u32,
    input: &'a Home,
    rows: u32,
    out: DevicePtr<f32>,
    out_stride: u32,
    add: u32,
}

/// True if a launch of one type takes both.
fn alike(a: &Matrix, b: &Matrix) -> bool {
    (a.dtype, a.cols) == (b.dtype, b.cols)
}

impl Task<'_> {
    /// Address, outputs and bias of each matrix; null and 0 where there is none.
    fn matrices(&self) -> ([DevicePtr<u8>; TOGETHER], [u32; TOGETHER], [DevicePtr<f32>; TOGETHER]) {
        let of = |index: usize| self.group.get(index);
        let numbers = [0, 1, 2];
        (
            numbers.map(|i| of(i).map_or(DevicePtr::NULL, |matrix| matrix.at)),
            numbers.map(|i| of(i).map_or(0, |matrix| matrix.rows)),
            numbers.map(|i| of(i).map_or(DevicePtr::NULL, |matrix| matrix.bias)),
        )
    }
}

impl Run<'_> {
    pub(super) fn side_by_side(
        &self,
        unit: &Products,
        rows: u32,
        weights: &Weights<'_>,
    ) -> Result<(), BackendError> {
        let matrices: Vec<Matrix> = unit.matrices.iter().map(|product| weights.matrix(product)).collect();
        self.products(&matrices, &unit.from, rows, self.at(unit.out), unit.out.stride, unit.add)
    }

    /// Computes `out[row] = [W0 x, W1 x, ...]`, or adds it to `out`, for matrices that share an input. Up to three
    /// neighbours of one type share a launch, and where a kernel takes it, a third one of another type.
    pub(super) fn products(
        &self,
        matrices: &[Matrix],
        input: &Home,
        rows: u32,
        out: DevicePtr<f32>,
        out_stride: u32,
        add: bool,
    ) -> Result<(), BackendError> {
        if self.are_two_types(matrices, rows) {
            return self.group(matrices, input, rows, out, out_stride, add);
        }
        let mut column = 0;
        for group in matrices.chunk_by(alike).flat_map(|run| run.chunks(TOGETHER)) {
            self.group(group, input, rows, out.offset(column), out_stride, add)?;
            column += group.iter().map(|matrix| matrix.rows as usize).sum::<usize>();
        }
        Ok(())
    }

    /// True for two matrices of one type and a third one of another that a kernel takes together. On a matrix unit it takes few
    /// rows alone, and splits the sums of three matrices otherwise than those of two.
    fn are_two_types(&self, matrices: &[Matrix], rows: u32) -> bool {
        let [first, second, last] = matrices else { return false };
        let family = |matrix: &Matrix| self.bound.modes.family(matrix.dtype, rows, matrix.cols);
        let unit = match family(first) {
            Family::GemmWide => MatrixUnit::AcrossWaves,
            Family::GemmQuant => MatrixUnit::OfWave,
            Family::GemvA8 => MatrixUnit::None,
            Family::GemvF32 | Family::Expanded => return false,
        };
        // Without a matrix unit sums are not split.
        let keeps_order = unit == MatrixUnit::None || self.bound.modes.order == Order::ByRows;
        keeps_order
            && alike(first, second)
            && first.cols == last.cols
            && family(first) == family(last)
            && rows <= choice::two_types_rows_max(unit, first.dtype, last.dtype)
    }

    /// Products that share an input, of one type, in one launch where a kernel takes them all.
    fn group(
        &self,
        group: &[Matrix],
        input: &Home,
        rows: u32,
        out: DevicePtr<f32>,
        out_stride: u32,
        add: bool,
    ) -> Result<(), BackendError> {
        let Some(first) = group.first() else { return Ok(()) };
        let task = Task {
            group,
            dtype: first.dtype,
            last: group.get(TOGETHER - 1).unwrap_or(first).dtype,
            cols: first.cols,
            input,
            rows,
            out,
            out_stride,
            add: u32::from(add),
        };
        match self.bound.modes.family(first.dtype, rows, first.cols) {
            Family::GemvA8 => self.gemv_a8(&task),
            Family::GemvF32 => self.gemv_f32(&task),
            Family::GemmWide => self.gemm_wide(&task),
            Family::GemmQuant => self.gemm_quant(&task),
            Family::Expanded => {
                let mut column = 0;
                for matrix in group {
                    let out = out.offset(column);
                    self.expand_and_multiply(*matrix, input, rows, out, out_stride, task.add)?;
                    column += matrix.rows as usize;
                }
                Ok(())
            }
        }
    }

    fn gemm_wide(&self, task: &Task<'_>) -> Result<(), BackendError> {
        let &Task { dtype, last, cols, rows, out, out_stride, add, .. } = task;
        let chosen = choice::gemm_wide(dtype, last, rows).ok_or_else(|| no_kernel("gemm", dtype))?;
        let ([w0, w1, w2], outputs, [bias0, bias1, bias2]) = task.matrices();
        let ([n0, n1, n2], (x, x_scale)) = (outputs, self.halves(task.input));
        let grid = choice::gemm_wide_grid(outputs, cols, rows, chosen.columns, self.bound.modes.order);
        if let Some(cluster) = choice::gemm_cluster(self.bound.modes.unit, &chosen, &grid) {
            let units = self.device.description().units;
            let grid = choice::gemm_cluster_grid(outputs, rows, cluster.columns, units);
            let arguments = GemmCluster {
                w0,
                w1,
                w2,
                n0,
                n1,
                n2,
                bias0,
                bias1,
                bias2,
                cols,
                x,
                x_scale,
                rows,
                out,
                out_stride,
                add,
            };
            return Ok(self.device.launch(self.stream, cluster.kernel, grid, &arguments)?);
        }
        let (parts, counters) = (self.scratch.slab.ptr(), self.scratch.counters.ptr());
        let arguments = GemmWide {
            w0,
            w1,
            w2,
            n0,
            n1,
            n2,
            bias0,
            bias1,
            bias2,
            cols,
            x,
            x_scale,
            rows,
            out,
            out_stride,
            add,
            parts,
            counters,
        };
        Ok(self.device.launch(self.stream, chosen.kernel, grid, &arguments)?)
    }

    fn gemm_quant(&self, task: &Task<'_>) -> Result<(), BackendError> {
        let &Task { dtype, last, cols, rows, out, out_stride, add, .. } = task;
        let chosen = choice::gemm_quant(dtype, last, rows).ok_or_else(|| no_kernel("gemm", dtype))?;
        let ([w0, w1, w2], outputs, [bias0, bias1, bias2]) = task.matrices();
        let ([n0, n1, n2], (x, x_scale)) = (outputs, self.halves(task.input));
        let (parts, counters) = (self.scratch.slab.ptr(), self.scratch.counters.ptr());
        let arguments = GemmQuant {
            w0,
            w1,
            w2,
            n0,
            n1,
            n2,
            bias0,
            bias1,
            bias2,
            cols,
            x,
            x_stride: cols,
            x_scale,
            rows,
            out,
            out_stride,
            add,
            parts,
            counters,
        };
        let grid = choice::gemm_quant_grid(outputs, cols, rows, chosen.columns);
        Ok(self.device.launch(self.stream, chosen.kernel, grid, &arguments)?)
    }

    fn gemv_a8(&self, task: &Task<'_>) -> Result<(), BackendError> {
        let &Task { dtype, last, cols, rows, out, out_stride, add, .. } = task;
        let chosen = choice::gemv_a8(dtype, last, rows).ok_or_else(|| no_kernel("gemv", dtype))?;
        let ([w0, w1, w2], outputs, [bias0, bias1, bias2]) = task.matrices();
        let ([n0, n1, n2], A8 { codes, scales, sums }) = (outputs, self.a8(task.input));
        let arguments = GemvA8 {
            w0,
            w1,
            w2,
            n0,
            n1,
            n2,
            bias0,
            bias1,
            bias2,
            cols,
            codes,
            scales,
            sums,
            rows,
            out,
            out_stride,
            add,
        };
        let grid = choice::gemv_grid(outputs, rows, chosen.columns);
        Ok(self.device.launch(self.stream, chosen.kernel, grid, &arguments)?)
    }

    fn gemv_f32(&self, task: &Task<'_>) -> Result<(), BackendError> {
        let &Task { dtype, cols, rows, out, out_stride, add, .. } = task;
        let ([w0, w1, w2], outputs, [bias0, bias1, bias2]) = task.matrices();
        let chosen = choice::gemv_f32_of(dtype, outputs, rows).ok_or_else(|| no_kernel("gemv", dtype))?;
        let [n0, n1, n2] = outputs;
        let arguments = GemvF32 {
            w0,
            w1,
            w2,
            n0,
            n1,
            n2,
            bias0,
            bias1,
            bias2,
            cols,
            x: self.floats(task.input),
            x_stride: task.input.float.map_or(cols, |view| view.stride),
            rows,
            out,
            out_stride,
            add,
        };
        let grid = choice::gemv_grid(outputs, rows, chosen.columns);
        Ok(self.device.launch(self.stream, chosen.kernel, grid, &arguments)?)
    }

    /// Matrix product of many rows. Expands weights to f16 one slab at a time and multiplies each slab while it is
    /// cached.
    fn expand_and_multiply(
        &self,
        matrix: Matrix,
        input: &Home,
        rows: u32,
        out: DevicePtr<f32>,
        out_stride: u32,
        add: u32,
    ) -> Result<(), BackendError> {
        let stride = matrix.cols.next_multiple_of(8);
        let (x, x_scale) = self.halves(input);
        let slab: DevicePtr<u16> = self.scratch.slab.ptr();
        let expand = choice::dequant(matrix.dtype);
        // F16 weights need no expansion: one slab holds all of them.
        let at_once = match expand {
            None => matrix.rows,
            Some(_) => {
                let slab = self.scratch.slab.len();
                let room = if rows < WIDE_ROWS { slab } else { slab.min(SLAB_BYTES) };
                (room as u32 / (2 * stride)).min(matrix.rows)
            }
        };
        if at_once == 0 {
            return Err(BackendError::Internal("a weight row is longer than a slab".to_owned()));
        }
        for first in (0..matrix.rows).step_by(at_once as usize) {
            let n = at_once.min(matrix.rows - first);
            let w = match expand {
                None => matrix.at.cast(),
                Some(kernel) => {
                    let arguments = Dequant {
                        planes: matrix.at,
                        weights: u64::from(matrix.rows) * u64::from(matrix.cols),
                        cols: matrix.cols,
                        first,
                        rows: n,
                        out: slab,
                    };
                    let groups = (u64::from(n) * u64::from(stride)).div_ceil(32);
                    let grid = Grid::x(groups.div_ceil(256).clamp(1, 1 << 16) as u32);
                    self.device.launch(self.stream, kernel, grid, &arguments)?;
                    slab
                }
            };
            let arguments = GemmF16 {
                w,
                w_stride: stride,
                n,
                x,
                x_stride: matrix.cols,
                x_scale,
                k: matrix.cols,
                rows,
                out: out.offset(first as usize),
                out_stride,
                bias: matrix.bias.offset(first as usize),
                add,
            };
            let (kernel, grid) = choice::gemm(n, rows);
            self.device.launch(self.stream, kernel, grid, &arguments)?;
        }
        Ok(())
    }
}
