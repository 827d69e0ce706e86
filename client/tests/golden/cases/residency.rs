//! Cases of the messages about weights on a device.

use super::*;

/// Every case.
pub fn all() -> Vec<Golden> {
    let load = |what| LoadToDeviceRequest { model: "tiny".into(), what, ext: vec![] };
    let at = |stream| At { stream, flags: Flags::NONE, n_fds: 0 };
    let more = [
        frame(Op::LoadToDevice, "all", at(7), load(Preload::All)),
        frame(Op::LoadToDevice, "critical", at(9), load(Preload::Critical)),
        frame(Op::LoadToDevice, "layers", at(11), load(Preload::Layers(vec![0, 7, 31]))),
        frame(Op::Reply, "streamed", at(13), plan(Fit::Streamed(streamed()))),
        frame(Op::Reply, "whole", at(15), plan(Fit::Whole)),
    ];
    let rules = SetRulesRequest {
        model: "tiny".into(),
        pinned: Some(true),
        priority: None,
        layers_min: Some(4),
        idle_s: None,
        ext: vec![],
    };
    let ruled = SetRulesReply {
        rules: Rules { pinned: true, priority: 0, layers_min: 4, idle_s: 600 },
        host_pinned: false,
        host_reason: "tiny: only an administrator locks it".into(),
        ext: vec![],
    };
    let event = EventEntry {
        kind: EventKind::Evicted,
        id: 41,
        model: "tiny".into(),
        part: 7,
        parts: 34,
        device_bytes: 134_217_728,
        text: String::new(),
        ext: vec![],
    };
    let item = LoadToDeviceItem {
        tensors: 17,
        tensors_total: 290,
        device_bytes: 314_572_800,
        device_bytes_total: 4_692_377_600,
        bytes_per_second: 48_318_382_080,
        ext: vec![],
    };
    let groups = [
        three(Op::LoadToDevice, load(Preload::First(8))),
        three(Op::Item, item),
        three(
            Op::End,
            LoadToDeviceEnd { tensors: 290, device_bytes: 4_692_377_600, elapsed_us: 118_000, ext: vec![] },
        ),
        three(Op::ClearCache, ClearCacheRequest { scope: CacheScope::Model("tiny".into()), ext: vec![] }),
        three(Op::Reply, ClearCacheReply { parts: 34, device_bytes: 4_692_377_600, ext: vec![] }),
        three(Op::Plan, PlanRequest { model: "tiny".into(), context_tokens: 4096, ext: vec![] }),
        three(Op::Reply, plan(Fit::No(3_221_225_472))),
        three(Op::Residency, ResidencyRequest { after: 40, ext: vec![] }),
        three(Op::Reply, reply()),
        three(Op::SetRules, rules),
        three(Op::Reply, ruled),
        three(Op::Subscribe, SubscribeRequest { ext: vec![] }),
        three(Op::Item, SubscribeItem { missed: 3, events: vec![event], ext: vec![] }),
        three(Op::End, SubscribeEnd { ext: vec![] }),
    ];
    groups.into_iter().flatten().chain(more).collect()
}

fn streamed() -> StreamedFit {
    StreamedFit { resident_bytes: 20_401_094_656, step_bytes: 22_548_578_304 }
}

fn plan(fit: Fit) -> PlanReply {
    PlanReply {
        device: 0,
        context_tokens: 4096,
        weight_bytes: 42_949_672_960,
        resident_bytes: 0,
        kv_bytes: 1_342_177_280,
        scratch_bytes: 268_435_456,
        available_bytes: 17_179_869_184,
        budget_bytes: 25_769_803_776,
        others_bytes: 536_870_912,
        fit,
        leaving: vec![LeavingEntry { id: 3, model: "tiny".into(), device_bytes: 4_692_377_600 }],
        leaving_bytes: 4_692_377_600,
        load_ms: Some(890),
        queued: 2,
        ext: vec![],
    }
}

fn reply() -> ResidencyReply {
    let device = DeviceMemory {
        kind: "hip".into(),
        device: "AMD Instinct MI210".into(),
        weight_bytes: 4_692_377_600,
        kv_bytes: 1_342_177_280,
        scratch_bytes: 268_435_456,
        staging_bytes: 67_108_864,
        graph_bytes: 0,
        taken_bytes: 6_442_450_944,
        budget_bytes: 25_769_803_776,
        available_bytes: 19_327_352_832,
        total_bytes: 68_702_699_520,
        free_bytes: 61_203_283_968,
        others_bytes: 1_056_964_608,
        sequences_running: 3,
        sequences_queued: 1,
        decode_rows: 2300,
        prefill_rows: 100,
        loads: 291,
        hits: 271_728,
        load_bytes: 4_692_377_600,
        evictions: 33,
        evicted_bytes: 4_510_973_952,
        load_waits: 2,
        load_wait_us: 118_000,
        bytes_per_second: 48_318_382_080,
        ext: vec![],
    };
    let model = ResidencyEntry {
        id: 41,
        device: 0,
        model: "tiny".into(),
        parts: "##->.#".into(),
        weight_bytes: 4_692_377_600,
        kv_bytes: 1_342_177_280,
        scratch_bytes: 268_435_456,
        rules: Rules { pinned: true, priority: 9, layers_min: 2, idle_s: 600 },
        sequences: 0,
        idle_ms: Some(1250),
        eviction_place: 0,
        loading: Some(LoadingProgress {
            tensors: 17,
            tensors_total: 290,
            device_bytes: 314_572_800,
            device_bytes_total: 4_692_377_600,
        }),
        ext: vec![],
    };
    ResidencyReply { devices: vec![device], models: vec![model], more: true, ext: vec![] }
}
