//! KV pages for tests: pages of a sequence lie in any order, with NaN wherever no token was written.

use half::f16;
use rocmforge::backend::hip::Buffer;
use rocmforge::backend::hip::kernels::Kernel;
use zerocopy::{Immutable, IntoBytes};

use crate::random::Random;
use crate::rig::Rig;

pub const PAGE: usize = 32;
/// Layers of a page; [`LAYER`] is the one in use, so that a write to the other one shows.
const LAYERS: usize = 2;
const LAYER: usize = 1;

/// Element of a page.
pub trait Element: Copy + IntoBytes + Immutable {
    /// Chooses the f16 or the f32 variant of a kernel.
    fn pick<A>(f16: Kernel<A>, f32: Kernel<A>) -> Kernel<A>;
    const NAN: Self;
    fn of(value: f32) -> Self;
    fn value(self) -> f64;
}

impl Element for f16 {
    fn pick<A>(f16: Kernel<A>, _: Kernel<A>) -> Kernel<A> {
        f16
    }
    const NAN: Self = Self::NAN;
    fn of(value: f32) -> Self {
        Self::from_f32(value)
    }
    fn value(self) -> f64 {
        self.to_f64()
    }
}

impl Element for f32 {
    fn pick<A>(_: Kernel<A>, f32: Kernel<A>) -> Kernel<A> {
        f32
    }
    const NAN: Self = Self::NAN;
    fn of(value: f32) -> Self {
        value
    }
    fn value(self) -> f64 {
        self.into()
    }
}

/// Numbers of heads, and their width.
#[derive(Clone, Copy, Debug)]
pub struct Heads {
    pub q: usize,
    pub kv: usize,
    pub dim: usize,
}

impl Heads {
    pub fn group(&self) -> usize {
        self.q / self.kv
    }

    pub fn cols(&self) -> usize {
        self.q * self.dim
    }
}

/// Pages of some sequences, on the host and on the device.
pub struct Cache<E> {
    pub heads: Heads,
    pub stride: usize,
    tables: Vec<u32>,
    values: Vec<E>,
    device: Option<Device>,
}

/// Buffers that kernels get.
pub struct Device {
    pages: Buffer,
    pub tables: Buffer,
    pub bases: Buffer,
}

impl<E: Element> Cache<E> {
    /// Pages for sequences of these lengths, with nothing written yet.
    pub fn new(random: &mut Random, heads: Heads, lengths: &[usize]) -> Self {
        let count: usize = lengths.iter().map(|length| length.div_ceil(PAGE)).sum();
        let stride = lengths.iter().map(|length| length.div_ceil(PAGE)).max().unwrap() + 1;
        let mut order = random.shuffled(count).into_iter();
        // Entries past a sequence's end are never read.
        let mut tables = vec![u32::MAX; lengths.len() * stride];
        for (length, table) in lengths.iter().zip(tables.chunks_exact_mut(stride)) {
            table[..length.div_ceil(PAGE)].fill_with(|| order.next().unwrap() as u32);
        }
        let values = vec![E::NAN; count * LAYERS * 2 * heads.kv * PAGE * heads.dim];
        Self { heads, stride, tables, values, device: None }
    }

    fn page_len(&self) -> usize {
        LAYERS * 2 * self.heads.kv * PAGE * self.heads.dim
    }

    /// Byte offset of the layer in use from a page's start.
    pub fn layer_offset(&self) -> u64 {
        (LAYER * 2 * self.heads.kv * PAGE * self.heads.dim * size_of::<E>()) as u64
    }

    /// Index of a token's key or value among all elements.
    fn place(&self, sequence: usize, position: usize, is_value: bool, head: usize) -> usize {
        let page = self.tables[sequence * self.stride + position / PAGE] as usize;
        let plane = (LAYER * 2 + usize::from(is_value)) * self.heads.kv + head;
        page * self.page_len() + (plane * PAGE + position % PAGE) * self.heads.dim
    }

    pub fn head(&self, sequence: usize, position: usize, is_value: bool, head: usize) -> &[E] {
        &self.values[self.place(sequence, position, is_value, head)..][..self.heads.dim]
    }

    /// Writes random keys and values for a sequence's first `length` tokens.
    pub fn fill(&mut self, random: &mut Random, sequence: usize, length: usize) {
        for position in 0..length {
            for (is_value, head) in (0..2 * self.heads.kv).map(|i| (i % 2 == 1, i / 2)) {
                let (at, dim) = (self.place(sequence, position, is_value, head), self.heads.dim);
                self.values[at..at + dim].fill_with(|| E::of(random.normal()));
            }
        }
    }

    /// Overwrites a sequence's tokens before `end` with NaN, and removes the pages that hold only those from its table.
    pub fn forget(&mut self, sequence: usize, end: usize) {
        for position in 0..end {
            for (is_value, head) in (0..2 * self.heads.kv).map(|i| (i % 2 == 1, i / 2)) {
                let (at, dim) = (self.place(sequence, position, is_value, head), self.heads.dim);
                self.values[at..at + dim].fill(E::NAN);
            }
        }
        self.tables[sequence * self.stride..][..end / PAGE].fill(u32::MAX);
    }

    /// Sets the first value of each key of a sequence's first `length` tokens, by position.
    pub fn set_first(&mut self, sequence: usize, length: usize, value: impl Fn(usize) -> f32) {
        for position in 0..length {
            for head in 0..self.heads.kv {
                let at = self.place(sequence, position, false, head);
                self.values[at] = E::of(value(position));
            }
        }
    }

    /// Copies pages and tables to the device.
    pub fn upload(&mut self, rig: &Rig) -> &Device {
        let pages = rig.upload(&self.values);
        let page_bytes = self.page_len() * size_of::<E>();
        let count = self.values.len() / self.page_len();
        let bases: Vec<u64> =
            (0..count).map(|i| pages.ptr::<u8>().address() + (i * page_bytes) as u64).collect();
        let tables = rig.upload(&self.tables);
        self.device.insert(Device { pages, tables, bases: rig.upload(&bases) })
    }

    /// The buffers of the last upload.
    pub fn device(&self) -> &Device {
        self.device.as_ref().unwrap()
    }

    /// The device's content as bits: `T` must be as large as `E`.
    pub fn download<T: zerocopy::FromBytes + IntoBytes + Clone>(&self, rig: &Rig) -> Vec<T> {
        rig.download(&self.device.as_ref().unwrap().pages)
    }

    /// Copies the device's content back to the host.
    pub fn read_back(&mut self, rig: &Rig)
    where
        E: zerocopy::FromBytes,
    {
        self.values = self.download(rig);
    }

    /// Number of elements that were ever written.
    pub fn written(&self) -> usize {
        self.values.iter().filter(|v| !v.value().is_nan()).count()
    }
}

/// Result of attention of one query head, and the weighted sum of the values' magnitudes.
pub struct Attended {
    pub value: f64,
    pub size: f64,
}

/// First position that a row at `position` sees; a window of 0 means no limit.
pub fn first_seen(position: usize, window: usize) -> usize {
    if window == 0 { 0 } else { (position + 1).saturating_sub(window) }
}

/// Attention of a row at `position` to tokens from `first` on, in f64: all query heads in order. `sinks` is empty, or has one more
/// score for each query head, whose value is 0. Scores are capped by `cap`, unless it is 0.
pub fn attend<E: Element>(
    cache: &Cache<E>,
    sequence: usize,
    (first, position): (usize, usize),
    q: &[f32],
    (sinks, cap): (&[f32], f32),
) -> Vec<Attended> {
    let heads = cache.heads;
    let mut out = Vec::new();
    for (h, q) in q.chunks_exact(heads.dim).enumerate() {
        let kv_head = h / heads.group();
        let score = |t: usize| -> f64 {
            let key = cache.head(sequence, t, false, kv_head);
            key.iter().zip(q).map(|(k, &q)| k.value() * f64::from(q)).sum::<f64>() / (heads.dim as f64).sqrt()
        };
        let capped = |x: f64| if cap == 0.0 { x } else { f64::from(cap) * (x / f64::from(cap)).tanh() };
        let scores: Vec<f64> = (first..=position).map(|t| capped(score(t))).collect();
        let sink = sinks.get(h).map_or(f64::NEG_INFINITY, |&sink| sink.into());
        let most = scores.iter().fold(sink, |most, &s| most.max(s));
        let weights: Vec<f64> = scores.iter().map(|s| (s - most).exp()).collect();
        let total: f64 = weights.iter().sum::<f64>() + (sink - most).exp();
        let mut sums: Vec<Attended> = (0..heads.dim).map(|_| Attended { value: 0.0, size: 0.0 }).collect();
        for (t, weight) in (first..).zip(&weights) {
            for (sum, value) in sums.iter_mut().zip(cache.head(sequence, t, true, kv_head)) {
                sum.value += weight / total * value.value();
                sum.size += weight / total * value.value().abs();
            }
        }
        out.extend(sums);
    }
    out
}
