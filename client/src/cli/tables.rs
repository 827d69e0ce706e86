//! Prints answers as text for people.

use std::io::{self, IsTerminal, Write};

use rocmforge_client::wire::{
    CancelRequestsReply, CheckState, DetokenizeReply, DeviceStatus, DoctorReply, ForgetSessionReply,
    GpuEntry, HostMemory, HostStatus, InfoReply, ListReply, LoadReply, ModelSummary, PagesState, PsReply,
    Residency, SessionsReply, ShowReply, TokenizeReply, UnloadReply, UserEntry,
};
use rocmforge_client::{printable, printable_text};

use super::report::snake_case;
use super::{PingTimes, Status};

pub type Out<'a> = &'a mut dyn Write;

pub fn list(out: Out<'_>, reply: &ListReply) -> io::Result<()> {
    let row = |model: &ModelSummary| {
        [
            printable(&model.name),
            snake_case(&format!("{:?}", model.state)),
            bytes(model.file_bytes),
            printable(&model.architecture),
            model.sequences.to_string(),
            printable(&model.reason),
        ]
    };
    table(out, ["NAME", "STATE", "SIZE", "ARCHITECTURE", "REQUESTS", "REASON"], reply.models.iter().map(row))
}

pub fn show(out: Out<'_>, reply: &ShowReply) -> io::Result<()> {
    let summary = &reply.summary;
    let types: Vec<_> = reply
        .types
        .iter()
        .map(|entry| format!("{} x{} ({})", printable(&entry.dtype), entry.tensors, bytes(entry.bytes)))
        .collect();
    let fields = [
        ("name", printable(&summary.name)),
        ("state", snake_case(&format!("{:?}", summary.state))),
        ("architecture", printable(&summary.architecture)),
        ("parameters", reply.parameters.to_string()),
        ("file", bytes(summary.file_bytes)),
        ("weights", bytes(reply.weight_bytes)),
        ("tensor types", types.join(", ")),
        ("gguf version", reply.gguf_version.to_string()),
        ("context", format!("{} tokens", reply.context_length)),
        ("layers", reply.layers.to_string()),
        ("hidden", reply.hidden.to_string()),
        ("heads", format!("{} x {}, {} for KV", reply.heads, reply.head_dim, reply.kv_heads)),
        ("feed-forward", if reply.ffn > 0 { reply.ffn.to_string() } else { String::new() }),
        ("encoder of", printable(reply.encoder().unwrap_or_default())),
        ("experts", printable(reply.experts().unwrap_or_default())),
        ("positions", printable(reply.positions().unwrap_or_default())),
        ("vocabulary", format!("{} tokens, {}", reply.vocab, printable(&reply.tokenizer))),
        ("chat template", if reply.chat_template { "yes" } else { "no" }.to_owned()),
        ("ends at", join(&reply.end_of_generation)),
        ("in memory", in_memory(&reply.host)),
        ("copy in memory", printable(reply.copy().unwrap_or_default())),
        ("kept in memory", kept(&reply.host)),
        ("reason", printable(&summary.reason)),
    ];
    pairs(out, fields.into_iter().filter(|(_, value)| !value.is_empty()))?;
    if !reply.metadata.is_empty() {
        writeln!(out)?;
        let rows = reply
            .metadata
            .iter()
            .map(|entry| [printable(&entry.key), printable(&entry.kind), printable(&entry.value)]);
        table(out, ["KEY", "TYPE", "VALUE"], rows)?;
    }
    if !reply.tensors.is_empty() {
        writeln!(out)?;
        let rows = reply.tensors.iter().map(|tensor| {
            let dims: Vec<_> = tensor.dims.iter().map(u64::to_string).collect();
            [
                printable(&tensor.name),
                printable(&tensor.dtype),
                dims.join(" x "),
                tensor.offset_bytes.to_string(),
                bytes(tensor.bytes),
            ]
        });
        table(out, ["TENSOR", "TYPE", "DIMENSIONS", "OFFSET", "SIZE"], rows)?;
    }
    Ok(())
}

/// How much of a model's files is in host memory.
fn in_memory(host: &HostMemory) -> String {
    let cached = host.cached_bytes.map_or("unknown".to_owned(), bytes);
    format!(
        "{} of {}, {} locked; in the page cache {cached}",
        bytes(host.resident_bytes),
        bytes(host.mapped_bytes),
        bytes(host.locked_bytes)
    )
}

/// The wanted host residency of the model's files and its state; empty if none is wanted.
fn kept(host: &HostMemory) -> String {
    if host.wanted == Residency::None {
        return String::new();
    }
    let lower = |name: String| snake_case(&name).replace('_', " ");
    let state = lower(format!("{:?}", host.state));
    let far = if host.state == PagesState::Coming {
        format!(", {} read", bytes(host.read_bytes))
    } else {
        String::new()
    };
    let reason =
        if host.reason.is_empty() { String::new() } else { format!(": {}", printable(&host.reason)) };
    format!("{}: {state}{far}{reason}", lower(format!("{:?}", host.wanted)))
}

pub fn load(out: Out<'_>, reply: &LoadReply) -> io::Result<()> {
    let name = printable(&reply.summary.name);
    if reply.mapped_now {
        writeln!(out, "{name}: mapped in {:.1} ms", reply.elapsed_us as f64 / 1e3)
    } else {
        writeln!(out, "{name}: its file was already mapped")
    }
}

pub fn unload(out: Out<'_>, reply: &UnloadReply) -> io::Result<()> {
    match (reply.was_mapped, reply.draining_sequences) {
        (false, _) => writeln!(out, "was not mapped"),
        (true, 0) => writeln!(out, "unmapped"),
        (true, running) => writeln!(out, "will be unmapped when {running} running requests end"),
    }
}

pub fn ps(out: Out<'_>, reply: &PsReply) -> io::Result<()> {
    let mut oldest_first: Vec<_> = reply.sequences.iter().collect();
    oldest_first.sort_by_key(|sequence| std::cmp::Reverse(sequence.age_ms));
    let rows = oldest_first.into_iter().map(|sequence| {
        let state = snake_case(&format!("{:?}", sequence.state));
        let place = sequence.queue_position;
        [
            sequence.id.to_string(),
            sequence.uid.to_string(),
            printable(&sequence.model),
            if place > 0 { format!("{state} ({place})") } else { state },
            format!("{}/{}", sequence.prefilled_tokens, sequence.prompt_tokens),
            sequence.reused_tokens().to_string(),
            format!("{}/{}", sequence.generated_tokens, sequence.max_tokens),
            sequence.kv_pages.to_string(),
            sequence.device_time_us().map_or(String::new(), |us| format!("{:.2} s", us as f64 / 1e6)),
            format!("{:.1} s", sequence.age_ms as f64 / 1e3),
        ]
    });
    table(
        out,
        ["ID", "UID", "MODEL", "STATE", "PROMPT", "REUSED", "GENERATED", "KV PAGES", "DEVICE", "AGE"],
        rows,
    )
}

pub fn cancelled(out: Out<'_>, reply: &CancelRequestsReply) -> io::Result<()> {
    let requests = if reply.cancelled == 1 { "request" } else { "requests" };
    writeln!(out, "cancelled {} {requests}", reply.cancelled)
}

pub fn sessions(out: Out<'_>, reply: &SessionsReply) -> io::Result<()> {
    let rows = reply.sessions.iter().map(|session| {
        [
            printable(&session.name),
            printable(&session.model),
            session.messages.map_or(String::new(), |messages| messages.to_string()),
            session.tokens.to_string(),
            bytes(session.bytes),
            if session.in_use {
                "in use".to_owned()
            } else {
                format!("{:.1} s", session.age_ms as f64 / 1e3)
            },
        ]
    });
    table(out, ["NAME", "MODEL", "MESSAGES", "TOKENS", "BYTES", "LAST USE"], rows)
}

pub fn forgotten(out: Out<'_>, reply: &ForgetSessionReply) -> io::Result<()> {
    let sessions = if reply.forgotten == 1 { "session" } else { "sessions" };
    writeln!(out, "forgot {} {sessions}", reply.forgotten)
}

pub fn status(out: Out<'_>, Status { status: reply, users }: &Status) -> io::Result<()> {
    let stopping = if reply.draining { ", stopping" } else { "" };
    let fields = [
        ("version", format!("{}{stopping}", printable(&reply.version))),
        ("process", format!("{}, up {:.1} s", reply.pid, reply.uptime_ms as f64 / 1e3)),
        ("connections", reply.connections.to_string()),
        ("models", format!("{} mapped", reply.models_mapped)),
        ("memory", format!("{}, mapped files {}", bytes(reply.rss_anon_bytes), bytes(reply.rss_file_bytes))),
    ];
    pairs(out, fields.into_iter())?;
    pairs(out, reply.notes().into_iter().map(|(name, value)| (name, printable(value))))?;
    pairs(out, host(&reply.host).into_iter().filter(|(_, value)| !value.is_empty()))?;
    reply.devices.iter().try_for_each(|device| device_status(out, device))?;
    if users.is_empty() { Ok(()) } else { holdings(out, users) }
}

/// Prints the holdings of users.
fn holdings(out: Out<'_>, users: &[UserEntry]) -> io::Result<()> {
    const HEAD: [&str; 16] = [
        "UID",
        "CONNECTIONS",
        "REQUESTS",
        "PAYLOADS",
        "UNREAD",
        "DESCRIPTORS",
        "PASSED MODELS",
        "FILES",
        "HEADERS",
        "SEQUENCES",
        "KV PAGES",
        "SESSIONS",
        "THEIR BYTES",
        "TEXT TIME",
        "FRAME TIME",
        "DEVICE",
    ];
    let ms = |us: u64| format!("{:.1} ms", us as f64 / 1e3);
    let row = |user: &UserEntry| {
        [
            user.uid.to_string(),
            user.connections.to_string(),
            user.requests.to_string(),
            bytes(user.request_bytes),
            bytes(user.answer_bytes),
            user.descriptors.to_string(),
            user.passed_models.to_string(),
            bytes(user.passed_bytes()),
            bytes(user.header_bytes),
            user.sequences.to_string(),
            user.kv_pages.to_string(),
            user.sessions().to_string(),
            bytes(user.session_bytes()),
            ms(user.text_us),
            ms(user.frame_us),
            format!("{:.1} %", user.device_us_per_s as f64 / 1e4),
        ]
    };
    writeln!(out)?;
    table(out, HEAD, users.iter().map(row))
}

/// Host memory fields that are shown only if they are not zero.
fn host(host: &HostStatus) -> [(&'static str, String); 3] {
    let locked = format!("{} of at most {}", bytes(host.locked_bytes), bytes(host.lock_bytes_max));
    let refused = format!("{} models: {}", host.locks_refused, printable(&host.reason));
    [
        ("locked", if host.locked_bytes > 0 { locked } else { String::new() }),
        ("not locked", if host.locks_refused > 0 { refused } else { String::new() }),
        (
            "memory pressure",
            if host.pressure_events > 0 { format!("{} times", host.pressure_events) } else { String::new() },
        ),
    ]
}

fn device_status(out: Out<'_>, device: &DeviceStatus) -> io::Result<()> {
    let per_step = |count: u64| if device.steps == 0 { 0.0 } else { count as f64 / device.steps as f64 };
    writeln!(out)?;
    let fields = [
        ("device", format!("{} {}", printable(&device.kind), printable(&device.device))),
        ("runs", format!("{}, {} threads", printable(&device.isa), device.threads)),
        (
            "types",
            format!("activations {}, KV {}", printable(&device.activations), printable(&device.kv_type)),
        ),
        ("sequences", format!("{} running, {} queued", device.sequences_running, device.sequences_queued)),
        (
            "ended",
            format!(
                "{} well, {} failed, {} cancelled",
                device.sequences_done, device.sequences_failed, device.sequences_cancelled
            ),
        ),
        (
            "KV pages",
            format!("{} of {}, {}", device.kv_pages_used, device.kv_pages_max, bytes(device.kv_bytes)),
        ),
        ("recurrent states", states(device)),
        (
            "prefixes",
            format!(
                "{} cached, {} pages evicted; {} prompt tokens reused",
                bytes(device.kv_cached_bytes()),
                device.kv_pages_evicted(),
                device.reused_tokens()
            ),
        ),
        (
            "steps",
            format!(
                "{}; {:.2} rows and {:.2} sequences a step; {} prompt rows, {} decode rows; {} of {} drafted tokens accepted",
                device.steps,
                per_step(device.rows),
                per_step(device.step_sequences),
                device.prefill_rows,
                device.decode_rows,
                device.accepted_tokens(),
                device.drafted_tokens()
            ),
        ),
        (
            "weights",
            format!(
                "{} on the device, {} tensors loaded, {} hits",
                bytes(device.device_bytes),
                device.tensors_loaded,
                device.tensor_hits
            ),
        ),
    ];
    pairs(out, fields.into_iter().filter(|(_, value)| !value.is_empty()))?;
    pairs(out, device.notes().into_iter().map(|(name, value)| (name, printable(value))))
}

/// Recurrent states of requests and of the cache; empty where there are none.
fn states(device: &DeviceStatus) -> String {
    match (device.states_used(), device.states_cached()) {
        (0, 0) => String::new(),
        (used, cached) => {
            format!("{used} of requests, {cached} cached with {}", bytes(device.states_cached_bytes()))
        }
    }
}

pub fn doctor(out: Out<'_>, reply: &DoctorReply) -> io::Result<()> {
    for check in &reply.checks {
        let state = snake_case(&format!("{:?}", check.state));
        writeln!(out, "{state:9}{}: {}", printable(&check.name), printable(&check.found))?;
        if !check.advice.is_empty() {
            writeln!(out, "{:9}-> {}", "", printable(&check.advice))?;
        }
    }
    reply.gpus.iter().try_for_each(|gpu| gpu_entry(out, gpu))?;
    writeln!(out, "\n{}", verdict(reply))
}

/// All of the doctor's checks in a line.
fn verdict(reply: &DoctorReply) -> String {
    let problems: Vec<String> = reply
        .checks
        .iter()
        .filter(|check| check.state == CheckState::Problem)
        .map(|check| printable(&check.name))
        .collect();
    let working = reply.gpus.iter().filter(|gpu| gpu.works).count();
    let device = match (working, reply.gpus.len()) {
        (0, 0) => "no GPU".to_owned(),
        (1, 1) => "1 of 1 GPU works".to_owned(),
        (working, all) => format!("{working} of {all} GPUs work"),
    };
    match problems.len() {
        0 => format!("no problem found; {device}"),
        1 => format!("1 problem: {}; {device}", problems[0]),
        count => format!("{count} problems: {}; {device}", problems.join(", ")),
    }
}

fn gpu_entry(out: Out<'_>, gpu: &GpuEntry) -> io::Result<()> {
    writeln!(out)?;
    let code = if gpu.code.is_empty() { "none for it".into() } else { printable(&gpu.code) };
    let fields = [
        ("device", format!("{} {}", gpu.index, printable(&gpu.name))),
        ("architecture", format!("{}, {} units, waves of {}", printable(&gpu.arch), gpu.units, gpu.wave)),
        ("memory", format!("{}, {} free", bytes(gpu.memory_bytes), bytes(gpu.memory_free_bytes))),
        ("PCI address", printable(&gpu.pci)),
        ("kernels", format!("{code}; {}", if gpu.works { "a kernel ran" } else { "no kernel ran" })),
    ];
    pairs(out, fields.into_iter())
}

pub fn ids(out: Out<'_>, reply: &TokenizeReply) -> io::Result<()> {
    writeln!(out, "{}", join(&reply.ids))
}

/// Only the text, without a newline, so that it can be piped. A terminal gets its control characters escaped, because a
/// model could use them to control it.
pub fn text(out: Out<'_>, reply: &DetokenizeReply) -> io::Result<()> {
    if io::stdout().is_terminal() {
        out.write_all(printable_text(&reply.text).as_bytes())
    } else {
        out.write_all(reply.text.as_bytes())
    }
}

pub fn ping(out: Out<'_>, times: &PingTimes) -> io::Result<()> {
    times.round_trips_us.iter().try_for_each(|us| writeln!(out, "answered in {:.3} ms", us / 1e3))
}

pub fn info(out: Out<'_>, reply: &InfoReply) -> io::Result<()> {
    let limits = &reply.limits;
    let ops: Vec<_> = reply.ops.iter().map(|op| format!("{} ({})", printable(&op.name), op.op)).collect();
    let fields = [
        ("version", printable(&reply.version)),
        ("requests", ops.join(", ")),
        ("frame", bytes(limits.frame_bytes_max.into())),
        ("streams", format!("{} at once, {} items of credit", limits.streams_max, limits.initial_credit)),
        ("descriptors", format!("{} a frame", limits.fds_max)),
        ("context", format!("{} tokens", limits.context_tokens_max)),
        ("stop texts", format!("{} of {} bytes", limits.stop_texts_max, limits.stop_text_bytes_max)),
        ("log-probabilities", format!("{} a token", limits.top_logprobs_max)),
    ];
    let others = reply.subordinates().map(|all| {
        let last = all.first.saturating_add(all.count - 1);
        ("you may act for", format!("{} users, uids {} to {last}", all.count, all.first))
    });
    pairs(out, fields.into_iter().chain(others))
}

/// Left-aligned columns, two spaces between them.
pub fn table<const N: usize>(
    out: Out<'_>,
    head: [&str; N],
    rows: impl Iterator<Item = [String; N]>,
) -> io::Result<()> {
    let rows: Vec<_> = std::iter::once(head.map(str::to_owned)).chain(rows).collect();
    let mut widths = [0; N];
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    for row in &rows {
        let cells: Vec<_> = row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        writeln!(out, "{}", cells.join("  ").trim_end())?;
    }
    Ok(())
}

pub fn pairs<'a>(out: Out<'_>, pairs: impl Iterator<Item = (&'a str, String)>) -> io::Result<()> {
    const NAME_WIDTH: usize = 18;
    for (name, value) in pairs {
        writeln!(out, "{name:NAME_WIDTH$}{value}")?;
    }
    Ok(())
}

fn join(ids: &[u32]) -> String {
    ids.iter().map(u32::to_string).collect::<Vec<_>>().join(" ")
}

/// A size in binary units.
pub fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let steps = [40, 30, 20, 10].iter().position(|shift| count >> shift != 0).map_or(0, |at| 4 - at);
    if steps == 0 {
        format!("{count} B")
    } else {
        format!("{:.1} {}", count as f64 / (1u64 << (10 * steps)) as f64, UNITS[steps])
    }
}

#[cfg(test)]
mod tests {
    use rocmforge_client::wire::{
        DoctorCheck, EXT_USER_PASSED_BYTES, EXT_USER_SESSION_BYTES, EXT_USER_SESSIONS, ModelState, number_ext,
    };

    use super::*;

    #[test]
    fn sizes_are_in_binary_units() {
        assert_eq!(
            [0, 1023, 1024, 1 << 20, 3 << 29].map(bytes),
            ["0 B", "1023 B", "1.0 KiB", "1.0 MiB", "1.5 GiB"]
        );
        assert_eq!(bytes(u64::MAX), "16777216.0 TiB");
    }

    #[test]
    fn the_doctors_last_line_names_problems_and_counts_gpus() {
        use CheckState::{Good, Note, Problem};
        let gpu = |works| GpuEntry {
            index: 0,
            name: "gpu".into(),
            arch: "gfx1100".into(),
            pci: String::new(),
            memory_bytes: 1,
            memory_free_bytes: 1,
            units: 1,
            wave: 32,
            code: String::new(),
            works,
            ext: vec![],
        };
        let last_line = |states: &[(&str, CheckState)], gpus: &[bool]| {
            let check = |(name, state): &(&str, CheckState)| DoctorCheck {
                name: (*name).into(),
                state: *state,
                found: String::new(),
                advice: String::new(),
                ext: vec![],
            };
            let checks = states.iter().map(check).collect();
            let reply =
                DoctorReply { checks, gpus: gpus.iter().map(|works| gpu(*works)).collect(), ext: vec![] };
            let mut out = Vec::new();
            doctor(&mut out, &reply).unwrap();
            String::from_utf8(out).unwrap().lines().last().unwrap().to_owned()
        };
        assert_eq!(last_line(&[("socket", Good)], &[]), "no problem found; no GPU");
        assert_eq!(last_line(&[("a", Note), ("b", Good)], &[true]), "no problem found; 1 of 1 GPU works");
        assert_eq!(last_line(&[("a", Problem)], &[false]), "1 problem: a; 0 of 1 GPUs work");
        let several = [("a", Problem), ("b", Note), ("c\u{1b}", Problem)];
        assert_eq!(last_line(&several, &[true, false]), "2 problems: a, c\\u{1b}; 1 of 2 GPUs work");
    }

    #[test]
    fn holdings_of_users_are_a_table() {
        let user = UserEntry {
            uid: 1000,
            connections: 2,
            request_bytes: 3 << 20,
            kv_pages: 7,
            text_us: 1500,
            device_us_per_s: 498_500,
            ext: number_ext([
                (EXT_USER_SESSIONS, 3),
                (EXT_USER_SESSION_BYTES, 2048),
                (EXT_USER_PASSED_BYTES, 1 << 30),
            ]),
            ..UserEntry::default()
        };
        let mut out = Vec::new();
        holdings(&mut out, &[user]).unwrap();
        let text = String::from_utf8(out).unwrap();
        let cells: Vec<_> = text.lines().nth(2).unwrap().split("  ").map(str::trim).collect();
        let cells: Vec<_> = cells.into_iter().filter(|cell| !cell.is_empty()).collect();
        assert_eq!(
            cells,
            [
                "1000", "2", "0", "3.0 MiB", "0 B", "0", "0", "1.0 GiB", "0 B", "0", "7", "3", "2.0 KiB",
                "1.5 ms", "0.0 ms", "49.9 %"
            ]
        );
    }

    #[test]
    fn columns_line_up_and_terminals_are_not_steered() {
        let mut out = Vec::new();
        let model = ModelSummary {
            name: "a\u{1b}[31m".into(),
            state: ModelState::Mapped,
            file_bytes: 2048,
            architecture: "llama".into(),
            sequences: 3,
            reason: String::new(),
            ext: vec![],
        };
        list(&mut out, &ListReply { models: vec![model], more: false, ext: vec![] }).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert_eq!(
            text,
            "NAME         STATE   SIZE     ARCHITECTURE  REQUESTS  REASON\n\
             a\\u{1b}[31m  mapped  2.0 KiB  llama         3\n"
        );
    }
}
