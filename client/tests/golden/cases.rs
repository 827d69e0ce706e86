//! The cases: the smallest and the largest of every message, and a typical one.

use std::fmt::Debug;

use rocmforge_client::wire::*;
use serde::Serialize;

use crate::common::{Largest, Smallest, filled};

mod hellos;
mod limits;
mod residency;
mod sessions;

/// Compares bytes and JSON of a message.
type Decode = dyn Fn(&[u8], &str);

/// One kept frame or hello.
pub struct Golden {
    /// Name of its files.
    pub name: String,
    /// Type of its message.
    pub message: &'static str,
    pub bytes: Vec<u8>,
    pub json: String,
    /// Decodes bytes and JSON and compares both with the value.
    pub decode: Box<Decode>,
}

#[derive(Serialize)]
struct FrameFile<'a, T> {
    message: &'a str,
    header: HeaderFile,
    payload: &'a T,
}

#[derive(Serialize)]
struct HeaderFile {
    len: u32,
    stream: u32,
    op: u16,
    flags: u8,
    n_fds: u8,
    crc_or_zero: u32,
}

#[derive(serde::Deserialize)]
struct PayloadOf<T> {
    payload: T,
}

/// `GenerateItem` as `generate-item`.
fn file_name(message: &str, case: &str) -> String {
    let mut name = String::new();
    for c in message.chars() {
        if c.is_ascii_uppercase() && !name.is_empty() {
            name.push('-');
        }
        name.push(c.to_ascii_lowercase());
    }
    format!("{name}-{case}")
}

fn pretty<T: Serialize>(value: &T) -> String {
    serde_json::to_string_pretty(value).unwrap() + "\n"
}

struct At {
    stream: u32,
    flags: Flags,
    n_fds: u8,
}

fn frame<T: Message + Clone + Debug + PartialEq + 'static>(op: Op, case: &str, at: At, value: T) -> Golden {
    let bytes =
        encode_frame_with_descriptors(at.stream, op, at.flags, PAYLOAD_BYTES_MAX, at.n_fds, &value).unwrap();
    let header = FrameHeader::parse(bytes.first_chunk().unwrap(), PAYLOAD_BYTES_MAX).unwrap();
    let json = pretty(&FrameFile {
        message: T::NAME,
        header: HeaderFile {
            len: header.len,
            stream: header.stream,
            op: header.op,
            flags: header.flags.bits(),
            n_fds: header.n_fds,
            crc_or_zero: header.crc_or_zero,
        },
        payload: &value,
    });
    let decode_both = move |bytes: &[u8], json: &str| {
        let (header, payload) = bytes.split_first_chunk().unwrap();
        let header = FrameHeader::parse(header, PAYLOAD_BYTES_MAX).unwrap();
        assert_eq!(payload.len(), header.len as usize);
        header.check_payload(payload).unwrap();
        assert_eq!(header.known_op(), Some(op));
        assert_eq!(decode::<T>(payload).unwrap(), value);
        assert_eq!(serde_json::from_str::<PayloadOf<T>>(json).unwrap().payload, value);
    };
    let name = file_name(T::NAME, case);
    Golden { name, message: T::NAME, bytes, json, decode: Box::new(decode_both) }
}

/// The three cases of a message.
fn three<T: Message + Clone + Debug + PartialEq + 'static>(op: Op, typical: T) -> [Golden; 3] {
    three_with_descriptors(op, 0, typical)
}

fn three_with_descriptors<T: Message + Clone + Debug + PartialEq + 'static>(
    op: Op,
    n_fds: u8,
    typical: T,
) -> [Golden; 3] {
    let stream = if op == Op::Error { 0 } else { 1 };
    [
        frame::<T>(op, "min", At { stream, flags: Flags::NONE, n_fds: 0 }, filled(&mut Smallest)),
        frame(op, "typical", At { stream: 5, flags: Flags::NONE, n_fds }, typical),
        frame::<T>(op, "max", At { stream: u32::MAX, flags: Flags::CRC, n_fds: 0 }, filled(&mut Largest)),
    ]
}

fn summary() -> ModelSummary {
    ModelSummary {
        name: "smollm2-135m-instruct-q4_1".into(),
        state: ModelState::Mapped,
        file_bytes: 98_058_496,
        architecture: "llama".into(),
        sequences: 2,
        reason: String::new(),
        ext: vec![],
    }
}

/// Every case.
pub fn all() -> Vec<Golden> {
    let mut cases = hellos::all();
    cases.extend(connection());
    cases.extend(models());
    cases.extend(residency::all());
    cases.extend(limits::all());
    cases.extend(tokens());
    cases.extend(daemon());
    cases
}

/// Names of all messages, sorted.
pub fn message_names() -> Vec<&'static str> {
    let mut names = vec![
        Cancel::NAME,
        Credit::NAME,
        PingRequest::NAME,
        PingReply::NAME,
        InfoRequest::NAME,
        InfoReply::NAME,
        ListRequest::NAME,
        ListReply::NAME,
        ShowRequest::NAME,
        ShowReply::NAME,
        LoadRequest::NAME,
        LoadReply::NAME,
        LoadToDeviceRequest::NAME,
        LoadToDeviceItem::NAME,
        LoadToDeviceEnd::NAME,
        ClearCacheRequest::NAME,
        ClearCacheReply::NAME,
        PlanRequest::NAME,
        PlanReply::NAME,
        ResidencyRequest::NAME,
        ResidencyReply::NAME,
        SetRulesRequest::NAME,
        SetRulesReply::NAME,
        SubscribeRequest::NAME,
        SubscribeItem::NAME,
        SubscribeEnd::NAME,
        UnloadRequest::NAME,
        UnloadReply::NAME,
        PsRequest::NAME,
        PsReply::NAME,
        CancelRequestsRequest::NAME,
        CancelRequestsReply::NAME,
        LimitUserRequest::NAME,
        LimitUserReply::NAME,
        UsersRequest::NAME,
        UsersReply::NAME,
        SessionsRequest::NAME,
        SessionsReply::NAME,
        ForgetSessionRequest::NAME,
        ForgetSessionReply::NAME,
        StatusRequest::NAME,
        StatusReply::NAME,
        DoctorRequest::NAME,
        DoctorReply::NAME,
        TokenizeRequest::NAME,
        TokenizeReply::NAME,
        DetokenizeRequest::NAME,
        DetokenizeReply::NAME,
        GenerateRequest::NAME,
        GenerateItem::NAME,
        GenerateEnd::NAME,
        FailRequest::NAME,
        WireError::NAME,
    ];
    names.sort_unstable();
    names
}

fn connection() -> Vec<Golden> {
    let error = WireError::new(ErrorCode::Busy, "1024 requests wait already: try again later")
        .with_retry_after_ms(500)
        .with_detail("queued", 1024);
    let groups = [
        three(Op::Cancel, Cancel { ext: vec![] }),
        three(Op::Credit, Credit { items: 16, ext: vec![] }),
        three(Op::Ping, PingRequest { payload: b"hello".to_vec(), ext: vec![(7, vec![1, 2])] }),
        three(Op::Reply, PingReply { payload: b"hello".to_vec(), ext: vec![] }),
        three(Op::Fail, FailRequest { code: ErrorCode::ModelCorrupt as u16, ext: vec![] }),
        three(Op::Error, error),
    ];
    groups.into_iter().flatten().collect()
}

fn models() -> Vec<Golden> {
    let show = ShowReply {
        summary: summary(),
        gguf_version: 3,
        parameters: 134_515_008,
        weight_bytes: 96_300_000,
        context_length: 8192,
        hidden: 576,
        layers: 30,
        heads: 9,
        kv_heads: 3,
        head_dim: 64,
        ffn: 1536,
        vocab: 49152,
        tokenizer: "gpt2".into(),
        chat_template: true,
        end_of_generation: vec![2, 0],
        types: vec![TypeCount { dtype: "Q4_1".into(), tensors: 210, bytes: 66_355_200 }],
        metadata_total: 33,
        tensors_total: 272,
        metadata: vec![MetadataEntry {
            key: "general.architecture".into(),
            kind: "string".into(),
            value: "llama".into(),
        }],
        tensors: vec![TensorEntry {
            name: "token_embd.weight".into(),
            dtype: "Q8_0".into(),
            dims: vec![576, 49152],
            offset_bytes: 1_756_800,
            bytes: 30_081_024,
        }],
        host: HostMemory {
            wanted: Residency::Lock,
            state: PagesState::Coming,
            mapped_bytes: 98_058_496,
            resident_bytes: 67_108_864,
            locked_bytes: 67_108_864,
            read_bytes: 67_108_864,
            cached_bytes: Some(98_058_496),
            reason: String::new(),
            ext: vec![],
        },
        ext: vec![],
    };
    let name = || summary().name;
    let load = LoadRequest {
        name: name(),
        by_descriptor: true,
        request_id: 0x0123_4567_89ab_cdef << 64 | 42,
        ext: vec![],
    };
    let groups = [
        three(Op::List, ListRequest { after: name(), ext: vec![] }),
        three(Op::Reply, ListReply { models: vec![summary()], more: true, ext: vec![] }),
        three(
            Op::Show,
            ShowRequest { model: name(), full: true, skip_metadata: 33, skip_tensors: 272, ext: vec![] },
        ),
        three(Op::Reply, show),
        three_with_descriptors(Op::Load, 1, load),
        three(Op::Reply, LoadReply { summary: summary(), mapped_now: true, elapsed_us: 14_250, ext: vec![] }),
        three(Op::Unload, UnloadRequest { name: name(), request_id: 7, ext: vec![] }),
        three(Op::Reply, UnloadReply { was_mapped: true, draining_sequences: 2, ext: vec![] }),
    ];
    groups.into_iter().flatten().collect()
}

fn tokens() -> Vec<Golden> {
    let tokenize = TokenizeRequest {
        model: "tiny".into(),
        text: "Füße".into(),
        add_special: true,
        parse_special: false,
        ext: vec![],
    };
    let generate = GenerateRequest {
        model: summary().name,
        prompt: Prompt::Chat(vec![ChatMessage {
            role: "user".into(),
            content: "Why is the sky blue?".into(),
        }]),
        max_tokens: 64,
        sampling: SamplingOptions {
            temperature: 0.8,
            top_k: 40,
            top_p: 0.95,
            min_p: 0.05,
            seed: Some(1),
            top_logprobs: 2,
        },
        stop: vec!["\n\n".into()],
        ignore_eog: false,
        timeout_ms: 30_000,
        request_id: 1 << 100,
        ext: vec![],
    };
    let of_prompt = |prompt| GenerateRequest { prompt, ..generate.clone() };
    let at = |stream| At { stream, flags: Flags::NONE, n_fds: 0 };
    let text = frame(Op::Generate, "text", at(7), of_prompt(Prompt::Text("Once upon a time".into())));
    let ids = frame(Op::Generate, "ids", at(9), of_prompt(Prompt::Ids(vec![1, 403, 49151])));
    let item = GenerateItem {
        ids: vec![504, 282],
        text: " the sky".into(),
        logprobs: vec![
            TokenLogprob { logprob: -0.25, top: vec![TopToken { id: 504, logprob: -0.25 }] },
            TokenLogprob {
                logprob: -1.5,
                top: vec![TopToken { id: 9, logprob: -0.5 }, TopToken { id: 282, logprob: -1.5 }],
            },
        ],
        prompt_ids: vec![1, 403],
        ext: vec![],
    };
    let end = GenerateEnd {
        stop_reason: StopReason::MaxTokens,
        text: "…".into(),
        usage: Usage { prompt_tokens: 31, generated_tokens: 64 },
        timings: Timings { queue_us: 12, load_us: 0, prefill_us: 151_000, decode_us: 640_000 },
        seed: 1,
        ext: vec![],
    };
    let sessions = sessions::all(&generate, &end);
    let groups = [
        three(Op::Tokenize, tokenize),
        three(Op::Reply, TokenizeReply { ids: vec![1, 435, 29000], ext: vec![] }),
        three(
            Op::Detokenize,
            DetokenizeRequest { model: "tiny".into(), ids: vec![1, 435], show_special: true, ext: vec![] },
        ),
        three(Op::Reply, DetokenizeReply { text: "<s> Füße".into(), ext: vec![] }),
        three(Op::Generate, generate),
        three(Op::Item, item),
        three(Op::End, end),
    ];
    groups.into_iter().flatten().chain([text, ids]).chain(sessions).collect()
}

fn daemon() -> Vec<Golden> {
    let info = InfoReply {
        version: "0.1.0".into(),
        ops: vec![
            OpInfo { op: Op::Ping as u16, name: "Ping".into() },
            OpInfo { op: Op::Info as u16, name: "Info".into() },
        ],
        limits: Limits {
            frame_bytes_max: PAYLOAD_BYTES_MAX,
            streams_max: STREAMS_MAX,
            fds_max: FDS_MAX.into(),
            initial_credit: INITIAL_CREDIT,
            context_tokens_max: 8192,
            stop_texts_max: 16,
            stop_text_bytes_max: 256,
            top_logprobs_max: 20,
            ext: vec![],
        },
        ext: vec![],
    };
    let sequence = SequenceEntry {
        id: 77,
        uid: 1000,
        model: summary().name,
        state: SequenceState::Decode,
        prompt_tokens: 31,
        prefilled_tokens: 31,
        generated_tokens: 9,
        max_tokens: 64,
        kv_pages: 2,
        age_ms: 412,
        queue_position: 0,
        ext: vec![],
    };
    let status = StatusReply {
        version: "0.1.0".into(),
        uptime_ms: 86_400_000,
        pid: 4242,
        draining: false,
        connections: 16,
        models_mapped: 1,
        devices: vec![device()],
        rss_anon_bytes: 41_943_040,
        rss_file_bytes: 98_058_496,
        host: HostStatus {
            locked_bytes: 98_058_496,
            lock_bytes_max: 48 << 30,
            locks_refused: 1,
            reason: "locking 40000000000 bytes beside the 98058496 of other models is too much".into(),
            pressure: "/sys/fs/cgroup/system.slice/rocmforged.service/memory.pressure".into(),
            pressure_events: 2,
            ext: vec![],
        },
        ext: vec![],
    };
    let acting = InfoReply {
        ext: InfoReply::subordinates_ext(Some(Subordinates { first: 3_000_000_000, count: 65_536 })),
        ..info.clone()
    };
    let acting = frame(Op::Reply, "acting", At { stream: 5, flags: Flags::NONE, n_fds: 0 }, acting);
    let groups = [
        three(Op::Info, InfoRequest { ext: vec![] }),
        three(Op::Reply, info),
        three(Op::Ps, PsRequest { after: 40, ext: vec![] }),
        three(Op::Reply, PsReply { sequences: vec![sequence], more: true, ext: vec![] }),
        three(Op::CancelRequests, CancelRequestsRequest { scope: RequestScope::Uid(1000), ext: vec![] }),
        three(Op::Reply, CancelRequestsReply { cancelled: 31, ext: vec![] }),
        three(Op::Status, StatusRequest { ext: vec![] }),
        three(Op::Reply, status),
        three(Op::Doctor, DoctorRequest { ext: vec![] }),
        three(Op::Reply, doctor()),
    ];
    groups.into_iter().flatten().chain([acting]).collect()
}

fn doctor() -> DoctorReply {
    let check = DoctorCheck {
        name: "/dev/kfd".into(),
        state: CheckState::Problem,
        found: "cannot be opened: permission denied".into(),
        advice: "let the daemon's user (uid 990) join the group: usermod -aG render USER".into(),
        ext: vec![],
    };
    let gpu = GpuEntry {
        index: 0,
        name: "AMD Instinct MI210".into(),
        arch: "gfx90a:sramecc+:xnack-".into(),
        pci: "0000:03:00.0".into(),
        memory_bytes: 68_702_699_520,
        memory_free_bytes: 68_413_292_544,
        units: 104,
        wave: 64,
        code: "gfx90a".into(),
        works: true,
        ext: vec![],
    };
    DoctorReply { checks: vec![check], gpus: vec![gpu], ext: vec![] }
}

fn device() -> DeviceStatus {
    DeviceStatus {
        kind: "cpu".into(),
        device: "AMD EPYC".into(),
        isa: "avx512".into(),
        threads: 2,
        activations: "f32".into(),
        kv_type: "f16".into(),
        sequences_running: 3,
        sequences_queued: 1,
        kv_pages_used: 12,
        kv_pages_max: 4096,
        kv_bytes: 11_796_480,
        steps: 1000,
        rows: 2400,
        decode_rows: 2300,
        prefill_rows: 100,
        sequences_done: 40,
        sequences_failed: 1,
        sequences_cancelled: 3,
        tensors_loaded: 272,
        tensor_hits: 271_728,
        device_bytes: 0,
        step_sequences: 2310,
        ext: vec![],
    }
}
