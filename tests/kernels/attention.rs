//! Attention over KV pages: few rows with their tokens split over workgroups, and many rows in tiles.

mod prefill;

use half::f16;
use rocmforge::backend::hip::kernels::Kernel;
use rocmforge::backend::hip::kernels::ops::{AttnDecode, AttnPrefill};
use rocmforge::backend::hip::{DevicePtr, Grid};

use self::prefill::{check_prefill, prefill};
use crate::attending::{CAP, CODED_DECODES, Cut, DECODES, Rows, Scores, is_coarse, scale, set_far, threads};
use crate::forms::{A8, X16};
use crate::pages::{Cache, Element, Heads};
use crate::random::Random;
use crate::rig::{Rig, rig};

/// f32 arithmetic: a score sums up to 256 products of about 1, in parts of 8, with an error below 5e-6. A weight has
/// that error too, and so does a sum of weighted values, relative to the sum of their magnitudes.
const F32_BOUND: f64 = 2e-5;
/// f16 queries and weights on matrix units: each product is off by up to 2^-11, in random directions.
const F16_BOUND: f64 = 4e-3;

/// Added to either bound for scores of up to 256, in units of log2: sums of up to 128 products round by 2^-17 each
/// time.
const FAR_BOUND: f64 = 1e-3;
/// In place of both for codes on matrix units. A key of 16 is a product that f16 rounds by 2^-12 of itself, and so is the query. So a
/// score of 256 moves by 2^-3, and its weight by a twelfth.
const CODED_FAR_BOUND: f64 = 0.09;

/// One run of decode attention; returns f32 results by row of the step.
struct Decode<'a> {
    kernel: Kernel<AttnDecode>,
    at_once: usize,
    rows: &'a Rows,
    /// The rows to run; all if `None`.
    chosen: Option<Vec<u32>>,
    /// Splits beyond the needed ones.
    spare: usize,
    /// Splits of a workgroup.
    each: usize,
    /// Most splits of what a row sees, on vector units.
    splits_max: usize,
}

impl Decode<'_> {
    fn cut(&self) -> Cut {
        if is_coarse(self.kernel) { Cut::Coarse } else { Cut::AtMost(self.splits_max) }
    }

    fn run<E: Element>(&self, rig: &Rig, cache: &mut Cache<E>, quantised: bool) -> Vec<f32> {
        let (heads, rows) = (self.rows.heads, self.rows.len());
        let (layer_offset, table_stride) = (cache.layer_offset(), cache.stride as u32);
        let device = cache.upload(rig);
        let splits = self.spare + (0..rows).map(|row| self.rows.splits(row, self.cut())).max().unwrap();
        let groups = splits.div_ceil(self.each);
        let splits = groups * self.each;
        let count = self.chosen.as_ref().map_or(rows, Vec::len);
        let blocks = heads.kv * heads.group().div_ceil(self.at_once);
        let chosen = self.chosen.as_ref().map(|chosen| rig.upload(chosen));
        let inputs =
            (rig.upload(&self.rows.q), rig.upload(&self.rows.positions), rig.upload(&self.rows.sequences));
        let part_values = rig.output::<f32>(count * heads.q * splits * heads.dim);
        let part_stats = rig.output::<f32>(count * heads.q * splits * 2);
        let counters = rig.upload(&vec![0u32; count * blocks]);
        let sinks = self.rows.upload_sinks(rig);
        let padded = heads.cols().next_multiple_of(256);
        let (out, a8) = (rig.output::<f32>(rows * heads.cols()), A8::new(rig, rows, padded));
        let writes_halves = E::WRITES_HALVES && heads.dim.is_multiple_of(4);
        let x16 = X16::both(rig, rows, heads.cols());
        let mut arguments = AttnDecode {
            q: inputs.0.ptr(),
            rows: chosen.as_ref().map_or(DevicePtr::NULL, |b| b.ptr()),
            positions: inputs.1.ptr(),
            row_seq: inputs.2.ptr(),
            page_tables: device.tables.ptr(),
            page_base: device.bases.ptr(),
            part_values: part_values.ptr(),
            part_stats: part_stats.ptr(),
            counters: counters.ptr(),
            out: out.ptr(),
            codes: if quantised { a8.codes.ptr() } else { DevicePtr::NULL },
            scales: a8.scales.ptr(),
            sums: a8.sums.ptr(),
            halves: DevicePtr::NULL,
            row_scales: DevicePtr::NULL,
            sinks: sinks.as_ref().map_or(DevicePtr::NULL, |sinks| sinks.ptr()),
            layer_offset,
            scale: scale(heads),
            cap: self.rows.cap * std::f32::consts::LOG2_E,
            n_heads: heads.q as u32,
            n_kv_heads: heads.kv as u32,
            head_dim: heads.dim as u32,
            table_stride,
            padded: padded as u32,
            window: self.rows.window as u32,
            tiled: 0,
            each: self.each as u32,
            splits_max: self.splits_max as u32,
            qkv: DevicePtr::NULL,
            q_norm: DevicePtr::NULL,
            k_norm: DevicePtr::NULL,
            angles: DevicePtr::NULL,
            eps: 0.0,
            rope_dims: 0,
            pairs_by_halves: 0,
        };
        let grid = Grid::xyz(blocks as u32, groups as u32, count as u32);
        // Launches twice: the arrival counter must be reset for the next launch.
        for (halves, tiled) in &x16 {
            if writes_halves {
                let to = (halves.values.ptr(), halves.scales.ptr());
                (arguments.halves, arguments.row_scales, arguments.tiled) = (to.0, to.1, *tiled);
            }
            rig.device
                .launch(&rig.stream, self.kernel, grid.threads(threads(self.kernel)), &arguments)
                .unwrap();
        }
        assert!(rig.download::<u32>(&counters).iter().all(|&c| c == 0));
        self.check_splits(&rig.download(&part_stats), splits);
        let got = rig.download::<f32>(&out);
        if self.chosen.is_none() && quantised {
            let want: Vec<f64> = got.iter().map(|&v| f64::from(v)).collect();
            a8.check(rig, &want, heads.cols());
        }
        if self.chosen.is_none() && writes_halves {
            let want: Vec<f64> = got.iter().map(|&v| f64::from(v)).collect();
            x16.iter().for_each(|(halves, _)| halves.check_unscaled(rig, &want, heads.cols()));
        }
        got
    }
}

impl Decode<'_> {
    /// Each row was split as splits.h says: each of its splits wrote statistics, no other did, and a row of one split
    /// wrote none.
    fn check_splits(&self, stats: &[f32], room: usize) {
        let all: Vec<u32> = (0..self.rows.len() as u32).collect();
        let rows = self.chosen.as_ref().unwrap_or(&all);
        for (&row, stats) in rows.iter().zip(stats.chunks_exact(self.rows.heads.q * room * 2)) {
            let is_padding = self.rows.sequences[row as usize] == u32::MAX;
            let count = if is_padding { 1 } else { self.rows.splits(row as usize, self.cut()) };
            let left = if count == 1 { 0 } else { count };
            for (i, split) in stats.chunks_exact(2).enumerate() {
                assert_eq!(!split[0].is_nan(), i % room < left, "row {row}: split {}", i % room);
            }
        }
    }
}

fn check_decode<E: Element>(
    random: &mut Random,
    rig: &Rig,
    (kernel, at_once): (Kernel<AttnDecode>, usize),
    heads: Heads,
    lengths: &[usize],
    window: usize,
    scores: Scores,
) {
    if !rig.device.has(kernel) {
        return;
    }
    let mut cache = Cache::<E>::new(random, heads, lengths);
    let mut at = vec![(u32::MAX, 5)];
    for (sequence, &length) in lengths.iter().enumerate() {
        cache.fill(random, sequence, length);
        at.push((sequence as u32, length as u32 - 1));
    }
    let mut rows = Rows::new(random, heads, &at);
    rows.window = window;
    let mut bound = F32_BOUND;
    if scores == Scores::Far {
        set_far(&mut cache, lengths);
        rows.spread();
        bound += FAR_BOUND;
    }
    if scores == Scores::Sinks {
        rows.add_sinks(random);
    }
    if scores == Scores::Capped {
        rows.cap = CAP;
    }
    rows.forget_unseen(&mut cache);
    let whole = |heads_of_block: usize| (heads_of_block * heads.dim).is_multiple_of(32);
    let quantised = whole(heads.group()) && whole(at_once);
    let decode = Decode { kernel, at_once, rows: &rows, chosen: None, spare: 0, each: 1, splits_max: 127 };
    let got = decode.run(rig, &mut cache, quantised);
    rows.check(&cache, &got, bound);
    let same = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits());
    // Workgroups that take several splits give the same bits.
    for each in [2, 4, 64] {
        let several = Decode { each, chosen: None, ..decode }.run(rig, &mut cache, false);
        assert!(same(&got, &several), "{heads:?}, {each} splits each");
    }
    // Fewer and longer splits than the rows' lengths ask for, which one workgroup takes.
    let longer: &[usize] = if is_coarse(kernel) { &[] } else { &[1, 2, 5] };
    for &splits_max in longer {
        let longer =
            Decode { splits_max, each: splits_max, chosen: None, ..decode }.run(rig, &mut cache, false);
        rows.check(&cache, &longer, bound);
    }
    // One row alone in a larger grid gives the same bits.
    let last = rows.len() - 1;
    let decode = Decode { chosen: Some(vec![last as u32]), spare: 2, ..decode };
    let alone = decode.run(rig, &mut cache, false);
    let cols = heads.cols();
    assert!(same(&got[last * cols..], &alone[last * cols..]), "{heads:?}");
    assert!(alone[..last * cols].iter().all(|v| v.is_nan()), "a row outside the launch was written");
}

#[test]
fn decode_is_that_of_f64_for_heads_of_64_and_128() {
    let Some(rig) = rig() else { return };
    let random = &mut Random::new();
    for (kernel, heads, lengths) in DECODES {
        check_decode::<f16>(random, rig, kernel, heads, lengths, 0, Scores::Near);
    }
}

/// With windows, far scores, sinks and caps.
#[test]
fn decode_of_codes_is_that_of_f64() {
    let Some(rig) = rig() else { return };
    let random = &mut Random::new();
    for (i, (kernel, heads, lengths)) in CODED_DECODES.into_iter().enumerate() {
        check_decode::<i8>(random, rig, kernel, heads, lengths, 0, Scores::Near);
        let scores = [Scores::Far, Scores::Sinks, Scores::Capped][i % 3];
        check_decode::<i8>(random, rig, kernel, heads, lengths, [40, 65, 0][i / 3 % 3], scores);
    }
}

#[test]
fn decode_is_that_of_f64_for_heads_of_any_size() {
    let Some(rig) = rig() else { return };
    let random = &mut Random::new();
    for dim in [2, 8, 16, 20, 80, 96, 128, 256] {
        for (q, kv, at_once) in [(2, 2, 1), (6, 1, 4)] {
            let heads = Heads { q, kv, dim };
            let half = [AttnDecode::attn_decode_f16_any_1, AttnDecode::attn_decode_f16_any_4][at_once / 4];
            let single = [AttnDecode::attn_decode_f32_any_1, AttnDecode::attn_decode_f32_any_4][at_once / 4];
            check_decode::<f16>(random, rig, (half, at_once), heads, &[1, 33, 70], 0, Scores::Near);
            check_decode::<f32>(random, rig, (single, at_once), heads, &[31, 100], 0, Scores::Near);
        }
    }
}

/// More tokens than 127 splits of 64 or 256 hold: splits grow, since a workgroup has room for the weights of 128.
#[test]
fn splits_of_many_tokens_are_longer() {
    let Some(rig) = rig() else { return };
    let heads = Heads { q: 1, kv: 1, dim: 8 };
    let kernel = (AttnDecode::attn_decode_f16_any_1, 1);
    check_decode::<f16>(&mut Random::new(), rig, kernel, heads, &[1024, 4096, 4097, 33_000], 0, Scores::Near);
}

/// Each query subtracts its own running maximum score; without that, exponentials overflow or underflow f32.
#[test]
fn scores_far_from_zero_and_from_each_other_are_weighed() {
    let Some(rig) = rig() else { return };
    let random = &mut Random::new();
    for (kernel, at_once, q, dim) in [
        (AttnDecode::attn_decode_f16_64_1, 1, 2, 64),
        (AttnDecode::attn_decode_f16_64_2, 2, 2, 64),
        (AttnDecode::attn_decode_f16_64_4, 4, 4, 64),
        (AttnDecode::attn_decode_f16_64_8, 8, 8, 64),
        (AttnDecode::attn_decode_f16_128_1, 1, 2, 128),
        (AttnDecode::attn_decode_f16_128_2, 2, 2, 128),
        (AttnDecode::attn_decode_f16_128_4, 4, 4, 128),
        (AttnDecode::attn_decode_f16_128_8, 8, 8, 128),
        (AttnDecode::attn_decode_matrix_64, 8, 3, 64),
        (AttnDecode::attn_decode_matrix_128, 8, 8, 128),
        (AttnDecode::attn_decode_f16_any_1, 1, 2, 80),
        (AttnDecode::attn_decode_f16_any_4, 4, 4, 80),
    ] {
        let heads = Heads { q, kv: 1, dim };
        check_decode::<f16>(random, rig, (kernel, at_once), heads, &[40, 150], 0, Scores::Far);
    }
    for (kernel, dim, bound) in [
        (AttnPrefill::attn_prefill_f16_64, 64, F16_BOUND),
        (AttnPrefill::attn_prefill_f16_128, 128, F16_BOUND),
        (AttnPrefill::attn_prefill_f16_256, 256, F16_BOUND),
        (AttnPrefill::attn_prefill_wide_f16_64, 64, F16_BOUND),
        (AttnPrefill::attn_prefill_wide_f16_128, 128, F16_BOUND),
        (AttnPrefill::attn_prefill_f16_any, 64, F32_BOUND),
    ] {
        let heads = Heads { q: 2, kv: 1, dim };
        check_prefill::<f16>(random, rig, (kernel, bound), heads, &[(0, 40), (30, 41)], 0, Scores::Far);
    }
}

/// A sink takes its share of a head's weights, once: whether the head's tokens are one split, many, or shared by workgroups.
#[test]
fn sinks_take_their_share_of_a_head() {
    check_variants(Scores::Sinks);
}

#[test]
fn capped_scores_are_those_of_f64() {
    check_variants(Scores::Capped);
}

fn check_variants(scores: Scores) {
    let Some(rig) = rig() else { return };
    let random = &mut Random::new();
    for (kernel, at_once, q, kv, dim) in [
        (AttnDecode::attn_decode_f16_64_8, 8, 14, 2, 64),
        (AttnDecode::attn_decode_f16_128_2, 2, 4, 2, 128),
        (AttnDecode::attn_decode_matrix_64, 8, 20, 2, 64),
        (AttnDecode::attn_decode_matrix_128, 8, 4, 2, 128),
        (AttnDecode::attn_decode_f16_any_4, 4, 6, 2, 96),
    ] {
        for window in [0, 40] {
            let heads = Heads { q, kv, dim };
            check_decode::<f16>(random, rig, (kernel, at_once), heads, &[1, 64, 321], window, scores);
        }
    }
    for (kernel, q, kv, dim, bound) in [
        (AttnPrefill::attn_prefill_f16_64, 9, 3, 64, F16_BOUND),
        (AttnPrefill::attn_prefill_f16_128, 8, 2, 128, F16_BOUND),
        (AttnPrefill::attn_prefill_f16_256, 4, 2, 256, F16_BOUND),
        (AttnPrefill::attn_prefill_wide_f16_64, 9, 3, 64, F16_BOUND),
        (AttnPrefill::attn_prefill_wide_f16_128, 8, 2, 128, F16_BOUND),
        (AttnPrefill::attn_prefill_f16_any, 4, 2, 20, F32_BOUND),
    ] {
        let heads = Heads { q, kv, dim };
        for window in [0, 40] {
            check_prefill::<f16>(random, rig, (kernel, bound), heads, &[(0, 70), (90, 40)], window, scores);
        }
    }
}

/// Windows shorter than a page, of one page, over several splits, and longer than the sequence. Rows that see all their
/// tokens and rows that see only the last ones. Tokens that no row sees are erased.
#[test]
fn rows_see_the_last_tokens_of_their_window() {
    let Some(rig) = rig() else { return };
    let random = &mut Random::new();
    for (kernel, at_once, q, kv, dim) in [
        (AttnDecode::attn_decode_f16_64_1, 1, 2, 2, 64),
        (AttnDecode::attn_decode_f16_64_2, 2, 2, 1, 64),
        (AttnDecode::attn_decode_f16_64_4, 4, 6, 2, 64),
        (AttnDecode::attn_decode_f16_64_8, 8, 7, 1, 64),
        (AttnDecode::attn_decode_f16_128_1, 1, 1, 1, 128),
        (AttnDecode::attn_decode_f16_128_2, 2, 2, 1, 128),
        (AttnDecode::attn_decode_f16_128_4, 4, 4, 1, 128),
        (AttnDecode::attn_decode_f16_128_8, 8, 8, 1, 128),
        (AttnDecode::attn_decode_matrix_64, 8, 7, 1, 64),
        (AttnDecode::attn_decode_matrix_128, 8, 5, 1, 128),
        (AttnDecode::attn_decode_f16_any_1, 1, 2, 2, 20),
        (AttnDecode::attn_decode_f16_any_4, 4, 3, 1, 96),
    ] {
        for window in [1, 17, 32, 65, 150, 1 << 31] {
            let heads = Heads { q, kv, dim };
            check_decode::<f16>(
                random,
                rig,
                (kernel, at_once),
                heads,
                &[16, 64, 190, 321],
                window,
                Scores::Near,
            );
        }
    }
    for (kernel, at_once, q) in
        [(AttnDecode::attn_decode_f32_any_1, 1, 1), (AttnDecode::attn_decode_f32_any_4, 4, 4)]
    {
        for window in [3, 64, 127] {
            let heads = Heads { q, kv: 1, dim: 32 };
            check_decode::<f32>(random, rig, (kernel, at_once), heads, &[2, 128, 200], window, Scores::Near);
        }
    }
    // Sequences of which the window is a small part.
    let heads = Heads { q: 1, kv: 1, dim: 8 };
    let kernel = (AttnDecode::attn_decode_f16_any_1, 1);
    for window in [40, 1000, 4000] {
        check_decode::<f16>(random, rig, kernel, heads, &[1025, 4096, 5000, 33_000], window, Scores::Near);
        let (kernel, heads) = ((AttnDecode::attn_decode_matrix_64, 8), Heads { q: 2, kv: 1, dim: 64 });
        check_decode::<f16>(random, rig, kernel, heads, &[1025, 4097, 5000], window, Scores::Near);
    }
}

/// A window that holds all tokens changes no bit.
#[test]
fn a_window_that_nothing_lies_before_is_none() {
    let Some(rig) = rig() else { return };
    let random = &mut Random::new();
    let heads = Heads { q: 4, kv: 2, dim: 64 };
    let mut cache = Cache::<f16>::new(random, heads, &[150]);
    cache.fill(random, 0, 150);
    let at: Vec<(u32, u32)> = (100..150).map(|position| (0, position)).collect();
    let mut rows = Rows::new(random, heads, &at);
    let mut all = Vec::new();
    for window in [0, 150, u32::MAX as usize] {
        rows.window = window;
        let (kernel, at_once) = (AttnDecode::attn_decode_f16_64_2, 2);
        let decode =
            Decode { kernel, at_once, rows: &rows, chosen: None, spare: 0, each: 1, splits_max: 127 };
        let decoded = decode.run(rig, &mut cache, true);
        let tiled = prefill(rig, AttnPrefill::attn_prefill_f16_64, &rows, &mut cache, 32, 1, true);
        all.push([decoded, tiled].concat().iter().map(|v| v.to_bits()).collect::<Vec<u32>>());
    }
    assert!(all[1] == all[0] && all[2] == all[0]);
}
