//! Conversion of activations into the form that their weights need.

use super::{Run, Weights};
use crate::backend::BackendError;
use crate::backend::hip::kernels::ops::{NormA8, NormF32, NormX16, QuantiseA8, QuantiseX16};
use crate::backend::hip::step::bind::{Convert, FORMS, Form, Home, Norm, View};
use crate::backend::hip::step::scratch::padded;
use crate::backend::hip::{DevicePtr, Grid, WORKGROUP};

/// Addresses of 8-bit rows, `padded` codes per row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct A8 {
    /// `i8[M][padded]`.
    pub codes: DevicePtr<i8>,
    /// `f32[M][padded / 32]`.
    pub scales: DevicePtr<f32>,
    /// `i16[M][padded / 16]`.
    pub sums: DevicePtr<i16>,
}

/// Threads of a workgroup that takes a row of `cols` values, sixteen values each: as many as a thread keeps in registers
/// (`KEPT` of kernels/common/row_norm.h). The row count must not matter: the bits of a norm depend on the thread count.
pub(super) fn row_threads(cols: u32) -> u32 {
    cols.div_ceil(16).next_multiple_of(64).clamp(64, 1024)
}

/// Threads of a workgroup that norms a whole row to 8-bit or f32 values. They are at least those of a router, which norms its
/// rows itself: so both give the same bits.
fn norm_threads(cols: u32) -> u32 {
    row_threads(cols).max(WORKGROUP)
}

/// Input rows of a norm, the weights of their groups, and the target of f32 results.
#[derive(Clone, Copy)]
struct NormRows {
    x: DevicePtr<f32>,
    x_stride: u32,
    weight: DevicePtr<f32>,
    bias: DevicePtr<f32>,
    out: DevicePtr<f32>,
    out_stride: u32,
    rows: u32,
}

impl Run<'_> {
    /// Addresses of the 8-bit form; null for a value without it.
    pub(super) fn a8(&self, home: &Home) -> A8 {
        let at = |plane: usize| home.a8.map_or(DevicePtr::NULL, |planes| self.plane::<u8>(planes[plane]));
        A8 { codes: at(0).cast(), scales: at(1).cast(), sums: at(2).cast() }
    }

    /// 1 where f16 rows lie in tiles.
    pub(super) fn tiled(&self) -> u32 {
        u32::from(self.bound.modes.tiled())
    }

    /// Addresses of the f16 rows and of their scales; null for a value without them.
    pub(super) fn halves(&self, home: &Home) -> (DevicePtr<u16>, DevicePtr<f32>) {
        let at = |plane: usize| home.half.map_or(DevicePtr::NULL, |planes| self.plane::<u8>(planes[plane]));
        (at(0).cast(), at(1).cast())
    }

    /// Address of the f32 form; null for a value without it.
    pub(super) fn floats(&self, home: &Home) -> DevicePtr<f32> {
        home.float.map_or(DevicePtr::NULL, |view| self.at(view))
    }

    /// Converts f32 rows to another form.
    pub(super) fn convert(
        &self,
        from: View,
        cols: u32,
        rows: u32,
        out: &Home,
        form: Form,
    ) -> Result<(), BackendError> {
        let (x, stride) = (self.at(from), from.stride);
        match form {
            Form::Float => Ok(()),
            Form::Half => {
                let (halves, row_scales) = self.halves(out);
                let arguments = QuantiseX16 { x, out: halves, row_scales, stride, cols, tiled: self.tiled() };
                let grid = Grid::x(rows).threads(row_threads(cols));
                Ok(self.device.launch(self.stream, QuantiseX16::quantise_x16, grid, &arguments)?)
            }
            Form::A8 => {
                let (a8, padded) = (self.a8(out), padded(cols as usize) as u32);
                let A8 { codes, scales, sums } = a8;
                let arguments = QuantiseA8 { x, codes, scales, sums, stride, cols, padded };
                let grid = Grid::xy(padded.div_ceil(1024), rows);
                Ok(self.device.launch(self.stream, QuantiseA8::quantise_a8, grid, &arguments)?)
            }
        }
    }

    pub(super) fn convert_all(&self, unit: &Convert, rows: u32) -> Result<(), BackendError> {
        let Some(from) = unit.home.float else { return Ok(()) };
        let forms = unit.forms.at(rows).without(Form::Float);
        FORMS
            .into_iter()
            .filter(|form| forms.has(*form))
            .try_for_each(|form| self.convert(from, unit.cols, rows, &unit.home, form))
    }

    pub(super) fn norm(&self, norm: &Norm, rows: u32, weights: &Weights<'_>) -> Result<(), BackendError> {
        let forms = norm.forms.at(rows);
        // One launch writes two forms.
        let both = forms.without(Form::Float).only().is_some() && self.also(norm, rows).is_some();
        let forms = if both { forms.without(Form::Float) } else { forms };
        for form in FORMS.into_iter().filter(|form| forms.has(*form)) {
            match form {
                Form::A8 => self.norm_a8(norm, rows, weights)?,
                Form::Float => self.norm_floats(norm, rows, weights)?,
                Form::Half => self.norm_halves(norm, rows, weights)?,
            }
        }
        Ok(())
    }

    /// Numbers of the rows that a norm reads; null for the first rows.
    fn which(&self, norm: &Norm) -> DevicePtr<u32> {
        if norm.takes { self.places.logits_rows } else { DevicePtr::NULL }
    }

    /// Where a norm to 8-bit or f16 rows writes the f32 rows as well, if these are wanted too.
    fn also(&self, norm: &Norm, rows: u32) -> Option<(DevicePtr<f32>, u32)> {
        let wanted = norm.forms.at(rows).has(Form::Float) && norm.groups == 1 && !norm.add;
        let view = norm.out.float.filter(|_| wanted)?;
        Some((self.at(view), view.stride))
    }

    fn norm_a8(&self, norm: &Norm, rows: u32, weights: &Weights<'_>) -> Result<(), BackendError> {
        let A8 { codes, scales, sums } = self.a8(&norm.out);
        let (also, also_stride) = self.also(norm, rows).unwrap_or((DevicePtr::NULL, 0));
        let arguments = NormA8 {
            x: self.at(norm.from),
            weight: weights.vector(norm.weight),
            bias: weights.optional(norm.bias),
            rows: self.which(norm),
            codes,
            scales,
            sums,
            also,
            eps: norm.eps,
            cols: norm.group,
            padded: padded(norm.group as usize) as u32,
            centre: u32::from(norm.centre),
            also_stride,
        };
        let grid = Grid::x(rows).threads(norm_threads(norm.group));
        Ok(self.device.launch(self.stream, NormA8::norm_a8, grid, &arguments)?)
    }

    fn norm_halves(&self, norm: &Norm, rows: u32, weights: &Weights<'_>) -> Result<(), BackendError> {
        let (out, row_scales) = self.halves(&norm.out);
        let (also, also_stride) = self.also(norm, rows).unwrap_or((DevicePtr::NULL, 0));
        let arguments = NormX16 {
            x: self.at(norm.from),
            weight: weights.vector(norm.weight),
            bias: weights.optional(norm.bias),
            rows: self.which(norm),
            out,
            row_scales,
            also,
            eps: norm.eps,
            cols: norm.group,
            centre: u32::from(norm.centre),
            tiled: self.tiled(),
            also_stride,
        };
        let grid = Grid::x(rows).threads(row_threads(norm.group));
        Ok(self.device.launch(self.stream, NormX16::norm_x16, grid, &arguments)?)
    }

    /// Runs an f32 norm. Groups without gaps, of the same weights, are rows to the kernel, in one launch. Otherwise each launch
    /// takes one group of all rows.
    fn norm_floats(&self, norm: &Norm, rows: u32, weights: &Weights<'_>) -> Result<(), BackendError> {
        let Norm { from, group, groups, .. } = *norm;
        let Some(out) = norm.out.float else { return Ok(()) };
        let all = NormRows {
            x: self.at(from),
            x_stride: from.stride,
            weight: weights.vector(norm.weight),
            bias: weights.optional(norm.bias),
            out: self.at(out),
            out_stride: out.stride,
            rows,
        };
        let width = group * groups;
        let whole = from.stride == width && out.stride == width && norm.weight_stride == 0;
        if groups > 1 && whole && !norm.takes {
            let each = NormRows { x_stride: group, out_stride: group, rows: rows * groups, ..all };
            return self.norm_f32(norm, each);
        }
        (0..groups).try_for_each(|number| {
            let (column, of_group) = ((number * group) as usize, (number * norm.weight_stride) as usize);
            let (weight, bias) = (all.weight.offset(of_group), all.bias.offset(of_group));
            let (x, out) = (all.x.offset(column), all.out.offset(column));
            self.norm_f32(norm, NormRows { x, weight, bias, out, ..all })
        })
    }

    fn norm_f32(&self, norm: &Norm, rows: NormRows) -> Result<(), BackendError> {
        let arguments = NormF32 {
            x: rows.x,
            weight: rows.weight,
            bias: rows.bias,
            rows: self.which(norm),
            out: rows.out,
            eps: norm.eps,
            cols: norm.group,
            x_stride: rows.x_stride,
            out_stride: rows.out_stride,
            centre: u32::from(norm.centre),
            add: u32::from(norm.add),
        };
        let threads = if norm.groups == 1 { norm_threads(norm.group) } else { row_threads(norm.group) };
        let grid = Grid::x(rows.rows).threads(threads);
        Ok(self.device.launch(self.stream, NormF32::norm_f32, grid, &arguments)?)
    }
}
