//! Decode attention that makes its heads itself, against `rope_kv` and attention of what that wrote: to the bit.

use half::f16;
use rocmforge::backend::hip::kernels::Kernel;
use rocmforge::backend::hip::kernels::ops::{AttnDecode, RopeKv};
use rocmforge::backend::hip::{Buffer, DevicePtr, Grid};

use crate::attending::{CODED_DECODES, DECODES, scale, threads};
use crate::pages::{Cache, Element, Heads};
use crate::random::Random;
use crate::rig::{Rig, rig};

const EPS: f32 = 1e-6;

/// A layer's heads before norm and rotation. The last row is padding.
struct Source {
    heads: Heads,
    lengths: Vec<usize>,
    rope_dims: usize,
    halves: bool,
    window: usize,
    norms: Vec<Buffer>,
    qkv: Buffer,
    angles: Buffer,
    positions: Buffer,
    sequences: Buffer,
    sinks: Buffer,
}

impl Source {
    fn random(random: &mut Random, rig: &Rig, heads: Heads, lengths: &[usize], normed: bool) -> Self {
        let rows = lengths.len() + 1;
        let rope_dims = if random.below(3) == 0 { (heads.dim / 4 * 2).max(2) } else { heads.dim };
        let longest = lengths.iter().max().copied().unwrap_or(1);
        let angles = random.angles(longest * rope_dims / 2);
        let positions: Vec<u32> = lengths.iter().map(|&l| l as u32 - 1).chain([u32::MAX]).collect();
        let sequences: Vec<u32> = (0..lengths.len() as u32).chain([u32::MAX]).collect();
        let norms = if normed { 2 } else { 0 };
        Self {
            heads,
            lengths: lengths.to_vec(),
            rope_dims,
            halves: random.below(2) == 0,
            window: if random.below(2) == 0 { 0 } else { 50 },
            norms: (0..norms).map(|_| rig.upload(&random.normals(heads.dim))).collect(),
            qkv: rig.upload(&random.normals(rows * (heads.q + 2 * heads.kv) * heads.dim)),
            angles: rig.upload(&angles),
            positions: rig.upload(&positions),
            sequences: rig.upload(&sequences),
            sinks: rig.upload(&random.normals(heads.q)),
        }
    }

    fn rows(&self) -> usize {
        self.lengths.len() + 1
    }

    fn norm(&self, which: usize) -> DevicePtr<f32> {
        self.norms.get(which).map_or(DevicePtr::NULL, Buffer::ptr)
    }

    /// Queries that `rope_kv` makes; it writes keys and values to the pages.
    fn turned<E: Element>(&self, rig: &Rig, cache: &Cache<E>) -> Buffer {
        let (heads, layer_offset, table_stride) = (self.heads, cache.layer_offset(), cache.stride as u32);
        let device = cache.device();
        let q = rig.output::<f32>(self.rows() * heads.cols());
        let arguments = RopeKv {
            qkv: self.qkv.ptr(),
            q_norm: self.norm(0),
            k_norm: self.norm(1),
            angles: self.angles.ptr(),
            positions: self.positions.ptr(),
            row_seq: self.sequences.ptr(),
            page_tables: device.tables.ptr(),
            page_base: device.bases.ptr(),
            q: q.ptr(),
            layer_offset,
            eps: EPS,
            n_heads: heads.q as u32,
            n_kv_heads: heads.kv as u32,
            head_dim: heads.dim as u32,
            rope_dims: self.rope_dims as u32,
            halves: self.halves.into(),
            table_stride,
        };
        let kernel = E::pick([RopeKv::rope_kv_f16, RopeKv::rope_kv_i8, RopeKv::rope_kv_f32]);
        let grid = Grid::xy((heads.q + 2 * heads.kv).div_ceil(8) as u32, self.rows() as u32);
        rig.device.launch(&rig.stream, kernel, grid, &arguments).unwrap();
        q
    }

    /// Attention of all rows, from these queries, or from heads that the kernel makes.
    fn attend<E: Element>(
        &self,
        rig: &Rig,
        cache: &Cache<E>,
        (kernel, at_once): (Kernel<AttnDecode>, usize),
        queries: Option<&Buffer>,
        each: usize,
    ) -> Vec<f32> {
        let (heads, rows) = (self.heads, self.rows());
        let (layer_offset, table_stride) = (cache.layer_offset(), cache.stride as u32);
        let device = cache.device();
        // A split has at least 64 tokens.
        let groups = self.lengths.iter().map(|length| length.div_ceil(64)).max().unwrap().div_ceil(each);
        let splits = groups * each;
        let blocks = heads.kv * heads.group().div_ceil(at_once);
        let part_values = rig.output::<f32>(rows * heads.q * splits * heads.dim);
        let part_stats = rig.output::<f32>(rows * heads.q * splits * 2);
        let counters = rig.upload(&vec![0u32; rows * blocks]);
        let out = rig.output::<f32>(rows * heads.cols());
        let null = DevicePtr::NULL;
        let arguments = AttnDecode {
            q: queries.map_or(null, Buffer::ptr),
            rows: DevicePtr::NULL,
            positions: self.positions.ptr(),
            row_seq: self.sequences.ptr(),
            page_tables: device.tables.ptr(),
            page_base: device.bases.ptr(),
            part_values: part_values.ptr(),
            part_stats: part_stats.ptr(),
            counters: counters.ptr(),
            out: out.ptr(),
            codes: DevicePtr::NULL,
            scales: null,
            sums: DevicePtr::NULL,
            halves: DevicePtr::NULL,
            row_scales: null,
            sinks: self.sinks.ptr(),
            layer_offset,
            scale: scale(heads),
            cap: 0.0,
            n_heads: heads.q as u32,
            n_kv_heads: heads.kv as u32,
            head_dim: heads.dim as u32,
            table_stride,
            padded: 0,
            window: self.window as u32,
            tiled: 0,
            each: each as u32,
            splits_max: 127,
            qkv: if queries.is_some() { null } else { self.qkv.ptr() },
            q_norm: self.norm(0),
            k_norm: self.norm(1),
            angles: self.angles.ptr(),
            eps: EPS,
            rope_dims: self.rope_dims as u32,
            pairs_by_halves: self.halves.into(),
        };
        let grid = Grid::xyz(blocks as u32, groups as u32, rows as u32);
        rig.device.launch(&rig.stream, kernel, grid.threads(threads(kernel)), &arguments).unwrap();
        rig.download::<f32>(&out)
    }
}

fn check<E: Element>(
    random: &mut Random,
    rig: &Rig,
    kernel: (Kernel<AttnDecode>, usize),
    heads: Heads,
    lengths: &[usize],
) {
    if !rig.device.has(kernel.0) {
        return;
    }
    let mut cache = Cache::<E>::new(random, heads, lengths);
    for (sequence, &length) in lengths.iter().enumerate() {
        cache.fill(random, sequence, length - 1);
    }
    let normed = random.below(2) == 0;
    let source = Source::random(random, rig, heads, lengths, normed);
    cache.upload(rig);
    let queries = source.turned(rig, &cache);
    let want = source.attend(rig, &cache, kernel, Some(&queries), 1);
    let pages = cache.download(rig);
    for each in [1, 2, 64] {
        // The rows' own tokens are not in their pages yet.
        cache.upload(rig);
        let got = source.attend(rig, &cache, kernel, None, each);
        let same = got.iter().zip(&want).all(|(a, b)| a.to_bits() == b.to_bits());
        assert!(same, "{heads:?}, {each} splits each: {got:?} instead of {want:?}");
        assert!(cache.download(rig) == pages, "{heads:?}: other keys or values");
    }
    assert!(want.iter().all(|value| !value.is_nan()), "{heads:?}");
}

#[test]
fn attention_makes_the_heads_that_rope_kv_makes() {
    let Some(rig) = rig() else { return };
    let random = &mut Random::new();
    let any = [AttnDecode::attn_decode_f16_any_1, AttnDecode::attn_decode_f16_any_4];
    let of_any = [
        ((any[1], 4), Heads { q: 6, kv: 1, dim: 80 }, &[1, 33, 70][..]),
        ((any[0], 1), Heads { q: 2, kv: 2, dim: 2 }, &[1, 100]),
        ((any[1], 4), Heads { q: 3, kv: 1, dim: 256 }, &[65, 2]),
    ];
    for (kernel, heads, lengths) in DECODES.into_iter().chain(of_any) {
        check::<f16>(random, rig, kernel, heads, lengths);
    }
    for (kernel, heads, lengths) in CODED_DECODES {
        check::<i8>(random, rig, kernel, heads, lengths);
    }
    for (dim, q, kv, at_once) in [(20, 2, 2, 1), (128, 6, 1, 4), (256, 5, 1, 4)] {
        let kernel = [AttnDecode::attn_decode_f32_any_1, AttnDecode::attn_decode_f32_any_4][at_once / 4];
        check::<f32>(random, rig, (kernel, at_once), Heads { q, kv, dim }, &[31, 100]);
    }
}
