//! The loop that the vector kernels share: weight rows in strips of one row per vector lane.
//!
//! For many activation rows, strips are decoded once, 768 values at a time, into panels that stay in L1. The panels
//! are multiplied in tiles with several activation rows. For few activation rows, codes go from the file's bytes
//! directly into the sums.
#![allow(unsafe_code)]

use std::ops::Range;

use super::{MatrixView, Output};
use crate::backend::cpu::activations::{ActivationView, PlaneView, half_sum};
use crate::backend::cpu::prefetch::{CACHE_LINE_BYTES, prefetch_far};

/// Most groups per panel: 768 values, 12 KiB of codes in 16 rows. Two panels and the activation rows of a tile then
/// stay in a 48 KiB L1. Whole quant blocks of any type.
pub(super) const PANEL_GROUPS: usize = 24;

/// Least prefetch distance of weights in bytes. The processor's own prefetch does not follow 16 rows at once: without this, decode
/// runs at a sixth of the read rate. The nearest cache has too few misses in flight for the whole rate: prefetched there, the
/// bytes came at half of it.
const AHEAD_BYTES: usize = 32 << 10;

/// Bytes that are prefetched beyond a strip when it begins.
const BEYOND_BYTES: usize = 8 << 10;

/// Greatest prefetch distance: half of a 512 KiB second-level cache. The last rows of longer strips are read cold.
const AHEAD_BYTES_MAX: usize = 256 << 10;

/// The prefetch distance for strips of so many bytes that are read in place. All of a strip must be there when it begins, because each
/// of its rows is read from its first byte on.
fn ahead_bytes(strip_bytes: usize) -> usize {
    (strip_bytes + BEYOND_BYTES).clamp(AHEAD_BYTES, AHEAD_BYTES_MAX)
}

/// Address of row 0's first byte, and the distance between rows.
#[derive(Clone, Copy)]
pub(super) struct Strip {
    pub(super) base: *const u8,
    pub(super) stride: usize,
}

impl Strip {
    /// No rows.
    const EMPTY: Self = Self { base: std::ptr::null(), stride: 0 };

    /// Byte `at` of row `row`.
    #[inline(always)]
    pub(super) fn at(self, row: usize, at: usize) -> *const u8 {
        self.base.wrapping_add(row * self.stride + at)
    }
}

/// The bytes that later calls need: as many as this one's, in the order of the file and not row by row.
#[derive(Clone, Copy)]
pub(super) struct Ahead {
    at: *const u8,
    /// Bytes from there to the end of the rows that this thread computes. Others would be in the wrong core's cache.
    left: usize,
}

impl Ahead {
    /// Prefetches as many bytes as `at .. at + bytes` of each of `lanes` rows are.
    #[inline(always)]
    pub(super) fn prefetch(self, lanes: usize, at: usize, bytes: usize) {
        for line in (lanes * at..(lanes * (at + bytes)).min(self.left)).step_by(CACHE_LINE_BYTES) {
            prefetch_far(self.at.wrapping_add(line));
        }
    }
}

/// Where a step's share of prefetching begins. Its lines are prefetched one by one, between its products. All at once, they find no
/// place among the misses in flight (24 on Zen 4). Then none is asked for until the next step, which cost a sixth of the rate.
#[derive(Clone, Copy)]
pub(super) struct Spread {
    at: *const u8,
}

impl Spread {
    /// The share of a step that reads `at .. at + bytes` of each of `lanes` rows. Where less than that is left to
    /// prefetch, it asks for the strip's first lines, which are in the cache.
    #[inline(always)]
    pub(super) fn new(piece: Piece, lanes: usize, at: usize, bytes: usize) -> Self {
        let ahead = piece.ahead;
        let left = lanes * (at + bytes) <= ahead.left;
        Self { at: if left { ahead.at.wrapping_add(lanes * at) } else { piece.strip.base } }
    }
    /// Prefetches the part of product `quad` of group `g`, one of eight. A group has `bytes` bytes in all rows, a constant.
    /// Products of groups of few lines ask for some of the next group's, too: with a bound, decode of a 1B model was 5 % slower.
    #[inline(always)]
    pub(super) fn prefetch(self, bytes: usize, g: usize, quad: usize) {
        if quad > 7 {
            return; // a high digit of quad - 8
        }
        let lines = bytes.div_ceil(CACHE_LINE_BYTES);
        let line = |n: usize| prefetch_far(self.at.wrapping_add(g * bytes + n * CACHE_LINE_BYTES));
        let each = if lines > 5 { 1 } else { 2 };
        if quad.is_multiple_of(each) {
            line(quad / each);
        }
        if quad == 7 {
            for n in 8 / each..lines {
                line(n);
            }
        }
    }
}

/// The work of one kernel call: decodes `groups` groups from `first` on of a strip's rows, both whole blocks.
#[derive(Clone, Copy)]
pub(super) struct Piece {
    pub(super) strip: Strip,
    pub(super) first: usize,
    pub(super) groups: usize,
    /// To be prefetched meanwhile.
    pub(super) ahead: Ahead,
}

/// A plane of activation codes, from a row and a group on.
#[derive(Clone, Copy)]
pub(super) struct Plane {
    codes: *const i8,
    scales: *const f32,
    offsets: *const i32,
    stride: usize,
}

impl Plane {
    fn new(plane: PlaneView<'_>, stride: usize) -> Self {
        Self {
            codes: plane.codes.as_ptr(),
            scales: plane.scales.as_ptr(),
            offsets: plane.offsets.as_ptr(),
            stride,
        }
    }

    /// The plane from row `m` and group `g` on.
    #[inline(always)]
    pub(super) fn from(self, m: usize, g: usize) -> Self {
        let k = m * self.stride + 32 * g;
        Self {
            codes: self.codes.wrapping_add(k),
            scales: self.scales.wrapping_add(k / 32),
            offsets: self.offsets.wrapping_add(k / 16),
            stride: self.stride,
        }
    }

    /// Address of code `at` of row `m`.
    #[cfg(target_arch = "aarch64")]
    #[inline(always)]
    pub(super) fn code(self, m: usize, at: usize) -> *const i8 {
        self.codes.wrapping_add(m * self.stride + at)
    }

    /// Codes `at .. at + 4` of row `m`.
    ///
    /// # Safety
    /// The codes are readable.
    #[inline(always)]
    pub(super) unsafe fn quad(self, m: usize, at: usize) -> i32 {
        // SAFETY: the caller vouches for the 4 bytes; the read needs no alignment.
        unsafe { self.codes.wrapping_add(m * self.stride + at).cast::<i32>().read_unaligned() }
    }

    /// Scale of group `g` of row `m`.
    ///
    /// # Safety
    /// The scale is readable.
    #[inline(always)]
    pub(super) unsafe fn scale(self, m: usize, g: usize) -> f32 {
        // SAFETY: the caller vouches for the scale.
        unsafe { *self.scales.wrapping_add(m * self.stride / 32 + g) }
    }

    /// Whether group `g` of row `m` has nonzero codes.
    ///
    /// # Safety
    /// The scale is readable.
    #[inline(always)]
    pub(super) unsafe fn has(self, m: usize, g: usize) -> bool {
        // SAFETY: the caller vouches for the scale.
        unsafe { self.scale(m, g) != 0.0 }
    }

    /// -128 times the code sums of both halves of group `g` of row `m`.
    ///
    /// # Safety
    /// The offsets are readable.
    #[inline(always)]
    pub(super) unsafe fn offsets(self, m: usize, g: usize) -> [i32; 2] {
        // SAFETY: the caller vouches for both values; the plane has i32 alignment.
        unsafe { *self.offsets.wrapping_add(m * self.stride / 16 + 2 * g).cast() }
    }
}

/// Activation rows, from a row and a group on.
#[derive(Clone, Copy)]
pub(super) struct Acts {
    pub(super) coarse: Plane,
    pub(super) fine: Plane,
    scaled_sums: *const f32,
}

impl Acts {
    fn new(acts: &ActivationView<'_>) -> Self {
        Self {
            coarse: Plane::new(acts.coarse, acts.stride),
            fine: Plane::new(acts.fine, acts.stride),
            scaled_sums: acts.scaled_sums.as_ptr(),
        }
    }

    /// The planes from row `m` and group `g` on.
    #[inline(always)]
    fn from(self, m: usize, g: usize) -> Self {
        let scaled_sums = self.scaled_sums.wrapping_add(m * self.coarse.stride / 32 + g);
        Self { coarse: self.coarse.from(m, g), fine: self.fine.from(m, g), scaled_sums }
    }

    /// Whether any of groups `g .. g + groups` of rows `0 .. rows` has fine codes.
    ///
    /// # Safety
    /// The scales are readable.
    #[inline(always)]
    pub(super) unsafe fn any_fine(self, rows: usize, g: usize, groups: usize) -> bool {
        let mut any = 0;
        for m in 0..rows {
            for g in g..g + groups {
                // SAFETY: the caller vouches for the scales.
                any |= unsafe { self.fine.scale(m, g) }.to_bits();
            }
        }
        any != 0
    }

    /// Scaled sum of group `g` of row `m`.
    ///
    /// # Safety
    /// The sum is readable.
    #[inline(always)]
    pub(super) unsafe fn scaled_sum(self, m: usize, g: usize) -> f32 {
        // SAFETY: the caller vouches for the sum.
        unsafe { *self.scaled_sums.wrapping_add(m * self.coarse.stride / 32 + g) }
    }

    /// Scaled sums of both halves of group `g` of row `m`.
    ///
    /// # Safety
    /// The offsets and scales are readable.
    #[inline(always)]
    pub(super) unsafe fn half_sums(self, m: usize, g: usize) -> [f32; 2] {
        // SAFETY: the caller vouches for both planes.
        let (coarse, fine) = unsafe { (self.coarse.offsets(m, g), self.fine.offsets(m, g)) };
        // SAFETY: as above.
        let (scale, fine_scale) = unsafe { (self.coarse.scale(m, g), self.fine.scale(m, g)) };
        [
            half_sum((coarse[0], scale), (fine[0], fine_scale)),
            half_sum((coarse[1], scale), (fine[1], fine_scale)),
        ]
    }
}

/// Location of the sums: `at[m * stride + row]`, `rows` of them per activation row.
#[derive(Clone, Copy)]
pub(super) struct Sums {
    at: *mut f32,
    stride: usize,
    rows: usize,
    /// Start from zero instead of the stored values.
    pub(super) from_zero: bool,
}

impl Sums {
    /// Address of the sum of activation row `m` and weight row `row`.
    #[inline(always)]
    pub(super) fn place(self, m: usize, row: usize) -> *mut f32 {
        self.at.wrapping_add(m * self.stride + row)
    }

    /// How many of the `lanes` weight rows from `row` on are needed.
    #[inline(always)]
    pub(super) fn rows_from(self, row: usize, lanes: usize) -> usize {
        self.rows.saturating_sub(row).min(lanes)
    }

    /// The sums of activation rows from `m` on.
    #[inline(always)]
    fn below(self, m: usize) -> Self {
        Self { at: self.place(m, 0), ..self }
    }
}

/// Kernels of one quantised type on one instruction set.
///
/// All functions require of their caller that the processor has the instruction set. The strips' rows and the
/// activation rows hold the named groups. The places of `sums` for these activation rows are readable and writable.
pub(super) trait StripKernels {
    /// Weight rows per strip.
    const LANES: usize;
    /// Strips per tile, 1 or 2.
    const STRIPS: usize;
    /// Most activation rows per tile.
    const TILE: usize;
    /// Up to this many activation rows, decoding again for each strip is faster than panels.
    /// [`Self::multiply_in_place`] takes 1 to this many.
    const IN_PLACE: usize;
    /// Digits of a code ([`Codec::DIGITS`](super::codecs::Codec::DIGITS)).
    const DIGITS: usize;
    /// Decoded weights of a strip, at most [`PANEL_GROUPS`] groups, or half as many of two digits.
    type Panel;

    /// Decodes a piece.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn decode(piece: Piece, panel: &mut Self::Panel);

    /// Adds the products of `strips` panels and `n` activation rows (1 to [`Self::TILE`]) over `groups` groups.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn multiply(
        strips: usize,
        n: usize,
        panels: &[Self::Panel; 2],
        groups: usize,
        acts: Acts,
        sums: Sums,
    );

    /// `decode` and `multiply` of one strip; `panel` is scratch.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn multiply_in_place(n: usize, piece: Piece, panel: &mut Self::Panel, acts: Acts, sums: Sums);
}

/// Multiplies `rows` with all of `acts` into `out`. The caller has checked the shapes. `tail` is scratch for copies
/// of the last rows, when they do not fill a strip.
///
/// # Safety
/// The processor has the kernels' instruction set.
pub(super) unsafe fn multiply<K: StripKernels>(
    weight: &MatrixView<'_>,
    rows: Range<usize>,
    acts: &ActivationView<'_>,
    panels: &mut [K::Panel; 2],
    tail: &mut Vec<u8>,
    out: Output<'_>,
) {
    let in_place = acts.rows() <= K::IN_PLACE;
    let bytes = weight.rows_bytes(rows.start, rows.len());
    // Longer distances were not measured for panels.
    let distance = if in_place { ahead_bytes(K::LANES * weight.row_bytes()) } else { AHEAD_BYTES };
    if in_place {
        // The first rows come all at once: nothing before them asked for them.
        Ahead { at: bytes.as_ptr(), left: bytes.len() }.prefetch(1, 0, distance);
    }
    let tile_rows = if in_place { K::LANES } else { K::STRIPS * K::LANES };
    let mut at = 0;
    while at < rows.len() {
        let count = (rows.len() - at).min(tile_rows);
        let first = rows.start + at;
        let strips = [
            strip(weight, first, count.min(K::LANES), K::LANES, tail),
            // The first strip is then in place, so `tail` is free.
            match count.checked_sub(K::LANES) {
                Some(rest) if rest > 0 => strip(weight, first + K::LANES, rest, K::LANES, tail),
                _ => Strip::EMPTY,
            },
        ];
        let places = out.values[at..].as_mut_ptr();
        let sums = Sums { at: places, stride: out.stride, rows: count, from_zero: true };
        let (pieces, planes) = (Pieces::new(weight, bytes, distance, K::DIGITS), Acts::new(acts));
        // SAFETY: the caller vouches for the processor. `strip` returns whole rows of `cols` values. The planes of
        // `acts` hold `rows` rows of `stride` values, at least `cols` (compared by `matmul_rows`). `out` holds
        // `count` values from `at` on at its stride for each activation row (compared there too); kernels write at
        // most `count`.
        unsafe {
            if in_place {
                few::<K>(strips[0], pieces, acts.rows(), planes, &mut panels[0], sums);
            } else {
                many::<K>(strips, pieces, acts.rows(), planes, panels, sums);
            }
        }
        at += count;
    }
}

/// Rows `first .. first + count`: in place if they fill the strip, else copied and followed by rows of zeros.
fn strip(weight: &MatrixView<'_>, first: usize, count: usize, lanes: usize, tail: &mut Vec<u8>) -> Strip {
    let bytes = weight.rows_bytes(first, count);
    let stride = weight.row_bytes();
    if count == lanes {
        return Strip { base: bytes.as_ptr(), stride };
    }
    tail.clear();
    tail.extend_from_slice(bytes);
    tail.resize(lanes * stride, 0);
    Strip { base: tail.as_ptr(), stride }
}

/// The pieces of a matrix row: as few as panels allow, of nearly equal size.
#[derive(Clone, Copy)]
struct Pieces {
    /// The first row, and past the last one.
    start: *const u8,
    end: *const u8,
    block_groups: usize,
    block_bytes: usize,
    blocks: usize,
    count: usize,
    /// Prefetch distance in bytes.
    distance: usize,
}

impl Pieces {
    /// Those of a matrix of which these are the bytes of some rows, with codes of so many digits.
    fn new(weight: &MatrixView<'_>, rows: &[u8], distance: usize, digits: usize) -> Self {
        let (len, block_bytes) = (weight.dtype().block_len(), weight.dtype().block_bytes());
        let blocks = weight.cols() / len;
        let count = (weight.cols() / 32).div_ceil(PANEL_GROUPS / digits);
        let Range { start, end } = rows.as_ptr_range();
        Self { start, end, block_groups: len / 32, block_bytes, blocks, count, distance }
    }

    /// First block of piece `index`.
    #[inline(always)]
    fn block(self, index: usize) -> usize {
        index * self.blocks / self.count
    }

    /// Piece `index` of a strip of `lanes` rows.
    #[inline(always)]
    fn piece(self, strip: Strip, index: usize, lanes: usize) -> Piece {
        let (first, end) = (self.block(index), self.block(index + 1));
        let ahead = strip.base.wrapping_add(self.distance + lanes * first * self.block_bytes);
        // Nothing comes after a strip that was copied, whose address says nothing.
        let inside = (self.start..self.end).contains(&ahead);
        Piece {
            strip,
            first: first * self.block_groups,
            groups: (end - first) * self.block_groups,
            ahead: Ahead { at: ahead, left: if inside { self.end.addr() - ahead.addr() } else { 0 } },
        }
    }
}

/// Multiplies one strip with `n` activation rows, at most [`StripKernels::IN_PLACE`].
///
/// # Safety
/// See [`StripKernels`].
unsafe fn few<K: StripKernels>(
    strip: Strip,
    pieces: Pieces,
    n: usize,
    acts: Acts,
    panel: &mut K::Panel,
    mut sums: Sums,
) {
    for index in 0..pieces.count {
        let piece = pieces.piece(strip, index, K::LANES);
        // SAFETY: the caller's promise, for the groups of the piece.
        unsafe { K::multiply_in_place(n, piece, panel, acts.from(0, piece.first), sums) };
        sums.from_zero = false;
    }
}

/// Multiplies two strips (the second may be empty) with any number of activation rows.
///
/// # Safety
/// See [`StripKernels`].
unsafe fn many<K: StripKernels>(
    strips: [Strip; 2],
    pieces: Pieces,
    rows: usize,
    acts: Acts,
    panels: &mut [K::Panel; 2],
    mut sums: Sums,
) {
    let used = if sums.rows > K::LANES { 2 } else { 1 };
    for index in 0..pieces.count {
        let piece = pieces.piece(strips[0], index, K::LANES);
        for (strip, panel) in strips.into_iter().zip(panels.iter_mut()).take(used) {
            // SAFETY: the caller's promise, for the groups of the piece.
            unsafe { K::decode(pieces.piece(strip, index, K::LANES), panel) };
        }
        for m in (0..rows).step_by(K::TILE) {
            let n = (rows - m).min(K::TILE);
            let acts = acts.from(m, piece.first);
            // SAFETY: the caller's promise, for activation rows `m .. m + n`.
            unsafe { K::multiply(used, n, panels, piece.groups, acts, sums.below(m)) };
        }
        sums.from_zero = false;
    }
}
