//! Rows that attend to tokens of KV pages, and what f64 says of them.

use rocmforge::backend::hip::kernels::Kernel;
use rocmforge::backend::hip::kernels::ops::AttnDecode;
use rocmforge::backend::hip::{Buffer, DevicePtr, Grid};

use crate::forms::X16;
use crate::pages::{Attended, Cache, Element, Heads, Others, attend, first_seen};
use crate::random::Random;
use crate::rig::Rig;

/// A kernel with the query heads of its workgroup, heads, and lengths of sequences.
pub type DecodeCase = ((Kernel<AttnDecode>, usize), Heads, &'static [usize]);

/// Decode attention of heads of 64 and 128. Of some, several workgroups share a KV head.
pub const DECODES: [DecodeCase; 15] = [
    ((AttnDecode::attn_decode_f16_64_1, 1), Heads { q: 3, kv: 3, dim: 64 }, &[1, 31, 77]),
    ((AttnDecode::attn_decode_f16_64_2, 2), Heads { q: 4, kv: 2, dim: 64 }, &[32, 33, 65]),
    ((AttnDecode::attn_decode_f16_64_4, 4), Heads { q: 9, kv: 3, dim: 64 }, &[64, 130, 1025]),
    ((AttnDecode::attn_decode_f16_64_8, 8), Heads { q: 14, kv: 2, dim: 64 }, &[200, 1, 1150]),
    ((AttnDecode::attn_decode_f16_128_1, 1), Heads { q: 2, kv: 2, dim: 128 }, &[31, 70]),
    ((AttnDecode::attn_decode_f16_128_2, 2), Heads { q: 4, kv: 2, dim: 128 }, &[32, 129]),
    ((AttnDecode::attn_decode_f16_128_4, 4), Heads { q: 8, kv: 2, dim: 128 }, &[33, 600]),
    ((AttnDecode::attn_decode_f16_128_8, 8), Heads { q: 12, kv: 1, dim: 128 }, &[1, 100, 1100]),
    ((AttnDecode::attn_decode_f16_128_4, 4), Heads { q: 4, kv: 1, dim: 128 }, &[4095]),
    ((AttnDecode::attn_decode_matrix_64, 8), Heads { q: 3, kv: 3, dim: 64 }, &[1, 31, 77]),
    ((AttnDecode::attn_decode_matrix_64, 8), Heads { q: 14, kv: 2, dim: 64 }, &[15, 16, 17, 200]),
    ((AttnDecode::attn_decode_matrix_64, 8), Heads { q: 20, kv: 2, dim: 64 }, &[64, 130, 1025]),
    ((AttnDecode::attn_decode_matrix_128, 8), Heads { q: 8, kv: 2, dim: 128 }, &[1, 33, 63, 600]),
    ((AttnDecode::attn_decode_matrix_128, 8), Heads { q: 12, kv: 1, dim: 128 }, &[48, 100]),
    ((AttnDecode::attn_decode_matrix_128, 8), Heads { q: 4, kv: 1, dim: 128 }, &[4095]),
];

/// Threads of a workgroup of decode attention.
pub fn threads(kernel: Kernel<AttnDecode>) -> u32 {
    if is_coarse(kernel) { 128 } else { 256 }
}

/// The same of pages with codes, and of heads of other whole groups.
pub const CODED_DECODES: [DecodeCase; 12] = [
    ((AttnDecode::attn_decode_i8_64_1, 1), Heads { q: 3, kv: 3, dim: 64 }, &[1, 31, 77]),
    ((AttnDecode::attn_decode_i8_64_2, 2), Heads { q: 4, kv: 2, dim: 64 }, &[32, 33, 65]),
    ((AttnDecode::attn_decode_i8_64_4, 4), Heads { q: 9, kv: 3, dim: 64 }, &[64, 130, 1025]),
    ((AttnDecode::attn_decode_i8_64_8, 8), Heads { q: 14, kv: 2, dim: 64 }, &[200, 1]),
    ((AttnDecode::attn_decode_i8_128_1, 1), Heads { q: 2, kv: 2, dim: 128 }, &[31, 70]),
    ((AttnDecode::attn_decode_i8_128_2, 2), Heads { q: 4, kv: 2, dim: 128 }, &[32, 129]),
    ((AttnDecode::attn_decode_i8_128_4, 4), Heads { q: 8, kv: 2, dim: 128 }, &[33, 600]),
    ((AttnDecode::attn_decode_i8_128_8, 8), Heads { q: 12, kv: 1, dim: 128 }, &[1, 100]),
    ((AttnDecode::attn_decode_i8_any_1, 1), Heads { q: 2, kv: 2, dim: 32 }, &[1, 100]),
    ((AttnDecode::attn_decode_i8_any_4, 4), Heads { q: 6, kv: 1, dim: 96 }, &[1, 33, 70]),
    ((AttnDecode::attn_decode_i8_any_4, 4), Heads { q: 3, kv: 1, dim: 256 }, &[65, 2]),
    ((AttnDecode::attn_decode_i8_128_4, 4), Heads { q: 4, kv: 1, dim: 128 }, &[4095]),
];

/// Weights are f16 where the bound is at least this.
const F16_WEIGHTS_BOUND: f64 = 4e-3;

/// Mean distance of scores from 0, in units of log2: their exponentials overflow or underflow f32.
const FAR: f32 = 200.0;
/// The key's factor of such a score.
const FAR_KEY: f32 = 16.0;

pub fn scale(heads: Heads) -> f32 {
    std::f32::consts::LOG2_E / (heads.dim as f32).sqrt()
}

/// Whether decode attention cuts rows into coarse splits: on the matrix unit.
pub fn is_coarse(kernel: Kernel<AttnDecode>) -> bool {
    kernel.name().starts_with("attn_decode_matrix")
}

/// How rows are cut into splits (kernels/attention/splits.h).
#[derive(Clone, Copy)]
pub enum Cut {
    /// By the position of a row.
    ByPosition,
    /// The same, twice as long.
    Coarse,
    /// Into at most so many.
    AtMost(usize),
}

impl Cut {
    /// Tokens per split of a row that is token `len - 1` of its sequence and sees `seen` tokens.
    fn tokens(self, len: usize, seen: usize) -> usize {
        match (self, len) {
            (Self::AtMost(most), _) => seen.div_ceil(most).next_multiple_of(64),
            (Self::Coarse, 0..=256) => 256,
            (Self::Coarse, _) => 2 * Self::ByPosition.tokens(len, seen),
            (Self::ByPosition, 0..=1024) => 64,
            (Self::ByPosition, 1025..=4096) => 128,
            (Self::ByPosition, _) => (len.div_ceil(128)).next_power_of_two().max(256),
        }
    }
}

/// Sets keys so that scores are all far from 0 in even sequences, and rise from one far side to the other in odd ones.
pub fn set_far<E: Element>(cache: &mut Cache<E>, lengths: &[usize]) {
    for (sequence, &length) in lengths.iter().enumerate() {
        let rising = |position: usize| (2.0 * position as f32 / length as f32 - 1.0) * FAR_KEY;
        cache.set_first(sequence, length, |p| if sequence % 2 == 0 { FAR_KEY } else { rising(p) });
    }
}

/// Magnitude of the scores.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Scores {
    Near,
    Far,
    /// Near, beside sinks: the first is far above all scores, the second far below, others are among them.
    Sinks,
    /// Near, and capped.
    Capped,
    /// Near, and falling with the distance. For windows that look both ways alone.
    Falling,
}

/// Cap of [`Scores::Capped`], about as large as the scores.
pub const CAP: f32 = 1.5;

/// Rows to attend, each a sequence and a position; the last rows of the step may be padding.
pub struct Rows {
    pub heads: Heads,
    pub sequences: Vec<u32>,
    pub positions: Vec<u32>,
    pub q: Vec<f32>,
    /// Maximum tokens that each row sees; 0: no limit.
    pub window: usize,
    /// One for each query head, or none.
    pub sinks: Vec<f32>,
    /// Cap of scores; 0: none.
    pub cap: f32,
    /// Scores fall with the distance.
    pub falls: bool,
}

impl Rows {
    pub fn new(random: &mut Random, heads: Heads, at: &[(u32, u32)]) -> Self {
        let q = random.normals(at.len() * heads.cols());
        let (sequences, positions) = at.iter().copied().unzip();
        Self { heads, sequences, positions, q, window: 0, sinks: Vec::new(), cap: 0.0, falls: false }
    }

    pub fn len(&self) -> usize {
        self.positions.len()
    }

    pub fn first_seen(&self, row: usize) -> usize {
        first_seen(self.positions[row] as usize, self.window)
    }

    /// Number of splits that overlap a row's window.
    pub fn splits(&self, row: usize, cut: Cut) -> usize {
        let (length, first) = (self.positions[row] as usize + 1, self.first_seen(row));
        let tokens = cut.tokens(length, length - first);
        length.div_ceil(tokens) - first / tokens
    }

    /// Erases the tokens before those that a sequence's first row sees.
    pub fn forget_unseen<E: Element>(&self, cache: &mut Cache<E>) {
        for row in 0..self.len() {
            let sequence = self.sequences[row];
            if sequence != u32::MAX && self.sequences[..row].iter().all(|&before| before != sequence) {
                cache.forget(sequence as usize, self.first_seen(row));
            }
        }
    }

    /// Alternates heads with scores at FAR and at -FAR for keys that begin with FAR_KEY.
    pub fn spread(&mut self) {
        let part = FAR / FAR_KEY / scale(self.heads);
        for (head, q) in self.q.chunks_exact_mut(self.heads.dim).enumerate() {
            q[0] = if head % 2 == 0 { part } else { -part };
        }
    }

    pub fn add_sinks(&mut self, random: &mut Random) {
        let of_head = |(head, near): (usize, f32)| match head {
            0 => FAR,
            1 => -FAR,
            _ => near * 3.0,
        };
        self.sinks = random.normals(self.heads.q).into_iter().enumerate().map(of_head).collect();
    }

    pub fn upload_sinks(&self, rig: &Rig) -> Option<Buffer> {
        (!self.sinks.is_empty()).then(|| rig.upload(&self.sinks))
    }

    pub fn want<E: Element>(&self, cache: &Cache<E>, row: usize) -> Vec<Attended> {
        let q = &self.q[row * self.heads.cols()..][..self.heads.cols()];
        let seen = (self.first_seen(row), self.positions[row] as usize);
        let others = Others { sinks: &self.sinks, cap: self.cap, ..Others::default() };
        attend(cache, self.sequences[row] as usize, seen, q, &others)
    }

    /// `bound`: relative to the sum of the weighted values' magnitudes.
    pub fn check<E: Element>(&self, cache: &Cache<E>, got: &[f32], bound: f64) {
        // Weights in f16 are off by 2^-25 each. A code may be 0: then nothing larger is in a sum.
        let of_weights = if bound < F16_WEIGHTS_BOUND { 0.0 } else { 2f64.powi(-25) };
        for (row, got) in got.chunks_exact(self.heads.cols()).enumerate() {
            if self.sequences[row] == u32::MAX {
                assert!(got.iter().all(|&v| v == 0.0), "row {row} is padding but not zero");
                continue;
            }
            for (i, (&got, want)) in got.iter().zip(self.want(cache, row)).enumerate() {
                // Beside a far sink all is below the smallest f32.
                let most = want.size * bound + want.all * of_weights + 1e-37;
                assert!(
                    (f64::from(got) - want.value).abs() <= most,
                    "{:?} row {row} at {}, window {}, value {i}: {got} instead of {}",
                    self.heads,
                    self.positions[row],
                    self.window,
                    want.value
                );
            }
        }
    }
}

/// Most queries of a tile for kernels of prefill attention, and for those on the matrix unit across waves.
pub const TILE_QUERIES: u32 = 64;
pub const WIDE_TILE_QUERIES: u32 = 128;

/// Tiles of neighbouring rows for prefill attention, with scratch for the workgroups that share them, and room for results.
pub struct Tiled {
    pub tiles: Buffer,
    pub out: Buffer,
    pub x16: X16,
    pub values: Buffer,
    pub stats: Buffer,
    pub counters: Buffer,
    pub grid: Grid,
    halves: bool,
}

impl Tiled {
    /// Tiles of at most `tile_rows` rows and `queries` queries, each of which `shares` workgroups share. With `halves`, f16 results
    /// are wanted too.
    pub fn new(rig: &Rig, rows: &Rows, queries: u32, tile_rows: usize, shares: u32, halves: bool) -> Self {
        let heads = rows.heads;
        let mut tiles: Vec<[u32; 2]> = Vec::new();
        for row in 0..rows.len() {
            let same = |first: u32| rows.sequences[row] == rows.sequences[first as usize];
            match tiles.last_mut() {
                Some([first, count]) if (*count as usize) < tile_rows && same(*first) => *count += 1,
                _ => tiles.push([row as u32, 1]),
            }
        }
        let parts = tiles.len() * heads.kv * shares as usize * queries as usize;
        // 16 queries a wave; across waves, five steps of 64 tokens are in LDS.
        let threads = queries / 16 * rig.device.description().wave;
        let lds = if queries == WIDE_TILE_QUERIES { 5 * 64 * 4 * heads.dim as u32 + 1024 } else { 0 };
        let grid = Grid::xyz(heads.kv as u32, tiles.len() as u32, shares).threads(threads).lds(lds);
        Self {
            tiles: rig.upload(&tiles),
            out: rig.output::<f32>(rows.len() * heads.cols()),
            x16: X16::new(rig, rows.len(), heads.cols()),
            values: rig.output::<f32>(parts * heads.dim),
            stats: rig.output::<f32>(parts * 2),
            counters: rig.upload(&vec![0u32; tiles.len() * heads.kv]),
            grid,
            halves,
        }
    }

    /// Address of the f16 results, if they are wanted.
    pub fn out16(&self) -> DevicePtr<u16> {
        if self.halves { self.x16.values.ptr() } else { DevicePtr::NULL }
    }

    /// f32 results of a launch, after a look at its counters and f16 results.
    pub fn results(&self, rig: &Rig, heads: Heads) -> Vec<f32> {
        assert!(rig.download::<u32>(&self.counters).iter().all(|count| *count == 0));
        let got = rig.download::<f32>(&self.out);
        if self.halves {
            let want: Vec<f64> = got.iter().map(|&v| f64::from(v)).collect();
            self.x16.check_unscaled(rig, &want, heads.cols());
        }
        got
    }
}
