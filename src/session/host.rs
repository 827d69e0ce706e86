//! The machine's memory, as reported to clients.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use rocmforge_client::wire::{self, Ext, HostMemory, HostStatus, limits};

use super::coarse::{Coarse, Count};
use super::{Call, Service};
use crate::lock::{Mutex, Rank};
use crate::model::pages::{PageResidency, PagesReport, PagesState};
use crate::model::{Model, ModelId};
use crate::tensor::HostPages;

/// The kernel's counts are asked for so rarely that this takes at most one part in so many of one processor's time.
const COUNTING: u32 = 20;

/// Counts of models that are gone are forgotten after this time.
const FORGOTTEN: Duration = Duration::from_secs(60);

/// The kernel's counts of pages, by model. The kernel walks page tables for them, 1 ms per GiB: without bounds, one
/// client that asks again and again would slow all others down.
#[derive(Debug)]
pub(super) struct PageCounts(Mutex<HashMap<ModelId, Counted>>);

#[derive(Clone, Debug)]
struct Counted {
    /// The order to the pages, and how far they were, when they were counted.
    report: PagesReport,
    pages: HostPages,
    cached_bytes: Option<u64>,
    at: Instant,
    took: Duration,
}

impl Default for PageCounts {
    fn default() -> Self {
        Self(Mutex::new(Rank::PageCounts, HashMap::new()))
    }
}

impl PageCounts {
    /// Counts that are new enough, or new ones. One caller counts, others wait.
    fn of(
        &self,
        id: ModelId,
        report: &PagesReport,
        count: impl FnOnce() -> (HostPages, Option<u64>),
    ) -> (HostPages, Option<u64>) {
        let mut all = self.0.lock();
        let fresh = all.values().map(|counted| counted.took).sum::<Duration>() * COUNTING;
        let is_fresh = |counted: &&Counted| counted.report == *report && counted.at.elapsed() < fresh;
        if let Some(counted) = all.get(&id).filter(is_fresh) {
            return (counted.pages, counted.cached_bytes);
        }
        let begun = Instant::now();
        let (pages, cached_bytes) = count();
        let took = begun.elapsed();
        all.retain(|_, counted| counted.at.elapsed() < FORGOTTEN);
        all.insert(id, Counted { report: report.clone(), pages, cached_bytes, at: Instant::now(), took });
        (pages, cached_bytes)
    }
}

fn count(model: &Model) -> (HostPages, Option<u64>) {
    // Zeros where the kernel does not report.
    let pages = HostPages::of(model.files.mappings().map(|file| &**file)).unwrap_or_default();
    let mut cached_bytes = Some(0u64);
    for file in model.files.mappings() {
        let file = file.cached_bytes().ok().flatten();
        cached_bytes = cached_bytes.zip(file).map(|(sum, file)| sum.saturating_add(file));
    }
    (pages, cached_bytes)
}

/// Memory of a model's files. May walk page tables: call it off the runtime's threads.
pub(super) fn of_model(call: &Call, model: &Model) -> HostMemory {
    let (report, coarse) = (model.pages.report(), Coarse::of(call));
    let (pages, cached_bytes) = call.service().page_counts.of(model.id, &report, || count(model));
    let (state, reason) = match report.state {
        PagesState::AsTheyCome => (wire::PagesState::AsTheyCome, String::new()),
        PagesState::Coming => (wire::PagesState::Coming, String::new()),
        PagesState::Here => (wire::PagesState::Here, String::new()),
        PagesState::GivenBack => (wire::PagesState::GivenBack, String::new()),
        PagesState::Refused(refusal) => (wire::PagesState::Refused, refusal.to_string()),
        PagesState::Failed(reason) => (wire::PagesState::Failed, reason),
    };
    HostMemory {
        wanted: match report.wanted {
            PageResidency::None => wire::Residency::None,
            PageResidency::Populate => wire::Residency::Populate,
            PageResidency::Lock => wire::Residency::Lock,
        },
        state,
        mapped_bytes: model.files.bytes(),
        resident_bytes: coarse.count(Count::ResidentBytes(model.id.0), pages.resident_bytes),
        locked_bytes: pages.locked_bytes,
        read_bytes: report.read_bytes,
        cached_bytes: cached_bytes.map(|bytes| coarse.count(Count::CachedBytes(model.id.0), bytes)),
        reason: wire::cut_text(&reason, limits::VALUE_BYTES_MAX).to_owned(),
        ext: Ext::new(),
    }
}

/// The daemon's use of locked memory, and its memory-pressure events.
pub(super) fn of_daemon(service: &Service) -> HostStatus {
    let budget = service.store.lock_budget();
    let (pressure, pressure_events) = service.pressure.report();
    let (locks_refused, refusal) = service.store.locks_refused();
    HostStatus {
        locked_bytes: budget.bytes(),
        lock_bytes_max: budget.max_bytes(),
        locks_refused,
        reason: refusal.map(|refusal| refusal.to_string()).unwrap_or_default(),
        pressure: wire::cut_text(pressure, limits::LABEL_BYTES_MAX).to_owned(),
        pressure_events,
        ext: Ext::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counting_takes_a_bounded_part_of_the_time() {
        let (counts, report) = (PageCounts::default(), PagesReport::default());
        let mut counted = 0;
        let mut of = |id| {
            counts.of(ModelId(id), &report, || {
                counted += 1;
                (HostPages::default(), None)
            });
        };
        // Three models, each as if its count had taken 100 ms: the next one is due after 6 s.
        let took = Duration::from_millis(100);
        for id in 1..=3 {
            of(id);
            counts.0.lock().get_mut(&ModelId(id)).expect("it was counted").took = took;
        }
        (1..=3).for_each(&mut of);
        assert_eq!(counted, 3, "at most one part in {COUNTING}");
        counts.0.lock().values_mut().for_each(|counted| counted.at -= COUNTING * 3 * took);
        let some = || (HostPages { resident_bytes: 7, ..HostPages::default() }, Some(1));
        assert_eq!(counts.of(ModelId(1), &report, some), some());
        let locked = PagesReport { locked: true, ..report.clone() };
        let none = || (HostPages::default(), None);
        assert_eq!(counts.of(ModelId(2), &locked, some), some(), "another state is counted at once");
        assert_eq!(counts.of(ModelId(1), &report, none), some());
    }
}
