//! Requests about the daemon itself.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Instant;

use rocmforge_client::wire::{
    self, CancelRequestsReply, CancelRequestsRequest, DeviceStatus, EXT_DEVICE_ACCEPTED, EXT_DEVICE_CACHED,
    EXT_DEVICE_DRAFTED, EXT_DEVICE_KV_BUDGET, EXT_DEVICE_KV_HELD, EXT_DEVICE_PAGE_TOKENS,
    EXT_DEVICE_PAGES_EVICTED, EXT_DEVICE_REUSED, EXT_DEVICE_STATES, EXT_DEVICE_STATES_CACHED,
    EXT_DEVICE_STATES_CACHED_BYTES, EXT_DEVICE_TIME, EXT_SEQUENCE_REUSED, EXT_STATUS_LOST_THREADS, ErrorCode,
    Ext, FailRequest, InfoReply, Op, OpInfo, PingReply, PingRequest, PsReply, PsRequest, RequestScope,
    SequenceEntry, StatusReply, WireError,
};

use super::coarse::{Coarse, Count};
use super::error::{Failure, failure};
use super::models::{fill, page_room};
use super::service::Preparing;
use super::{Call, host};
use crate::backend::{BackendInfo, DeviceCounters, KV_PAGE_TOKENS};
use crate::scheduler::{Counters, EngineSnapshot, SequenceId, SequenceSnapshot, SequenceState};

/// Version that clients see.
const VERSION: &str = env!("CARGO_PKG_VERSION");

pub(super) fn ping(request: PingRequest) -> PingReply {
    PingReply { payload: request.payload, ext: Ext::new() }
}

pub(super) fn fail(request: &FailRequest) -> WireError {
    let Some(code) = ErrorCode::from_u16(request.code) else {
        return failure(ErrorCode::InvalidArgument, &format!("{} is not an error code", request.code));
    };
    failure(code, "as asked for by `Fail`")
}

pub(super) fn info(call: &Call) -> InfoReply {
    let requests = Op::ALL.iter().filter(|op| (**op as u16) < Op::Reply as u16);
    InfoReply {
        version: VERSION.to_owned(),
        ops: requests.map(|op| OpInfo { op: *op as u16, name: op.name().to_owned() }).collect(),
        limits: wire::Limits {
            frame_bytes_max: call.connection.limits.max_frame,
            streams_max: call.connection.limits.max_streams,
            fds_max: wire::FDS_MAX.into(),
            initial_credit: call.connection.limits.initial_credit,
            context_tokens_max: call.service().settings.context_tokens,
            stop_texts_max: wire::limits::STOP_TEXTS_MAX as u32,
            stop_text_bytes_max: wire::limits::STOP_TEXT_BYTES_MAX as u32,
            top_logprobs_max: wire::limits::TOP_LOGPROBS_MAX as u32,
            ext: Ext::new(),
        },
        ext: InfoReply::subordinates_ext(call.service().subordinates_of(&call.connection.peer)),
    }
}

/// The client's token requests; those of all users if it has [`super::Right::See`].
pub(super) async fn ps(call: Call, request: PsRequest) -> Result<PsReply, Failure> {
    let (service, peer) = (call.service(), call.peer());
    let shown = |id: SequenceId, uid: u32| id.0 > request.after && (peer.sees || uid == peer.uid);
    // Before the snapshot: a request that goes to the engine meanwhile is in both lists, not in none.
    let preparing = service.preparing(shown);
    let snapshot = service.engine.snapshot();
    let mut all: Vec<&SequenceSnapshot> = snapshot.sequences.iter().collect();
    all.retain(|sequence| shown(sequence.id, sequence.uid));
    let names = service.model_names(all.iter().map(|sequence| sequence.id));
    let entries = all.into_iter().zip(names).map(|(sequence, model)| (sequence.id, entry(sequence, model)));
    let mut entries: BTreeMap<SequenceId, SequenceEntry> = entries.collect();
    if !Coarse::of(&call).is_exact() {
        let own = snapshot.sequences.iter().filter(|sequence| sequence.uid == peer.uid);
        number_own(&mut entries, own);
    }
    for asked in preparing {
        entries.entry(asked.id).or_insert_with(|| of_preparing(asked));
    }
    let of_all = entries.len();
    let mut room = page_room(call.connection.limits.max_frame);
    let entries = entries.into_values().take(wire::limits::SEQUENCES_MAX);
    let sequences = fill(&mut room, entries, entry_bytes);
    Ok(PsReply { more: sequences.len() < of_all, sequences, ext: Ext::new() })
}

/// Numbers the waiting requests of one user among themselves: places among all would tell how many others wait.
fn number_own<'a>(
    entries: &mut BTreeMap<SequenceId, SequenceEntry>,
    own: impl Iterator<Item = &'a SequenceSnapshot>,
) {
    let mut waiting: Vec<_> = own.filter(|sequence| sequence.queue_position > 0).collect();
    waiting.sort_by_key(|sequence| sequence.queue_position);
    for (place, sequence) in (1..).zip(waiting) {
        if let Some(entry) = entries.get_mut(&sequence.id) {
            entry.queue_position = place;
        }
    }
}

/// Upper bound of an entry's encoded size in bytes.
fn entry_bytes(entry: &SequenceEntry) -> usize {
    entry.model.len() + 100
}

/// Cancels requests for tokens, whatever connection they belong to.
pub(super) async fn cancel(
    call: Call,
    request: CancelRequestsRequest,
) -> Result<CancelRequestsReply, Failure> {
    let (peer, service) = (call.peer(), call.service());
    let mut wanted = service.sequences();
    wanted.retain(|(id, uid)| match request.scope {
        RequestScope::Id(wanted) => id.0 == wanted,
        RequestScope::Uid(wanted) => *uid == wanted,
    });
    let asked = match request.scope {
        RequestScope::Id(id) => format!("request {id}"),
        RequestScope::Uid(uid) => format!("request of uid {uid}"),
    };
    // The same answer whether another user has such a request or not.
    let own = match request.scope {
        RequestScope::Id(_) => wanted.iter().any(|(_, uid)| *uid == peer.uid),
        RequestScope::Uid(uid) => uid == peer.uid,
    };
    if !own && !peer.administrator {
        let text =
            format!("uid {} has no {asked}: only an administrator cancels those of other users", peer.uid);
        return Err(failure(ErrorCode::Forbidden, &text));
    }
    if wanted.is_empty() {
        let text = format!("no {asked} is waiting or running: `ps` lists them");
        return Err(failure(ErrorCode::InvalidArgument, &text));
    }
    for (id, uid) in &wanted {
        tracing::info!(name: "cancelled", uid, request = id.0, by = peer.uid, "a request was cancelled");
        service.cancel(*id);
    }
    Ok(CancelRequestsReply { cancelled: u32::try_from(wanted.len()).unwrap_or(u32::MAX), ext: Ext::new() })
}

fn of_preparing(asked: Preparing) -> SequenceEntry {
    SequenceEntry {
        id: asked.id.0,
        uid: asked.uid,
        model: asked.model,
        state: wire::SequenceState::Preparing,
        prompt_tokens: 0,
        prefilled_tokens: 0,
        generated_tokens: 0,
        max_tokens: 0,
        kv_pages: 0,
        age_ms: milliseconds_since(asked.arrived),
        queue_position: 0,
        ext: Ext::new(),
    }
}

fn milliseconds_since(moment: Instant) -> u64 {
    u64::try_from(moment.elapsed().as_millis()).unwrap_or(u64::MAX)
}

fn entry(sequence: &SequenceSnapshot, model: String) -> SequenceEntry {
    let device_us = u64::try_from(sequence.device_time.as_micros()).unwrap_or(u64::MAX);
    let mut ext = vec![(EXT_DEVICE_TIME, device_us.to_le_bytes().to_vec())];
    ext.extend(wire::number_ext([(EXT_SEQUENCE_REUSED, sequence.reused_tokens.into())]));
    SequenceEntry {
        id: sequence.id.0,
        uid: sequence.uid,
        model,
        state: match sequence.state {
            SequenceState::Queued => wire::SequenceState::Queued,
            SequenceState::Prefill => wire::SequenceState::Prefill,
            SequenceState::Decode => wire::SequenceState::Decode,
            SequenceState::Stalled => wire::SequenceState::Stalled,
        },
        prompt_tokens: sequence.prompt_tokens,
        prefilled_tokens: sequence.prefilled_tokens,
        generated_tokens: sequence.generated_tokens,
        max_tokens: sequence.max_tokens,
        kv_pages: sequence.kv_pages,
        age_ms: milliseconds_since(sequence.arrived),
        queue_position: sequence.queue_position,
        ext,
    }
}

pub(super) async fn status(call: Call) -> Result<StatusReply, Failure> {
    let ask = |call: &Call| {
        let service = call.service();
        Ok((Memory::read(service.memory_use.as_ref()), host::of_daemon(service), service.kept()))
    };
    let (memory, host, kept) = call.blocking(ask).await?;
    let (service, coarse, sees) = (call.service(), Coarse::of(&call), call.peer().sees);
    let mapped = if sees { service.store.mapped() } else { service.store.mapped_for(call.peer().uid) };
    Ok(StatusReply {
        version: VERSION.to_owned(),
        uptime_ms: milliseconds_since(service.started),
        pid: std::process::id(),
        draining: service.is_draining(),
        connections: u32::try_from(coarse.count(Count::Connections, service.connections().held()))
            .unwrap_or(u32::MAX),
        models_mapped: u32::try_from(mapped).unwrap_or(u32::MAX),
        devices: vec![device(&call, &service.engine.snapshot())],
        rss_anon_bytes: coarse.count(Count::AnonBytes, memory.anon_bytes),
        rss_file_bytes: coarse.count(Count::FileBytes, memory.file_bytes),
        host,
        ext: status_ext(&call, kept),
    })
}

/// Notes about the daemon with the `kept` state, and the number of its lost threads.
fn status_ext(call: &Call, kept: String) -> Ext {
    let service = call.service();
    let (copies, bytes) = service.store.copied();
    let copies = (copies > 0).then(|| {
        format!(
            "{copies} models, {bytes} bytes in memory, because the servers of their file systems may hang"
        )
    });
    let lost = service.lost_threads();
    let silent =
        (lost > 0).then(|| format!("{lost} wait for file systems that do not answer; the log names them"));
    // How many files all users passed is not for everybody.
    let (kept, copies) = if call.peer().sees { (Some(kept), copies) } else { (None, None) };
    let notes =
        [("you may", Some(call.rights())), ("kept", kept), ("copies", copies), ("lost threads", silent)];
    let notes =
        notes.into_iter().filter_map(|(name, text)| Some((name, text.filter(|text| !text.is_empty())?)));
    let mut ext = StatusReply::notes_ext(notes);
    if lost > 0 {
        let lost = u32::try_from(lost).unwrap_or(u32::MAX);
        ext.push((EXT_STATUS_LOST_THREADS, lost.to_le_bytes().to_vec()));
    }
    ext
}

fn device(call: &Call, snapshot: &EngineSnapshot) -> DeviceStatus {
    let info = call.service().engine.info();
    let counters = &snapshot.counters;
    let (running, queued) = snapshot.running_and_queued();
    let count = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
    let coarse = Coarse::of(call);
    let exact = DeviceStatus {
        kind: info.kind.to_owned(),
        device: wire::cut_text(&info.device, wire::limits::LABEL_BYTES_MAX).to_owned(),
        isa: info.isa.clone(),
        threads: count(info.threads as u64),
        activations: format!("{:?}", info.activations).to_lowercase(),
        kv_type: format!("{:?}", info.kv).to_lowercase(),
        sequences_running: count(running as u64),
        sequences_queued: count(queued as u64),
        kv_pages_used: count(snapshot.kv_pages_used),
        kv_pages_max: count(kv_pages_max(call, snapshot, &coarse)),
        kv_bytes: snapshot.kv_bytes,
        steps: counters.steps,
        rows: counters.rows,
        decode_rows: counters.decode_rows,
        prefill_rows: counters.prefill_rows,
        sequences_done: counters.sequences_done,
        sequences_failed: counters.sequences_failed,
        sequences_cancelled: counters.sequences_cancelled,
        tensors_loaded: counters.tensors_loaded,
        tensor_hits: counters.tensor_hits,
        device_bytes: snapshot.device_bytes,
        step_sequences: counters.step_sequences,
        ext: device_ext(&info, snapshot, &coarse),
    };
    coarse.status(exact)
}

/// Pages of all open models; for a user that may not see others', of those that it has names for.
fn kv_pages_max(call: &Call, snapshot: &EngineSnapshot, coarse: &Coarse) -> u64 {
    if coarse.is_exact() {
        return snapshot.kv_pages_max;
    }
    let ids: Vec<_> = snapshot.models.iter().map(|model| model.model).collect();
    let names = call.service().store.names_of(call.peer().uid, false, &ids);
    snapshot
        .models
        .iter()
        .filter(|model| names.contains_key(&model.model))
        .map(|model| model.kv_pages_max)
        .sum()
}

fn device_ext(info: &BackendInfo, snapshot: &EngineSnapshot, coarse: &Coarse) -> Ext {
    let counters = &snapshot.counters;
    let mut ext = DeviceStatus::notes_ext(notes(info, snapshot, coarse));
    ext.extend(wire::number_ext([
        (EXT_DEVICE_REUSED, coarse.count(Count::ReusedTokens, counters.reused_tokens)),
        (EXT_DEVICE_CACHED, coarse.count(Count::KvCachedBytes, snapshot.kv_cached_bytes)),
        (EXT_DEVICE_PAGES_EVICTED, coarse.count(Count::PagesEvicted, counters.kv_pages_evicted)),
        (EXT_DEVICE_DRAFTED, coarse.count(Count::DraftedTokens, counters.drafted_tokens)),
        (EXT_DEVICE_ACCEPTED, coarse.count(Count::AcceptedTokens, counters.accepted_tokens)),
        (EXT_DEVICE_STATES, coarse.states(snapshot.states_used)),
        (EXT_DEVICE_STATES_CACHED, coarse.count(Count::StatesCached, snapshot.states_cached)),
        (
            EXT_DEVICE_STATES_CACHED_BYTES,
            coarse.count(Count::StatesCachedBytes, snapshot.states_cached_bytes),
        ),
        (EXT_DEVICE_KV_BUDGET, snapshot.kv_budget_bytes),
        (EXT_DEVICE_KV_HELD, coarse.kv_held_bytes(snapshot.kv_held_bytes)),
        (EXT_DEVICE_PAGE_TOKENS, KV_PAGE_TOKENS as u64),
    ]));
    ext
}

/// Device details for display, beside the numbers.
fn notes<'a>(
    info: &'a BackendInfo,
    snapshot: &EngineSnapshot,
    coarse: &Coarse,
) -> impl Iterator<Item = (&'a str, String)> {
    let device = snapshot.device;
    let fixed = info.notes.iter().map(|(name, value)| (*name, value.clone()));
    let refused = device.graphs_refused.map(|why| ("graphs off", why.to_owned()));
    let uploads = (device.uploads + device.upload_failures > 0).then(|| {
        let DeviceCounters { uploads, upload_bytes, upload_failures, .. } = device;
        ("uploads", format!("{uploads} tensors, {upload_bytes} bytes, {upload_failures} failed"))
    });
    let rates = device.upload_rates.into_iter().filter(|rate| rate.in_use || rate.refused || rate.bytes > 0);
    let rates = rates.map(|rate| (if rate.in_use { "upload" } else { "upload tried" }, rate.to_string()));
    let used = (device.used_bytes > 0).then(|| ("in use", format!("{} MiB", device.used_bytes >> 20)));
    let graphs = (device.graphs > 0)
        .then(|| ("graphs", format!("{} recorded, {} replays", device.graphs, device.graph_replays)));
    let Counters { kv_pages_swapped_out: out, kv_pages_swapped_in: back, .. } = snapshot.counters;
    let swapped = (out > 0).then(|| {
        let mib = snapshot.kv_swapped_bytes >> 20;
        ("swapped", format!("{mib} MiB of KV pages and states in host memory; {out} copied out, {back} back"))
    });
    let memory = snapshot.memory;
    let kernel =
        memory.kernel_used.map(|used| ("kernel", format!("{} MiB in use by all programs", used >> 20)));
    let differ = memory.contradiction().map(|text| ("memory", text));
    // Each of these counts what all users do.
    let counted = rates.chain(uploads).chain(used).chain(kernel).chain(differ).chain(graphs).chain(swapped);
    let exact = coarse.is_exact();
    fixed.chain(counted.filter(move |_| exact)).chain(refused)
}

/// This process's resident memory, as the kernel counts it.
#[derive(Debug, Default, PartialEq, Eq)]
struct Memory {
    anon_bytes: u64,
    file_bytes: u64,
}

impl Memory {
    /// Zeros if the kernel does not report. `/proc/self/status` has about 1.5 KB; each read at offset 0 is a new
    /// report.
    fn read(status: Option<&File>) -> Self {
        let mut text = [0; 8 << 10];
        let bytes = status.and_then(|status| status.read_at(&mut text, 0).ok()).unwrap_or(0);
        Self::parse(&String::from_utf8_lossy(&text[..bytes]))
    }

    fn parse(status: &str) -> Self {
        let bytes = |key: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(key))?;
            line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
        };
        Self { anon_bytes: bytes("RssAnon:").unwrap_or(0), file_bytes: bytes("RssFile:").unwrap_or(0) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::ModelId;

    fn queued(id: u64, queue_position: u32) -> SequenceSnapshot {
        SequenceSnapshot {
            id: SequenceId(id),
            uid: 1,
            model: ModelId(1),
            state: SequenceState::Queued,
            prompt_tokens: 1,
            prefilled_tokens: 1,
            reused_tokens: 1,
            generated_tokens: 1,
            max_tokens: 1,
            kv_pages: 1,
            states: 0,
            kv_bytes: 0,
            device_time: std::time::Duration::ZERO,
            arrived: Instant::now(),
            queue_position,
        }
    }

    #[test]
    fn a_users_waiting_requests_are_numbered_among_themselves() {
        // 7 runs; the first page with 3 was told before.
        let own = [queued(3, 40), queued(5, 12), queued(7, 0), queued(9, 90)];
        let shown = own.iter().filter(|sequence| sequence.id.0 > 3);
        let mut entries = shown.map(|sequence| (sequence.id, entry(sequence, String::new()))).collect();
        number_own(&mut entries, own.iter());
        let places: Vec<_> = entries.values().map(|entry| (entry.id, entry.queue_position)).collect();
        assert_eq!(places, [(5, 1), (7, 0), (9, 3)]);
    }

    #[test]
    fn a_page_of_the_longest_entries_fits_its_payload_and_wastes_none() {
        let sequence = queued(1, 1);
        let longest = || entry(&sequence, "n".repeat(wire::limits::NAME_BYTES_MAX));
        let mut room = page_room(wire::PAYLOAD_BYTES_MIN);
        let entries = std::iter::repeat_with(longest).take(1000);
        let sequences = fill(&mut room, entries, entry_bytes);
        assert!(sequences.len() < 1000);
        let reply = PsReply { sequences, more: true, ext: Ext::new() };
        let (encoded, limit) = (wire::encode(&reply).unwrap().len(), wire::PAYLOAD_BYTES_MIN as usize);
        assert!(encoded <= limit && encoded + entry_bytes(&longest()) > limit, "{encoded}");
    }

    #[test]
    fn memory_is_read_from_the_kernels_text() {
        let text = "VmRSS:\t   99 kB\nRssAnon:\t    1234 kB\nRssFile:\t       8 kB\n";
        assert_eq!(Memory::parse(text), Memory { anon_bytes: 1234 * 1024, file_bytes: 8 * 1024 });
        assert_eq!(Memory::parse("RssAnon: many kB"), Memory::default());
        let status = File::open("/proc/self/status").unwrap();
        for _ in 0..2 {
            assert!(Memory::read(Some(&status)).anon_bytes > 0);
        }
        assert_eq!(Memory::read(None), Memory::default());
    }
}
