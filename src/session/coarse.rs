//! Counters, made coarse for users who may not see others' requests.
//!
//! A count of rows tells how long others' prompts and answers are, also a rounded one. A user that adds rows of its
//! own, one by one, sees where it jumps. So a count jumps at places that nobody can know: one in each step, by a secret
//! of this process. Memory in use goes up and down, so the same place could be passed again and again: there the places
//! change once per [`SLOT`]. A user that asks for long learns averages.

use std::hash::{BuildHasher, RandomState};
use std::time::{Duration, Instant};

use rocmforge_client::wire::DeviceStatus;

use super::Call;
use crate::scheduler::SequenceState;

/// Steps of counted rows. A prompt or an answer has seldom more.
const ROWS_STEP: u64 = 1024;
/// Steps of bytes of KV pages.
const BYTES_STEP: u64 = 64 << 20;
/// Steps of recurrent states that only the cache has.
const STATES_STEP: u64 = 64;
/// Steps of open connections.
const CONNECTIONS_STEP: u64 = 64;
/// Steps of counted tensors: a step of a model uses hundreds.
const TENSORS_STEP: u64 = 1 << 20;
/// Steps of bytes that were ever loaded or evicted: several models.
const LOADED_STEP: u64 = 64 << 30;
/// Steps of the time that steps waited for weights, in microseconds: a quarter of an hour.
const WAITED_STEP: u64 = 900_000_000;
/// Steps of the rate of uploads, in bytes per second.
const RATE_STEP: u64 = 1 << 30;

/// Time after which the places change at which memory in use jumps.
const SLOT: Duration = Duration::from_secs(10);

/// Kinds of counts: each jumps at places of its own.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub(super) enum Count {
    Steps,
    Rows,
    DecodeRows,
    PrefillRows,
    StepSequences,
    TensorHits,
    Done,
    Failed,
    Cancelled,
    Connections,
    TensorsLoaded,
    AnonBytes,
    FileBytes,
    KvBytes,
    KvCachedBytes,
    StatesCached,
    StatesCachedBytes,
    ReusedTokens,
    DraftedTokens,
    AcceptedTokens,
    PagesEvicted,
    TakenBytes,
    AvailableBytes,
    FreeBytes,
    OthersBytes,
    WeightBytes,
    ScratchBytes,
    StagingBytes,
    GraphBytes,
    LeavingBytes,
    LoadedBytes,
    EvictedBytes,
    Evictions,
    LoadWaits,
    LoadWaitTime,
    UploadRate,
    /// Bytes of the files of the model with that number in the daemon's memory.
    ResidentBytes(u64),
    /// As [`Self::ResidentBytes`], in the page cache.
    CachedBytes(u64),
    /// KV bytes of the model with that number.
    ModelBytes(u64),
    /// Bytes of that model's cached KV pages and recurrent states.
    ModelCachedBytes(u64),
    /// Number of that model's cached recurrent states.
    ModelStatesCached(u64),
    /// Their bytes.
    ModelStatesCachedBytes(u64),
}

impl Count {
    fn step(self) -> u64 {
        match self {
            Self::Steps
            | Self::Rows
            | Self::DecodeRows
            | Self::PrefillRows
            | Self::StepSequences
            | Self::ReusedTokens
            | Self::DraftedTokens
            | Self::AcceptedTokens
            | Self::PagesEvicted
            | Self::Done
            | Self::Failed
            | Self::Cancelled
            | Self::Evictions
            | Self::LoadWaits => ROWS_STEP,
            Self::LoadedBytes | Self::EvictedBytes => LOADED_STEP,
            Self::LoadWaitTime => WAITED_STEP,
            Self::UploadRate => RATE_STEP,
            Self::TensorHits | Self::TensorsLoaded => TENSORS_STEP,
            Self::Connections => CONNECTIONS_STEP,
            Self::StatesCached | Self::ModelStatesCached(_) => STATES_STEP,
            Self::AnonBytes
            | Self::FileBytes
            | Self::KvBytes
            | Self::KvCachedBytes
            | Self::StatesCachedBytes
            | Self::TakenBytes
            | Self::AvailableBytes
            | Self::FreeBytes
            | Self::OthersBytes
            | Self::WeightBytes
            | Self::ScratchBytes
            | Self::StagingBytes
            | Self::GraphBytes
            | Self::LeavingBytes
            | Self::ResidentBytes(_)
            | Self::CachedBytes(_)
            | Self::ModelBytes(_)
            | Self::ModelCachedBytes(_)
            | Self::ModelStatesCachedBytes(_) => BYTES_STEP,
        }
    }

    fn goes_down(self) -> bool {
        [BYTES_STEP, STATES_STEP, CONNECTIONS_STEP, RATE_STEP].contains(&self.step())
    }
}

/// Rounds counts for users without [`super::Right::See`], unless all requests were their own.
#[derive(Clone, Debug)]
pub(super) struct Coarse {
    /// The secret; `None` gives exact counts.
    secret: Option<RandomState>,
    slot: u64,
    own: Own,
}

/// The user's own requests.
#[derive(Clone, Copy, Debug, Default)]
struct Own {
    pages: u32,
    states: u32,
    kv_bytes: u64,
    running: u32,
    queued: u32,
}

impl Coarse {
    /// Exact counts.
    #[cfg(test)]
    pub(super) const NO: Self =
        Self { secret: None, slot: 0, own: Own { pages: 0, states: 0, kv_bytes: 0, running: 0, queued: 0 } };

    /// Coarse counts of a user without requests.
    #[cfg(test)]
    pub(super) fn for_others() -> Self {
        Self { secret: Some(RandomState::new()), slot: 0, own: Own::default() }
    }

    pub(super) fn of(call: &Call) -> Self {
        let (peer, service) = (call.peer(), call.service());
        let exact = peer.sees || service.is_alone(peer.uid);
        let slot = Instant::now().saturating_duration_since(service.started).as_secs() / SLOT.as_secs();
        let mut own = Own::default();
        for sequence in service.engine.snapshot().sequences.iter().filter(|s| s.uid == peer.uid) {
            own.pages = own.pages.saturating_add(sequence.kv_pages);
            own.states = own.states.saturating_add(sequence.states);
            own.kv_bytes = own.kv_bytes.saturating_add(sequence.kv_bytes);
            *(if sequence.state == SequenceState::Queued { &mut own.queued } else { &mut own.running }) += 1;
        }
        Self { secret: (!exact).then(|| service.secret.clone()), slot, own }
    }

    /// True where the user sees everything.
    pub(super) fn is_exact(&self) -> bool {
        self.secret.is_none()
    }

    /// Numbers of running and of queued requests: the user's own, unless counts are exact.
    pub(super) fn running_and_queued(&self, exact: (u32, u32)) -> (u32, u32) {
        if self.secret.is_some() { (self.own.running, self.own.queued) } else { exact }
    }

    /// Number of recurrent states of requests: of the user's own, unless counts are exact.
    pub(super) fn states(&self, exact: u64) -> u64 {
        if self.secret.is_some() { self.own.states.into() } else { exact }
    }

    /// Bytes of the KV cache that requests have: the user's own, unless counts are exact.
    pub(super) fn kv_held_bytes(&self, exact: u64) -> u64 {
        if self.secret.is_some() { self.own.kv_bytes } else { exact }
    }

    /// The count, or a multiple of its step next to it.
    pub(super) fn count(&self, what: Count, count: u64) -> u64 {
        let Some(secret) = &self.secret else { return count };
        let step = what.step();
        let (whole, rest) = (count / step, count % step);
        let slot = if what.goes_down() { self.slot } else { 0 };
        let place = secret.hash_one((what, whole, slot)) % step;
        whole.saturating_add(u64::from(rest > place)).saturating_mul(step)
    }

    pub(super) fn status(&self, exact: DeviceStatus) -> DeviceStatus {
        let (sequences_running, sequences_queued) =
            self.running_and_queued((exact.sequences_running, exact.sequences_queued));
        DeviceStatus {
            sequences_running,
            sequences_queued,
            sequences_done: self.count(Count::Done, exact.sequences_done),
            sequences_failed: self.count(Count::Failed, exact.sequences_failed),
            sequences_cancelled: self.count(Count::Cancelled, exact.sequences_cancelled),
            tensors_loaded: self.count(Count::TensorsLoaded, exact.tensors_loaded),
            device_bytes: self.count(Count::WeightBytes, exact.device_bytes),
            kv_pages_used: if self.secret.is_some() { self.own.pages } else { exact.kv_pages_used },
            kv_bytes: self.count(Count::KvBytes, exact.kv_bytes),
            steps: self.count(Count::Steps, exact.steps),
            rows: self.count(Count::Rows, exact.rows),
            decode_rows: self.count(Count::DecodeRows, exact.decode_rows),
            prefill_rows: self.count(Count::PrefillRows, exact.prefill_rows),
            step_sequences: self.count(Count::StepSequences, exact.step_sequences),
            tensor_hits: self.count(Count::TensorHits, exact.tensor_hits),
            ..exact
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn coarse(secret: &RandomState, slot: u64) -> Coarse {
        Coarse {
            secret: Some(secret.clone()),
            slot,
            own: Own { pages: 3, states: 4, kv_bytes: 5, running: 1, queued: 2 },
        }
    }

    #[test]
    fn counts_rise_in_steps_at_places_that_differ() {
        let secret = RandomState::new();
        let rows = |count| coarse(&secret, 0).count(Count::Rows, count);
        assert_eq!(rows(0), 0);
        let mut places = Vec::new();
        for count in 1..64 * ROWS_STEP {
            let (before, now) = (rows(count - 1), rows(count));
            assert!(now >= before && now.abs_diff(count) <= ROWS_STEP && now % ROWS_STEP == 0);
            if now > before {
                places.push(count % ROWS_STEP);
            }
        }
        // Even places would tell a user that counts its own rows between two jumps what others added.
        let (least, most) = (places.iter().min().unwrap(), places.iter().max().unwrap());
        assert!(places.len() >= 63 && most - least > ROWS_STEP / 2, "{places:?}");
        let other = coarse(&RandomState::new(), 0);
        assert!((1..64 * ROWS_STEP).any(|count| other.count(Count::Rows, count) != rows(count)), "a secret");
        assert!(
            (1..64 * ROWS_STEP).any(|count| coarse(&secret, 0).count(Count::Steps, count) != rows(count))
        );
    }

    #[test]
    fn memory_jumps_at_other_places_in_each_slot_and_pages_are_ones_own() {
        let secret = RandomState::new();
        let bytes = |slot, count| coarse(&secret, slot).count(Count::KvBytes, count);
        assert!((0..64).any(|slot| bytes(slot, 40 << 20) != bytes(0, 40 << 20)));
        assert!((0..64).all(|slot| bytes(slot, 40 << 20).abs_diff(40 << 20) <= BYTES_STEP));
        let exact = DeviceStatus { kv_pages_used: 70, rows: 5000, ..DeviceStatus::default() };
        let exact = DeviceStatus { sequences_running: 9, sequences_done: 5, ..exact };
        let shown = coarse(&secret, 0).status(exact.clone());
        assert_eq!((shown.kv_pages_used, shown.sequences_running, shown.sequences_queued), (3, 1, 2));
        assert_eq!(shown.sequences_done % ROWS_STEP, 0);
        assert_eq!((coarse(&secret, 0).states(70), Coarse::NO.states(70)), (4, 70));
        let cached = |slot| coarse(&secret, slot).count(Count::StatesCached, 593);
        assert!((0..64).all(|slot| [576, 640].contains(&cached(slot))));
        assert_eq!(Coarse::NO.status(exact.clone()), exact);
    }
}
