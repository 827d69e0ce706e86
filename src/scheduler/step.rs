//! One step: runs a batch of rows through the parts of one model's program.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::masks::{Masked, Masking, WAIT_ALONE};
use super::paging::Paging;
use super::residency::Residency;
use super::schedule::Work;
use crate::backend::{
    Backend, BackendError, ModelSlot, Progress, RecurrentPlace, SampleRow, Sampled, StepBatch,
};
use crate::lock;
use crate::model::{Model, ModelId};
use crate::program::FIRST_PART;
use crate::tensor::MapError;

/// Input arrays of a step, reused by the next: plain numbers, ready for the copy to a device.
#[derive(Debug, Default)]
pub(super) struct StepArrays {
    token_ids: Vec<u32>,
    positions: Vec<u32>,
    row_sequences: Vec<u32>,
    page_tables: Vec<u32>,
    page_table_stride: usize,
    sequences: u32,
    logits_rows: Vec<u32>,
    /// Places of the sequences' recurrent states, if there are any.
    recurrent: Vec<RecurrentPlace>,
    /// Rows whose last layer is wanted, in rising order.
    last_rows: Vec<Range<u32>>,
    samples: Vec<SampleRow>,
    /// Beside each of `samples`, what limits its tokens, and how many drafted ones are before it. The sequences own it. Held here
    /// until the next step, the constraints of a step took up to 200 MiB after their answers had ended.
    maskings: Vec<Option<(Weak<Masking>, u32)>>,
    /// Places in `samples` whose masks did not come in time.
    missed: Vec<usize>,
    /// How long the step waits for masks.
    pub patience: Duration,
}

impl StepArrays {
    /// Empties the arrays for sequences of at most `stride` pages each.
    pub fn clear(&mut self, stride: usize) {
        self.token_ids.clear();
        self.positions.clear();
        self.row_sequences.clear();
        self.page_tables.clear();
        self.page_table_stride = stride;
        self.sequences = 0;
        self.logits_rows.clear();
        self.recurrent.clear();
        self.last_rows.clear();
        self.samples.clear();
        self.maskings.clear();
        self.missed.clear();
        self.patience = WAIT_ALONE;
    }

    /// Adds a sequence's rows. `tokens` holds all its known tokens, and `drafted` those that may follow. `pages` has the pages of
    /// its positions, at most the stride given to [`StepArrays::clear`]. `sample` gives the sampling settings behind so many drafted
    /// tokens if `work.samples`, and what limits the next token. `score` gives those of a row whose next token is known.
    pub fn push(
        &mut self,
        work: &Work,
        (tokens, drafted): (&[u32], &[u32]),
        (pages, recurrent): (&[u32], Option<RecurrentPlace>),
        sample: impl Fn(u32) -> (SampleRow, Option<Arc<Masking>>),
        score: impl Fn(u32) -> SampleRow,
    ) {
        let positions = work.start..work.start + work.rows;
        let scored = positions.end.saturating_sub(work.scores)..positions.end;
        let known = work.start as usize..(positions.end - work.drafts) as usize;
        let drafted = &drafted[..work.drafts as usize];
        self.add_rows(work.start, tokens[known].iter().chain(drafted).copied(), pages);
        self.recurrent.extend(recurrent);
        let end = self.token_ids.len() as u32; // at most the rows of a step
        if work.embeds > 0 {
            self.last_rows.push(end.saturating_sub(work.embeds)..end);
        }
        for row in scored {
            self.logits_rows.push(self.token_ids.len() as u32 - (work.start + work.rows - row));
            self.samples.push(score(row));
            self.maskings.push(None);
        }
        if work.samples {
            for place in 0..=work.drafts {
                self.logits_rows.push(end - 1 - work.drafts + place);
                let (row, masking) = sample(place);
                self.samples.push(row);
                self.maskings.push(masking.map(|masking| (Arc::downgrade(&masking), place)));
            }
        }
    }

    /// Adds rows that a draft model computes of a sequence, from the position `start` on. Where it is to draw the next token, `sample`
    /// has the settings.
    pub fn push_drafting(
        &mut self,
        start: u32,
        tokens: impl Iterator<Item = u32>,
        pages: &[u32],
        sample: Option<SampleRow>,
    ) {
        self.add_rows(start, tokens, pages);
        if let Some(sample) = sample {
            self.logits_rows.push(self.token_ids.len() as u32 - 1);
            self.samples.push(sample);
            self.maskings.push(None);
        }
    }

    fn add_rows(&mut self, start: u32, tokens: impl Iterator<Item = u32>, pages: &[u32]) {
        let before = self.token_ids.len();
        self.token_ids.extend(tokens);
        let rows = (self.token_ids.len() - before) as u32;
        self.positions.extend(start..start + rows);
        self.row_sequences.resize(self.token_ids.len(), self.sequences);
        self.sequences += 1;
        self.page_tables.extend(pages);
        self.page_tables.resize(self.sequences as usize * self.page_table_stride, 0);
    }

    /// Puts the masks into the rows to sample, and waits for those that are not there yet, as long as the step's patience lasts. Nobody
    /// waits for the mask behind a drafted token. A row whose answer is complete or failed gets none: its token counts for nothing.
    fn take_masks(&mut self) {
        let until = lock::now() + self.patience;
        for (at, (row, masking)) in self.samples.iter_mut().zip(&self.maskings).enumerate() {
            let masking = masking.as_ref().and_then(|(masking, place)| Some((masking.upgrade()?, *place)));
            row.mask = match masking {
                None => None, // no form, or the sequence ended
                Some((masking, 0)) => match masking.wait_until(until) {
                    Some(Masked::Tokens(mask)) => Some(mask),
                    Some(Masked::Complete | Masked::Cut | Masked::Failed(_)) => None,
                    None => {
                        self.missed.push(at);
                        None
                    }
                },
                Some((masking, place)) => masking.ahead(place),
            };
        }
    }

    /// True if the mask of this place of a finished step did not come in time: its token is none of the answer's.
    pub fn is_missed(&self, place: usize) -> bool {
        self.missed.contains(&place)
    }

    /// True if the token drawn in this place of a finished step may be an answer's: its form, if there is one, gave a mask.
    pub fn is_drawn_by_form(&self, place: usize) -> bool {
        let masked = self.maskings.get(place).is_some_and(Option::is_some);
        !masked || self.samples.get(place).is_some_and(|row| row.mask.is_some())
    }

    fn batch(&self) -> StepBatch<'_> {
        StepBatch {
            token_ids: &self.token_ids,
            positions: &self.positions,
            row_sequences: &self.row_sequences,
            page_tables: &self.page_tables,
            page_table_stride: self.page_table_stride,
            logits_rows: &self.logits_rows,
            recurrent: &self.recurrent,
        }
    }
}

/// Backend, weights and model of a step.
pub(super) struct StepDevice<'a> {
    pub backend: &'a mut dyn Backend,
    pub residency: &'a mut Residency,
    pub model: ModelId,
    /// The step runs while another one of the model is suspended.
    pub beside: bool,
    /// Number of parts of the model's program.
    pub parts: u32,
    pub slot: ModelSlot,
    /// Incremented after every part.
    pub heartbeat: &'a AtomicU64,
    /// For a backend that reads weights in place.
    pub paging: Option<(&'a mut Paging, &'a Arc<Model>)>,
    /// True when no client wants the step any more. A step calls it between parts, and only while it still loads
    /// weights: a step over resident weights is short.
    pub given_up: &'a dyn Fn() -> bool,
    /// Called when the device has all of the step's work, before anything waits for it.
    pub launched: &'a mut dyn FnMut(),
    /// True when the step should make way for others. Called between parts, and when a part pauses.
    pub is_due: &'a dyn Fn() -> bool,
}

/// How far a step came.
pub(super) enum Ran {
    /// To its end: one sampled token, or the cause of a failure, for each sequence that samples, in the order of
    /// [`StepArrays::push`]. Then the rows of the last layer that are wanted, one after the other.
    Done(Vec<Result<Sampled, BackendError>>, Vec<f32>),
    /// It made way for others before this part, or inside it.
    Suspended(u32),
    /// As `Suspended`, until pages of weights are read.
    Waits(u32),
    /// Its model's file does not answer.
    Unreadable(MapError),
}

/// Runs a step, from `resumed` if it was suspended there.
///
/// # Errors
/// [`BackendError`] of the first load or part that failed, or [`BackendError::GivenUp`]. The KV rows of this step are
/// then undefined.
pub(super) fn run(
    device: StepDevice<'_>,
    arrays: &mut StepArrays,
    resumed: Option<u32>,
) -> Result<Ran, BackendError> {
    let StepDevice {
        backend,
        residency,
        model,
        beside,
        parts,
        slot,
        heartbeat,
        mut paging,
        given_up,
        launched,
        is_due,
    } = device;
    match resumed {
        None if beside => backend.begin_beside(slot, &arrays.batch())?,
        None => backend.begin_step(slot, &arrays.batch())?,
        Some(_) if beside => backend.resume_beside(slot)?,
        Some(_) => backend.resume_step(slot)?,
    }
    let cold = !residency.has_all(model);
    // No sequence samples, so no logits are needed: skip the head.
    let parts = if arrays.samples.is_empty() { parts.saturating_sub(1) } else { parts };
    let first = resumed.unwrap_or(FIRST_PART);
    let mut part = first;
    while part < parts {
        if part > first {
            if cold && given_up() {
                return Err(BackendError::GivenUp);
            }
            if is_due() {
                backend.suspend_step()?;
                return Ok(Ran::Suspended(part));
            }
        }
        residency.load_part(model, part, backend)?;
        if let Some((paging, of)) = &mut paging {
            match paging.has_part(of, part, &arrays.token_ids) {
                Ok(true) => {}
                Ok(false) => return waits(backend, part),
                Err(error) => return Ok(Ran::Unreadable(error)),
            }
        }
        part = loop {
            let progress = backend.run(part, &residency.weights(model)?)?;
            heartbeat.fetch_add(1, Ordering::Relaxed);
            let chosen = match progress {
                Progress::Done => break part + 1,
                Progress::Again => break FIRST_PART,
                Progress::Needs(chosen) => chosen,
                Progress::Paused if is_due() => {
                    backend.suspend_step()?;
                    return Ok(Ran::Suspended(part));
                }
                Progress::Paused => continue,
            };
            residency.load_chosen(model, part, &chosen, backend)?;
            if let Some((paging, of)) = &mut paging {
                match paging.has_chosen(of, part, &chosen) {
                    Ok(true) => {}
                    Ok(false) => return waits(backend, part),
                    Err(error) => return Ok(Ran::Unreadable(error)),
                }
            }
        };
    }
    launched();
    let mut last_rows = Vec::new();
    for rows in &arrays.last_rows {
        last_rows.append(&mut backend.last_rows(rows.clone())?);
    }
    if arrays.samples.is_empty() {
        backend.finish_step()?;
        return Ok(Ran::Done(Vec::new(), last_rows));
    }
    arrays.take_masks();
    let sampled = backend.sample(&arrays.samples)?;
    if sampled.len() != arrays.samples.len() {
        return Err(BackendError::Internal(
            "the sampler returned a different number of tokens than requested".to_owned(),
        ));
    }
    Ok(Ran::Done(sampled, last_rows))
}

fn waits(backend: &mut dyn Backend, part: u32) -> Result<Ran, BackendError> {
    backend.suspend_step()?;
    Ok(Ran::Waits(part))
}
