//! Sampling on the device. Settings and sampled tokens travel in host words that host and device share.
//!
//! Log-probabilities are those of the unchanged logits, but logits are changed in place. So a step with rows that want both
//! is sampled twice. The first time lists likely tokens, before the changes, and the second draws. From rows with a [`chain`]
//! the host draws, after the changes.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::adjusting::Adjusting;
use crate::backend::hip::kernels::ops::{SampleDraw, SampleGreedy};
use crate::backend::hip::{ALIGN, Buffer, Device, DevicePtr, Grid, HipError, HostWords, Purpose, Stream};
use crate::backend::{BackendError, SampleRow, Sampled, chain};

/// Tokens per workgroup of `sample_greedy`.
const GREEDY_TOKENS: usize = 2048;

/// Threads per workgroup of `sample_draw`.
const DRAW_THREADS: u32 = 1024;

/// Words of a row's settings, and words of its report (`REPORT_WORDS` of kernels/sampling/report.h).
const ROW_WORDS: usize = 8;

/// Words per entry of a row's list: token id and bits of the logit.
const TOP_WORDS: usize = 2;

/// Most tokens in a row's list: the capacity of a `sample_draw` workgroup.
const TOP_MAX: u32 = 1024;

/// The value 1.0 in a report's fixed-point sums.
const SHARE: f64 = (1u64 << 40) as f64;

/// Memory for sampling a model's rows.
#[derive(Debug)]
pub struct Sampler {
    vocab: usize,
    /// Settings of all rows, then their reports, then both once more for a second sampling, then their lists.
    words: Arc<HostWords>,
    rows: usize,
    top_stride: usize,
    adjusting: Adjusting,
    /// The step was sampled before the changes too.
    twice: bool,
    parts: Buffer,
    counters: Buffer,
}

impl Sampler {
    /// Bytes of the counters, and of the partial results of greedy sampling.
    fn sizes(vocab: usize, rows: usize) -> [usize; 2] {
        [rows.saturating_mul(4), rows.saturating_mul(vocab.div_ceil(GREEDY_TOKENS)).saturating_mul(8)]
    }

    /// Device bytes for `rows` rows of `vocab` logits.
    pub fn bytes(vocab: usize, rows: usize) -> u64 {
        let taken = |bytes: usize| bytes.max(1).checked_next_multiple_of(ALIGN).map(|bytes| bytes as u64);
        Self::sizes(vocab, rows)
            .into_iter()
            .try_fold(0u64, |all, bytes| all.checked_add(taken(bytes)?))
            .unwrap_or(u64::MAX)
    }

    /// Allocates memory for `rows` rows of `vocab` logits.
    ///
    /// # Errors
    /// [`BackendError`] when device memory is short.
    pub fn new(device: &Device, stream: &Stream, vocab: usize, rows: usize) -> Result<Self, BackendError> {
        let [counters, parts] = Self::sizes(vocab, rows);
        let counters = device.take(counters, Purpose::Scratch)?;
        stream.fill(counters.all(), 0)?;
        Ok(Self {
            vocab,
            words: device.host_words((4 * rows * ROW_WORDS).max(1))?,
            rows,
            top_stride: 0,
            adjusting: Adjusting::default(),
            twice: false,
            parts: device.take(parts, Purpose::Scratch)?,
            counters,
        })
    }

    /// Starts sampling from `logits`. The last result must have been read.
    ///
    /// # Errors
    /// [`BackendError`].
    pub fn launch(
        &mut self,
        device: &Device,
        stream: &Stream,
        logits: DevicePtr<f32>,
        rows: &[SampleRow],
    ) -> Result<(), BackendError> {
        if rows.is_empty() {
            return Ok(());
        }
        if rows.len() > self.rows {
            return Err(BackendError::Batch("there are more rows to sample than the model was opened for"));
        }
        let vocab = self.vocab as u32; // it fits, and so does the number of rows: `open` checked them
        let listed = |row: &SampleRow| row.top_logprobs.min(TOP_MAX).min(vocab);
        self.make_lists(device, rows.iter().map(listed).max().unwrap_or(0) as usize)?;
        self.twice = rows.iter().any(|row| is_adjusted(row) && row.top_logprobs > 0);
        if self.twice {
            let greedy =
                |row: &SampleRow| SampleRow { temperature: 0.0, changes: None, mask: None, ..row.clone() };
            let plain = |row: &SampleRow| SampleRow { top_logprobs: 0, ..row.clone() };
            self.sample(device, stream, logits, &rows.iter().map(greedy).collect::<Vec<_>>(), Pass::Lists)?;
            self.adjusting.launch(device, stream, logits, self.vocab, rows)?;
            return self.sample(
                device,
                stream,
                logits,
                &rows.iter().map(plain).collect::<Vec<_>>(),
                Pass::Again,
            );
        }
        if rows.iter().any(is_adjusted) {
            self.adjusting.launch(device, stream, logits, self.vocab, rows)?;
        }
        self.sample(device, stream, logits, rows, Pass::Lists)
    }

    /// Samples the logits as they are now.
    fn sample(
        &self,
        device: &Device,
        stream: &Stream,
        logits: DevicePtr<f32>,
        rows: &[SampleRow],
        pass: Pass,
    ) -> Result<(), BackendError> {
        let (count, vocab) = (rows.len() as u32, self.vocab as u32);
        rows.iter().enumerate().for_each(|(index, row)| self.set(index, row, vocab, pass));
        let greedy = SampleGreedy {
            logits,
            parts: self.parts.ptr(),
            counters: self.counters.ptr(),
            reports: self.words.device_ptr(self.reports_at(pass))?.first(self.rows * ROW_WORDS),
            vocab,
        };
        let grid = Grid::xy(self.vocab.div_ceil(GREEDY_TOKENS) as u32, count);
        device.launch(stream, SampleGreedy::sample_greedy, grid, &greedy)?;
        if rows.iter().all(|row| is_greedy(row) && row.top_logprobs == 0) {
            return Ok(());
        }
        let lists = self.top_stride > 0 && pass == Pass::Lists;
        let draw = SampleDraw {
            logits,
            settings: self.words.device_ptr(self.settings_at(pass))?.first(self.rows * ROW_WORDS),
            reports: greedy.reports,
            tops: if lists { self.words.device_ptr(self.lists_at())? } else { DevicePtr::NULL },
            vocab,
            top_stride: if lists { self.top_stride as u32 } else { 0 },
        };
        let grid = Grid::x(count).threads(DRAW_THREADS);
        Ok(device.launch(stream, SampleDraw::sample_draw, grid, &draw)?)
    }

    /// The sampled tokens. The device must be done.
    ///
    /// `changed` copies the logits of a row as they are now, for rows that a [`chain`] draws from.
    pub fn read(
        &self,
        rows: &[SampleRow],
        mut changed: impl FnMut(usize) -> Result<Vec<f32>, BackendError>,
    ) -> Vec<Result<Sampled, BackendError>> {
        rows.iter().enumerate().map(|(index, row)| self.read_row(index, row, &mut changed)).collect()
    }

    fn read_row(
        &self,
        index: usize,
        row: &SampleRow,
        changed: &mut impl FnMut(usize) -> Result<Vec<f32>, BackendError>,
    ) -> Result<Sampled, BackendError> {
        let report = |pass, word| self.word(self.reports_at(pass) + index * ROW_WORDS + word);
        let [mut id, mut failed, mut logit, best, total_low, total_high, listed] =
            [0, 1, 2, 3, 4, 5, 6].map(|word| report(Pass::Lists, word));
        if self.twice {
            let [drawn, broken, changed] = [0, 1, 2].map(|word| report(Pass::Again, word));
            (id, failed) = (drawn, failed | broken);
            logit = self.adjusting.before(index, drawn).unwrap_or(changed);
        }
        if failed != 0 {
            return Err(BackendError::NotFinite);
        }
        let mut surprise = None;
        if let Some(chain) = row.chain.as_ref().filter(|_| !row.is_greedy()) {
            let logits = changed(index)?;
            let (drawn, bits) = chain::draw(&logits, row, chain)?;
            (id, surprise) = (drawn, Some(bits));
            let now = logits.get(drawn as usize).map_or(0, |logit| logit.to_bits());
            logit = self.adjusting.before(index, drawn).filter(|_| is_adjusted(row)).unwrap_or(now);
        }
        if row.top_logprobs == 0 {
            return Ok(Sampled { id, logprob: 0.0, top: Vec::new(), surprise });
        }
        let total = (u64::from(total_high) << 32 | u64::from(total_low)) as f64 / SHARE;
        let best = f64::from(f32::from_bits(best));
        let logprob = |bits: u32| (f64::from(f32::from_bits(bits)) - best - total.ln()) as f32;
        let list = self.lists_at() + index * self.top_stride * TOP_WORDS;
        let entry = |number: usize| {
            let at = list + number * TOP_WORDS;
            (self.word(at), logprob(self.word(at + 1)))
        };
        let top = (0..(listed as usize).min(self.top_stride)).map(entry).collect();
        Ok(Sampled { id, logprob: logprob(logit), top, surprise })
    }

    fn settings_at(&self, pass: Pass) -> usize {
        2 * self.rows * ROW_WORDS * pass as usize
    }

    fn reports_at(&self, pass: Pass) -> usize {
        self.settings_at(pass) + self.rows * ROW_WORDS
    }

    fn lists_at(&self) -> usize {
        4 * self.rows * ROW_WORDS
    }

    /// Ensures room for lists of `most` tokens.
    fn make_lists(&mut self, device: &Device, most: usize) -> Result<(), HipError> {
        if most > self.top_stride {
            let stride = most.next_power_of_two();
            self.words = device.host_words(self.lists_at() + self.rows * stride * TOP_WORDS)?;
            self.top_stride = stride;
        }
        Ok(())
    }

    fn set(&self, index: usize, row: &SampleRow, vocab: u32, pass: Pass) {
        let min_p_log = if row.min_p > 0.0 { row.min_p.ln() } else { f32::NEG_INFINITY };
        let temperature = if is_greedy(row) { 0.0 } else { row.temperature };
        let values = [
            temperature.to_bits(),
            row.top_k,
            row.top_p.to_bits(),
            min_p_log.to_bits(),
            row.seed as u32,
            (row.seed >> 32) as u32,
            row.position,
            row.top_logprobs.min(TOP_MAX).min(vocab),
        ];
        let words = self.words.words().get(self.settings_at(pass) + index * ROW_WORDS..).unwrap_or_default();
        words.iter().zip(values).for_each(|(word, value)| word.store(value, Ordering::Relaxed));
    }

    fn word(&self, at: usize) -> u32 {
        self.words.words().get(at).map_or(0, |word| word.load(Ordering::Relaxed))
    }
}

/// The one sampling of a step, or the first of two, which lists likely tokens; or the second.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pass {
    Lists,
    Again,
}

/// Whether the row's logits change before a token is drawn.
fn is_adjusted(row: &SampleRow) -> bool {
    row.changes.is_some() || row.mask.is_some()
}

/// Whether the device draws no token by chance: the most likely one is taken, or the host draws.
fn is_greedy(row: &SampleRow) -> bool {
    row.is_greedy() || row.chain.is_some()
}
