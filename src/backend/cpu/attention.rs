//! Attention of a step's rows over the KV pages of their sequences: one-pass softmax, f32 throughout.
//!
//! A row's tokens are cut into splits. Their length depends only on how many tokens the row attends to. Each split
//! gives a greatest score, a sum and weighted values; these are merged in rising order. With few workers, one worker
//! takes all splits of a tile of rows; with many, each split is a chunk of its own. Both ways do the same operations
//! on a row in the same order, so the bits are equal.
//!
//! All query heads of a KV head are computed together, and so are up to `thresholds::ATTENTION_TILE_MAX` queries of
//! neighbouring rows. Keys and values are read (and widened) once for all of them.

mod state;

use std::ops::Range;

use half::f16;

use state::{State, exp, finish, merge};

use super::compute::Worker;
use super::grid::{Block, Grid};
use super::kv::{KvElement, KvHead, KvLayout, KvPool};
use super::norm;
use super::pool::{Parts, Pool};
use super::prefetch::prefetch_all;
use super::simd::{LANES, Level, Simd, vectorize};
use super::slices::{Cuttable, Slices, Stretch};
use super::step::Step;
use crate::backend::{BackendError, KV_GROUP, KV_PAGE_TOKENS, KvType};

/// Tokens in a split of a row that attends to `len` tokens: always whole pages. Workers share the splits of a long row,
/// and merging them costs almost nothing.
pub fn split_len(len: usize) -> usize {
    match len {
        0..=1024 => 64,
        1025..=4096 => 128,
        _ => 256,
    }
}

/// Inputs of attention over one state.
#[derive(Clone, Copy)]
pub struct Problem<'a> {
    /// Rows, page tables, splits.
    pub step: &'a Step,
    /// Runs of rows that are computed together.
    pub tiles: &'a [Range<usize>],
    /// Keys and values.
    pub kv: &'a KvPool,
    /// Where the state lies in each KV page.
    pub layout: KvLayout,
    /// Rotated queries: row r starts at `r * stride`, its heads one after the other.
    pub queries: &'a [f32],
    /// Distance between query rows, in values.
    pub stride: usize,
    /// Query heads per KV head.
    pub group: usize,
    /// Factor applied to queries.
    pub scale: f32,
    /// Positions that a row sees, including its own: at least 1. Both ways, half of it before the row, and half of it after.
    pub window: usize,
    /// A row sees positions after its own, too, which its sequence has in the step.
    pub both_ways: bool,
    /// Scores become `cap * tanh(score / cap)`.
    pub cap: Option<f32>,
    /// A slope for each query head, or none. A score falls by it for each position between the key's and the row's.
    pub slopes: &'a [f32],
    /// A sink for each query head, or none. Its power is part of a head's sum.
    pub sinks: &'a [f32],
}

impl Problem<'_> {
    /// Positions that a row sees.
    fn visible(&self, row: usize) -> Range<usize> {
        let (end, len) = (self.end(row), self.step.len(row));
        let before = if self.both_ways { self.window / 2 } else { self.window - 1 };
        (len - 1).saturating_sub(before)..end
    }

    /// The end of the positions that a row sees.
    fn end(&self, row: usize) -> usize {
        let len = self.step.len(row);
        if self.both_ways { self.step.text_len(row).min(len.saturating_add(self.window / 2)) } else { len }
    }

    /// Tokens in a split of a row. All rows of a text that sees both ways have equal splits.
    fn split_len(&self, row: usize) -> usize {
        split_len(if self.both_ways { self.step.text_len(row) } else { self.step.len(row) })
    }
}

/// A worker's buffers for the queries of a tile. They grow to the largest tile.
#[derive(Default)]
pub struct AttentionScratch {
    queries: Vec<f32>,
    weights: Vec<[f32; KV_PAGE_TOKENS]>,
    split: State,
    total: State,
}

/// Results of splits that ran as chunks: for each query `head_stride` values, then greatest score and sum.
#[derive(Default)]
pub struct Partials {
    values: Vec<f32>,
}

impl Partials {
    /// Makes room for `items` results of `item_len` values; contents are unspecified.
    fn resize(&mut self, items: usize, item_len: usize) -> Result<&mut [f32], BackendError> {
        let refused = |len: usize| BackendError::OutOfMemory {
            what: "the attention results of splits",
            need_bytes: (len as u64).saturating_mul(size_of::<f32>() as u64),
        };
        let len = items.checked_mul(item_len).ok_or_else(|| refused(usize::MAX))?;
        self.values.try_reserve(len.saturating_sub(self.values.len())).map_err(|_| refused(len))?;
        self.values.resize(len, 0.0);
        Ok(&mut self.values)
    }
}

vectorize!(fn tile_f16 = tile::<f16, _>, (p: &Problem<'_>, rows: Range<usize>, scratch: &mut AttentionScratch, out: Block<'_>));
vectorize!(fn tile_i8 = tile::<i8, _>, (p: &Problem<'_>, rows: Range<usize>, scratch: &mut AttentionScratch, out: Block<'_>));
vectorize!(fn tile_f32 = tile::<f32, _>, (p: &Problem<'_>, rows: Range<usize>, scratch: &mut AttentionScratch, out: Block<'_>));
vectorize!(fn partial_f16 = partial::<f16, _>, (p: &Problem<'_>, item: Item, scratch: &mut AttentionScratch, out: &mut [f32]));
vectorize!(fn partial_i8 = partial::<i8, _>, (p: &Problem<'_>, item: Item, scratch: &mut AttentionScratch, out: &mut [f32]));
vectorize!(fn partial_f32 = partial::<f32, _>, (p: &Problem<'_>, item: Item, scratch: &mut AttentionScratch, out: &mut [f32]));
vectorize!(fn merge_row = merge_row_lanes, (p: &Problem<'_>, row: usize, partials: &[f32], splits: Range<usize>, scratch: &mut AttentionScratch, out: &mut [f32]));

/// One split of one row and KV head.
#[derive(Clone, Copy)]
struct Item {
    row: usize,
    split: usize,
    kv_head: usize,
}

/// Threads that compute a stretch of attention.
pub struct Phase<'a> {
    /// The threads.
    pub pool: &'a mut Pool,
    /// State of each.
    pub workers: &'a mut [Worker],
    /// How long tiles are cut.
    pub slices: Slices,
    /// The tiles to compute.
    pub stretch: Stretch,
}

/// Attention of all rows. Writes `[rows][n_kv_heads * group * head_dim]` to `out`. Returns the first tile that the stretch
/// left, if any.
///
/// # Errors
/// [`BackendError::OutOfMemory`] for the results of splits; then nothing was computed.
pub fn attend(
    level: Level,
    p: &Problem<'_>,
    phase: Phase<'_>,
    partials: &mut Partials,
    out: &mut [f32],
) -> Result<Option<usize>, BackendError> {
    let Phase { pool, workers, slices, stretch } = phase;
    let tiles = p.tiles.len() * p.layout.heads;
    // The step's splits end at each row's own position.
    let many_splits = !p.both_ways && p.step.splits.len() > p.step.rows();
    // Fewer tiles would leave workers idle at the end; more items would make the partial results large.
    if pool.threads() > 1 && many_splits && tiles < 4 * pool.threads() {
        attend_by_split(level, p, pool, workers, partials, out)?;
        return Ok(None);
    }
    // Scores, then weighted values.
    let of_position = 2 * p.group * p.layout.heads * p.layout.head_dim;
    let of_tile = |rows: &Range<usize>| rows.len() * p.visible(rows.end.saturating_sub(1)).len();
    let work = of_position * p.tiles.iter().map(of_tile).max().unwrap_or(0);
    let unit = Cuttable { count: p.tiles.len(), multiple: 1, work };
    Ok(slices.run(stretch, unit, |tiles| attend_by_tile(level, p, &p.tiles[tiles], pool, workers, out)))
}

fn attend_by_tile(
    level: Level,
    p: &Problem<'_>,
    tiles: &[Range<usize>],
    pool: &mut Pool,
    workers: &mut [Worker],
    out: &mut [f32],
) {
    let head_dim = p.layout.head_dim;
    let cols = p.layout.heads * p.group * head_dim;
    let grid =
        Grid { stride: cols, rows: tiles, cols: 0..cols, block_cols: p.group * head_dim, wide_cols: 0 };
    grid.run(pool, workers, out, |worker, block| match p.kv.kv() {
        KvType::F16 => tile_f16(level, p, block.rows(), &mut worker.attention, block),
        KvType::Int8 => tile_i8(level, p, block.rows(), &mut worker.attention, block),
        KvType::F32 => tile_f32(level, p, block.rows(), &mut worker.attention, block),
    });
}

fn attend_by_split(
    level: Level,
    p: &Problem<'_>,
    pool: &mut Pool,
    workers: &mut [Worker],
    partials: &mut Partials,
    out: &mut [f32],
) -> Result<(), BackendError> {
    let layout = p.layout;
    let item_len = p.group * (layout.head_stride + 2);
    let items = p.step.splits.len() * p.layout.heads;
    let parts = Parts::new(partials.resize(items, item_len)?);
    pool.run_with(workers, items, |worker, chunk| {
        let scratch = &mut worker.attention;
        let (row, split) = p.step.splits[chunk / p.layout.heads];
        let item = Item { row: row as usize, split: split as usize, kv_head: chunk % p.layout.heads };
        // SAFETY: each chunk takes only the part with its own number.
        let part = unsafe { parts.take(chunk * item_len..(chunk + 1) * item_len) };
        match p.kv.kv() {
            KvType::F16 => partial_f16(level, p, item, scratch, part),
            KvType::Int8 => partial_i8(level, p, item, scratch, part),
            KvType::F32 => partial_f32(level, p, item, scratch, part),
        }
    });
    let cols = p.layout.heads * p.group * layout.head_dim;
    let mut first = 0;
    for (row, out) in out.chunks_exact_mut(cols).take(p.step.rows()).enumerate() {
        let count = p.step.splits[first..].iter().take_while(|s| s.0 as usize == row).count();
        merge_row(level, p, row, &partials.values, first..first + count, &mut workers[0].attention, out);
        first += count;
    }
    Ok(())
}

/// All splits of the queries of `rows` with the KV head that the block's columns belong to.
#[inline(always)]
fn tile<E: KvElement, S: Simd>(
    s: S,
    p: &Problem<'_>,
    rows: Range<usize>,
    scratch: &mut AttentionScratch,
    mut out: Block<'_>,
) {
    let (head_dim, stride) = (p.layout.head_dim, p.layout.head_stride);
    let kv_head = out.cols().start / (p.group * head_dim);
    let queries = rows.len() * p.group;
    let longest = p.end(rows.end - 1);
    let split = p.split_len(rows.end - 1);
    let first = p.visible(rows.start).start / split * split;
    load_queries(p, rows.clone(), kv_head, scratch);
    scratch.total.reset(queries, stride);
    for start in (first..longest).step_by(split) {
        scratch.split.reset(queries, stride);
        split_state::<E, S>(s, p, rows.clone(), kv_head, start..(start + split).min(longest), scratch);
        for q in 0..queries {
            // A row that sees no token of this split takes no part in it.
            let visible = p.visible(rows.start + q / p.group);
            if visible.end > start && visible.start < start + split {
                let part = &scratch.split.values[q * stride..][..stride];
                merge(s, &mut scratch.total, q, scratch.split.max[q], scratch.split.sum[q], part);
            }
        }
    }
    for q in 0..queries {
        let head = &mut out.row(rows.start + q / p.group)[q % p.group * head_dim..][..head_dim];
        let sink = p.sinks.get(kv_head * p.group + q % p.group);
        finish(s, &scratch.total, q, sink, head);
    }
}

/// One split of one row and KV head.
#[inline(always)]
fn partial<E: KvElement, S: Simd>(
    s: S,
    p: &Problem<'_>,
    item: Item,
    scratch: &mut AttentionScratch,
    out: &mut [f32],
) {
    let stride = p.layout.head_stride;
    let len = p.step.len(item.row);
    let start = item.split * split_len(len);
    let rows = item.row..item.row + 1;
    load_queries(p, rows.clone(), item.kv_head, scratch);
    scratch.split.reset(p.group, stride);
    let end = (start + split_len(len)).min(len);
    if p.visible(item.row).start < end {
        split_state::<E, S>(s, p, rows, item.kv_head, start..end, scratch);
    }
    for (q, out) in out.chunks_exact_mut(stride + 2).enumerate() {
        out[..stride].copy_from_slice(&scratch.split.values[q * stride..][..stride]);
        out[stride] = scratch.split.max[q];
        out[stride + 1] = scratch.split.sum[q];
    }
}

/// Merges the partial results of one row; `splits` are indices into the step's list.
#[inline(always)]
fn merge_row_lanes<S: Simd>(
    s: S,
    p: &Problem<'_>,
    row: usize,
    partials: &[f32],
    splits: Range<usize>,
    scratch: &mut AttentionScratch,
    out: &mut [f32],
) {
    let (head_dim, stride) = (p.layout.head_dim, p.layout.head_stride);
    let heads = p.layout.heads * p.group;
    scratch.total.reset(heads, stride);
    // Splits that end before the row's window take no part.
    let unseen = p.visible(row).start / split_len(p.step.len(row));
    for split in splits.skip(unseen) {
        let all = &partials[split * heads * (stride + 2)..][..heads * (stride + 2)];
        for (q, part) in all.chunks_exact(stride + 2).enumerate() {
            merge(s, &mut scratch.total, q, part[stride], part[stride + 1], &part[..stride]);
        }
    }
    for (q, head) in out.chunks_exact_mut(head_dim).enumerate() {
        finish(s, &scratch.total, q, p.sinks.get(q), head);
    }
}

/// Copies the tile's queries into one scaled buffer, and makes room for their weights.
#[inline(always)]
fn load_queries(p: &Problem<'_>, rows: Range<usize>, kv_head: usize, scratch: &mut AttentionScratch) {
    let head_dim = p.layout.head_dim;
    scratch.queries.clear();
    scratch.weights.resize(rows.len() * p.group, [0.0; KV_PAGE_TOKENS]);
    for row in rows {
        let heads = &p.queries[row * p.stride + kv_head * p.group * head_dim..][..p.group * head_dim];
        scratch.queries.extend(heads.iter().map(|q| q * p.scale));
    }
}

/// Online softmax over `tokens`, which start at a page, page by page. The result is in `scratch.split`.
#[inline(always)]
fn split_state<E: KvElement, S: Simd>(
    s: S,
    p: &Problem<'_>,
    rows: Range<usize>,
    kv_head: usize,
    tokens: Range<usize>,
    scratch: &mut AttentionScratch,
) {
    let pages = p.step.pages(rows.start);
    let tokens_end = tokens.end;
    for start in tokens.step_by(KV_PAGE_TOKENS) {
        let head = p.kv.head::<E>(pages[start / KV_PAGE_TOKENS], &p.layout, kv_head);
        let next = match pages.get(start / KV_PAGE_TOKENS + 1) {
            Some(&page) if start + KV_PAGE_TOKENS < tokens_end => p.kv.head::<E>(page, &p.layout, kv_head).k,
            _ => &[],
        };
        let visible = |row: usize| {
            let Range { start: from, end } = p.visible(row);
            from.saturating_sub(start)..end.saturating_sub(start).min(KV_PAGE_TOKENS)
        };
        const WHOLE: Range<usize> = 0..KV_PAGE_TOKENS;
        let mut first = rows.start;
        while first < rows.end {
            // Rows that see the whole page go together, other rows one by one. A value that a row may not see must not
            // enter its sums, not even with weight 0.
            let mut end = first + 1;
            while end < rows.end && visible(first) == WHOLE && visible(end) == WHOLE {
                end += 1;
            }
            let tokens = visible(first);
            if !tokens.is_empty() {
                let queries = (first - rows.start) * p.group..(end - rows.start) * p.group;
                let place = Place { first_row: rows.start, queries, kv_head, start };
                page(s, p, &head, next, place, tokens, scratch);
            }
            first = end;
        }
    }
}

/// Adds `tokens` of a page to the state of the place's queries. `next` holds the keys of the next page.
///
/// A step reads more weights than caches hold, so keys and values come from memory each time. The processor's own
/// prefetch restarts at every 4 KiB. So values are prefetched before the scores, and the next keys before the
/// weighted sum.
#[inline(always)]
fn page<E: KvElement, S: Simd>(
    s: S,
    p: &Problem<'_>,
    head: &KvHead<'_, E>,
    next: &[E],
    place: Place,
    tokens: Range<usize>,
    scratch: &mut AttentionScratch,
) {
    prefetch_all(head.v);
    let head_dim = p.layout.head_dim;
    let queries = place.queries;
    let mut q = queries.start;
    while q < queries.end {
        let n = (queries.end - q).min(S::SUMS / 4).max(1);
        match n {
            4 => scores::<E, S, 4>(s, head, head_dim, q, scratch),
            3 => scores::<E, S, 3>(s, head, head_dim, q, scratch),
            2 => scores::<E, S, 2>(s, head, head_dim, q, scratch),
            _ => scores::<E, S, 1>(s, head, head_dim, q, scratch),
        }
        let n = n.min(4);
        for q in q..q + n {
            if let Some(cap) = p.cap {
                norm::cap(s, cap, &mut scratch.weights[q]);
            }
            if let Some(&slope) = p.slopes.get(place.kv_head * p.group + q % p.group) {
                let own = p.step.len(place.first_row + q / p.group) - 1;
                fall(slope, own, place.start, &mut scratch.weights[q]);
            }
            softmax(s, q, &tokens, scratch);
        }
        if q == queries.start {
            prefetch_all(next);
        }
        match n {
            4 => weigh::<E, S, 4>(s, head, &tokens, q, scratch),
            3 => weigh::<E, S, 3>(s, head, &tokens, q, scratch),
            2 => weigh::<E, S, 2>(s, head, &tokens, q, scratch),
            _ => weigh::<E, S, 1>(s, head, &tokens, q, scratch),
        }
        q += n;
    }
}

/// The place of a page among the positions, and of queries in a tile.
struct Place {
    /// The first row of the tile.
    first_row: usize,
    queries: Range<usize>,
    kv_head: usize,
    /// Position of the page's first token.
    start: usize,
}

/// Lowers the scores of a page's tokens by `slope` for each position between theirs and `own`.
#[inline(always)]
fn fall(slope: f32, own: usize, start: usize, scores: &mut [f32; KV_PAGE_TOKENS]) {
    for (position, score) in (start..).zip(scores) {
        *score -= slope * own.abs_diff(position) as f32;
    }
}

/// Scores of all 32 tokens of a page with `Q` queries from `first`; scores of tokens past the end are meaningless.
#[inline(always)]
fn scores<E: KvElement, S: Simd, const Q: usize>(
    s: S,
    head: &KvHead<'_, E>,
    head_dim: usize,
    first: usize,
    scratch: &mut AttentionScratch,
) {
    let queries: [&[f32]; Q] =
        std::array::from_fn(|i| &scratch.queries[(first + i) * head_dim..][..head_dim]);
    let mut sums = [[s.splat(0.0); 2]; Q];
    let (halves, _) = head.k.as_chunks::<LANES>();
    let (scale_halves, _) = head.k_scales.as_chunks::<LANES>();
    let mut scales = [s.splat(1.0); 2];
    for (d, pair) in halves.chunks_exact(2).take(head_dim).enumerate() {
        let mut keys = [E::load(s, &pair[0]), E::load(s, &pair[1])];
        if E::SCALED {
            if d % KV_GROUP == 0 {
                let of_group = &scale_halves[d / KV_GROUP * 2..][..2];
                scales = [s.load_f16(&of_group[0]), s.load_f16(&of_group[1])];
            }
            keys = [s.mul(keys[0], scales[0]), s.mul(keys[1], scales[1])];
        }
        for i in 0..Q {
            let q = s.splat(queries[i][d]);
            sums[i] = [s.mul_add(keys[0], q, sums[i][0]), s.mul_add(keys[1], q, sums[i][1])];
        }
    }
    for (sum, weights) in sums.iter().zip(&mut scratch.weights[first..first + Q]) {
        let (halves, _) = weights.as_chunks_mut::<LANES>();
        s.store(sum[0], &mut halves[0]);
        s.store(sum[1], &mut halves[1]);
    }
}

/// Turns the scores of query `q` into weights `e^(score - max)`, 0 outside `tokens`, and rescales its state to the
/// new maximum.
#[inline(always)]
fn softmax<S: Simd>(s: S, q: usize, tokens: &Range<usize>, scratch: &mut AttentionScratch) {
    let state = &mut scratch.split;
    let weights = &mut scratch.weights[q];
    weights[..tokens.start].fill(f32::NEG_INFINITY);
    weights[tokens.end..].fill(f32::NEG_INFINITY);
    let (halves, _) = weights.as_chunks_mut::<LANES>();
    let scores = [s.load(&halves[0]), s.load(&halves[1])];
    let page_max = s.reduce_max(s.max(scores[0], scores[1]));
    if page_max > state.max[q] {
        let shrink = exp(s, state.max[q] - page_max);
        state.sum[q] *= shrink;
        let stride = state.values.len() / state.max.len();
        for value in &mut state.values[q * stride..][..stride] {
            *value *= shrink;
        }
        state.max[q] = page_max;
    }
    let max = s.splat(state.max[q]);
    let exps = [s.exp(s.sub(scores[0], max)), s.exp(s.sub(scores[1], max))];
    s.store(exps[0], &mut halves[0]);
    s.store(exps[1], &mut halves[1]);
    weights[..tokens.start].fill(0.0);
    weights[tokens.end..].fill(0.0);
    let (halves, _) = weights.as_chunks::<LANES>();
    state.sum[q] += s.reduce_add(s.add(s.load(&halves[0]), s.load(&halves[1])));
}

/// Adds the weighted values of `tokens` to the state of `Q` queries from `first`.
#[inline(always)]
fn weigh<E: KvElement, S: Simd, const Q: usize>(
    s: S,
    head: &KvHead<'_, E>,
    tokens: &Range<usize>,
    first: usize,
    scratch: &mut AttentionScratch,
) {
    let stride = head.v.len() / KV_PAGE_TOKENS / LANES;
    let mut column = 0;
    while column < stride {
        if S::SUMS >= 16 && stride - column >= 4 {
            weigh_columns::<E, S, Q, 4>(s, head, tokens, first, column, scratch);
            column += 4;
        } else {
            weigh_columns::<E, S, Q, 1>(s, head, tokens, first, column, scratch);
            column += 1;
        }
    }
}

/// As [`weigh`], for `C` vectors of each value row from vector `column`.
#[inline(always)]
fn weigh_columns<E: KvElement, S: Simd, const Q: usize, const C: usize>(
    s: S,
    head: &KvHead<'_, E>,
    tokens: &Range<usize>,
    first: usize,
    column: usize,
    scratch: &mut AttentionScratch,
) {
    let (v, _) = head.v.as_chunks::<LANES>();
    let stride = v.len() / KV_PAGE_TOKENS;
    let (state, _) = scratch.split.values.as_chunks_mut::<LANES>();
    let mut sums = [[s.splat(0.0); C]; Q];
    for i in 0..Q {
        for c in 0..C {
            sums[i][c] = s.load(&state[(first + i) * stride + column + c]);
        }
    }
    let scales = value_scales::<E, S, C>(s, head, column);
    // No closures or adapters that carry vectors: without link-time optimisation, their instructions are calls.
    for token in tokens.clone() {
        let row = &v[token * stride + column..][..C];
        let mut values = [s.splat(0.0); C];
        for c in 0..C {
            values[c] = E::load(s, &row[c]);
            if E::SCALED {
                values[c] = s.mul(values[c], s.splat(scales[c][token]));
            }
        }
        for (i, sums) in sums.iter_mut().enumerate() {
            let weight = s.splat(scratch.weights[first + i][token]);
            for c in 0..C {
                sums[c] = s.mul_add(values[c], weight, sums[c]);
            }
        }
    }
    for i in 0..Q {
        for c in 0..C {
            s.store(sums[i][c], &mut state[(first + i) * stride + column + c]);
        }
    }
}

/// The scales of all tokens for each of `C` vectors of a value row from vector `column`; of no use for elements without
/// scales.
#[inline(always)]
fn value_scales<E: KvElement, S: Simd, const C: usize>(
    s: S,
    head: &KvHead<'_, E>,
    column: usize,
) -> [[f32; KV_PAGE_TOKENS]; C] {
    let mut scales = [[0.0; KV_PAGE_TOKENS]; C];
    if E::SCALED {
        let (halves, _) = head.v_scales.as_chunks::<LANES>();
        for (c, of_column) in scales.iter_mut().enumerate() {
            let of_group = &halves[(column + c) * LANES / KV_GROUP * 2..][..2];
            for (half, out) in of_group.iter().zip(of_column.as_chunks_mut::<LANES>().0) {
                s.store(s.load_f16(half), out);
            }
        }
    }
    scales
}

#[cfg(test)]
mod tests;
