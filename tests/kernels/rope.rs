//! Per-head norm and rotation, and where the kernel writes keys and values.

use half::f16;
use rocmforge::backend::hip::kernels::ops::RopeKv;
use rocmforge::backend::hip::{Buffer, DevicePtr, Grid};

use crate::pages::{Cache, Element, Heads};
use crate::random::Random;
use crate::rig::{Rig, rig};

const EPS: f32 = 1e-6;

/// A layer's parameters besides its projections.
struct Extras {
    norms: Option<[Vec<f32>; 2]>,
    rope_dims: usize,
    halves: bool,
}

/// A head after norm and rotation by its position's angles.
fn turned(x: &[f32], norm: Option<&[f32]>, angles: Option<&[f32]>, extras: &Extras) -> Vec<f64> {
    let mut head: Vec<f64> = x.iter().map(|&v| v.into()).collect();
    if let Some(norm) = norm {
        let mean = head.iter().map(|v| v * v).sum::<f64>() / head.len() as f64;
        let factor = 1.0 / (mean + f64::from(EPS)).sqrt();
        head.iter_mut().zip(norm).for_each(|(v, &w)| *v *= factor * f64::from(w));
    }
    for (i, angle) in angles.into_iter().flat_map(|a| a.as_chunks::<2>().0).enumerate() {
        let (a, b) = if extras.halves { (i, i + extras.rope_dims / 2) } else { (2 * i, 2 * i + 1) };
        let ([cos, sin], x, y) = (angle.map(f64::from), head[a], head[b]);
        (head[a], head[b]) = (x * cos - y * sin, x * sin + y * cos);
    }
    head
}

fn check<E: Element>(random: &mut Random, rig: &Rig, heads: Heads, extras: &Extras) {
    let lengths = [1usize, 32, 33, 77];
    let rows = lengths.len() + 1;
    let mut cache = Cache::<E>::new(random, heads, &lengths);
    let (layer_offset, table_stride) = (cache.layer_offset(), cache.stride as u32);
    let device = cache.upload(rig);
    let all = heads.q + 2 * heads.kv;
    let qkv = random.normals(rows * all * heads.dim);
    // The last row is padding with an invalid position.
    let positions: Vec<u32> = lengths.iter().map(|&l| l as u32 - 1).chain([u32::MAX]).collect();
    let row_seq: Vec<u32> = (0..lengths.len() as u32).chain([u32::MAX]).collect();
    let angles = random.angles(77 * extras.rope_dims / 2);
    let norms: Vec<Buffer> = extras.norms.iter().flatten().map(|n| rig.upload(n)).collect();
    let given = |buffers: &[Buffer], i: usize| buffers.get(i).map_or(DevicePtr::NULL, |b| b.ptr());
    let inputs = (rig.upload(&qkv), rig.upload(&angles), rig.upload(&positions), rig.upload(&row_seq));
    let q = rig.output::<f32>(rows * heads.cols());
    let arguments = RopeKv {
        qkv: inputs.0.ptr(),
        q_norm: given(&norms, 0),
        k_norm: given(&norms, 1),
        angles: inputs.1.ptr(),
        positions: inputs.2.ptr(),
        row_seq: inputs.3.ptr(),
        page_tables: device.tables.ptr(),
        page_base: device.bases.ptr(),
        q: q.ptr(),
        layer_offset,
        eps: EPS,
        n_heads: heads.q as u32,
        n_kv_heads: heads.kv as u32,
        head_dim: heads.dim as u32,
        rope_dims: extras.rope_dims as u32,
        halves: extras.halves.into(),
        table_stride,
    };
    let kernel = E::pick([RopeKv::rope_kv_f16, RopeKv::rope_kv_i8, RopeKv::rope_kv_f32]);
    let grid = Grid::xy(all.div_ceil(8) as u32, rows as u32);
    rig.device.launch(&rig.stream, kernel, grid, &arguments).unwrap();
    let q = rig.download::<f32>(&q);
    cache.read_back(rig);
    assert_eq!(
        cache.written(),
        lengths.len() * 2 * heads.kv * heads.dim,
        "the number of written elements is wrong"
    );
    assert!(q[lengths.len() * heads.cols()..].iter().all(|&v| v == 0.0), "padding");
    for (row, length) in lengths.into_iter().enumerate() {
        let position = length - 1;
        let angles = &angles[position * extras.rope_dims..][..extras.rope_dims];
        for h in 0..all {
            let x = &qkv[(row * all + h) * heads.dim..][..heads.dim];
            let (part, of_part) = match h {
                _ if h < heads.q => (0, h),
                _ if h < heads.q + heads.kv => (1, h - heads.q),
                _ => (2, h - heads.q - heads.kv),
            };
            let norm = extras.norms.as_ref().filter(|_| part < 2).map(|n| n[part].as_slice());
            let want = turned(x, norm, (part < 2).then_some(angles), extras);
            let got: Vec<f64> = match part {
                0 => q[row * heads.cols() + h * heads.dim..][..heads.dim].iter().map(|&v| v.into()).collect(),
                _ => cache.head(row, position, part == 2, of_part).iter().map(|&v| v.into()).collect(),
            };
            let rounding = if part == 0 { vec![0.0; heads.dim] } else { E::rounding(&want) };
            for (d, ((&got, &want), rounding)) in got.iter().zip(&want).zip(rounding).enumerate() {
                assert!(
                    (got - want).abs() <= rounding + 4e-6 * (want.abs() + 1.0),
                    "{heads:?} row {row} head {h} value {d}: {got} instead of {want}"
                );
            }
        }
    }
}

#[test]
fn heads_are_turned_and_written_to_their_pages() {
    let Some(rig) = rig() else { return };
    let random = &mut Random::new();
    // In some heads only the first dims rotate, in either layout.
    for (q, kv, dim, rope_dims, halves, normed) in [
        (9, 3, 64, 64, false, false),
        (14, 2, 64, 64, true, false),
        (4, 2, 128, 128, true, true),
        (8, 1, 128, 32, false, true),
        (2, 2, 64, 32, false, false),
        (3, 3, 80, 40, true, true),
        (2, 1, 96, 24, true, false),
        (2, 1, 256, 256, false, false),
        (5, 1, 2, 2, true, true),
        (2, 2, 20, 0, false, true),
        (1, 1, 32, 0, true, false),
    ] {
        let heads = Heads { q, kv, dim };
        let norms = normed.then(|| [random.normals(dim), random.normals(dim)]);
        let extras = Extras { norms, rope_dims, halves };
        check::<f16>(random, rig, heads, &extras);
        check::<f32>(random, rig, heads, &extras);
        if dim.is_multiple_of(32) {
            check::<i8>(random, rig, heads, &extras);
        }
    }
}
