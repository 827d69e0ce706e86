//! Limits of the kernels: types, sizes, attributes of operations.

use super::recurrent::Taps;
use crate::backend::BackendError;
use crate::backend::hip::kernels::heads::WIDE_MAX;
use crate::backend::hip::kernels::matmul::{choice, planes};
use crate::backend::hip::kernels::recurrent::SUMMED_MAX;
use crate::backend::hip::kernels::thresholds::LAUNCH_ROWS_MAX;
use crate::program::{Activation, HeadPart, Program, TensorId};
use crate::tensor::LazyTensor;

/// Largest width. Kernels count in 32 bits and need room to multiply.
const WIDTH_MAX: u32 = 1 << 24;

/// Most experts that `route` chooses among.
const EXPERTS_MAX: u32 = 512;

/// Most values per head that the usual kernels of attention hold.
const HEAD_DIM_MAX: u32 = 256;

/// The error for an operation without a kernel.
pub fn operation(operation: impl Into<String>) -> BackendError {
    BackendError::Operation { operation: operation.into(), backend: "hip" }
}

fn unsupported(tensor: &LazyTensor) -> BackendError {
    let (name, dtype) = (tensor.name().to_owned(), tensor.dtype());
    BackendError::Unsupported { tensor: name, dtype, backend: "hip" }
}

/// Looks up a tensor of a program.
pub fn tensor(program: &Program, id: TensorId) -> Result<&LazyTensor, BackendError> {
    let tensor = program.tensor(id).map(|tensor| &tensor.lazy);
    tensor.ok_or_else(|| BackendError::Internal(format!("there is no tensor {}", id.0)))
}

/// Refuses a matrix without a product kernel.
pub fn matrix(tensor: &LazyTensor) -> Result<(), BackendError> {
    let (shape, dtype) = (tensor.shape(), tensor.dtype());
    let known = choice::gemv_f32(dtype, 1).is_some();
    let fits = planes::planes(dtype, shape.rows(), shape.cols()).is_some();
    if known && fits { Ok(()) } else { Err(unsupported(tensor)) }
}

/// Refuses experts without a product kernel.
pub fn expert(tensor: &LazyTensor) -> Result<(), BackendError> {
    matrix(tensor)?;
    choice::experts_f32(tensor.dtype()).map(|_| ()).ok_or_else(|| unsupported(tensor))
}

/// Refuses an embedding table without a kernel.
pub fn table(tensor: &LazyTensor) -> Result<(), BackendError> {
    choice::embed(tensor.dtype()).map(|_| ()).ok_or_else(|| unsupported(tensor))
}

/// Refuses rows wider than the kernels can count.
pub fn width(width: u32) -> Result<u32, BackendError> {
    if width > WIDTH_MAX {
        return Err(BackendError::Dims("a row has more than 16777216 values, the limit of the GPU kernels"));
    }
    Ok(width)
}

/// Refuses more rows than one launch takes.
pub fn rows(rows: usize) -> Result<(), BackendError> {
    if rows > LAUNCH_ROWS_MAX {
        Err(BackendError::Dims("a step has more than 65535 rows, the limit of one launch"))
    } else {
        Ok(())
    }
}

/// Refuses more experts, or pairs of a row and an expert, than the kernels can count.
pub fn experts(count: u32, used: u32, rows: usize) -> Result<(), BackendError> {
    if count > EXPERTS_MAX {
        return Err(operation(format!("a choice among {count} experts")));
    }
    if rows.saturating_mul(used as usize) > LAUNCH_ROWS_MAX {
        return Err(BackendError::Dims(
            "a step has more than 65535 pairs of a row and an expert, the limit of one launch",
        ));
    }
    Ok(())
}

/// Refuses a clamped gate that does not belong to experts: no model has one.
pub fn gate(activation: Activation) -> Result<(), BackendError> {
    match activation {
        Activation::Clamped => Err(operation("a clamped gate outside experts")),
        Activation::Silu
        | Activation::Gelu
        | Activation::Sigmoid
        | Activation::Linear
        | Activation::SquaredRelu => Ok(()),
    }
}

/// Refuses parts of heads that do not begin at multiples of 16 bytes, from which products read them.
pub fn part(part: HeadPart) -> Result<(), BackendError> {
    let HeadPart { head_dim, first, .. } = part;
    if head_dim.is_multiple_of(4) && first.is_multiple_of(4) {
        return Ok(());
    }
    Err(operation(format!("products of heads of {head_dim} values, of which the part begins at {first}")))
}

/// Refuses more heads than one launch takes, of products or of states.
pub fn heads(heads: u32) -> Result<(), BackendError> {
    if heads as usize > LAUNCH_ROWS_MAX {
        return Err(operation(format!("an operation on {heads} heads")));
    }
    Ok(())
}

/// Refuses convolutions over more rows than a lane keeps, or of rows that are not read four values at a time.
pub fn convolution(width: u32, taps: u64) -> Result<Taps, BackendError> {
    let known = [(2, Taps::Two), (3, Taps::Three), (4, Taps::Four)];
    let known = known.into_iter().find(|(count, _)| *count == taps && width.is_multiple_of(4));
    let refused = || operation(format!("a convolution of {taps} taps over rows of {width} values"));
    known.map(|(_, taps)| taps).ok_or_else(refused)
}

/// Refuses scans whose rows of a state eight lanes cannot hold, or read four values at a time.
pub fn scan(head_dim: u32, columns: u32) -> Result<(), BackendError> {
    if columns <= SUMMED_MAX && [head_dim, columns].iter().all(|size| size.is_multiple_of(4)) {
        return Ok(());
    }
    Err(operation(format!("a selective scan of heads of {head_dim} values and {columns} columns")))
}

/// Refuses delta rules whose columns of a state eight lanes cannot hold, or read four values at a time.
pub fn delta(key_dim: u32, value_dim: u32) -> Result<(), BackendError> {
    if key_dim <= SUMMED_MAX && [key_dim, value_dim].iter().all(|size| size.is_multiple_of(4)) {
        return Ok(());
    }
    Err(operation(format!("a delta rule of keys of {key_dim} values and heads of {value_dim}")))
}

/// Whether heads take the kernels of wide heads.
pub fn is_wide(head_dim: u32) -> bool {
    head_dim > HEAD_DIM_MAX
}

/// Refuses heads that a workgroup cannot hold.
pub fn head(head_dim: u32) -> Result<(), BackendError> {
    if head_dim == 0 || head_dim > WIDE_MAX || !head_dim.is_multiple_of(2) {
        return Err(operation(format!("attention of heads of {head_dim} values")));
    }
    Ok(())
}
