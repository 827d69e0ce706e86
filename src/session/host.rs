//! The machine's memory, as reported to clients.

use rocmforge_client::wire::{self, Ext, HostMemory, HostStatus, limits};

use super::Service;
use crate::model::Model;
use crate::model::pages::{PageResidency, PagesState};
use crate::tensor::HostPages;

/// Memory of a model's files. The kernel walks page tables for it: call it off the runtime's threads.
pub(super) fn of_model(model: &Model) -> HostMemory {
    let report = model.pages.report();
    // Zeros where the kernel does not report.
    let pages = HostPages::of(model.files.mappings().map(|file| &**file)).unwrap_or_default();
    let mut cached_bytes = Some(0u64);
    for file in model.files.mappings() {
        let file = file.cached_bytes().ok().flatten();
        cached_bytes = cached_bytes.zip(file).map(|(sum, file)| sum.saturating_add(file));
    }
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
        resident_bytes: pages.resident_bytes,
        locked_bytes: pages.locked_bytes,
        read_bytes: report.read_bytes,
        cached_bytes,
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
