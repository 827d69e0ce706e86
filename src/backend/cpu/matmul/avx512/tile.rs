//! Products of decoded weights and activation rows, 16 weight rows per vector.

#![allow(clippy::needless_range_loop)] // tiles index several arrays by the same row

use std::arch::x86_64::*;

use super::decode::{Codec, Lanes, PANEL_GROUPS, Scales, Strip};
use crate::backend::cpu::quant::GroupKind;

/// 64 bytes: 4 codes of each of 16 rows.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(super) struct Quad([u8; 64]);

/// Decoded weights of 16 rows, up to [`PANEL_GROUPS`] groups.
#[derive(Clone, Debug)]
pub(super) struct Panel {
    codes: [[Quad; 8]; PANEL_GROUPS],
    pub(super) scales: Scales,
}

impl Panel {
    pub(super) const ZERO: Self = Self { codes: [[Quad([0; 64]); 8]; PANEL_GROUPS], scales: Scales::ZERO };
}

/// Activation rows as they are read: planes of row 0 at the group where the panel starts, and the codes per row.
#[derive(Clone, Copy)]
pub(super) struct Acts {
    pub(super) codes: *const i8,
    pub(super) scales: *const f32,
    pub(super) scaled_sums: *const f32,
    pub(super) offsets: *const i32,
    pub(super) stride: usize,
}

impl Acts {
    /// The planes from row `m` and group `g` on.
    pub(super) fn at(self, m: usize, g: usize) -> Self {
        let k = m * self.stride + 32 * g;
        Self {
            codes: self.codes.wrapping_add(k),
            scales: self.scales.wrapping_add(k / 32),
            scaled_sums: self.scaled_sums.wrapping_add(k / 32),
            offsets: self.offsets.wrapping_add(k / 16),
            stride: self.stride,
        }
    }

    /// 4 codes in every lane.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn quad(self, m: usize, at: usize) -> __m512i {
        // SAFETY: the caller vouches for codes `at .. at + 4` of row `m`.
        _mm512_set1_epi32(unsafe {
            self.codes.wrapping_add(m * self.stride + at).cast::<i32>().read_unaligned()
        })
    }

    /// What the integer sum over part `part` of group `g` starts with: the correction of codes that are 128 too large.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn start<C: Codec>(self, m: usize, g: usize, part: usize) -> __m512i {
        let p = self.offsets.wrapping_add(m * self.stride / 16 + 2 * g);
        // SAFETY: the caller vouches for group `g` of row `m`: two offsets.
        let start = unsafe {
            match C::KIND {
                GroupKind::Affine => 0,
                GroupKind::Symmetric => *p + *p.add(1),
                GroupKind::SymmetricHalves => *p.add(part),
            }
        };
        _mm512_set1_epi32(start)
    }

    /// `acc + f32(dots) * activation scale * weight scale`, by the rule of `matmul`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn add_dots(self, m: usize, g: usize, dots: __m512i, scales: &Lanes, acc: __m512) -> __m512 {
        // SAFETY: the caller vouches for group `g` of row `m`; `Lanes` are 16 aligned floats.
        unsafe {
            let scale = _mm512_set1_ps(*self.scales.wrapping_add(m * self.stride / 32 + g));
            let scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(dots), scale);
            _mm512_fmadd_ps(scaled, _mm512_load_ps(scales.0.as_ptr()), acc)
        }
    }

    /// `acc + activation scaled sum * minimum`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn add_min(self, m: usize, g: usize, min: &Lanes, acc: __m512) -> __m512 {
        // SAFETY: as in `add_dots`.
        unsafe {
            let sum = _mm512_set1_ps(*self.scaled_sums.wrapping_add(m * self.stride / 32 + g));
            _mm512_fmadd_ps(sum, _mm512_load_ps(min.0.as_ptr()), acc)
        }
    }
}

/// Integer sums that a group takes: one per scale.
const fn parts<C: Codec>() -> usize {
    match C::KIND {
        GroupKind::SymmetricHalves => 2,
        GroupKind::Symmetric | GroupKind::Affine => 1,
    }
}

/// Decodes `groups` groups from `first` on of the strip's rows.
///
/// # Safety
/// The processor has the features; the rows hold those groups; `first` starts a block and a step, `groups` are whole
/// blocks and at most [`PANEL_GROUPS`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) unsafe fn decode<C: Codec>(strip: Strip, first: usize, groups: usize, panel: &mut Panel) {
    debug_assert!(groups <= PANEL_GROUPS && (32 * groups).is_multiple_of(C::BLOCK_LEN));
    // SAFETY: the caller's promise is this function's.
    unsafe { C::scales(strip, first, groups, &mut panel.scales) };
    for (step, codes) in panel.codes[..groups].chunks_exact_mut(C::STEP_GROUPS).enumerate() {
        let put = |g: usize, quad: usize, v| {
            // SAFETY: 64 aligned bytes.
            unsafe { _mm512_store_si512(codes[g][quad].0.as_mut_ptr().cast(), v) }
        };
        // SAFETY: as above.
        unsafe { C::codes(strip, first / C::STEP_GROUPS + step, put) };
    }
}

/// Where a tile's sums are: `at[m * stride + 16 w + row]`, rows of each 16 by mask.
#[derive(Clone, Copy)]
pub(super) struct Sums<const W: usize> {
    pub(super) at: *mut f32,
    pub(super) stride: usize,
    pub(super) masks: [u16; W],
    /// Start from zero instead of what is there.
    pub(super) from_zero: bool,
}

impl<const W: usize> Sums<W> {
    /// The sums of activation rows from `m` on.
    pub(super) fn below(self, m: usize) -> Self {
        Self { at: self.place(m, 0), ..self }
    }

    /// The sums of the first 16 weight rows alone.
    pub(super) fn narrow(self) -> Sums<1> {
        Sums { at: self.at, stride: self.stride, masks: [self.masks[0]], from_zero: self.from_zero }
    }

    fn place(self, m: usize, w: usize) -> *mut f32 {
        self.at.wrapping_add(m * self.stride + 16 * w)
    }
}

/// `W` panels times `N` activation rows: adds `groups` groups to the sums.
///
/// Registers: 2 W N sums (integer and float), W weights, 1 activation. W = 2, N = 6 fills the 32 there are.
///
/// # Safety
/// The processor has the features; `acts` holds `N` rows of `groups` groups; the masked places of `sums` may be
/// read and written.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) unsafe fn multiply<C: Codec, const W: usize, const N: usize>(
    panels: &[Panel; 2],
    groups: usize,
    acts: Acts,
    sums: Sums<W>,
) {
    let mut acc = [[_mm512_setzero_ps(); N]; W];
    if !sums.from_zero {
        for (w, acc) in acc.iter_mut().enumerate() {
            for (m, acc) in acc.iter_mut().enumerate() {
                // SAFETY: the caller vouches for the masked places.
                *acc = unsafe { _mm512_maskz_loadu_ps(sums.masks[w], sums.place(m, w)) };
            }
        }
    }
    for g in 0..groups.min(PANEL_GROUPS) {
        for part in 0..parts::<C>() {
            // One part at a time, so that its integer sums need no second set of registers.
            // SAFETY: the caller vouches for group `g` of `N` rows.
            acc = unsafe { add_part::<C, W, N>(panels, g, part, acts, acc) };
        }
        if matches!(C::KIND, GroupKind::Affine) {
            for m in 0..N {
                for w in 0..W {
                    // SAFETY: as above.
                    acc[w][m] = unsafe { acts.add_min(m, g, &panels[w].scales.mins[g], acc[w][m]) };
                }
            }
        }
    }
    for (w, acc) in acc.into_iter().enumerate() {
        for (m, acc) in acc.into_iter().enumerate() {
            // SAFETY: the caller vouches for the masked places.
            unsafe { _mm512_mask_storeu_ps(sums.place(m, w), sums.masks[w], acc) };
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn add_part<C: Codec, const W: usize, const N: usize>(
    panels: &[Panel; 2],
    g: usize,
    part: usize,
    acts: Acts,
    mut acc: [[__m512; N]; W],
) -> [[__m512; N]; W] {
    let mut dots = [[_mm512_setzero_si512(); N]; W];
    for m in 0..N {
        // SAFETY: the caller vouches for group `g` of row `m`.
        let start = unsafe { acts.start::<C>(m, g, part) };
        for dots in &mut dots {
            dots[m] = start;
        }
    }
    let quads = 8 / parts::<C>();
    for quad in quads * part..quads * (part + 1) {
        let mut weights = [_mm512_setzero_si512(); W];
        for (weights, panel) in weights.iter_mut().zip(panels) {
            // SAFETY: 64 aligned bytes.
            *weights = unsafe { _mm512_load_si512(panel.codes[g][quad].0.as_ptr().cast()) };
        }
        for m in 0..N {
            // SAFETY: the caller vouches for group `g` of row `m`.
            let x = unsafe { acts.quad(m, 32 * g + 4 * quad) };
            for w in 0..W {
                dots[w][m] = _mm512_dpbusd_epi32(dots[w][m], weights[w], x);
            }
        }
    }
    for m in 0..N {
        for w in 0..W {
            let scales = &panels[w].scales.scales[g][part];
            // SAFETY: as above.
            acc[w][m] = unsafe { acts.add_dots(m, g, dots[w][m], scales, acc[w][m]) };
        }
    }
    acc
}

/// As [`multiply`] for one strip, with the codes going from the file's bytes through registers: for so few activation
/// rows that a panel would cost more than it saves. `scales` are those of the `groups` groups from `first` on.
///
/// # Safety
/// As for [`decode`] and [`multiply`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) unsafe fn multiply_in_place<C: Codec, const N: usize>(
    strip: Strip,
    scales: &Scales,
    first: usize,
    groups: usize,
    acts: Acts,
    sums: Sums<1>,
) {
    let mut acc = [_mm512_setzero_ps(); N];
    if !sums.from_zero {
        for (m, acc) in acc.iter_mut().enumerate() {
            // SAFETY: the caller vouches for the masked places.
            *acc = unsafe { _mm512_maskz_loadu_ps(sums.masks[0], sums.place(m, 0)) };
        }
    }
    let groups = groups.min(PANEL_GROUPS);
    for step in 0..groups / C::STEP_GROUPS {
        let start = step * C::STEP_GROUPS;
        let mut dots = [[[_mm512_setzero_si512(); 2]; N]; 4];
        for (g, dots) in dots.iter_mut().enumerate().take(C::STEP_GROUPS) {
            for (m, dots) in dots.iter_mut().enumerate() {
                for (part, dots) in dots.iter_mut().enumerate().take(parts::<C>()) {
                    // SAFETY: the caller vouches for group `start + g` of row `m`.
                    *dots = unsafe { acts.start::<C>(m, start + g, part) };
                }
            }
        }
        let put = |g: usize, quad: usize, weights: __m512i| {
            let part = quad * parts::<C>() / 8;
            for (m, dots) in dots[g].iter_mut().enumerate() {
                // SAFETY: as above.
                let x = unsafe { acts.quad(m, 32 * (start + g) + 4 * quad) };
                dots[part] = _mm512_dpbusd_epi32(dots[part], weights, x);
            }
        };
        // SAFETY: the caller vouches for the rows' blocks.
        unsafe { C::codes(strip, first / C::STEP_GROUPS + step, put) };
        for (g, dots) in dots.iter().enumerate().take(C::STEP_GROUPS) {
            for (m, dots) in dots.iter().enumerate() {
                // SAFETY: as above.
                unsafe {
                    for (part, dots) in dots.iter().enumerate().take(parts::<C>()) {
                        acc[m] = acts.add_dots(m, start + g, *dots, &scales.scales[start + g][part], acc[m]);
                    }
                    if matches!(C::KIND, GroupKind::Affine) {
                        acc[m] = acts.add_min(m, start + g, &scales.mins[start + g], acc[m]);
                    }
                }
            }
        }
    }
    for (m, acc) in acc.into_iter().enumerate() {
        // SAFETY: the caller vouches for the masked places.
        unsafe { _mm512_mask_storeu_ps(sums.place(m, 0), sums.masks[0], acc) };
    }
}
