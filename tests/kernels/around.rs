//! Attention within a window that looks both ways, in tiles.

use half::f16;
use rocmforge::backend::hip::DevicePtr;
use rocmforge::backend::hip::kernels::Kernel;
use rocmforge::backend::hip::kernels::heads::AttnAround;
use rocmforge::program::alibi_slope;

use crate::attending::{CAP, Rows, Scores, TILE_QUERIES, Tiled, scale, set_far};
use crate::pages::{Cache, Element, Heads, Others, attend};
use crate::random::Random;
use crate::rig::{Rig, rig};

/// As of `attn_prefill`: f32 arithmetic, f16 queries and weights on matrix units, and what far scores add.
const F32_BOUND: f64 = 2e-5;
const F16_BOUND: f64 = 4e-3;
const FAR_BOUND: f64 = 1e-3;

/// Neighbouring rows of a text: the text's tokens, the first row, and the number of rows.
#[derive(Clone, Copy, Debug)]
struct Text {
    length: usize,
    first: usize,
    count: usize,
}

const fn text(length: usize, first: usize, count: usize) -> Text {
    Text { length, first, count }
}

/// Rows of some texts, their window, and pages in which no other token was written than those that they see.
struct Case<E> {
    rows: Rows,
    ends: Vec<u32>,
    cache: Cache<E>,
}

impl<E: Element> Case<E> {
    fn new(random: &mut Random, heads: Heads, texts: &[Text], window: usize, scores: Scores) -> Self {
        let lengths: Vec<usize> = texts.iter().map(|text| text.length).collect();
        let mut cache = Cache::new(random, heads, &lengths);
        let (mut at, mut ends) = (Vec::new(), Vec::new());
        let written = texts.iter().map(|text| (text.first + text.count + window / 2).min(text.length));
        let written: Vec<usize> = written.collect();
        for (sequence, text) in texts.iter().enumerate() {
            cache.fill(random, sequence, written[sequence]);
            at.extend((text.first..text.first + text.count).map(|row| (sequence as u32, row as u32)));
            ends.extend(std::iter::repeat_n(text.length as u32 - 1, text.count));
        }
        let mut rows = Rows::new(random, heads, &at);
        rows.window = window;
        match scores {
            Scores::Near => {}
            Scores::Far => {
                set_far(&mut cache, &written);
                rows.spread();
            }
            Scores::Sinks => rows.add_sinks(random),
            Scores::Capped => rows.cap = CAP,
            Scores::Falling => rows.falls = true,
        }
        for (sequence, text) in texts.iter().enumerate() {
            cache.forget(sequence, text.first.saturating_sub(window / 2));
        }
        Self { rows, ends, cache }
    }

    /// Launches in tiles of at most `tile_rows` rows, each of which `shares` workgroups share. Returns f32 results.
    fn run(&mut self, rig: &Rig, kernel: Kernel<AttnAround>, tile_rows: usize, shares: u32) -> Vec<f32> {
        let Self { rows, ends, cache } = self;
        let heads = rows.heads;
        let tiled = Tiled::new(rig, rows, TILE_QUERIES, tile_rows, shares, E::WRITES_HALVES);
        let (layer_offset, table_stride) = (cache.layer_offset(), cache.stride as u32);
        let device = cache.upload(rig);
        let [positions, ends, row_seq] =
            [&rows.positions, &*ends, &rows.sequences].map(|all| rig.upload(all));
        let q = rig.upload(&rows.q);
        let sinks = rows.upload_sinks(rig);
        let arguments = AttnAround {
            q: q.ptr(),
            tiles: tiled.tiles.ptr(),
            positions: positions.ptr(),
            ends: ends.ptr(),
            row_seq: row_seq.ptr(),
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
            falls: rows.falls.into(),
        };
        rig.device.launch(&rig.stream, kernel, tiled.grid, &arguments).unwrap();
        tiled.results(rig, heads)
    }

    /// Compares each row with f64 over the positions from `window / 2` before its own to as many after it, in its text.
    fn check(&self, got: &[f32], bound: f64) {
        let Self { rows, ends, cache } = self;
        let half = rows.window / 2;
        for (row, got) in got.chunks_exact(rows.heads.cols()).enumerate() {
            let (position, end) = (rows.positions[row] as usize, ends[row] as usize);
            let seen = (position.saturating_sub(half), (position + half).min(end));
            let q = &rows.q[row * rows.heads.cols()..][..rows.heads.cols()];
            let count = rows.heads.q as u32;
            let falls = rows.falls.then_some(0..count).into_iter().flatten();
            let slopes: Vec<f32> = falls.map(|head| alibi_slope(head, count)).collect();
            let others = Others { sinks: &rows.sinks, cap: rows.cap, slopes: &slopes, position };
            let wanted = attend(cache, rows.sequences[row] as usize, seen, q, &others);
            for (i, (&got, want)) in got.iter().zip(wanted).enumerate() {
                assert!(
                    (f64::from(got) - want.value).abs() <= want.size * bound + 1e-37,
                    "{:?} row {row} at {position} of {end}, window {}, value {i}: {got} instead of {}",
                    rows.heads,
                    rows.window,
                    want.value
                );
            }
        }
    }
}

fn check<E: Element>(
    random: &mut Random,
    rig: &Rig,
    (kernel, bound): (Kernel<AttnAround>, f64),
    heads: Heads,
    (texts, window, scores): (&[Text], usize, Scores),
) {
    let mut case = Case::<E>::new(random, heads, texts, window, scores);
    let bound = if scores == Scores::Far { bound + FAR_BOUND } else { bound };
    let most = TILE_QUERIES as usize / heads.group();
    let got = case.run(rig, kernel, most, 1);
    case.check(&got, bound);
    // Workgroups that share a tile's pages; with the most of them, some have none.
    for shares in [3, 32] {
        let shared = case.run(rig, kernel, most, shares);
        case.check(&shared, bound);
    }
    // The same rows in smaller tiles give the same bits.
    for rows in [1, 3] {
        let small = case.run(rig, kernel, rows.min(most), 1);
        assert!(got.iter().zip(&small).all(|(a, b)| a.to_bits() == b.to_bits()), "{heads:?}, {rows} rows");
    }
}

/// Whole texts, and rows within one that see neither its first tokens nor its last ones.
const TEXTS: [Text; 4] = [text(70, 0, 70), text(1, 0, 1), text(200, 90, 37), text(90, 60, 30)];

/// An odd window sees as many tokens before as after; the last is wider than any text.
const WINDOWS: [usize; 6] = [1, 2, 8, 33, 128, 1000];

#[test]
fn windows_both_ways_are_those_of_f64() {
    let Some(rig) = rig() else { return };
    let random = &mut Random::new();
    for window in WINDOWS {
        let heads = Heads { q: 6, kv: 2, dim: 64 };
        let kernel = (AttnAround::attn_around_f16_64, F16_BOUND);
        check::<f16>(random, rig, kernel, heads, (&TEXTS, window, Scores::Near));
        let heads = Heads { q: 3, kv: 3, dim: 20 };
        let kernel = (AttnAround::attn_around_f16_any, F32_BOUND);
        check::<f16>(random, rig, kernel, heads, (&TEXTS, window, Scores::Near));
        let kernel = (AttnAround::attn_around_f32_any, F32_BOUND);
        check::<f32>(random, rig, kernel, heads, (&TEXTS, window, Scores::Near));
    }
}

#[test]
fn windows_both_ways_take_heads_of_any_size() {
    let Some(rig) = rig() else { return };
    let random = &mut Random::new();
    let texts = [text(40, 0, 40), text(120, 70, 20)];
    for (q, kv, dim) in [(2, 2, 2), (1, 1, 64), (3, 1, 256), (64, 1, 16), (33, 1, 8)] {
        let heads = Heads { q, kv, dim };
        let [half, single] = [AttnAround::attn_around_f16_any, AttnAround::attn_around_f32_any];
        check::<f16>(random, rig, (half, F32_BOUND), heads, (&texts, 24, Scores::Near));
        check::<f32>(random, rig, (single, F32_BOUND), heads, (&texts, 24, Scores::Near));
    }
    for (q, kv) in [(1, 1), (64, 1), (33, 1)] {
        let heads = Heads { q, kv, dim: 64 };
        let kernel = (AttnAround::attn_around_f16_64, F16_BOUND);
        check::<f16>(random, rig, kernel, heads, (&texts, 24, Scores::Near));
    }
    for (q, kv) in [(3, 1), (2, 2), (33, 1)] {
        let heads = Heads { q, kv, dim: 256 };
        let kernel = (AttnAround::attn_around_f16_256, F16_BOUND);
        check::<f16>(random, rig, kernel, heads, (&texts, 24, Scores::Near));
    }
}

#[test]
fn windows_both_ways_have_sinks_caps_far_and_falling_scores() {
    let Some(rig) = rig() else { return };
    let random = &mut Random::new();
    for scores in [Scores::Far, Scores::Sinks, Scores::Capped, Scores::Falling] {
        let texts = [text(90, 0, 90), text(150, 50, 30)];
        for window in [10, 64, 1 << 31] {
            let heads = Heads { q: 6, kv: 2, dim: 64 };
            let kernel = (AttnAround::attn_around_f16_64, F16_BOUND);
            check::<f16>(random, rig, kernel, heads, (&texts, window, scores));
            let kernel = (AttnAround::attn_around_f32_any, F32_BOUND);
            check::<f32>(random, rig, kernel, heads, (&texts, window, scores));
            let heads = Heads { q: 3, kv: 1, dim: 256 };
            let kernel = (AttnAround::attn_around_f16_256, F16_BOUND);
            check::<f16>(random, rig, kernel, heads, (&texts, window, scores));
        }
    }
}
