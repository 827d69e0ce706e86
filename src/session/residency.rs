//! Requests about models' weights on a device: memory use, plans, evicting weights, rules.

use std::time::Duration;

use rocmforge_client::wire::{
    self, CacheScope, ClearCacheReply, ClearCacheRequest, DeviceMemory, EXT_MODEL_CACHED,
    EXT_MODEL_STATES_CACHED, EXT_MODEL_STATES_CACHED_BYTES, ErrorCode, Ext, LeavingEntry, PlanReply,
    PlanRequest, ResidencyEntry, ResidencyReply, ResidencyRequest, Rules, SetRulesReply, SetRulesRequest,
    StreamedFit, limits,
};

use super::coarse::{Coarse, Count};
use super::error::{Failure, failure, of_job, of_store};
use super::models::{fill, page_room};
use super::{Call, Right};
use crate::backend::DeviceCounters;
use crate::model::ModelId;
use crate::scheduler::{
    EngineSnapshot, Fit, LoadingProgress, ModelResidency, PartState, ResidencyPlan, ResidencyRules,
    RulesChange,
};

/// The engine has one device.
const DEVICE: u32 = 0;

pub(super) async fn clear(call: Call, request: ClearCacheRequest) -> Result<ClearCacheReply, Failure> {
    let (peer, service) = (call.peer(), call.service());
    let model = match request.scope {
        CacheScope::Model(name) => {
            let owned = service.store.owned(peer.uid, call.may(Right::Manage), &name);
            let Some(model) = owned.map_err(|error| of_store(&error))? else {
                return Ok(ClearCacheReply::default()); // not mapped: it has no weights on the device
            };
            Some(model)
        }
        CacheScope::All if peer.administrator => None,
        CacheScope::All => {
            let text =
                "only an administrator may evict the weights of all models: name a model that you passed";
            return Err(failure(ErrorCode::Forbidden, text));
        }
    };
    let cleared = service.engine.evict_weights(model.as_ref().map(|model| model.id)).await;
    let cleared = cleared.map_err(|error| of_job(&error))?;
    if let Some(restores) = service.restores.get().cloned() {
        call.blocking(move |_| Ok(restores.store.forget(model.as_deref()))).await?;
    }
    Ok(ClearCacheReply { parts: cleared.parts, device_bytes: cleared.bytes, ext: Ext::new() })
}

pub(super) async fn set_rules(call: Call, request: SetRulesRequest) -> Result<SetRulesReply, Failure> {
    call.service().refuse_while_draining()?;
    let change = RulesChange {
        pinned: request.pinned,
        priority: request.priority,
        parts_min: request.layers_min.map(parts_of),
        idle_max: request.idle_s.map(|idle| (idle > 0).then(|| Duration::from_secs(idle.into()))),
    };
    let acquire = move |call: &Call| {
        let peer = call.peer();
        let (lease, _) = call.acquire(&request.model)?;
        let store = &call.service().store;
        store.owned(peer.uid, call.may(Right::Manage), &request.model).map_err(|error| of_store(&error))?;
        Ok((lease, pin_file(call, &request)))
    };
    let (lease, (host_pinned, host_reason)) = call.blocking(acquire).await?;
    let ruled = call.service().engine.set_rules(lease.model(), change).await;
    let rules = rules(ruled.map_err(|error| of_job(&error))?);
    call.blocking(|call| {
        call.service().keep_state();
        Ok(())
    })
    .await?;
    Ok(SetRulesReply { rules, host_pinned, host_reason, ext: Ext::new() })
}

/// Applies the pin to the model's file in the machine's memory, if the client may lock. Returns whether the file is
/// pinned, and the reason if that failed.
fn pin_file(call: &Call, request: &SetRulesRequest) -> (bool, String) {
    let (peer, store) = (call.peer(), &call.service().store);
    let pinned = match request.pinned {
        None => return (false, String::new()),
        Some(true) => store.pin(peer.uid, call.may(Right::Lock), &request.model).map(|()| true),
        // A client without the right to pin has nothing to unpin.
        Some(false) if !call.may(Right::Lock) => return (false, String::new()),
        Some(false) => store.unpin(peer.uid, true, &request.model).map(|_| false),
    };
    match pinned {
        Ok(pinned) => (pinned, String::new()),
        Err(error) => (false, wire::cut_text(&error.to_string(), limits::VALUE_BYTES_MAX).to_owned()),
    }
}

pub(super) async fn plan(call: Call, request: PlanRequest) -> Result<PlanReply, Failure> {
    call.service().refuse_while_draining()?;
    call.blocking(move |call| {
        let service = call.service();
        let (lease, _) = call.acquire(&request.model)?;
        let (own, most) = (lease.model().plan.context_length, service.settings.context_tokens);
        let context_tokens = match request.context_tokens {
            0 => own.min(most),
            tokens if tokens > own.min(most) => return Err(too_long(tokens, own, most)),
            tokens => tokens,
        };
        let plan = service.engine.plan(lease.model(), context_tokens);
        Ok(plan_reply(call, context_tokens, plan))
    })
    .await
}

/// No sequence has so many tokens: `own` is the model's context, `most` the daemon's limit.
fn too_long(tokens: u32, own: u32, most: u32) -> Failure {
    let which = if own <= most { "the model has" } else { "limits.context_tokens allows" };
    let text = format!("a context of {tokens} tokens cannot be served: {which} {}", own.min(most));
    failure(ErrorCode::LimitExceeded, &text)
}

fn plan_reply(call: &Call, context_tokens: u32, plan: ResidencyPlan) -> PlanReply {
    let (peer, coarse, mut leaving) = (call.peer(), Coarse::of(call), plan.leaving);
    if !coarse.is_exact() {
        leaving.sort_by_key(|leaving| leaving.model); // in their order, they tell which models others used last
    }
    let ids: Vec<ModelId> = leaving.iter().map(|leaving| leaving.model).collect();
    let names = call.service().store.names_of(peer.uid, peer.sees, &ids);
    let entries = leaving.iter().filter_map(|leaving| {
        let model = names.get(&leaving.model).cloned();
        let model = if peer.sees { model.unwrap_or_default() } else { model? };
        Some(LeavingEntry { id: leaving.model.0, model, device_bytes: leaving.bytes })
    });
    // The rest of the reply takes about 130 bytes.
    let mut room = page_room(call.connection.limits.max_frame).saturating_sub(256);
    PlanReply {
        device: DEVICE,
        context_tokens,
        weight_bytes: plan.weight_bytes,
        resident_bytes: plan.resident_bytes,
        kv_bytes: plan.kv_bytes,
        scratch_bytes: plan.scratch_bytes,
        available_bytes: coarse.count(Count::AvailableBytes, plan.available_bytes),
        budget_bytes: plan.budget_bytes,
        others_bytes: coarse.count(Count::OthersBytes, plan.others_bytes),
        fit: match plan.fit {
            Fit::Whole => wire::Fit::Whole,
            Fit::Streamed { resident_bytes, streamed_bytes } => {
                wire::Fit::Streamed(StreamedFit { resident_bytes, step_bytes: streamed_bytes })
            }
            Fit::No { missing_bytes } => wire::Fit::No(missing_bytes),
        },
        leaving: fill(&mut room, entries.take(limits::MODELS_MAX), |entry| entry.model.len() + 24),
        leaving_bytes: coarse.count(Count::LeavingBytes, leaving.iter().map(|leaving| leaving.bytes).sum()),
        load_ms: plan.load_seconds.map(|seconds| (seconds * 1e3) as u64),
        queued: coarse.running_and_queued((0, plan.queued)).1,
        ext: Ext::new(),
    }
}

/// Memory use by model. Models that only other users have names for are left out, unless the client has [`Right::See`].
pub(super) async fn residency(call: Call, request: ResidencyRequest) -> Result<ResidencyReply, Failure> {
    let (peer, service) = (call.peer(), call.service());
    let coarse = Coarse::of(&call);
    let snapshot = service.engine.snapshot();
    let mut all: Vec<&ModelResidency> = snapshot.models.iter().collect();
    all.retain(|model| model.model.0 > request.after);
    all.sort_unstable_by_key(|model| model.model);
    let ids: Vec<ModelId> = all.iter().map(|model| model.model).collect();
    let mut names = service.store.names_of(peer.uid, peer.sees, &ids);
    all.retain(|model| peer.sees || names.contains_key(&model.model));
    let of_all = all.len();
    all.truncate(limits::MODELS_MAX);
    let entries = all.into_iter().map(|model| {
        let name = names.remove(&model.model).unwrap_or_default();
        let of_model = snapshot.sequences.iter().filter(|sequence| sequence.model == model.model);
        let sequences = of_model.filter(|sequence| peer.sees || sequence.uid == peer.uid).count();
        entry(model, name, sequences, &coarse)
    });
    let devices = vec![device(&call, &snapshot)];
    let mut room = page_room(call.connection.limits.max_frame).saturating_sub(DEVICE_BYTES * devices.len());
    let models = fill(&mut room, entries, entry_bytes);
    Ok(ResidencyReply { devices, more: models.len() < of_all, models, ext: Ext::new() })
}

/// Upper bound of a device's encoded size in bytes, with the count of devices.
const DEVICE_BYTES: usize = 2 * limits::LABEL_BYTES_MAX + 208;

/// Upper bound of an entry's encoded size in bytes.
fn entry_bytes(entry: &ResidencyEntry) -> usize {
    entry.model.len() + entry.parts.len() + 166
}

fn entry(model: &ModelResidency, name: String, sequences: usize, coarse: &Coarse) -> ResidencyEntry {
    let exact = coarse.is_exact();
    ResidencyEntry {
        id: model.model.0,
        device: DEVICE,
        model: name,
        parts: model.parts.iter().take(limits::PARTS_MAX).map(letter).collect(),
        weight_bytes: model.weight_bytes,
        kv_bytes: coarse.count(Count::ModelBytes(model.model.0), model.kv_bytes),
        scratch_bytes: model.scratch_bytes,
        rules: rules(model.rules),
        sequences: u32::try_from(sequences).unwrap_or(u32::MAX),
        idle_ms: model.idle_since.filter(|_| exact).map(|since| milliseconds(since.elapsed())),
        // The order tells which models others used last.
        eviction_place: if exact { model.eviction_place } else { model.eviction_place.min(1) },
        loading: model.loading.filter(|_| exact).map(loading),
        ext: cached_ext(model, coarse),
    }
}

/// How much the cache has of a model.
fn cached_ext(model: &ModelResidency, coarse: &Coarse) -> Ext {
    let id = model.model.0;
    wire::number_ext([
        (EXT_MODEL_CACHED, coarse.count(Count::ModelCachedBytes(id), model.kv_cached_bytes)),
        (EXT_MODEL_STATES_CACHED, coarse.count(Count::ModelStatesCached(id), model.states_cached)),
        (
            EXT_MODEL_STATES_CACHED_BYTES,
            coarse.count(Count::ModelStatesCachedBytes(id), model.states_cached_bytes),
        ),
    ])
}

fn loading(loading: LoadingProgress) -> wire::LoadingProgress {
    let count = |tensors: usize| u32::try_from(tensors).unwrap_or(u32::MAX);
    wire::LoadingProgress {
        tensors: count(loading.tensors),
        tensors_total: count(loading.tensors_total),
        device_bytes: loading.bytes,
        device_bytes_total: loading.bytes_total,
    }
}

fn letter(part: &PartState) -> char {
    match part {
        PartState::Absent => wire::PART_ABSENT,
        PartState::Loading => wire::PART_LOADING,
        PartState::Partial => wire::PART_PARTIAL,
        PartState::Resident => wire::PART_RESIDENT,
    }
}

/// Number of parts that hold the first `layers` layers, with the embedding.
fn parts_of(layers: u32) -> u32 {
    if layers == 0 { 0 } else { layers.saturating_add(1) }
}

/// The wire counts layers; the part before the first layer is the embedding.
fn rules(rules: ResidencyRules) -> Rules {
    Rules {
        pinned: rules.pinned,
        priority: rules.priority,
        layers_min: rules.parts_min.saturating_sub(1),
        idle_s: rules.idle_max.map_or(0, |idle| u32::try_from(idle.as_secs()).unwrap_or(u32::MAX)),
    }
}

fn device(call: &Call, snapshot: &EngineSnapshot) -> DeviceMemory {
    let info = call.service().engine.info();
    let (memory, counters) = (snapshot.memory, snapshot.counters);
    let coarse = Coarse::of(call);
    let (running, queued) = snapshot.running_and_queued();
    let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
    let (sequences_running, sequences_queued) = coarse.running_and_queued((count(running), count(queued)));
    let label = |text: &str| wire::cut_text(text, limits::LABEL_BYTES_MAX).to_owned();
    let load_wait_us = u64::try_from(counters.load_wait.as_micros()).unwrap_or(u64::MAX);
    DeviceMemory {
        kind: label(info.kind),
        device: label(&info.device),
        weight_bytes: coarse.count(Count::WeightBytes, memory.weights),
        kv_bytes: coarse.count(Count::KvBytes, memory.kv),
        scratch_bytes: coarse.count(Count::ScratchBytes, memory.scratch),
        staging_bytes: coarse.count(Count::StagingBytes, memory.staging),
        graph_bytes: coarse.count(Count::GraphBytes, memory.graphs),
        taken_bytes: coarse.count(Count::TakenBytes, memory.taken),
        budget_bytes: memory.budget,
        available_bytes: coarse.count(Count::AvailableBytes, memory.available()),
        total_bytes: memory.total,
        free_bytes: coarse.count(Count::FreeBytes, memory.free),
        others_bytes: coarse.count(Count::OthersBytes, memory.others()),
        sequences_running,
        sequences_queued,
        decode_rows: coarse.count(Count::DecodeRows, counters.decode_rows),
        prefill_rows: coarse.count(Count::PrefillRows, counters.prefill_rows),
        loads: coarse.count(Count::TensorsLoaded, counters.tensors_loaded),
        hits: coarse.count(Count::TensorHits, counters.tensor_hits),
        load_bytes: coarse.count(Count::LoadedBytes, counters.load_bytes),
        evictions: coarse.count(Count::Evictions, counters.evictions),
        evicted_bytes: coarse.count(Count::EvictedBytes, counters.evicted_bytes),
        load_waits: coarse.count(Count::LoadWaits, counters.load_waits),
        load_wait_us: coarse.count(Count::LoadWaitTime, load_wait_us),
        bytes_per_second: coarse.count(Count::UploadRate, upload_rate(&snapshot.device)),
        ext: Ext::new(),
    }
}

/// Bytes per second of the upload method in use; 0 before the first upload.
fn upload_rate(device: &DeviceCounters) -> u64 {
    let rate = device.upload_rates.iter().find(|rate| rate.in_use && rate.bytes > 0);
    rate.map_or(0, |rate| rate.bytes_per_second() as u64)
}

fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    fn longest() -> ModelResidency {
        ModelResidency {
            model: ModelId(u64::MAX),
            name: String::new(),
            parts: vec![PartState::Partial; 514],
            weight_bytes: 1,
            kv_bytes: 1,
            kv_pages_max: 1,
            kv_cached_bytes: 1,
            states_cached: 1,
            states_cached_bytes: 1,
            scratch_bytes: 1,
            rules: ResidencyRules::default(),
            idle_since: Some(Instant::now()),
            eviction_place: 1,
            loading: Some(LoadingProgress::default()),
        }
    }

    #[test]
    fn a_page_of_the_longest_entries_fits_its_payload_and_wastes_none() {
        let longest = || entry(&longest(), "n".repeat(limits::NAME_BYTES_MAX), 3, &Coarse::NO);
        let label = "d".repeat(limits::LABEL_BYTES_MAX);
        let device = DeviceMemory { kind: label.clone(), device: label, ..DeviceMemory::default() };
        let mut room = page_room(wire::PAYLOAD_BYTES_MIN) - DEVICE_BYTES;
        let models = fill(&mut room, std::iter::repeat_with(longest).take(1000), entry_bytes);
        assert!(models.len() < 1000);
        let reply = ResidencyReply { devices: vec![device], models, more: true, ext: Ext::new() };
        let (encoded, limit) = (wire::encode(&reply).unwrap().len(), wire::PAYLOAD_BYTES_MIN as usize);
        assert!(encoded <= limit && encoded + entry_bytes(&longest()) > limit, "{encoded}");
    }

    #[test]
    fn the_order_of_eviction_is_not_for_everybody() {
        let place = |eviction_place, coarse: &Coarse| {
            entry(&ModelResidency { eviction_place, ..longest() }, String::new(), 0, coarse).eviction_place
        };
        assert_eq!([0, 1, 7].map(|of| place(of, &Coarse::NO)), [0, 1, 7]);
        assert_eq!([0, 1, 7].map(|of| place(of, &Coarse::for_others())), [0, 1, 1]);
    }

    #[test]
    fn layers_are_counted_without_the_embedding() {
        let kept = ResidencyRules { pinned: true, priority: 3, parts_min: 5, idle_max: None };
        assert_eq!(rules(kept), Rules { pinned: true, priority: 3, layers_min: 4, idle_s: 0 });
        let idle = ResidencyRules { idle_max: Some(Duration::from_secs(60)), ..ResidencyRules::default() };
        assert_eq!([0, 4, u32::MAX].map(parts_of), [0, 5, u32::MAX]);
        assert_eq!((rules(idle).layers_min, rules(idle).idle_s), (0, 60));
    }
}
