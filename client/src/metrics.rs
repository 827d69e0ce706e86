//! The daemon's counters and gauges as text for Prometheus.
//!
//! Only model names that the asking user may know appear. Texts of requests never appear. The format is the text
//! exposition format, version 0.0.4.

use std::fmt::Write;

use crate::printable::is_hidden;
use crate::wire::{DeviceMemory, DeviceStatus, ResidencyEntry, ResidencyReply, StatusReply};

/// Labels of a value.
type Labels<'a> = &'a [(&'static str, &'a str)];

/// Renders the page of metrics.
pub fn prometheus(status: &StatusReply, residency: &ResidencyReply) -> String {
    let mut page = Page::default();
    daemon(&mut page, status);
    let numbers: Vec<String> =
        (0..status.devices.len().max(residency.devices.len())).map(|n| n.to_string()).collect();
    let engines: Vec<_> = numbers.iter().map(String::as_str).zip(&status.devices).collect();
    let memories: Vec<_> = numbers.iter().map(String::as_str).zip(&residency.devices).collect();
    work(&mut page, &engines);
    weights(&mut page, &memories);
    memory(&mut page, &memories);
    models(&mut page, &residency.models);
    page.text
}

fn daemon(page: &mut Page, status: &StatusReply) {
    page.gauge(
        "build_info",
        "1, with the daemon's version.",
        [(&[("version", status.version.as_str())][..], 1.0)],
    );
    page.gauge(
        "uptime_seconds",
        "Seconds since the daemon's start.",
        [(&[][..], status.uptime_ms as f64 / 1e3)],
    );
    page.gauge(
        "draining",
        "1 while the daemon refuses new work.",
        [(&[][..], f64::from(u8::from(status.draining)))],
    );
    page.gauge("connections", "Open connections.", [(&[][..], f64::from(status.connections))]);
    page.gauge("models_mapped", "Models that are mapped.", [(&[][..], f64::from(status.models_mapped))]);
    page.gauge(
        "process_memory_bytes",
        "Resident memory of the daemon.",
        [
            (&[("kind", "anonymous")][..], status.rss_anon_bytes as f64),
            (&[("kind", "files")][..], status.rss_file_bytes as f64),
            (&[("kind", "locked")][..], status.host.locked_bytes as f64),
        ],
    );
    page.gauge(
        "lost_threads",
        "Threads that wait for a file system whose server does not answer.",
        [(&[][..], f64::from(status.lost_threads()))],
    );
    page.counter(
        "memory_pressure_events_total",
        "Times that host memory was short.",
        [(&[][..], status.host.pressure_events as f64)],
    );
}

/// Metrics of a device's engine.
fn work(page: &mut Page, devices: &[(&str, &DeviceStatus)]) {
    for (number, device) in devices {
        let labels =
            [("device", *number), ("kind", &device.kind), ("name", &device.device), ("isa", &device.isa)];
        page.gauge("device_info", "1, with the device's kind and name.", [(&labels[..], 1.0)]);
    }
    page.by_kind("requests_total", "counter", "Requests for tokens that ended.", "outcome", devices, |d| {
        vec![
            ("done", d.sequences_done as f64),
            ("failed", d.sequences_failed as f64),
            ("cancelled", d.sequences_cancelled as f64),
        ]
    });
    page.by_kind("requests", "gauge", "Requests for tokens that run or wait.", "state", devices, |d| {
        vec![("running", d.sequences_running.into()), ("queued", d.sequences_queued.into())]
    });
    page.by_kind("tokens_total", "counter", "Tokens computed.", "kind", devices, |d| {
        vec![("generated", d.decode_rows as f64), ("prompt", d.prefill_rows as f64)]
    });
    let help = "Prompt tokens that were not computed, because an earlier prompt began with them.";
    page.by_kind("reused_tokens_total", "counter", help, "", devices, |d| {
        vec![("", d.reused_tokens() as f64)]
    });
    page.by_kind("draft_tokens_total", "counter", "Drafted tokens by their fate.", "fate", devices, |d| {
        let (drafted, accepted) = (d.drafted_tokens(), d.accepted_tokens());
        vec![("accepted", accepted as f64), ("refused", drafted.saturating_sub(accepted) as f64)]
    });
    let help = "Bytes of keys, values and recurrent states of known prefixes that no request has.";
    page.by_kind("kv_cached_bytes", "gauge", help, "", devices, |d| vec![("", d.kv_cached_bytes() as f64)]);
    let help = "Recurrent states of requests, and of known prefixes that no request has.";
    page.by_kind("recurrent_states", "gauge", help, "state", devices, |d| {
        vec![("used", d.states_used() as f64), ("cached", d.states_cached() as f64)]
    });
    let help = "Bytes of recurrent states of known prefixes that no request has.";
    page.by_kind("recurrent_states_cached_bytes", "gauge", help, "", devices, |d| {
        vec![("", d.states_cached_bytes() as f64)]
    });
    let help = "Pages of known prefixes that went because others needed their bytes.";
    page.by_kind("kv_pages_evicted_total", "counter", help, "", devices, |d| {
        vec![("", d.kv_pages_evicted() as f64)]
    });
    page.by_kind("steps_total", "counter", "Steps run.", "", devices, |d| vec![("", d.steps as f64)]);
    page.by_kind(
        "step_sequences_total",
        "counter",
        "Requests in a step, summed over steps.",
        "",
        devices,
        |d| vec![("", d.step_sequences as f64)],
    );
    page.by_kind("kv_pages", "gauge", "Pages of keys and values.", "state", devices, |d| {
        vec![("used", d.kv_pages_used.into()), ("max", d.kv_pages_max.into())]
    });
}

/// Metrics of loads, evictions and the device's memory.
fn weights(page: &mut Page, devices: &[(&str, &DeviceMemory)]) {
    type Of = fn(&DeviceMemory) -> f64;
    let counters: [(&'static str, &'static str, Of); 7] = [
        ("weight_misses_total", "Tensors that had to be loaded to the device.", |d| d.loads as f64),
        ("weight_hits_total", "Tensors asked for that were already resident.", |d| d.hits as f64),
        ("weight_load_bytes_total", "Device bytes filled with weights.", |d| d.load_bytes as f64),
        ("evictions_total", "Parts of models evicted from the device.", |d| d.evictions as f64),
        ("evicted_bytes_total", "Device bytes freed by evictions.", |d| d.evicted_bytes as f64),
        ("load_waits_total", "Steps that waited for weights.", |d| d.load_waits as f64),
        ("load_wait_seconds_total", "Time that steps waited for weights.", |d| d.load_wait_us as f64 / 1e6),
    ];
    for (name, help, of) in counters {
        page.by_kind(name, "counter", help, "", devices, |device| vec![("", of(device))]);
    }
}

fn memory(page: &mut Page, devices: &[(&str, &DeviceMemory)]) {
    page.by_kind("device_memory_bytes", "gauge", "Device memory by use.", "kind", devices, |d| {
        let held = [
            ("weights", d.weight_bytes),
            ("kv", d.kv_bytes),
            ("activations", d.scratch_bytes),
            ("staging", d.staging_bytes),
            ("graphs", d.graph_bytes),
        ];
        let owned = held.iter().fold(0u64, |sum, (_, bytes)| sum.saturating_add(*bytes));
        let rest = [
            ("kept", d.taken_bytes.saturating_sub(owned)),
            ("others", d.others_bytes),
            ("free", d.free_bytes),
        ];
        held.into_iter().chain(rest).map(|(kind, bytes)| (kind, bytes as f64)).collect()
    });
    page.by_kind("device_memory_budget_bytes", "gauge", "Most memory that may be taken.", "", devices, |d| {
        vec![("", d.budget_bytes as f64)]
    });
    page.by_kind("device_memory_size_bytes", "gauge", "All of the device's memory.", "", devices, |d| {
        vec![("", d.total_bytes as f64)]
    });
}

/// Metrics of each model on a device. The model's number tells apart models whose names the asking user may not know.
fn models(page: &mut Page, models: &[ResidencyEntry]) {
    let numbers: Vec<_> =
        models.iter().map(|model| (model.id.to_string(), model.device.to_string())).collect();
    let all = || models.iter().zip(&numbers);
    let held = all().flat_map(|(model, (id, device))| {
        [("weights", model.weight_bytes), ("kv", model.kv_bytes), ("activations", model.scratch_bytes)].map(
            |(kind, bytes)| {
                let labels =
                    [("device", device.as_str()), ("id", id), ("kind", kind), ("model", &model.model)];
                (labels, bytes as f64)
            },
        )
    });
    page.family("model_memory_bytes", "gauge", "Device memory of each model.", held);
    let requests = all().map(|(model, (id, device))| {
        ([("device", device.as_str()), ("id", id), ("model", &model.model)], f64::from(model.sequences))
    });
    page.family("model_requests", "gauge", "Requests of a model that run or wait.", requests);
}

#[derive(Default)]
struct Page {
    text: String,
}

impl Page {
    fn gauge<'a>(&mut self, name: &str, help: &str, values: impl IntoIterator<Item = (Labels<'a>, f64)>) {
        self.family(name, "gauge", help, values);
    }

    fn counter<'a>(&mut self, name: &str, help: &str, values: impl IntoIterator<Item = (Labels<'a>, f64)>) {
        self.family(name, "counter", help, values);
    }

    /// One value per device, or one per device and kind.
    fn by_kind<D>(
        &mut self,
        name: &str,
        metric: &str,
        help: &str,
        label: &'static str,
        devices: &[(&str, &D)],
        values: impl Fn(&D) -> Vec<(&'static str, f64)>,
    ) {
        let of = |(number, device): &(&str, &D)| {
            let number = (*number).to_owned();
            values(device).into_iter().map(move |(kind, value)| (number.clone(), kind, value))
        };
        let all: Vec<_> = devices.iter().flat_map(of).collect();
        let labelled = all.iter().map(|(number, kind, value)| {
            let both = [("device", number.as_str()), (label, *kind)];
            (both.into_iter().filter(|(label, _)| !label.is_empty()).collect::<Vec<_>>(), *value)
        });
        self.family(name, metric, help, labelled);
    }

    fn family<'a, L: AsRef<[(&'static str, &'a str)]>>(
        &mut self,
        name: &str,
        metric: &str,
        help: &str,
        values: impl IntoIterator<Item = (L, f64)>,
    ) {
        let head = format!("# HELP rocmforge_{name} {help}\n# TYPE rocmforge_{name} {metric}\n");
        if !self.text.contains(&head) {
            self.text.push_str(&head);
        }
        for (labels, value) in values {
            let labels: Vec<_> = labels
                .as_ref()
                .iter()
                .map(|(label, text)| format!("{label}=\"{}\"", escaped(text)))
                .collect();
            let labels = if labels.is_empty() { String::new() } else { format!("{{{}}}", labels.join(",")) };
            let _ = writeln!(self.text, "rocmforge_{name}{labels} {value}");
        }
    }
}

/// A label's value: characters that would end it are escaped, terminal control characters replaced.
fn escaped(text: &str) -> String {
    let mut escaped = String::new();
    for c in text.chars() {
        match c {
            '\\' => escaped.push_str("\\\\"),
            '"' => escaped.push_str("\\\""),
            '\n' => escaped.push_str("\\n"),
            c if is_hidden(c) => escaped.push('\u{fffd}'),
            c => escaped.push(c),
        }
    }
    escaped
}
