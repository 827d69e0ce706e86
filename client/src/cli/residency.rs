//! Commands for models' weights on a device.

use std::io::{self, IsTerminal};

use rocmforge_client::wire::{
    ClearCacheReply, DeviceMemory, EventEntry, EventKind, Fit, LoadReply, LoadToDeviceEnd, LoadToDeviceItem,
    LoadingProgress, PART_ABSENT, PlanReply, Preload, ResidencyEntry, ResidencyReply, Rules, SetRulesReply,
};
use rocmforge_client::{Client, ClientError, printable};
use serde::{Serialize, Serializer};
use serde_json::{Value, json};

use super::report::{Failure, Output, show_progress, snake_case};
use super::tables::{Out, bytes, load, pairs, table};

/// Shown instead of the name of another user's model.
const UNNAMED: &str = "(another user's)";

/// Reply of `load --preload`: the mapping and the load to the device.
#[derive(Debug, Serialize)]
pub struct Loaded {
    #[serde(flatten)]
    pub load: LoadReply,
    pub preload: LoadToDeviceEnd,
}

/// Loads weights to the device. Shows progress if standard error is a terminal and the output is text.
pub fn bring(
    client: &Client,
    model: &str,
    what: &Preload,
    output: Output,
) -> Result<LoadToDeviceEnd, Failure> {
    let mut loading = client.preload(model, what.clone())?;
    let told = !output.json && io::stderr().is_terminal();
    let followed = loop {
        match loading.next_item() {
            Ok(Some(item)) if told => show_progress(&progress(&item)),
            Ok(Some(_)) => {}
            ended => break ended,
        }
    };
    // Clears the progress line, so that the next message or error starts on a line of its own.
    if told {
        show_progress("");
    }
    followed?;
    let broken =
        || ClientError::Disconnected { reason: "the load ended without its final message".to_owned() };
    Ok(loading.end().cloned().ok_or_else(broken)?)
}

/// A line that shows the progress of a load.
fn progress(item: &LoadToDeviceItem) -> String {
    let LoadToDeviceItem { tensors, tensors_total, device_bytes, device_bytes_total, .. } = *item;
    format!(
        "{tensors} of {tensors_total} tensors, {} of {}, {}/s",
        bytes(device_bytes),
        bytes(device_bytes_total),
        bytes(item.bytes_per_second)
    )
}

pub fn loaded(out: Out<'_>, reply: &Loaded) -> io::Result<()> {
    load(out, &reply.load)?;
    preloaded(out, &reply.preload)
}

pub fn preloaded(out: Out<'_>, end: &LoadToDeviceEnd) -> io::Result<()> {
    let LoadToDeviceEnd { tensors, device_bytes, elapsed_us, .. } = *end;
    if device_bytes == 0 {
        return writeln!(out, "{tensors} tensors are read in place from the mapped file");
    }
    let milliseconds = elapsed_us as f64 / 1e3;
    writeln!(out, "{tensors} tensors on the device, {}, in {milliseconds:.1} ms", bytes(device_bytes))
}

pub fn cleared(out: Out<'_>, reply: &ClearCacheReply) -> io::Result<()> {
    match (reply.parts, reply.device_bytes) {
        (0, 0) => writeln!(out, "no weights were on the device"),
        (parts, freed) => writeln!(out, "{parts} parts evicted, {}", bytes(freed)),
    }
}

pub fn ruled(out: Out<'_>, reply: &SetRulesReply) -> io::Result<()> {
    let wanted = rules(&reply.rules);
    writeln!(out, "{}", if wanted.is_empty() { "no rules".to_owned() } else { wanted })?;
    if reply.host_pinned {
        writeln!(out, "its file is being locked in memory; `show` shows the progress")?;
    }
    if !reply.host_reason.is_empty() {
        writeln!(out, "its file is not locked in memory: {}", printable(&reply.host_reason))?;
    }
    Ok(())
}

/// Number of events that the daemon dropped, as JSON.
#[derive(Debug, Serialize)]
struct Missed {
    missed: u64,
}

/// Prints events until the daemon stops, which is an error, or until the output's reader closes it.
pub fn follow(client: &Client, output: Output) -> Result<(), Failure> {
    for item in &mut client.events()? {
        let item = item?;
        if item.missed > 0 {
            let text = |out: Out<'_>, missed: &Missed| writeln!(out, "{} events were missed", missed.missed);
            output.show(&Missed { missed: item.missed }, text)?;
        }
        for entry in &item.events {
            output.show(entry, event)?;
        }
    }
    let reason = "the daemon is stopping".to_owned();
    Err(ClientError::Disconnected { reason }.into())
}

fn event(out: Out<'_>, event: &EventEntry) -> io::Result<()> {
    let what = snake_case(&format!("{:?}", event.kind)).replace('_', " ");
    let about = match event.kind {
        EventKind::Loaded | EventKind::Evicted => {
            format!("{} {}, {}", name(&event.model), part(event.part, event.parts), bytes(event.device_bytes))
        }
        EventKind::DeviceLost => printable(&event.text),
        EventKind::ModelMapped | EventKind::ModelUnmapped => name(&event.model),
        EventKind::ModelPoisoned => format!("{}: {}", name(&event.model), printable(&event.text)),
    };
    writeln!(out, "{what:15}{about}")
}

/// Name of a part of a model.
fn part(number: u32, count: u32) -> String {
    match number {
        0 => "embedding".to_owned(),
        head if head + 1 == count => "head".to_owned(),
        layer => format!("layer {}", layer - 1),
    }
}

/// A plan; in JSON its `fit` is an object with a `kind`.
#[derive(Debug)]
pub struct Plan(pub PlanReply);

impl Serialize for Plan {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut value = serde_json::to_value(&self.0).map_err(serde::ser::Error::custom)?;
        value["fit"] = fit_object(self.0.fit);
        value.serialize(serializer)
    }
}

fn fit_object(fit: Fit) -> Value {
    match fit {
        Fit::Whole => json!({ "kind": "whole" }),
        Fit::Streamed(fit) => json!({
            "kind": "streamed",
            "resident_bytes": fit.resident_bytes,
            "step_bytes": fit.step_bytes,
        }),
        Fit::No(missing) => json!({ "kind": "no", "missing_bytes": missing }),
    }
}

pub fn plan(out: Out<'_>, Plan(plan): &Plan) -> io::Result<()> {
    if plan.budget_bytes == 0 {
        let text = "weights are read in place from the mapped file: there is no device memory to plan";
        return writeln!(out, "{text}");
    }
    let fits = match plan.fit {
        Fit::Whole if plan.leaving.is_empty() => "yes, all of it".to_owned(),
        Fit::Whole => format!("yes, after evicting {} of other models", bytes(plan.leaving_bytes)),
        Fit::Streamed(fit) => format!(
            "in part: {} stay, {} are loaded again for every step",
            bytes(fit.resident_bytes),
            bytes(fit.step_bytes)
        ),
        Fit::No(missing) => format!("no, {} too little", bytes(missing)),
    };
    let leaving: Vec<_> = plan
        .leaving
        .iter()
        .map(|entry| format!("{} ({})", name(&entry.model), bytes(entry.device_bytes)))
        .collect();
    let load =
        plan.load_ms.map_or("no rate is known yet".to_owned(), |ms| format!("{:.1} s", ms as f64 / 1e3));
    let fields = [
        ("fits", fits),
        ("weights", format!("{}, {} of them resident", bytes(plan.weight_bytes), bytes(plan.resident_bytes))),
        ("KV pages", format!("{} for {} tokens", bytes(plan.kv_bytes), plan.context_tokens)),
        ("activations", bytes(plan.scratch_bytes)),
        ("free", format!("{} of {}", bytes(plan.available_bytes), bytes(plan.budget_bytes))),
        ("other programs", bytes(plan.others_bytes)),
        ("would evict", leaving.join(", ")),
        ("time to load", load),
        ("waiting", if plan.queued > 0 { format!("{} requests", plan.queued) } else { String::new() }),
    ];
    pairs(out, fields.into_iter().filter(|(_, value)| !value.is_empty()))
}

pub fn residency(out: Out<'_>, reply: &ResidencyReply) -> io::Result<()> {
    for device in &reply.devices {
        device_memory(out, device)?;
        writeln!(out)?;
    }
    let rows = reply.models.iter().map(|entry| {
        let there = entry.parts.chars().filter(|part| *part != PART_ABSENT).count();
        [
            name(&entry.model),
            format!("{there}/{}", entry.parts.chars().count()),
            entry.loading.as_ref().map_or("-".to_owned(), loading),
            bytes(entry.weight_bytes),
            kv(entry),
            bytes(entry.scratch_bytes),
            entry.sequences.to_string(),
            entry.idle_ms.map_or("-".to_owned(), |ms| format!("{:.0} s", ms as f64 / 1e3)),
            leaves(entry),
            rules(&entry.rules),
        ]
    });
    let head =
        ["MODEL", "PARTS", "LOADING", "WEIGHTS", "KV", "ACTIVATIONS", "REQUESTS", "IDLE", "LEAVES", "RULES"];
    table(out, head, rows)
}

/// Bytes of KV pages, those of them that are cached, and how much of that is recurrent states.
fn kv(entry: &ResidencyEntry) -> String {
    let states = match entry.states_cached() {
        0 => String::new(),
        count => format!(" ({count} states, {})", bytes(entry.states_cached_bytes())),
    };
    match entry.kv_cached_bytes() {
        0 => bytes(entry.kv_bytes),
        cached => format!("{}, {} cached{states}", bytes(entry.kv_bytes), bytes(cached)),
    }
}

/// The reply with what the cache has of each model.
pub fn json(reply: &ResidencyReply) -> serde_json::Result<Value> {
    let mut value = serde_json::to_value(reply)?;
    for (entry, value) in reply.models.iter().zip(value["models"].as_array_mut().into_iter().flatten()) {
        value["kv_cached_bytes"] = entry.kv_cached_bytes().into();
        value["states_cached"] = entry.states_cached().into();
        value["states_cached_bytes"] = entry.states_cached_bytes().into();
    }
    Ok(value)
}

/// Progress of a load to the device, whichever client asked for it.
fn loading(loading: &LoadingProgress) -> String {
    format!("{} of {}", bytes(loading.device_bytes), bytes(loading.device_bytes_total))
}

/// Place in the eviction order.
fn leaves(entry: &ResidencyEntry) -> String {
    if entry.eviction_place == 0 { "never".to_owned() } else { entry.eviction_place.to_string() }
}

pub fn rules(rules: &Rules) -> String {
    let parts = [
        rules.pinned.then(|| "pinned".to_owned()),
        (rules.priority > 0).then(|| format!("priority {}", rules.priority)),
        (rules.layers_min > 0).then(|| format!("keeps {} layers", rules.layers_min)),
        (rules.idle_s > 0).then(|| format!("idle {} s", rules.idle_s)),
    ];
    parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

fn device_memory(out: Out<'_>, device: &DeviceMemory) -> io::Result<()> {
    let name = format!("{} {}", printable(&device.kind), printable(&device.device));
    if device.budget_bytes == 0 {
        return pairs(
            out,
            [("device", name), ("memory", "weights are read in place".to_owned())].into_iter(),
        );
    }
    let held = [
        ("weights", device.weight_bytes),
        ("KV", device.kv_bytes),
        ("activations", device.scratch_bytes),
        ("staging", device.staging_bytes),
        ("graphs", device.graph_bytes),
    ];
    let held: Vec<_> = held.iter().map(|(owner, held)| format!("{owner} {}", bytes(*held))).collect();
    let wait = device.load_wait_us as f64 / 1e6;
    let fields = [
        ("device", name),
        ("memory", held.join(", ")),
        ("budget", format!("{}, {} available", bytes(device.budget_bytes), bytes(device.available_bytes))),
        (
            "whole device",
            format!(
                "{}, {} free, other programs {}",
                bytes(device.total_bytes),
                bytes(device.free_bytes),
                bytes(device.others_bytes)
            ),
        ),
        (
            "loads",
            format!(
                "{} tensors, {}, {}/s; {} hits; {} steps waited {wait:.1} s",
                device.loads,
                bytes(device.load_bytes),
                bytes(device.bytes_per_second),
                device.hits,
                device.load_waits
            ),
        ),
        ("evicted", format!("{} parts, {}", device.evictions, bytes(device.evicted_bytes))),
    ];
    pairs(out, fields.into_iter())
}

fn name(model: &str) -> String {
    if model.is_empty() { UNNAMED.to_owned() } else { printable(model) }
}

#[cfg(test)]
mod tests {
    use rocmforge_client::wire::{LeavingEntry, StreamedFit};

    use super::*;

    fn text<T>(print: impl FnOnce(Out<'_>, &T) -> io::Result<()>, value: &T) -> String {
        let mut out = Vec::new();
        print(&mut out, value).unwrap();
        String::from_utf8(out).unwrap()
    }

    fn planned(fit: Fit) -> Plan {
        let gib = |count: u64| count << 30;
        Plan(PlanReply {
            device: 0,
            context_tokens: 4096,
            weight_bytes: gib(40),
            resident_bytes: 0,
            kv_bytes: gib(1),
            scratch_bytes: 1 << 28,
            available_bytes: gib(16),
            budget_bytes: gib(24),
            others_bytes: 1 << 29,
            fit,
            leaving: vec![LeavingEntry { id: 3, model: String::new(), device_bytes: gib(4) }],
            leaving_bytes: gib(4),
            load_ms: Some(890),
            queued: 2,
            ext: vec![],
        })
    }

    #[test]
    fn a_plan_says_whether_it_fits_first() {
        assert_eq!(
            text(plan, &planned(Fit::No(3 << 30))),
            "fits              no, 3.0 GiB too little\n\
             weights           40.0 GiB, 0 B of them resident\n\
             KV pages          1.0 GiB for 4096 tokens\n\
             activations       256.0 MiB\n\
             free              16.0 GiB of 24.0 GiB\n\
             other programs    512.0 MiB\n\
             would evict       (another user's) (4.0 GiB)\n\
             time to load      0.9 s\n\
             waiting           2 requests\n"
        );
        let streamed = Fit::Streamed(StreamedFit { resident_bytes: 20 << 30, step_bytes: 21 << 30 });
        assert!(text(plan, &planned(streamed)).starts_with(
            "fits              in part: 20.0 GiB stay, 21.0 GiB are loaded again for every step\n"
        ));
        let whole = text(plan, &planned(Fit::Whole));
        assert!(whole.starts_with("fits              yes, after evicting 4.0 GiB of other models\n"));
        let value = serde_json::to_value(planned(streamed)).unwrap();
        assert_eq!(
            (&value["fit"]["kind"], &value["fit"]["step_bytes"]),
            (&json!("streamed"), &json!(21u64 << 30))
        );
        assert_eq!(value["queued"], 2);
    }

    #[test]
    fn holders_of_memory_are_a_table() {
        let device = DeviceMemory {
            kind: "hip".into(),
            device: "AMD Instinct MI210".into(),
            weight_bytes: 3 << 29,
            budget_bytes: 24 << 30,
            evictions: 3,
            evicted_bytes: 1 << 20,
            ..DeviceMemory::default()
        };
        let model = ResidencyEntry {
            id: 4,
            device: 0,
            model: "tiny".into(),
            parts: "##-.#".into(),
            weight_bytes: 3 << 29,
            kv_bytes: 0,
            scratch_bytes: 0,
            rules: Rules { pinned: true, priority: 2, layers_min: 1, idle_s: 60 },
            sequences: 1,
            idle_ms: None,
            eviction_place: 0,
            loading: Some(LoadingProgress {
                tensors: 30,
                tensors_total: 40,
                device_bytes: 3 << 29,
                device_bytes_total: 1 << 31,
            }),
            ext: vec![],
        };
        let reply = ResidencyReply { devices: vec![device], models: vec![model], more: false, ext: vec![] };
        let shown = text(residency, &reply);
        assert!(shown.contains("evicted           3 parts, 1.0 MiB\n"), "{shown}");
        assert!(
            shown.ends_with(
                "MODEL  PARTS  LOADING             WEIGHTS  KV   ACTIVATIONS  REQUESTS  IDLE  LEAVES  RULES\n\
                 tiny   4/5    1.5 GiB of 2.0 GiB  1.5 GiB  0 B  0 B          1         -     never   pinned, priority 2, keeps 1 layers, idle 60 s\n"
            ),
            "{shown}"
        );
    }

    #[test]
    fn events_and_rules_are_a_line() {
        let happened = |kind, part| EventEntry {
            kind,
            id: 4,
            model: "tiny".into(),
            part,
            parts: 7,
            device_bytes: 3 << 20,
            text: "the file lost bytes".into(),
            ext: vec![],
        };
        let line = |kind, part| text(event, &happened(kind, part));
        assert_eq!(line(EventKind::Loaded, 0), "loaded         tiny embedding, 3.0 MiB\n");
        assert_eq!(line(EventKind::Evicted, 1), "evicted        tiny layer 0, 3.0 MiB\n");
        assert_eq!(line(EventKind::Evicted, 6), "evicted        tiny head, 3.0 MiB\n");
        assert_eq!(line(EventKind::ModelPoisoned, 0), "model poisoned tiny: the file lost bytes\n");
        let refused = SetRulesReply {
            rules: Rules { pinned: true, ..Rules::default() },
            host_pinned: false,
            host_reason: "no".into(),
            ext: vec![],
        };
        assert_eq!(text(ruled, &refused), "pinned\nits file is not locked in memory: no\n");
        assert_eq!(text(ruled, &SetRulesReply::default()), "no rules\n");
    }

    #[test]
    fn progress_and_ends_are_a_line() {
        let item = LoadToDeviceItem {
            tensors: 3,
            tensors_total: 9,
            device_bytes: 1 << 20,
            device_bytes_total: 3 << 20,
            bytes_per_second: 5 << 30,
            ext: vec![],
        };
        assert_eq!(progress(&item), "3 of 9 tensors, 1.0 MiB of 3.0 MiB, 5.0 GiB/s");
        let end = LoadToDeviceEnd { tensors: 9, device_bytes: 3 << 20, elapsed_us: 1500, ext: vec![] };
        assert_eq!(text(preloaded, &end), "9 tensors on the device, 3.0 MiB, in 1.5 ms\n");
        let left = ClearCacheReply { parts: 7, device_bytes: 3 << 20, ext: vec![] };
        assert_eq!(text(cleared, &left), "7 parts evicted, 3.0 MiB\n");
        assert_eq!(text(cleared, &ClearCacheReply::default()), "no weights were on the device\n");
    }
}
