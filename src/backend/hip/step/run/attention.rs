//! Decode attention: few rows, each split over workgroups. Also decides which rows take which attention.

use super::forms::A8;
use super::heads::Source;
use super::prefill::TILE_QUERIES;
use super::{Run, Weights};
use crate::backend::hip::kernels::Kernel;
use crate::backend::hip::kernels::ops::AttnDecode;
use crate::backend::hip::kernels::thresholds::{ATTENTION_ROWS, ATTENTION_ROWS_MAX, Order};
use crate::backend::hip::step::Modes;
use crate::backend::hip::step::bind::{Attend, Form, Wanted, is_wide};
use crate::backend::hip::step::scratch::{SPLITS_MAX, padded};
use crate::backend::hip::{DevicePtr, Grid, WORKGROUP};
use crate::backend::{BackendError, KvType};

/// Values of a row that two tiles of f16 rows hold (kernels/common/tiled.h).
const TILED_COLS: u32 = 128;

/// Workgroups of 256 threads of `attn_decode` that a unit runs at a time.
const BLOCKS_OF_UNIT: u64 = 2;
/// Workgroups of 256 threads that a large device runs at a time.
const DECODE_BLOCKS: u64 = 256;

/// Smallest split, in tokens.
const SPLIT_MIN: u32 = 64;

/// Splits into which a row is cut at most: with `blocks` workgroups for each, as many as the device runs `at_once`. Fewer leave it idle.
/// Cut at every 256th token, 4,100 tokens of a model with four KV heads take 68 workgroups, and an H200 runs 264.
///
/// Rows that have the bits of a row alone are cut as if they were alone. Where they may be more than [`ATTENTION_ROWS`], they have fewer
/// splits: a launch takes as many rows as there is room for their splits.
fn splits_max(modes: Modes, blocks: u32, rows: usize, at_once: u64, window: u32) -> u32 {
    let half_from = modes.thresholds().half_from;
    let fixed = modes.order == Order::Fixed;
    let beside = if fixed || rows < half_from { 1 } else { rows as u64 };
    let room = if fixed || half_from > ATTENTION_ROWS + 1 { SPLITS_MAX / 4 } else { SPLITS_MAX };
    let most = room - u32::from(window != 0);
    let blocks = (u64::from(blocks) * beside).max(1);
    ((at_once + blocks / 2) / blocks).clamp(1, u64::from(most)) as u32 // at most SPLITS_MAX
}

/// Most splits of a row that is cut into at most `most` and is one of the first `tokens` of its sequence. Window 0: it sees all.
/// Matches `split_tokens` of kernels/attention/splits.h.
fn splits_up_to(tokens: u32, window: u32, most: u32) -> u32 {
    match window {
        0 => tokens.div_ceil(SPLIT_MIN).clamp(1, most),
        _ => tokens.min(window).div_ceil(SPLIT_MIN).clamp(1, most) + 1,
    }
}

/// Splits of a row that is token `len - 1` of its sequence and sees `window` tokens (0 for all). Matches `split_tokens_of`
/// of kernels/attention/splits.h; with a window a row may have fewer.
pub fn splits_of(len: u32, window: u32) -> u32 {
    let mut tokens = match len {
        0..=1024 => SPLIT_MIN,
        1025..=4096 => 128,
        _ => 256,
    };
    while u64::from(tokens) * u64::from(SPLITS_MAX) < u64::from(len) {
        tokens *= 2;
    }
    let all = len.div_ceil(tokens).max(1);
    if window == 0 { all } else { all.min(window.div_ceil(tokens).saturating_add(1)) }
}

/// Most splits of a row with this many of [`splits_of`] where they are cut by `coarse_split_tokens`
/// (kernels/attention/splits.h): twice as long, and 256 tokens at least.
fn coarse_splits(splits: u32, window: u32) -> u32 {
    match (splits, window) {
        (0..=4, 0) => 1,
        (_, 0) => splits.div_ceil(2),
        // They may begin earlier before the window.
        _ => splits.div_ceil(2) + 1,
    }
}

/// Splits that a workgroup of `attn_decode` takes: all, or a power of two, so that all workgroups of a row together take at
/// most [`SPLITS_MAX`]. One, until there are more workgroups than the device runs `at_once`. Each group of splits
/// then saves the look-up of its row, its queries and the wait for the others.
fn splits_of_block(blocks: u32, splits: u32, rows: usize, at_once: u64) -> u32 {
    let all = u64::from(blocks) * u64::from(splits) * rows as u64;
    let each = all / at_once;
    if each >= u64::from(splits) { splits.max(1) } else { 1 << each.max(1).ilog2() }
}

/// A kernel of decode attention.
#[derive(Clone, Copy)]
struct Decode {
    kernel: Kernel<AttnDecode>,
    /// Query heads of a workgroup.
    heads: u32,
    /// Threads of a workgroup.
    threads: u32,
    /// Workgroups that a large device runs at a time.
    at_once: u64,
    /// Its splits are longer: [`coarse_splits`].
    coarse: bool,
}

/// The kernel for these heads, in a launch of so many rows.
fn decode_kernel(modes: Modes, head_dim: u32, group: u32, rows: usize, units: u32) -> Decode {
    let on_matrix_unit = match (modes.kv, head_dim) {
        (KvType::F16, 64) => Some(AttnDecode::attn_decode_matrix_64),
        (KvType::F16, 128) => Some(AttnDecode::attn_decode_matrix_128),
        _ => None,
    };
    if let Some(kernel) = on_matrix_unit.filter(|_| rows >= modes.thresholds().attention_matrix_from) {
        return Decode { kernel, heads: 8, threads: WORKGROUP / 2, at_once: 2 * DECODE_BLOCKS, coarse: true };
    }
    let (kernel, heads) = plain_kernel(modes.kv, head_dim, group);
    let at_once = DECODE_BLOCKS.max(BLOCKS_OF_UNIT * u64::from(units));
    Decode { kernel, heads, threads: WORKGROUP, at_once, coarse: false }
}

/// The kernel on vector units for these heads, and the query heads per workgroup.
fn plain_kernel(kv: KvType, head_dim: u32, group: u32) -> (Kernel<AttnDecode>, u32) {
    let of = |kernels: &[(Kernel<AttnDecode>, u32)]| {
        let fits = kernels.iter().find(|(_, heads)| *heads >= group);
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
        (KvType::Int8, 64) => of(&[
            (AttnDecode::attn_decode_i8_64_1, 1),
            (AttnDecode::attn_decode_i8_64_2, 2),
            (AttnDecode::attn_decode_i8_64_4, 4),
            (AttnDecode::attn_decode_i8_64_8, 8),
        ]),
        (KvType::Int8, 128) => of(&[
            (AttnDecode::attn_decode_i8_128_1, 1),
            (AttnDecode::attn_decode_i8_128_2, 2),
            (AttnDecode::attn_decode_i8_128_4, 4),
            (AttnDecode::attn_decode_i8_128_8, 8),
        ]),
        (KvType::Int8, _) => {
            of(&[(AttnDecode::attn_decode_i8_any_1, 1), (AttnDecode::attn_decode_i8_any_4, 4)])
        }
        (KvType::F32, _) => {
            of(&[(AttnDecode::attn_decode_f32_any_1, 1), (AttnDecode::attn_decode_f32_any_4, 4)])
        }
    };
    chosen.unwrap_or((AttnDecode::attn_decode_f16_any_1, 1))
}

/// Whether decode attention can write 8-bit rows: every workgroup must write whole groups of 32 values.
fn writes_a8(kv: KvType, head_dim: u32, group: u32) -> bool {
    // Eight heads of a matrix unit's kernel are whole groups too.
    let (_, heads) = plain_kernel(kv, head_dim, group);
    let whole = |heads: u32| (heads * head_dim).is_multiple_of(32);
    whole(heads) && whole(group)
}

/// Whether decode attention can write f16 rows: a mean of f16 values fits f16, and a lane writes four values. A mean of codes fits
/// too, unless f16 pages would have overflowed.
fn writes_halves(kv: KvType, head_dim: u32) -> bool {
    kv != KvType::F32 && head_dim.is_multiple_of(4)
}

/// Whether tiles of queries can write f16 rows: only one after the other. A mean of f16 values fits f16; a mean of f32
/// values may not.
pub(super) fn tiles_write_halves(modes: Modes) -> bool {
    modes.kv != KvType::F32 && !modes.tiled()
}

/// Whether some kernel leaves f32 rows that must be converted, in steps of at most `rows` rows. `around`: a window looks both
/// ways, so that few rows are in tiles too.
pub fn attend_leaves_floats(
    modes: Modes,
    (head_dim, group): (u32, u32),
    forms: Wanted,
    (rows, around): (usize, bool),
) -> bool {
    let decode = |form| match form {
        Some(Form::A8) => !writes_a8(modes.kv, head_dim, group),
        Some(Form::Half) => !writes_halves(modes.kv, head_dim),
        Some(Form::Float) | None => false,
    };
    let tiles = |form| match form {
        Some(Form::Half) => !tiles_write_halves(modes),
        Some(Form::A8) => true,
        Some(Form::Float) | None => false,
    };
    let many = forms.many.only();
    if is_wide(head_dim) {
        // Their kernel writes no other form.
        return [forms.few.only(), many].into_iter().flatten().any(|form| form != Form::Float);
    }
    // Also many rows may be decoded: one of a sequence each.
    decode(forms.few.only())
        || decode(many)
        || (around || rows >= modes.thresholds().tiled_from)
            && group <= TILE_QUERIES
            && (tiles(many) || tiles(forms.few.only()))
}

impl Run<'_> {
    /// Runs attention, with the result in the form that its reader wants. The step's first rows go to decode attention, and
    /// tiles of neighbouring rows to prefill attention.
    pub(super) fn attend(&self, unit: &Attend, rows: u32, weights: &Weights<'_>) -> Result<(), BackendError> {
        let makes = unit.source.is_some() && self.layout.apart;
        if let Some(heads) = unit.source.filter(|_| !makes) {
            self.heads(&heads, rows, weights)?;
        }
        let form = unit.forms.at(rows).only().unwrap_or(Form::Float);
        if is_wide(unit.head_dim) {
            return self.attend_wide(unit, rows, form, weights);
        }
        let group = unit.heads / unit.kv.heads.max(1);
        let (modes, kv) = (self.bound.modes, self.bound.modes.kv);
        let tiles = self.layout.tiles > 0 && group <= TILE_QUERIES;
        let direct = match form {
            Form::A8 => !tiles && writes_a8(kv, unit.head_dim, group),
            Form::Half => writes_halves(kv, unit.head_dim) && (!tiles || tiles_write_halves(modes)),
            Form::Float => false,
        };
        let decoded = if tiles { self.layout.alone } else { self.layout.rows };
        let source = unit.source.filter(|_| makes).map(|heads| self.source(&heads, weights));
        self.attend_alone(unit, decoded, if direct { form } else { Form::Float }, source, weights)?;
        if tiles {
            self.attend_in_tiles(unit, direct, weights.optional(unit.sinks))?;
        }
        match unit.out.float {
            Some(view) if !direct => self.convert(view, unit.heads * unit.head_dim, rows, &unit.out, form),
            _ => Ok(()),
        }
    }

    /// The last position that each row sees.
    pub(super) fn ends_of_rows(&self, unit: &Attend) -> DevicePtr<u32> {
        if unit.both_ways { self.places.ends } else { self.places.positions }
    }

    /// Decode attention of the first `count` rows, with the result in a form that the kernel can write.
    fn attend_alone(
        &self,
        unit: &Attend,
        count: usize,
        form: Form,
        source: Option<Source>,
        weights: &Weights<'_>,
    ) -> Result<(), BackendError> {
        let group = unit.heads / unit.kv.heads.max(1);
        let (a8, half) = (form == Form::A8, form == Form::Half);
        let Decode { kernel, heads, threads, at_once, coarse } =
            decode_kernel(self.bound.modes, unit.head_dim, group, count, self.device.description().units);
        let cols = unit.heads * unit.head_dim;
        let padded = padded(cols as usize);
        let out = if a8 || half { DevicePtr::NULL } else { self.floats(&unit.out) };
        let A8 { codes, scales, sums } = self.a8(&unit.out);
        let (halves, row_scales) = self.halves(&unit.out);
        let half_cols = if self.bound.modes.tiled() { cols.next_multiple_of(TILED_COLS) } else { cols };
        let qkv_cols = cols + 2 * unit.kv.heads * unit.head_dim;
        let sinks = weights.optional(unit.sinks);
        let blocks = unit.kv.heads * group.div_ceil(heads);
        // A product of float weights waits with its first loads in the room that attention leaves. After 4,096 tokens an H200 writes
        // 218 tokens/s of an 8B model in F16 with a quarter left, and 212 with none. Quantised weights lose 2 % with it.
        let before_floats = unit.forms.at(self.layout.rows as u32).only() == Some(Form::Float);
        let at_once = if before_floats && !coarse { at_once * 3 / 4 } else { at_once };
        let splits_max = splits_max(self.bound.modes, blocks, count, at_once, unit.window);
        let splits = if coarse {
            coarse_splits(self.splits(unit.windows_at), unit.window)
        } else {
            splits_up_to(self.tokens, unit.window, splits_max)
        };
        let each = splits_of_block(blocks, splits, count, at_once);
        let groups = splits.div_ceil(each);
        let together = ATTENTION_ROWS * (SPLITS_MAX / (groups * each).clamp(1, SPLITS_MAX)) as usize;
        let together = together.min(ATTENTION_ROWS_MAX);
        for first in (0..count).step_by(together) {
            let rows = (count - first).min(together) as u32;
            // Addresses of the first row, and no row numbers: then the extents of all rows are known. Tiles have 8 rows,
            // and `together` is a multiple of them.
            let (values, codes_before) = (first * cols as usize, first * padded);
            let Source { qkv, q_norm, k_norm, angles, eps, rope_dims, pairs_by_halves } =
                source.unwrap_or(Source::NONE);
            let arguments = AttnDecode {
                q: if source.is_some() { DevicePtr::NULL } else { self.at(unit.queries).offset(values) },
                rows: DevicePtr::NULL,
                positions: self.ends_of_rows(unit).offset(first),
                row_seq: self.places.sequences.offset(first),
                page_tables: self.places.tables,
                page_base: self.pages,
                part_values: self.scratch.part_values.ptr(),
                part_stats: self.scratch.part_stats.ptr(),
                counters: self.scratch.counters.ptr(),
                out: out.offset(values),
                codes: if a8 { codes.offset(codes_before) } else { DevicePtr::NULL },
                scales: scales.offset(codes_before / 32),
                sums: sums.offset(codes_before / 16),
                halves: if half { halves.offset(first * half_cols as usize) } else { DevicePtr::NULL },
                row_scales: row_scales.offset(first),
                sinks,
                layer_offset: unit.kv.offset,
                scale: unit.scale,
                cap: unit.cap,
                n_heads: unit.heads,
                n_kv_heads: unit.kv.heads,
                head_dim: unit.head_dim,
                table_stride: self.layout.stride as u32,
                padded: padded as u32,
                window: unit.window,
                tiled: self.tiled(),
                each,
                splits_max,
                qkv: qkv.offset(first * qkv_cols as usize),
                q_norm,
                k_norm,
                angles,
                eps,
                rope_dims,
                pairs_by_halves,
            };
            let grid = Grid::xyz(blocks, groups, rows).threads(threads);
            self.device.launch(self.stream, kernel, grid, &arguments)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::hip::kernels::MatrixUnit;

    #[test]
    fn workgroups_take_several_splits_where_there_are_many_rows() {
        let of = |splits, rows| splits_of_block(8, splits, rows, DECODE_BLOCKS);
        assert_eq!([of(1, 1), of(1, 512), of(9, 1), of(32, 1)], [1, 1, 1, 1]);
        assert_eq!([of(9, 16), of(9, 64), of(128, 64), of(3, 64)], [4, 9, 128, 3]);
        for (splits, rows) in [(1u32, 64usize), (9, 16), (100, 64), (127, 3), (128, 64)] {
            let each = of(splits, rows);
            assert!(splits.div_ceil(each) * each <= SPLITS_MAX, "{splits} splits, {rows} rows");
        }
    }

    #[test]
    fn splits_fill_the_device_and_have_room_for_every_row() {
        let modes = |unit, order| Modes { unit, order, ..Modes::default() };
        let by_rows = modes(MatrixUnit::AcrossWaves, Order::ByRows);
        let of = |blocks, rows, window| splits_max(by_rows, blocks, rows, 264, window);
        // Eight and four workgroups of a split on 132 units. Few rows are cut like one, 16 and 20 rows together fill the device.
        assert_eq!([of(8, 1, 0), of(8, 4, 0), of(4, 1, 0), of(8, 16, 0), of(8, 20, 0)], [33, 33, 66, 2, 2]);
        assert_eq!([of(1, 1, 0), of(1, 1, 1000), of(4096, 1, 0)], [SPLITS_MAX, SPLITS_MAX - 1, 1]);
        // In a fixed order, and without a matrix unit, many rows are cut like one.
        let fixed = modes(MatrixUnit::AcrossWaves, Order::Fixed);
        let none = modes(MatrixUnit::None, Order::ByRows);
        assert_eq!([1, 16, 1024].map(|rows| splits_max(fixed, 4, rows, 264, 0)), [32; 3]);
        assert_eq!([1, 16, 63].map(|rows| splits_max(none, 4, rows, 264, 0)), [32; 3]);
        for len in (1..3000u32).chain([4095, 4096, 4097, 33_000, 70_000]) {
            for (window, most) in
                [0u32, 1, 64, 200, 1000].into_iter().flat_map(|w| [1, 2, 33, 127].map(|m| (w, m)))
            {
                let seen = if window == 0 { len } else { len.min(window) };
                let tokens = seen.div_ceil(most).next_multiple_of(SPLIT_MIN);
                let needed = len.div_ceil(tokens) - (len - seen) / tokens;
                let launched = splits_up_to(len.next_power_of_two(), window, most);
                assert!(
                    (needed..=SPLITS_MAX).contains(&launched),
                    "{len} {window} {most}: {launched} of {needed}"
                );
            }
        }
    }

    #[test]
    fn a_window_bounds_the_splits_and_no_window_does_not() {
        assert_eq!(
            [1, 64, 65, 1024, 1025, 4096, 4097].map(|len| splits_of(len, 0)),
            [1, 1, 2, 16, 9, 32, 17]
        );
        assert_eq!(splits_of(u32::MAX, 0), SPLITS_MAX);
        // 1500 tokens are cut at multiples of 128. The last 200 lie in splits 10 and 11, and a window may reach into
        // one more.
        assert_eq!(splits_of(1500, 200), 3);
        assert_eq!(splits_of(100, 1 << 30), 2);
        for (len, window) in [(2000u32, 130u32), (700, 1), (5000, 512), (64, 64), (1025, 1024)] {
            let tokens = if len <= 1024 {
                64
            } else if len <= 4096 {
                128
            } else {
                256
            };
            let needed = len.div_ceil(tokens) - len.saturating_sub(window) / tokens;
            assert!(splits_of(len, window) >= needed, "{len} {window}");
        }
    }

    #[test]
    fn coarse_splits_are_enough_for_every_row() {
        for len in (1..1500u32).chain([4095, 4096, 4097, 33_000, 70_000]) {
            for window in [0u32, 1, 40, 64, 200, 1000, 5000] {
                let fine = match len {
                    0..=1024 => 64,
                    1025..=4096 => 128,
                    _ => len.div_ceil(SPLITS_MAX).next_power_of_two().max(256),
                };
                let tokens = if len <= 256 { 256 } else { 2 * fine };
                let unseen = if window == 0 { 0 } else { len.saturating_sub(window) };
                let needed = len.div_ceil(tokens) - unseen / tokens;
                let most = splits_of(len, window);
                let recorded = most.next_power_of_two().min(SPLITS_MAX);
                for splits in [most, recorded].map(|splits| coarse_splits(splits, window)) {
                    assert!((needed..=SPLITS_MAX).contains(&splits), "{len} {window}: {splits} of {needed}");
                }
            }
        }
    }
}
