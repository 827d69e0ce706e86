//! Wide heads: their rotation, their store, and attention with them.

use half::f16;
use rocmforge::backend::hip::kernels::Kernel;
use rocmforge::backend::hip::kernels::heads::{AttnWide, RopeKvWide, WIDE_HEADS};
use rocmforge::backend::hip::{DevicePtr, Grid};

use crate::attending::{CAP, Cut, Rows, Scores, scale, set_far};
use crate::pages::{Cache, Element, Heads};
use crate::random::Random;
use crate::rig::{Rig, rig};

/// As of `attn_decode`. A score sums up to 576 products here.
const BOUND: f64 = 2e-5;
const FAR_BOUND: f64 = 1e-3;

/// Attends with all rows, with room for `spare` more splits than any row has.
fn attend<E: Element>(
    rig: &Rig,
    kernel: Kernel<AttnWide>,
    rows: &Rows,
    cache: &mut Cache<E>,
    spare: usize,
) -> Vec<f32> {
    let (heads, count) = (rows.heads, rows.len());
    let (layer_offset, table_stride) = (cache.layer_offset(), cache.stride as u32);
    let device = cache.upload(rig);
    let splits = spare + (0..count).map(|row| rows.splits(row, Cut::ByPosition)).max().unwrap();
    let blocks = heads.kv * heads.group().div_ceil(WIDE_HEADS as usize);
    let (q, positions, row_seq) =
        (rig.upload(&rows.q), rig.upload(&rows.positions), rig.upload(&rows.sequences));
    let part_values = rig.output::<f32>(count * heads.q * splits * heads.dim);
    let part_stats = rig.output::<f32>(count * heads.q * splits * 2);
    let counters = rig.upload(&vec![0u32; count * blocks]);
    let sinks = rows.upload_sinks(rig);
    let out = rig.output::<f32>(count * heads.cols());
    let arguments = AttnWide {
        q: q.ptr(),
        positions: positions.ptr(),
        row_seq: row_seq.ptr(),
        page_tables: device.tables.ptr(),
        page_base: device.bases.ptr(),
        part_values: part_values.ptr(),
        part_stats: part_stats.ptr(),
        counters: counters.ptr(),
        out: out.ptr(),
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
    let grid = Grid::xyz(blocks as u32, splits as u32, count as u32);
    rig.device.launch(&rig.stream, kernel, grid, &arguments).unwrap();
    assert!(rig.download::<u32>(&counters).iter().all(|count| *count == 0));
    rig.download(&out)
}

fn check<E: Element>(
    random: &mut Random,
    rig: &Rig,
    kernel: Kernel<AttnWide>,
    heads: Heads,
    (lengths, window, scores): (&[usize], usize, Scores),
) {
    let mut cache = Cache::<E>::new(random, heads, lengths);
    let mut at = vec![(u32::MAX, 5)];
    for (sequence, &length) in lengths.iter().enumerate() {
        cache.fill(random, sequence, length);
        at.push((sequence as u32, length as u32 - 1));
    }
    let mut rows = Rows::new(random, heads, &at);
    rows.window = window;
    let mut bound = BOUND;
    match scores {
        Scores::Near => {}
        Scores::Far => {
            set_far(&mut cache, lengths);
            rows.spread();
            bound += FAR_BOUND;
        }
        Scores::Sinks => rows.add_sinks(random),
        Scores::Capped => rows.cap = CAP,
        Scores::Falling => unreachable!("scores of wide heads do not fall"),
    }
    rows.forget_unseen(&mut cache);
    let got = attend(rig, kernel, &rows, &mut cache, 0);
    rows.check(&cache, &got, bound);
    let more = attend(rig, kernel, &rows, &mut cache, 3);
    let same = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits());
    assert!(same(&got, &more), "{heads:?}: a larger grid gives other bits");
    // The last row alone gives the same bits.
    let (first, cols) = (rows.len() - 1, heads.cols());
    let alone = Rows {
        sequences: rows.sequences.split_off(first),
        positions: rows.positions.split_off(first),
        q: rows.q.split_off(first * cols),
        ..rows
    };
    let got_alone = attend(rig, kernel, &alone, &mut cache, 0);
    assert!(same(&got[first * cols..], &got_alone), "{heads:?}: other rows change a row's bits");
}

#[test]
fn wide_heads_attend_as_in_f64() {
    let Some(rig) = rig() else { return };
    let random = &mut Random::new();
    let [half, single] = [AttnWide::attn_wide_f16, AttnWide::attn_wide_f32];
    for (q, kv, dim, lengths) in [
        (16, 1, 576, &[1, 33, 130][..]),
        (20, 1, 576, &[64, 65]),
        (33, 1, 320, &[200, 16]),
        (4, 2, 258, &[70]),
        (2, 2, 512, &[1025]),
        (3, 1, 20, &[17, 95]),
    ] {
        let heads = Heads { q, kv, dim };
        check::<f16>(random, rig, half, heads, (lengths, 0, Scores::Near));
        check::<f32>(random, rig, single, heads, (lengths, 0, Scores::Near));
    }
}

#[test]
fn wide_heads_have_windows_sinks_caps_and_far_scores() {
    let Some(rig) = rig() else { return };
    let random = &mut Random::new();
    let heads = Heads { q: 6, kv: 2, dim: 288 };
    for scores in [Scores::Near, Scores::Far, Scores::Sinks, Scores::Capped] {
        for window in [0, 1, 40, 100] {
            check::<f16>(random, rig, AttnWide::attn_wide_f16, heads, (&[1, 64, 150], window, scores));
        }
    }
}

/// Rotates and stores rows of two sequences, one of which is padding.
fn check_rope<E: Element>(
    random: &mut Random,
    rig: &Rig,
    kernel: Kernel<RopeKvWide>,
    heads: Heads,
    (rope_dims, halves): (usize, bool),
) {
    let lengths = [40, 5];
    let mut cache = Cache::<E>::new(random, heads, &lengths);
    let at = [(0u32, 39u32), (1, 0), (u32::MAX, 3), (1, 4)];
    let (sequences, positions): (Vec<u32>, Vec<u32>) = at.iter().copied().unzip();
    let all = heads.q + 2 * heads.kv;
    let qkv = random.normals(at.len() * all * heads.dim);
    let angles = random.angles(lengths[0] * rope_dims / 2);
    let (layer_offset, table_stride) = (cache.layer_offset(), cache.stride as u32);
    let device = cache.upload(rig);
    let inputs = [rig.upload(&qkv), rig.upload(&angles), rig.upload(&positions), rig.upload(&sequences)];
    let q = rig.output::<f32>(at.len() * heads.cols());
    let arguments = RopeKvWide {
        qkv: inputs[0].ptr(),
        angles: inputs[1].ptr(),
        positions: inputs[2].ptr(),
        row_seq: inputs[3].ptr(),
        page_tables: device.tables.ptr(),
        page_base: device.bases.ptr(),
        q: q.ptr(),
        layer_offset,
        n_heads: heads.q as u32,
        n_kv_heads: heads.kv as u32,
        head_dim: heads.dim as u32,
        rope_dims: rope_dims as u32,
        halves: halves.into(),
        table_stride,
    };
    let grid = Grid::xy(all as u32, at.len() as u32);
    rig.device.launch(&rig.stream, kernel, grid, &arguments).unwrap();
    let got = rig.download::<f32>(&q);
    cache.read_back(rig);
    assert_eq!(cache.written(), 3 * 2 * heads.kv * heads.dim, "it wrote other tokens");
    for (row, &(sequence, position)) in at.iter().enumerate() {
        for head in 0..all {
            let from = &qkv[(row * all + head) * heads.dim..][..heads.dim];
            let mut want: Vec<f64> = from.iter().map(|&x| f64::from(x)).collect();
            let is_value = head >= heads.q + heads.kv;
            for pair in 0..if is_value { 0 } else { rope_dims / 2 } {
                let places = if halves { [pair, pair + rope_dims / 2] } else { [2 * pair, 2 * pair + 1] };
                let [x, y] = places.map(|place| f64::from(from[place]));
                let at = position as usize * rope_dims + 2 * pair;
                let [cos, sin] = [angles[at], angles[at + 1]].map(f64::from);
                (want[places[0]], want[places[1]]) = (x * cos - y * sin, x * sin + y * cos);
            }
            let (found, more): (Vec<f64>, Vec<f64>) = if head < heads.q {
                let got = &got[(row * heads.q + head) * heads.dim..][..heads.dim];
                (got.iter().map(|&x| f64::from(x)).collect(), vec![0.0; heads.dim])
            } else if sequence == u32::MAX {
                continue;
            } else {
                let kv_head = (head - heads.q) % heads.kv;
                let stored = cache.head(sequence as usize, position as usize, is_value, kv_head);
                (stored.iter().map(|&x| f64::from(x)).collect(), E::rounding(&want))
            };
            if sequence == u32::MAX {
                assert!(found.iter().all(|&x| x == 0.0), "a padding row is not 0");
                continue;
            }
            for (k, ((got, want), more)) in found.iter().zip(&want).zip(more).enumerate() {
                let most = more + 4e-6 * (want.abs() + 1.0);
                assert!(
                    (got - want).abs() <= most,
                    "{heads:?} row {row} head {head} value {k}: {got}, {want}"
                );
            }
        }
    }
}

#[test]
fn wide_heads_are_turned_and_written_to_their_pages() {
    let Some(rig) = rig() else { return };
    let random = &mut Random::new();
    for (q, kv, dim, turns) in
        [(3, 1, 576, (64, false)), (1, 2, 576, (576, true)), (2, 1, 514, (2, true)), (2, 1, 6, (4, false))]
    {
        let heads = Heads { q, kv, dim };
        check_rope::<f32>(random, rig, RopeKvWide::rope_kv_wide_f32, heads, turns);
        check_rope::<f16>(random, rig, RopeKvWide::rope_kv_wide_f16, heads, turns);
    }
}
