//! KV pages for tests: pages of a sequence lie in any order, with NaN wherever no token was written.

use std::marker::PhantomData;

use half::f16;
use rocmforge::backend::hip::Buffer;
use rocmforge::backend::hip::kernels::Kernel;

use crate::random::Random;
use crate::rig::Rig;

pub const PAGE: usize = 32;
/// Layers of a page; [`LAYER`] is the one in use, so that a write to the other one shows.
const LAYERS: usize = 2;
const LAYER: usize = 1;

/// Element of a page.
pub trait Element: Copy {
    /// Chooses the variant of a kernel.
    fn pick<A>(kernels: [Kernel<A>; 3]) -> Kernel<A>;
    /// Whether results may be written as f16 rows.
    const WRITES_HALVES: bool = true;
    /// Bytes of a token's key or value in a page, on average.
    fn token_bytes(dim: usize) -> usize;
    /// Bytes of the keys, or values, of a head's tokens. `values`: `[PAGE][dim]`, NaN where nothing was written.
    fn encode(values: &[f32], dim: usize) -> Vec<u8>;
    /// The values of such bytes.
    fn decode(bytes: &[u8], dim: usize) -> Vec<f32>;
    /// Most that storing a head's values changes each.
    fn rounding(values: &[f64]) -> Vec<f64>;
}

impl Element for f16 {
    fn pick<A>([f16, _, _]: [Kernel<A>; 3]) -> Kernel<A> {
        f16
    }
    fn token_bytes(dim: usize) -> usize {
        2 * dim
    }
    fn encode(values: &[f32], _: usize) -> Vec<u8> {
        values.iter().flat_map(|&v| f16::from_f32(v).to_le_bytes()).collect()
    }
    fn decode(bytes: &[u8], _: usize) -> Vec<f32> {
        bytes.as_chunks().0.iter().map(|&b| f16::from_le_bytes(b).to_f32()).collect()
    }
    fn rounding(values: &[f64]) -> Vec<f64> {
        values.iter().map(|v| 2f64.powi(-11) * (v.abs() + 1.0)).collect()
    }
}

impl Element for f32 {
    fn pick<A>([_, _, f32]: [Kernel<A>; 3]) -> Kernel<A> {
        f32
    }
    const WRITES_HALVES: bool = false;
    fn token_bytes(dim: usize) -> usize {
        4 * dim
    }
    fn encode(values: &[f32], _: usize) -> Vec<u8> {
        values.iter().flat_map(|v| v.to_le_bytes()).collect()
    }
    fn decode(bytes: &[u8], _: usize) -> Vec<f32> {
        bytes.as_chunks().0.iter().map(|&b| f32::from_le_bytes(b)).collect()
    }
    fn rounding(values: &[f64]) -> Vec<f64> {
        vec![0.0; values.len()]
    }
}

/// Codes, with a scale for each 32 values of a token.
const GROUP: usize = 32;

impl Element for i8 {
    fn pick<A>([_, i8, _]: [Kernel<A>; 3]) -> Kernel<A> {
        i8
    }
    fn token_bytes(dim: usize) -> usize {
        dim + dim / GROUP * 2
    }
    fn encode(values: &[f32], dim: usize) -> Vec<u8> {
        let scale = |group: &[f32; GROUP]| {
            let most = group.iter().fold(0f32, |most, v| if v.is_nan() { *v } else { most.max(v.abs()) });
            if group.iter().any(|v| v.is_nan()) { f16::NAN } else { f16::from_f32(most / 127.0) }
        };
        let (groups, _) = values.as_chunks::<GROUP>();
        assert!(dim.is_multiple_of(GROUP));
        let code = |v: f32, scale: f32| if scale > 0.0 { (v / scale).round() as i8 } else { 0 };
        let codes = groups.iter().flat_map(|group| group.map(|v| code(v, scale(group).to_f32()) as u8));
        codes.chain(groups.iter().flat_map(|group| scale(group).to_le_bytes())).collect()
    }
    fn decode(bytes: &[u8], dim: usize) -> Vec<f32> {
        let (codes, scales) = bytes.split_at(PAGE * dim);
        let scales = f16::decode(scales, dim);
        codes.iter().zip(0..).map(|(&code, i)| f32::from(code as i8) * scales[i / GROUP]).collect()
    }
    fn rounding(values: &[f64]) -> Vec<f64> {
        // Half a step, and what rounding the scale takes from the greatest value.
        let most = |group: &[f64]| group.iter().fold(0f64, |most, v| most.max(v.abs()));
        let of_group = |group: &[f64]| vec![most(group) * (1.0 / 254.0 + 2f64.powi(-11)); group.len()];
        values.chunks(GROUP).flat_map(of_group).collect()
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
    /// The pages' exact content: `[page][layer][k | v][head][token][dim]`, NaN where nothing was written.
    values: Vec<f32>,
    device: Option<Device>,
    element: PhantomData<E>,
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
        let values = vec![f32::NAN; count * LAYERS * 2 * heads.kv * PAGE * heads.dim];
        Self { heads, stride, tables, values, device: None, element: PhantomData }
    }

    fn page_len(&self) -> usize {
        LAYERS * 2 * self.heads.kv * PAGE * self.heads.dim
    }

    /// Byte offset of the layer in use from a page's start.
    pub fn layer_offset(&self) -> u64 {
        (LAYER * 2 * self.heads.kv * PAGE * E::token_bytes(self.heads.dim)) as u64
    }

    /// Index of a token's key or value among all elements.
    fn place(&self, sequence: usize, position: usize, is_value: bool, head: usize) -> usize {
        let page = self.tables[sequence * self.stride + position / PAGE] as usize;
        let plane = (LAYER * 2 + usize::from(is_value)) * self.heads.kv + head;
        page * self.page_len() + (plane * PAGE + position % PAGE) * self.heads.dim
    }

    pub fn head(&self, sequence: usize, position: usize, is_value: bool, head: usize) -> &[f32] {
        &self.values[self.place(sequence, position, is_value, head)..][..self.heads.dim]
    }

    /// Writes random keys and values for a sequence's first `length` tokens.
    pub fn fill(&mut self, random: &mut Random, sequence: usize, length: usize) {
        for position in 0..length {
            for (is_value, head) in (0..2 * self.heads.kv).map(|i| (i % 2 == 1, i / 2)) {
                let (at, dim) = (self.place(sequence, position, is_value, head), self.heads.dim);
                self.values[at..at + dim].fill_with(|| random.normal());
            }
        }
        self.settle();
    }

    /// Rounds values to those that pages can hold.
    fn settle(&mut self) {
        let dim = self.heads.dim;
        for plane in self.values.chunks_exact_mut(PAGE * dim) {
            plane.copy_from_slice(&E::decode(&E::encode(plane, dim), dim));
        }
    }

    /// Overwrites a sequence's tokens before `end` with NaN, and removes the pages that hold only those from its table.
    pub fn forget(&mut self, sequence: usize, end: usize) {
        for position in 0..end {
            for (is_value, head) in (0..2 * self.heads.kv).map(|i| (i % 2 == 1, i / 2)) {
                let (at, dim) = (self.place(sequence, position, is_value, head), self.heads.dim);
                self.values[at..at + dim].fill(f32::NAN);
            }
        }
        self.tables[sequence * self.stride..][..end / PAGE].fill(u32::MAX);
    }

    /// Sets the first value of each key of a sequence's first `length` tokens, by position.
    pub fn set_first(&mut self, sequence: usize, length: usize, value: impl Fn(usize) -> f32) {
        for position in 0..length {
            for head in 0..self.heads.kv {
                let at = self.place(sequence, position, false, head);
                self.values[at] = value(position);
            }
        }
        self.settle();
    }

    /// Copies pages and tables to the device.
    pub fn upload(&mut self, rig: &Rig) -> &Device {
        let dim = self.heads.dim;
        let planes = self.values.chunks_exact(PAGE * dim);
        let bytes: Vec<u8> = planes.flat_map(|plane| E::encode(plane, dim)).collect();
        let pages = rig.upload(&bytes);
        let page_bytes = self.page_len() / dim * E::token_bytes(dim);
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

    /// The device's content.
    pub fn download(&self, rig: &Rig) -> Vec<u8> {
        rig.download(&self.device.as_ref().unwrap().pages)
    }

    /// Copies the device's content back to the host.
    pub fn read_back(&mut self, rig: &Rig) {
        let (bytes, dim) = (self.download(rig), self.heads.dim);
        let planes = bytes.chunks_exact(PAGE * E::token_bytes(dim));
        self.values = planes.flat_map(|plane| E::decode(plane, dim)).collect();
    }

    /// Number of elements that were ever written.
    pub fn written(&self) -> usize {
        self.values.iter().filter(|v| !v.is_nan()).count()
    }
}

/// Result of attention of one query head, the weighted sum of the values' magnitudes, and their sum.
pub struct Attended {
    pub value: f64,
    pub size: f64,
    pub all: f64,
}

/// First position that a row at `position` sees; a window of 0 means no limit.
pub fn first_seen(position: usize, window: usize) -> usize {
    if window == 0 { 0 } else { (position + 1).saturating_sub(window) }
}

/// Sinks, cap and slopes, which change the weights of a row's tokens.
#[derive(Default)]
pub struct Others<'a> {
    /// Empty, or one more score for each query head, whose value is 0.
    pub sinks: &'a [f32],
    /// Scores are capped by it, unless it is 0.
    pub cap: f32,
    /// Empty, or what a capped score of each query head falls by for each token of distance from `position`.
    pub slopes: &'a [f32],
    pub position: usize,
}

/// Attention of a row to tokens `first` to `last`, in f64: all query heads in order.
pub fn attend<E: Element>(
    cache: &Cache<E>,
    sequence: usize,
    (first, last): (usize, usize),
    q: &[f32],
    &Others { sinks, cap, slopes, position }: &Others<'_>,
) -> Vec<Attended> {
    let heads = cache.heads;
    let mut out = Vec::new();
    for (h, q) in q.chunks_exact(heads.dim).enumerate() {
        let kv_head = h / heads.group();
        let score = |t: usize| -> f64 {
            let key = cache.head(sequence, t, false, kv_head);
            key.iter().zip(q).map(|(&k, &q)| f64::from(k) * f64::from(q)).sum::<f64>()
                / (heads.dim as f64).sqrt()
        };
        let capped = |x: f64| if cap == 0.0 { x } else { f64::from(cap) * (x / f64::from(cap)).tanh() };
        let slope = slopes.get(h).map_or(0.0, |&slope| slope.into());
        let falls = |t: usize| slope * t.abs_diff(position) as f64;
        let scores: Vec<f64> = (first..=last).map(|t| capped(score(t)) - falls(t)).collect();
        let sink = sinks.get(h).map_or(f64::NEG_INFINITY, |&sink| sink.into());
        let most = scores.iter().fold(sink, |most, &s| most.max(s));
        let weights: Vec<f64> = scores.iter().map(|s| (s - most).exp()).collect();
        let total: f64 = weights.iter().sum::<f64>() + (sink - most).exp();
        let mut sums: Vec<Attended> =
            (0..heads.dim).map(|_| Attended { value: 0.0, size: 0.0, all: 0.0 }).collect();
        for (t, weight) in (first..).zip(&weights) {
            for (sum, &value) in sums.iter_mut().zip(cache.head(sequence, t, true, kv_head)) {
                sum.value += weight / total * f64::from(value);
                sum.size += weight / total * f64::from(value).abs();
                sum.all += f64::from(value).abs();
            }
        }
        out.extend(sums);
    }
    out
}
