//! Requests about the daemon itself.

use rocmforge_client::wire::{
    self, DeviceStatus, ErrorCode, Ext, FailRequest, InfoReply, Op, OpInfo, PingReply, PingRequest, PsReply,
    SequenceEntry, StatusReply, WireError,
};

use super::{Call, Failure, failure};
use crate::scheduler::{EngineSnapshot, SequenceSnapshot, SequenceState};

/// Version told to clients.
const VERSION: &str = env!("CARGO_PKG_VERSION");

pub(super) fn ping(request: PingRequest) -> PingReply {
    PingReply { payload: request.payload, ext: Ext::new() }
}

pub(super) fn fail(request: &FailRequest) -> WireError {
    let Some(code) = ErrorCode::from_u16(request.code) else {
        return failure(ErrorCode::InvalidArgument, &format!("{} is no error code", request.code));
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
        ext: Ext::new(),
    }
}

/// All requests for tokens. Another uid's name for a model is told only where everyone knows it.
pub(super) async fn ps(call: Call) -> Result<PsReply, Failure> {
    let snapshot = call.service().engine.snapshot();
    let sequences = snapshot.sequences.iter().take(wire::limits::SEQUENCES_MAX);
    Ok(PsReply { sequences: sequences.map(|sequence| entry(&call, sequence)).collect(), ext: Ext::new() })
}

fn entry(call: &Call, sequence: &SequenceSnapshot) -> SequenceEntry {
    let peer = call.peer();
    let service = call.service();
    let model = match service.asked_by(sequence.id) {
        Some((uid, name)) if uid == peer.uid || peer.administrator || service.store.is_public(&name) => name,
        _ => String::new(),
    };
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
        age_ms: u64::try_from(sequence.arrived.elapsed().as_millis()).unwrap_or(u64::MAX),
        queue_position: sequence.queue_position,
        ext: Ext::new(),
    }
}

pub(super) async fn status(call: Call) -> Result<StatusReply, Failure> {
    let memory = call.blocking(|_| Ok(Memory::read())).await?;
    let service = call.service();
    Ok(StatusReply {
        version: VERSION.to_owned(),
        uptime_ms: u64::try_from(service.started.elapsed().as_millis()).unwrap_or(u64::MAX),
        pid: std::process::id(),
        draining: service.is_draining(),
        connections: service.connections(),
        models_mapped: u32::try_from(service.store.mapped()).unwrap_or(u32::MAX),
        devices: vec![device(&call, &service.engine.snapshot())],
        rss_anon_bytes: memory.anon_bytes,
        rss_file_bytes: memory.file_bytes,
        ext: Ext::new(),
    })
}

fn device(call: &Call, snapshot: &EngineSnapshot) -> DeviceStatus {
    let info = call.service().engine.info();
    let counters = &snapshot.counters;
    let (running, queued) = snapshot.running_and_queued();
    let count = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
    DeviceStatus {
        kind: info.kind.to_owned(),
        device: wire::cut_text(&info.device, wire::limits::LABEL_BYTES_MAX).to_owned(),
        isa: info.isa.clone(),
        threads: count(info.threads as u64),
        activations: format!("{:?}", info.activations).to_lowercase(),
        kv_type: format!("{:?}", info.kv).to_lowercase(),
        sequences_running: count(running as u64),
        sequences_queued: count(queued as u64),
        kv_pages_used: count(snapshot.kv_pages_used),
        kv_pages_max: count(snapshot.kv_pages_max),
        kv_bytes: snapshot.kv_bytes,
        steps: counters.steps,
        rows: counters.rows,
        decode_rows: counters.decode_rows,
        prefill_rows: counters.prefill_rows,
        sequences_done: counters.sequences_done,
        sequences_failed: counters.sequences_failed,
        tensors_loaded: counters.tensors_loaded,
        tensor_hits: counters.tensor_hits,
        device_bytes: snapshot.device_bytes,
        step_sequences: counters.step_sequences,
        ext: Ext::new(),
    }
}

/// What the kernel counts as this process's memory.
#[derive(Debug, Default, PartialEq, Eq)]
struct Memory {
    anon_bytes: u64,
    file_bytes: u64,
}

impl Memory {
    fn read() -> Self {
        std::fs::read_to_string("/proc/self/status").map(|text| Self::parse(&text)).unwrap_or_default()
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

    #[test]
    fn memory_is_read_from_the_kernels_text() {
        let text = "VmRSS:\t   99 kB\nRssAnon:\t    1234 kB\nRssFile:\t       8 kB\n";
        assert_eq!(Memory::parse(text), Memory { anon_bytes: 1234 * 1024, file_bytes: 8 * 1024 });
        assert_eq!(Memory::parse("RssAnon: many kB"), Memory::default());
        assert!(Memory::read().anon_bytes > 0);
    }
}
