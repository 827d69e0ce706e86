//! Projections to queries, keys and values, and attention over KV pages.

use super::super::kernels::Kernel;
use super::super::kernels::ops::{AttnDecode, RopeKv};
use super::super::scratch::{ATTENTION_ROWS, SPLITS_MAX, padded};
use super::super::{DevicePtr, Grid};
use super::forms::FORMS;
use super::{Form, Matrix, Run, offset};
use crate::backend::{BackendError, KvType, RopeLayout};

/// Heads of a block of `rope_kv`.
const ROPE_HEADS: u32 = 8;

/// Splits of a row that attends to `len` tokens: `split_tokens` of kernels/attention/splits.h.
pub fn splits_of(len: u32) -> u32 {
    let mut tokens = match len {
        0..=1024 => 64,
        1025..=4096 => 128,
        _ => 256,
    };
    while u64::from(tokens) * u64::from(SPLITS_MAX) < u64::from(len) {
        tokens *= 2;
    }
    len.div_ceil(tokens).max(1)
}

/// The kernel for these heads, and how many query heads its blocks take.
fn decode_kernel(kv: KvType, head_dim: usize, group: usize) -> (Kernel<AttnDecode>, u32) {
    let of = |kernels: &[(Kernel<AttnDecode>, u32)]| {
        let fits = kernels.iter().find(|(_, heads)| *heads as usize >= group);
        fits.or(kernels.last()).copied()
    };
    let chosen = match (kv, head_dim) {
        (KvType::F16, 64) => of(&[
            (AttnDecode::attn_decode_f16_64_1, 1),
            (AttnDecode::attn_decode_f16_64_2, 2),
            (AttnDecode::attn_decode_f16_64_4, 4),
            (AttnDecode::attn_decode_f16_64_8, 8),
        ]),
        (KvType::F16, 128) => of(&[
            (AttnDecode::attn_decode_f16_128_1, 1),
            (AttnDecode::attn_decode_f16_128_2, 2),
            (AttnDecode::attn_decode_f16_128_4, 4),
            (AttnDecode::attn_decode_f16_128_8, 8),
        ]),
        (KvType::F16, _) => {
            of(&[(AttnDecode::attn_decode_f16_any_1, 1), (AttnDecode::attn_decode_f16_any_4, 4)])
        }
        (KvType::F32, _) => {
            of(&[(AttnDecode::attn_decode_f32_any_1, 1), (AttnDecode::attn_decode_f32_any_4, 4)])
        }
    };
    chosen.unwrap_or((AttnDecode::attn_decode_f16_any_1, 1))
}

impl Run<'_> {
    pub(super) fn attention_input(
        &self,
        layer: u32,
        norm: DevicePtr<f32>,
        parts: &[Matrix; 3],
        head_norms: [DevicePtr<f32>; 2],
        angles: DevicePtr<f32>,
    ) -> Result<(), BackendError> {
        let (input, rows) = (&self.scratch.input, self.rows());
        for form in FORMS {
            if parts.iter().any(|part| self.form_for(*part, rows) == form) {
                self.norm(norm, DevicePtr::NULL, rows, input, form)?;
            }
        }
        let stride = parts.iter().map(|part| part.rows).sum();
        self.products(parts, input, rows, self.scratch.qkv.ptr(), stride, false)?;
        let kernel = match self.kv {
            KvType::F16 => RopeKv::rope_kv_f16,
            KvType::F32 => RopeKv::rope_kv_f32,
        };
        let dims = self.dims;
        let heads = (dims.n_heads + 2 * dims.n_kv_heads) as u32;
        let arguments = RopeKv {
            qkv: self.scratch.qkv.ptr(),
            q_bias: DevicePtr::NULL, // added by the products
            k_bias: DevicePtr::NULL,
            v_bias: DevicePtr::NULL,
            q_norm: head_norms[0],
            k_norm: head_norms[1],
            angles,
            positions: self.places.positions,
            row_seq: self.places.sequences,
            page_tables: self.places.tables,
            page_base: self.pages,
            q: self.scratch.queries.ptr(),
            layer_offset: u64::from(layer) * self.layer_bytes,
            eps: dims.norm_eps,
            n_heads: dims.n_heads as u32,
            n_kv_heads: dims.n_kv_heads as u32,
            head_dim: dims.head_dim as u32,
            rope_dims: dims.rope.dims as u32,
            halves: u32::from(dims.rope.layout == RopeLayout::Halves),
            table_stride: self.layout.stride as u32,
        };
        let grid = Grid::xy(heads.div_ceil(ROPE_HEADS), rows);
        Ok(self.device.launch(self.stream, kernel, grid, &arguments)?)
    }

    /// Attention, its result as the output projection wants it.
    pub(super) fn attention(&self, layer: u32, form: Form) -> Result<(), BackendError> {
        if self.layout.tiles > 0 {
            return self.attention_in_tiles(layer, form);
        }
        let dims = self.dims;
        let group = dims.n_heads / dims.n_kv_heads;
        let (kernel, heads) = decode_kernel(self.kv, dims.head_dim, group);
        let cols = dims.n_heads * dims.head_dim;
        // A block writes whole groups of 32 values itself, or none.
        let whole = |heads: usize| (heads * dims.head_dim).is_multiple_of(32);
        let direct = form == Form::A8 && whole(heads as usize) && whole(group);
        let (input, scratch) = (&self.scratch.input, self.scratch);
        let out = match (form, direct) {
            (Form::A8, true) => DevicePtr::NULL,
            (Form::A8, false) | (Form::Half, _) => scratch.attended.ptr(),
            (Form::Float, _) => input.values(),
        };
        let a8 = input.a8();
        let blocks = dims.n_kv_heads as u32 * (group as u32).div_ceil(heads);
        for first in (0..self.layout.rows).step_by(ATTENTION_ROWS) {
            let rows = (self.layout.rows - first).min(ATTENTION_ROWS) as u32;
            let arguments = AttnDecode {
                q: scratch.queries.ptr(),
                rows: offset(scratch.row_numbers.ptr(), first),
                positions: self.places.positions,
                row_seq: self.places.sequences,
                page_tables: self.places.tables,
                page_base: self.pages,
                part_values: scratch.part_values.ptr(),
                part_stats: scratch.part_stats.ptr(),
                counters: scratch.counters.ptr(),
                out,
                out16: DevicePtr::NULL,
                row_scales: DevicePtr::NULL,
                codes: if direct { a8.codes } else { DevicePtr::NULL },
                scales: a8.scales,
                sums: a8.sums,
                layer_offset: u64::from(layer) * self.layer_bytes,
                scale: self.attention_scale(),
                n_heads: dims.n_heads as u32,
                n_kv_heads: dims.n_kv_heads as u32,
                head_dim: dims.head_dim as u32,
                table_stride: self.layout.stride as u32,
                padded: padded(cols) as u32,
            };
            let grid = Grid::xyz(blocks, self.splits, rows);
            self.device.launch(self.stream, kernel, grid, &arguments)?;
        }
        if out.is_null() || form == Form::Float {
            return Ok(());
        }
        self.convert(out, cols as u32, input, form)
    }
}
