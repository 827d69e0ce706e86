//! Writes kept prefixes back to free pages, a slice in each turn.

use std::time::Duration;

use super::Core;
use crate::backend::BackendError;
use crate::lock;
use crate::scheduler::device::Device;
use crate::scheduler::facts::Facts;
use crate::scheduler::prefixes::{PrefixPage, Prefixes, RestoreOrder};
use crate::scheduler::schedule::Schedule;

/// Pages of a restore are written for so long in one turn of the engine.
const SLICE: Duration = Duration::from_millis(10);

/// A restore that goes on in the next turn, and the index of its next page.
#[derive(Debug)]
pub(in crate::scheduler) struct Restoring {
    order: RestoreOrder,
    next: usize,
    taken: u32,
}

impl From<RestoreOrder> for Restoring {
    fn from(order: RestoreOrder) -> Self {
        Self { order, next: 0, taken: 0 }
    }
}

impl Core {
    /// Writes pages of sequences back that were parked and are admitted again; true if there were any.
    pub(super) fn swap_in(&mut self) -> bool {
        let facts = self.shared.facts();
        let any = self.device.swap_in(&mut self.schedule, &facts);
        if any {
            self.device.release_freed(&mut self.schedule);
        }
        any
    }

    /// Writes some prefixes to free pages; true if there were any. A device that fails here fails in the next step too.
    pub(super) fn restore_some(&mut self) -> bool {
        let Some(mut restoring) = self.restores.pop_front() else { return false };
        let (begun, facts) = (lock::now(), self.shared.facts());
        let (device, schedule) = (&mut self.device, &mut self.schedule);
        if schedule.is_suspended(restoring.order.model.id) {
            self.restores.push_back(restoring);
            return false; // that step may still write pages that are free now
        }
        let ended = restoring.order.done.is_closed() || {
            let written = restoring.write(device, schedule, &facts, || lock::now() - begun >= SLICE);
            written.unwrap_or_else(|error| {
                let model = restoring.order.model.id.0;
                tracing::warn!(model, %error, "kept prefixes could not be written back");
                true
            })
        };
        device.release_freed(schedule);
        match ended {
            true => drop(restoring.order.done.send(restoring.taken)),
            false => self.restores.push_back(restoring),
        }
        true
    }
}

impl Restoring {
    /// Writes pages until the time is `over`. True if none is left, or if the device cannot take them.
    fn write(
        &mut self,
        device: &mut Device,
        schedule: &mut Schedule,
        facts: &Facts,
        over: impl Fn() -> bool,
    ) -> Result<bool, BackendError> {
        let RestoreOrder { model, uid, prefixes, .. } = &self.order;
        let program = &model.plan.program;
        let (page_bytes, state_bytes) = (facts.page_bytes(program), facts.state_bytes(program));
        let goes_on = match self.next {
            0 => {
                schedule.kv().reuses()
                    && prefixes.uid == schedule.kv().user_of_tree(*uid)
                    && prefixes.layout == device.backend.page_layout()
                    && prefixes.are_whole(page_bytes, state_bytes)
            }
            _ => device.models.get(model.id).is_some(),
        };
        if !goes_on {
            return Ok(true);
        }
        device.enter(model, lock::now());
        let slot = device.open(model, facts, schedule)?;
        schedule.kv_mut().open(model.id, page_bytes);
        schedule.kv_mut().open_states(model.id, state_bytes);
        while let Some(page) = prefixes.pages.get(self.next) {
            let mut tokens = prefixes.stem(self.next);
            let (backend, kv) = (device.backend.as_mut(), schedule.kv_mut());
            let fill = |to| backend.write_page(slot, to, &page.bytes);
            let mut taken = kv.adopt((model.id, *uid), &tokens, &page.tokens, fill)?;
            if let Some(state) = page.state.as_ref().filter(|_| taken) {
                tokens.extend(&page.tokens);
                let fill = |to| backend.write_state(slot, to, state);
                taken = kv.adopt_state((model.id, *uid), &tokens, fill)?;
                if !taken {
                    return Ok(true); // those behind it would have no room either
                }
            }
            self.taken += u32::from(taken);
            self.next += 1;
            if over() {
                return Ok(self.next == prefixes.pages.len());
            }
        }
        Ok(true)
    }
}

impl Prefixes {
    /// Whether each page and each state has so many bytes, and comes after the page that it continues.
    fn are_whole(&self, page_bytes: u64, state_bytes: u64) -> bool {
        let whole = |(at, page): (u32, &PrefixPage)| {
            page.bytes.len() as u64 == page_bytes
                && page.state.as_ref().is_none_or(|state| state.len() as u64 == state_bytes)
                && page.after.is_none_or(|before| before < at)
        };
        (0..).zip(&self.pages).all(whole)
    }

    /// Tokens of the pages before one.
    fn stem(&self, of: usize) -> Vec<u32> {
        let mut pages = Vec::new();
        let mut at = of;
        while let Some(before) = self.pages.get(at).and_then(|page| page.after) {
            at = before as usize; // less than before, as `are_whole` checked
            pages.push(at);
        }
        pages.into_iter().rev().flat_map(|at| self.pages[at].tokens.iter().copied()).collect()
    }
}
