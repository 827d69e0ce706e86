//! Prefill attention: many rows in tiles.

use half::f16;
use rocmforge::backend::hip::DevicePtr;
use rocmforge::backend::hip::kernels::Kernel;
use rocmforge::backend::hip::kernels::ops::{AttnDecode, AttnPrefill};

use super::{CODED_FAR_BOUND, Decode, F16_BOUND, F32_BOUND, FAR_BOUND};
use crate::attending::{CAP, Rows, Scores, TILE_QUERIES, Tiled, WIDE_TILE_QUERIES, scale, set_far};
use crate::pages::{Cache, Element, Heads};
use crate::random::Random;
use crate::rig::{Rig, rig};

/// Most queries of a tile.
fn queries(kernel: Kernel<AttnPrefill>) -> u32 {
    if kernel.name().contains("_wide_") { WIDE_TILE_QUERIES } else { TILE_QUERIES }
}

/// Runs prefill over runs of rows, one sequence each, given as first position and count. Returns f32 results.
pub fn prefill<E: Element>(
    rig: &Rig,
    kernel: Kernel<AttnPrefill>,
    rows: &Rows,
    cache: &mut Cache<E>,
    tile_rows: usize,
    shares: u32,
    halves: bool,
) -> Vec<f32> {
    let heads = rows.heads;
    let tiled = Tiled::new(rig, rows, queries(kernel), tile_rows, shares, halves);
    let (layer_offset, table_stride) = (cache.layer_offset(), cache.stride as u32);
    let device = cache.upload(rig);
    let inputs = (rig.upload(&rows.q), rig.upload(&rows.positions), rig.upload(&rows.sequences));
    let sinks = rows.upload_sinks(rig);
    let arguments = AttnPrefill {
        q: inputs.0.ptr(),
        tiles: tiled.tiles.ptr(),
        positions: inputs.1.ptr(),
        row_seq: inputs.2.ptr(),
        page_tables: device.tables.ptr(),
        page_base: device.bases.ptr(),
        out: tiled.out.ptr(),
        out16: tiled.out16(),
        row_scales: tiled.x16.scales.ptr(),
        part_values: tiled.values.ptr(),
        part_stats: tiled.stats.ptr(),
        counters: tiled.counters.ptr(),
        sinks: sinks.as_ref().map_or(DevicePtr::NULL, |sinks| sinks.ptr()),
        layer_offset,
        scale: scale(heads),
        cap: rows.cap * std::f32::consts::LOG2_E,
        n_heads: heads.q as u32,
        n_kv_heads: heads.kv as u32,
        head_dim: heads.dim as u32,
        table_stride,
        window: rows.window as u32,
    };
    rig.device.launch(&rig.stream, kernel, tiled.grid, &arguments).unwrap();
    tiled.results(rig, heads)
}

pub fn check_prefill<E: Element>(
    random: &mut Random,
    rig: &Rig,
    (kernel, mut bound): (Kernel<AttnPrefill>, f64),
    heads: Heads,
    runs: &[(usize, usize)],
    window: usize,
    scores: Scores,
) {
    if !rig.device.has(kernel) {
        return;
    }
    let lengths: Vec<usize> = runs.iter().map(|(first, count)| first + count).collect();
    let mut cache = Cache::<E>::new(random, heads, &lengths);
    let mut at = Vec::new();
    for (sequence, &(first, count)) in runs.iter().enumerate() {
        cache.fill(random, sequence, first + count);
        at.extend((first..first + count).map(|position| (sequence as u32, position as u32)));
    }
    let mut rows = Rows::new(random, heads, &at);
    rows.window = window;
    if scores == Scores::Far {
        set_far(&mut cache, &lengths);
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
    let got = prefill(
        rig,
        kernel,
        &rows,
        &mut cache,
        queries(kernel) as usize / heads.group(),
        1,
        E::WRITES_HALVES,
    );
    rows.check(&cache, &got, bound);
    // Blocks that share a tile's pages; with the most of them, some have none.
    for shares in [3, 32] {
        let shared = prefill(
            rig,
            kernel,
            &rows,
            &mut cache,
            queries(kernel) as usize / heads.group(),
            shares,
            E::WRITES_HALVES,
        );
        rows.check(&cache, &shared, bound);
    }
    // The same rows in smaller tiles give the same bits.
    let small = prefill(rig, kernel, &rows, &mut cache, 3, 1, false);
    assert!(got.iter().zip(&small).all(|(a, b)| a.to_bits() == b.to_bits()), "{heads:?}");
}

#[test]
fn prefill_is_that_of_f64_within_f16() {
    let Some(rig) = rig() else { return };
    let random = &mut Random::new();
    for (kernel, q, kv, dim, runs) in [
        (AttnPrefill::attn_prefill_f16_64, 9, 3, 64, vec![(0, 70), (5, 17), (33, 1)]),
        (AttnPrefill::attn_prefill_f16_80, 6, 2, 80, vec![(0, 41), (31, 2)]),
        (AttnPrefill::attn_prefill_f16_96, 7, 1, 96, vec![(0, 33), (31, 2)]),
        (AttnPrefill::attn_prefill_f16_128, 8, 2, 128, vec![(0, 65), (64, 33)]),
        (AttnPrefill::attn_prefill_f16_128, 2, 2, 128, vec![(0, 130)]),
        (AttnPrefill::attn_prefill_f16_256, 8, 2, 256, vec![(0, 65), (64, 33)]),
        (AttnPrefill::attn_prefill_f16_256, 3, 1, 256, vec![(0, 40), (31, 2)]),
        (AttnPrefill::attn_prefill_wide_f16_64, 9, 3, 64, vec![(0, 70), (5, 17), (33, 1)]),
        (AttnPrefill::attn_prefill_wide_f16_64, 2, 2, 64, vec![(0, 200), (300, 20)]),
        (AttnPrefill::attn_prefill_wide_f16_128, 8, 2, 128, vec![(0, 65), (64, 33)]),
        (AttnPrefill::attn_prefill_wide_f16_128, 2, 2, 128, vec![(0, 130), (450, 4)]),
    ] {
        check_prefill::<f16>(random, rig, (kernel, F16_BOUND), Heads { q, kv, dim }, &runs, 0, Scores::Near);
    }
}

#[test]
fn prefill_of_codes_is_that_of_f64() {
    let Some(rig) = rig() else { return };
    let random = &mut Random::new();
    for (kernel, bound, q, kv, dim, runs) in [
        (AttnPrefill::attn_prefill_i8_64, F16_BOUND, 9, 3, 64, vec![(0, 70), (5, 17), (33, 1)]),
        (AttnPrefill::attn_prefill_i8_96, F16_BOUND, 7, 1, 96, vec![(0, 33), (31, 2)]),
        (AttnPrefill::attn_prefill_i8_128, F16_BOUND, 8, 2, 128, vec![(0, 65), (64, 33)]),
        (AttnPrefill::attn_prefill_i8_256, F16_BOUND, 3, 1, 256, vec![(0, 40), (31, 2)]),
        (AttnPrefill::attn_prefill_i8_any, F32_BOUND, 6, 2, 32, vec![(0, 40), (31, 2)]),
        (AttnPrefill::attn_prefill_i8_any, F32_BOUND, 2, 2, 256, vec![(30, 9), (0, 1)]),
    ] {
        let heads = Heads { q, kv, dim };
        for (window, scores) in
            [(0, Scores::Near), (40, Scores::Sinks), (0, Scores::Far), (7, Scores::Capped)]
        {
            let far = scores == Scores::Far && bound == F16_BOUND;
            let bound = if far { CODED_FAR_BOUND } else { bound };
            check_prefill::<i8>(random, rig, (kernel, bound), heads, &runs, window, scores);
        }
    }
}

#[test]
fn prefill_without_matrix_unit_is_that_of_f64() {
    let Some(rig) = rig() else { return };
    let random = &mut Random::new();
    for dim in [2, 16, 20, 64, 128, 256] {
        for (q, kv) in [(6, 2), (2, 2)] {
            let heads = Heads { q, kv, dim };
            let (half, single) = (AttnPrefill::attn_prefill_f16_any, AttnPrefill::attn_prefill_f32_any);
            check_prefill::<f16>(random, rig, (half, F32_BOUND), heads, &[(0, 40), (31, 2)], 0, Scores::Near);
            check_prefill::<f32>(
                random,
                rig,
                (single, F32_BOUND),
                heads,
                &[(30, 9), (0, 1)],
                0,
                Scores::Near,
            );
        }
    }
}

#[test]
fn rows_of_a_tile_see_each_their_own_window() {
    let Some(rig) = rig() else { return };
    let random = &mut Random::new();
    for (kernel, q, kv, dim, bound) in [
        (AttnPrefill::attn_prefill_f16_64, 2, 2, 64, F16_BOUND),
        (AttnPrefill::attn_prefill_f16_64, 5, 1, 64, F16_BOUND),
        (AttnPrefill::attn_prefill_f16_80, 4, 2, 80, F16_BOUND),
        (AttnPrefill::attn_prefill_f16_96, 1, 1, 96, F16_BOUND),
        (AttnPrefill::attn_prefill_f16_128, 8, 2, 128, F16_BOUND),
        (AttnPrefill::attn_prefill_f16_256, 4, 2, 256, F16_BOUND),
        (AttnPrefill::attn_prefill_wide_f16_64, 5, 1, 64, F16_BOUND),
        (AttnPrefill::attn_prefill_wide_f16_128, 8, 2, 128, F16_BOUND),
        (AttnPrefill::attn_prefill_f16_any, 2, 2, 20, F32_BOUND),
        (AttnPrefill::attn_prefill_f16_any, 3, 1, 64, F32_BOUND),
    ] {
        for window in [1, 7, 32, 45, 100, 1 << 31] {
            let heads = Heads { q, kv, dim };
            let runs = [(0, 70), (90, 68), (201, 3)];
            check_prefill::<f16>(random, rig, (kernel, bound), heads, &runs, window, Scores::Near);
        }
    }
    let (kernel, heads) = (AttnPrefill::attn_prefill_f32_any, Heads { q: 2, kv: 1, dim: 32 });
    for window in [5, 40] {
        check_prefill::<f32>(
            random,
            rig,
            (kernel, F32_BOUND),
            heads,
            &[(0, 40), (61, 20)],
            window,
            Scores::Near,
        );
    }
}

/// Rows that see later tokens too have the position of their text's end, all the same.
#[test]
fn rows_of_a_text_see_all_of_it() {
    let Some(rig) = rig() else { return };
    let random = &mut Random::new();
    let lengths = [90, 33, 130];
    for (kernel, bound, q, kv, dim) in [
        (AttnPrefill::attn_prefill_f16_64, F16_BOUND, 3, 3, 64),
        (AttnPrefill::attn_prefill_f16_128, F16_BOUND, 4, 2, 128),
        (AttnPrefill::attn_prefill_wide_f16_64, F16_BOUND, 3, 3, 64),
        (AttnPrefill::attn_prefill_wide_f16_128, F16_BOUND, 4, 2, 128),
        (AttnPrefill::attn_prefill_f16_any, F32_BOUND, 2, 2, 32),
    ] {
        if !rig.device.has(kernel) {
            continue;
        }
        let heads = Heads { q, kv, dim };
        let mut cache = Cache::<f16>::new(random, heads, &lengths);
        let mut at = Vec::new();
        for (sequence, length) in (0..).zip(lengths) {
            cache.fill(random, sequence, length);
            at.extend((0..length).map(|_| (sequence as u32, length as u32 - 1)));
        }
        let rows = Rows::new(random, heads, &at);
        for shares in [1, 3] {
            let got = prefill(
                rig,
                kernel,
                &rows,
                &mut cache,
                queries(kernel) as usize / heads.group(),
                shares,
                true,
            );
            rows.check(&cache, &got, bound);
        }
        let (kernel, at_once) = (AttnDecode::attn_decode_f16_any_1, 1);
        let decode =
            Decode { kernel, at_once, rows: &rows, chosen: None, spare: 0, each: 1, splits_max: 127 };
        let got = decode.run(rig, &mut cache, false);
        rows.check(&cache, &got, F32_BOUND);
    }
}
