//! Changes of logits on the device before tokens are drawn. They travel in host words that host and device share.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::backend::hip::kernels::ops::{AdjustRows, NO_MASK};
use crate::backend::hip::{Device, DevicePtr, Grid, HostWords, Stream};
use crate::backend::{BackendError, LogitChange, SampleRow};

/// Tokens per workgroup of `adjust_rows`.
const TOKENS: usize = 2048;

/// Words of a row, and of a change (`ROW_WORDS` and `CHANGE_WORDS` of kernels/adjust_rows.hip).
const ROW_WORDS: usize = 4;
const CHANGE_WORDS: usize = 5;

/// Word of a change that becomes the logit as it was.
const BEFORE: usize = 4;

/// Memory for the changes of a model's rows. It grows to the most that a step needed, and none is taken before the first.
#[derive(Debug, Default)]
pub(super) struct Adjusting {
    words: Option<Arc<HostWords>>,
    /// For each row of the step its changes: the first one's number, and their ids.
    changes: Vec<(usize, Vec<u32>)>,
    changes_at: usize,
}

impl Adjusting {
    /// Starts to change the logits of rows. The work of an earlier call must be done.
    ///
    /// # Errors
    /// [`BackendError`], also when memory for the changes is short.
    pub fn launch(
        &mut self,
        device: &Device,
        stream: &Stream,
        logits: DevicePtr<f32>,
        vocab: usize,
        rows: &[SampleRow],
    ) -> Result<(), BackendError> {
        let mask_words = vocab.div_ceil(32);
        self.changes.clear();
        let (mut changes, mut masks) = (0, 0);
        for row in rows {
            let ids: Vec<u32> = changes_of(row, vocab).map(|change| change.id).collect();
            changes += ids.len();
            masks += usize::from(row.mask.is_some());
            self.changes.push((changes - ids.len(), ids));
        }
        self.changes_at = rows.len() * ROW_WORDS;
        let masks_at = self.changes_at + changes * CHANGE_WORDS;
        let words = self.words_for(device, masks_at + masks * mask_words)?;
        let put = |at: usize, values: &mut dyn Iterator<Item = u32>| {
            let places = words.words().get(at..).unwrap_or_default();
            places.iter().zip(values).for_each(|(word, value)| word.store(value, Ordering::Relaxed));
        };
        let mut mask = 0;
        for (index, (row, (first, ids))) in rows.iter().zip(&self.changes).enumerate() {
            let number = if row.mask.is_some() { mask as u32 } else { NO_MASK };
            put(index * ROW_WORDS, &mut [*first as u32, ids.len() as u32, number, 0].into_iter());
            let words_of =
                |c: &LogitChange| [c.id, c.bias.to_bits(), c.repeat.to_bits(), c.less.to_bits(), 0];
            put(self.changes_at + first * CHANGE_WORDS, &mut changes_of(row, vocab).flat_map(words_of));
            if let Some(tokens) = &row.mask {
                put_mask(words.words(), masks_at + mask * mask_words, mask_words, tokens.words());
                mask += 1;
            }
        }
        let part = |at: usize, count: usize| match count {
            0 => Ok(DevicePtr::NULL),
            _ => words.device_ptr(at).map(|words| words.first(count)),
        };
        let arguments = AdjustRows {
            logits,
            rows: part(0, rows.len() * ROW_WORDS)?,
            changes: part(self.changes_at, changes * CHANGE_WORDS)?,
            masks: part(masks_at, masks * mask_words)?,
            vocab: vocab as u32,
            mask_words: mask_words as u32,
        };
        let grid = Grid::xy(vocab.div_ceil(TOKENS) as u32, rows.len() as u32);
        Ok(device.launch(stream, AdjustRows::adjust_rows, grid, &arguments)?)
    }

    /// Bits of the logit of a changed token as it was; `None` for one that the row's changes did not have. The device must
    /// be done.
    pub fn before(&self, row: usize, id: u32) -> Option<u32> {
        let (first, ids) = self.changes.get(row)?;
        let number = first + ids.iter().position(|of| *of == id)?;
        let word = self.words.as_ref()?.words().get(self.changes_at + number * CHANGE_WORDS + BEFORE)?;
        Some(word.load(Ordering::Relaxed))
    }

    fn words_for(&mut self, device: &Device, count: usize) -> Result<Arc<HostWords>, BackendError> {
        match &self.words {
            Some(words) if words.words().len() >= count => Ok(Arc::clone(words)),
            _ => {
                let words = device.host_words(count.max(1).next_power_of_two())?;
                self.words = Some(Arc::clone(&words));
                Ok(words)
            }
        }
    }
}

/// Writes a mask of so many words, zeros where it has none. The closure for few words calls for each word: 40 us for a vocabulary of
/// 128,000. A step of 16 answers waited 0.6 ms for that.
fn put_mask(words: &[AtomicU32], at: usize, count: usize, mask: &[u32]) {
    let places = words.get(at..).unwrap_or_default();
    let (given, rest) = places.split_at(mask.len().min(count).min(places.len()));
    given.iter().zip(mask).for_each(|(word, value)| word.store(*value, Ordering::Relaxed));
    rest.iter().take(count - given.len()).for_each(|word| word.store(0, Ordering::Relaxed));
}

/// Changes of tokens inside the vocabulary: the kernel does not check ids.
fn changes_of(row: &SampleRow, vocab: usize) -> impl Iterator<Item = &LogitChange> {
    let all = row.changes.iter().flat_map(|changes| changes.iter());
    all.filter(move |change| (change.id as usize) < vocab)
}
