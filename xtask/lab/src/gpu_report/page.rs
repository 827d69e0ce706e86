//! The report as a page to read and to send: Markdown, with all data again as JSON at its end.

use std::fmt::Write;

use rocmforge::backend::doctor::{Gpu, Report as Findings, State as Health};
use serde_json::{Value, json};

use super::part::{Outcome, State};
use super::system::{self, Fact};

/// Shows the last bytes of a failed part's output.
const OUTPUT_MAX: usize = 20_000;

/// Device name of the CPU look-alike in tests/lookalike.
const LOOKALIKE: &str = "ROCmForge CPU look-alike";

/// The hardware that really runs a device's kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Played {
    /// An AMD GPU.
    No,
    /// Kernels run on the CPU.
    OnCpu,
    /// An NVIDIA GPU behind the project's own library.
    OnNvidia,
}

/// Whether `gpu` is an AMD GPU, or something else behind a library of this project.
pub fn played(gpu: &Gpu) -> Played {
    match gpu {
        _ if gpu.name == LOOKALIKE => Played::OnCpu,
        _ if gpu.arch.starts_with("sm_") => Played::OnNvidia,
        _ => Played::No,
    }
}

/// All contents of the report.
#[derive(Debug)]
pub struct Page {
    pub facts: Vec<Fact>,
    pub findings: Findings,
    /// The GPU that was tried.
    pub gpu: Option<Gpu>,
    pub outcomes: Vec<Outcome>,
}

impl Page {
    /// Names of the failed parts.
    pub fn failed(&self) -> Vec<&str> {
        let failed = self.outcomes.iter().filter(|outcome| outcome.state == State::Failed);
        failed.map(|outcome| outcome.name.as_str()).collect()
    }

    /// The result in one line.
    pub fn verdict(&self) -> String {
        let tried = self.outcomes.iter().filter(|outcome| outcome.state != State::Left).count();
        let (failed, left) = (self.failed(), self.outcomes.len() - tried);
        let left = if left == 0 { String::new() } else { format!(", {left} not tried") };
        match &self.gpu {
            None => "no GPU that works was found; nothing was tried".into(),
            Some(_) if failed.is_empty() => format!("all {tried} parts passed{left}"),
            Some(_) => format!("{} of {tried} parts failed{left}: {}", failed.len(), failed.join(", ")),
        }
    }

    /// The text of the page.
    pub fn text(&self) -> String {
        let mut text = String::from("# ROCmForge on a GPU\n\n");
        self.heading(&mut text);
        self.parts(&mut text);
        self.health(&mut text);
        self.measurements(&mut text);
        self.system(&mut text);
        self.outputs(&mut text);
        let _ = write!(text, "## For programs\n\n```json\n{:#}\n```\n", self.json());
        text
    }

    fn heading(&self, text: &mut String) {
        let about = self.gpu.as_ref().map(|gpu| match played(gpu) {
            Played::No => String::new(),
            Played::OnCpu => {
                "**This was no GPU.** The project's look-alike ran the kernels on the CPU, with small sizes: \
                              the test results count, but the times say nothing about any GPU.\n\n"
                    .into()
            }
            Played::OnNvidia => {
                "**This was no AMD GPU.** The project's own library ran the kernels on an NVIDIA GPU: \
                                 nothing here says anything about AMD GPUs.\n\n"
                    .into()
            }
        });
        text.push_str(&about.unwrap_or_default());
        let _ = writeln!(text, "{}.\n", capitalised(&self.verdict()));
        if let Some(gpu) = &self.gpu {
            let _ = writeln!(
                text,
                "Device {}: {}, {}, at {}, {} MiB of memory, {} of them free, {} compute units, waves of {} lanes; kernels built \
                 for {}.\n",
                gpu.index,
                gpu.name,
                gpu.arch,
                if gpu.pci.is_empty() { "an unknown place" } else { &gpu.pci },
                gpu.memory_bytes >> 20,
                gpu.memory_free_bytes >> 20,
                gpu.units,
                gpu.wave,
                gpu.code
            );
        }
    }

    fn parts(&self, text: &mut String) {
        if self.outcomes.is_empty() {
            return;
        }
        text.push_str("## Parts\n\n| part | | seconds | |\n|---|---|---:|---|\n");
        for outcome in &self.outcomes {
            let Outcome { name, seconds, note, .. } = outcome;
            let _ = writeln!(text, "| {name} | {} | {seconds:.1} | {} |", word(outcome.state), cell(note));
        }
        let skipped = self.outcomes.iter().flat_map(|o| o.skipped.iter().map(move |why| (&o.name, why)));
        let skipped: Vec<String> = skipped.map(|(name, why)| format!("- {name}: {why}\n")).collect();
        if !skipped.is_empty() {
            let _ = write!(text, "\nTests that did not run:\n\n{}", skipped.concat());
        }
        text.push('\n');
    }

    fn health(&self, text: &mut String) {
        text.push_str("## What the doctor found\n\n| | | found | what to do |\n|---|---|---|---|\n");
        for check in &self.findings.checks {
            let state = match check.state {
                Health::Good => "good",
                Health::Note => "note",
                Health::Problem => "PROBLEM",
            };
            let (found, advice) = (cell(&check.found), cell(&check.advice));
            let _ = writeln!(text, "| {} | {state} | {found} | {advice} |", check.name);
        }
        text.push('\n');
    }

    /// One table per kind of measurement, in order of first appearance. The first measurement of a kind determines
    /// the columns.
    fn measurements(&self, text: &mut String) {
        let all = || self.outcomes.iter().flat_map(|o| o.measured.iter().map(move |value| (&o.name, value)));
        let mut kinds: Vec<&str> = Vec::new();
        for (_, value) in all() {
            if let Some(kind) =
                value["what"].as_str().filter(|kind| *kind != "device" && !kinds.contains(kind))
            {
                kinds.push(kind);
            }
        }
        for kind in kinds {
            let rows: Vec<_> = all().filter(|(_, value)| value["what"] == kind).collect();
            let columns: Vec<&String> =
                rows[0].1.as_object().into_iter().flat_map(|map| map.keys()).collect();
            let columns: Vec<&&String> = columns.iter().filter(|name| **name != "what").collect();
            let names: Vec<String> = columns.iter().map(|name| name.replace('_', " ")).collect();
            let _ = writeln!(text, "## Measured: {kind}\n\n| part | {} |", names.join(" | "));
            let _ = writeln!(text, "|---|{}", "---:|".repeat(names.len()));
            for (part, value) in rows {
                let cells: Vec<String> = columns.iter().map(|name| shown(&value[name.as_str()])).collect();
                let _ = writeln!(text, "| {part} | {} |", cells.join(" | "));
            }
            text.push('\n');
        }
    }

    fn system(&self, text: &mut String) {
        text.push_str("## The machine\n\n| | |\n|---|---|\n");
        for (name, value) in &self.facts {
            let _ = writeln!(text, "| {name} | {} |", cell(value));
        }
        text.push('\n');
    }

    fn outputs(&self, text: &mut String) {
        for outcome in self.outcomes.iter().filter(|outcome| outcome.state == State::Failed) {
            if outcome.output.is_empty() {
                continue;
            }
            // A line of the output must not end its code block.
            let output = tail(&outcome.output).replace("````", "'''' ");
            let _ = write!(text, "## What {} printed\n\n````text\n{output}\n````\n\n", outcome.name);
        }
    }

    fn json(&self) -> Value {
        let parts: Vec<Value> = self
            .outcomes
            .iter()
            .map(|outcome| {
                json!({
                    "name": outcome.name,
                    "state": word(outcome.state).to_lowercase(),
                    "seconds": outcome.seconds,
                    "note": outcome.note,
                    "skipped": outcome.skipped,
                    "measured": outcome.measured,
                })
            })
            .collect();
        json!({
            "verdict": self.verdict(),
            "is_amd_gpu": self.gpu.as_ref().map(|gpu| played(gpu) == Played::No),
            "device": self.gpu,
            "parts": parts,
            "doctor": self.findings,
            "machine": system::to_json(&self.facts),
        })
    }
}

fn word(state: State) -> &'static str {
    match state {
        State::Passed => "passed",
        State::Failed => "FAILED",
        State::Left => "not tried",
    }
}

fn capitalised(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map(|first| first.to_uppercase().chain(chars).collect()).unwrap_or_default()
}

/// Escapes text for a table cell.
fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace(['\n', '\r'], " ")
}

/// Shows numbers with four significant digits.
fn shown(value: &Value) -> String {
    match value {
        Value::Number(number) if number.is_f64() => {
            let x = number.as_f64().unwrap_or(0.0);
            let before = if x.abs() < 1.0 { 0 } else { x.abs().log10() as usize + 1 };
            format!("{x:.*}", 4usize.saturating_sub(before))
        }
        Value::String(text) => cell(text),
        Value::Null => String::new(),
        other => cell(&other.to_string()),
    }
}

/// The end of a long text, from the start of a line.
fn tail(text: &str) -> &str {
    let text = text.trim_end();
    let Some(excess) = text.len().checked_sub(OUTPUT_MAX) else { return text };
    let from = (excess..text.len()).find(|&at| text.is_char_boundary(at)).unwrap_or(0);
    let text = &text[from..];
    text.split_once('\n').map_or(text, |(_, rest)| rest)
}

#[cfg(test)]
mod unit {
    #![allow(clippy::expect_used)] // tests fail by panicking

    use rocmforge::backend::doctor::Check;

    use super::*;

    fn gpu(name: &str, arch: &str) -> Gpu {
        Gpu {
            index: 1,
            name: name.into(),
            arch: arch.into(),
            pci: "0000:03:00.0".into(),
            memory_bytes: 24 << 30,
            memory_free_bytes: 23 << 30,
            units: 96,
            wave: 32,
            code: "gfx1100".into(),
            works: true,
        }
    }

    fn page(gpu: Option<Gpu>) -> Page {
        let check = Check {
            name: "/dev/kfd".into(),
            state: Health::Problem,
            found: "cannot be opened | denied".into(),
            advice: "join the group".into(),
        };
        let mut failed = Outcome::left("engine", "1 passed, 1 failed, 0 skipped");
        failed.state = State::Failed;
        failed.output = format!("{}\nthe end ````\n", "x".repeat(2 * OUTPUT_MAX));
        let mut measured = Outcome::left("matmul Q4_K", "2 values");
        measured.state = State::Passed;
        measured.skipped = vec!["t: no file".into()];
        measured.measured = vec![
            json!({ "what": "device", "device": "A card" }),
            json!({ "what": "read", "type": "Q4_K", "gb_s": 812.3456 }),
            json!({ "what": "step", "rows": 1, "ms": 0.012_345 }),
            json!({ "what": "read", "type": "Q8_0", "gb_s": 1234.5 }),
        ];
        Page {
            facts: vec![("kernel".into(), "6.12".into())],
            findings: Findings { checks: vec![check], gpus: gpu.clone().into_iter().collect() },
            gpu,
            outcomes: vec![failed, measured, Outcome::left("upload", "no room")],
        }
    }

    fn json_of(text: &str) -> Value {
        let (_, rest) = text.split_once("```json\n").expect("a part for programs");
        serde_json::from_str(rest.trim_end().strip_suffix("```").expect("it ends the page")).expect("JSON")
    }

    #[test]
    fn a_page_tells_what_failed_and_what_was_measured() {
        let page = page(Some(gpu("A card", "gfx1100")));
        let text = page.text();
        assert_eq!(page.verdict(), "1 of 2 parts failed, 1 not tried: engine");
        for line in [
            "| engine | FAILED | 0.0 | 1 passed, 1 failed, 0 skipped |",
            "| upload | not tried | 0.0 | no room |",
            "- matmul Q4_K: t: no file",
            "| /dev/kfd | PROBLEM | cannot be opened \\| denied | join the group |",
            "## Measured: read\n\n| part | type | gb s |\n|---|---:|---:|\n| matmul Q4_K | Q4_K | 812.3 |\n\
             | matmul Q4_K | Q8_0 | 1234 |",
            "| matmul Q4_K | 1 | 0.0123 |",
            "| kernel | 6.12 |",
            "````text\nthe end ''''",
        ] {
            assert!(text.contains(line), "{line:?} is not in:\n{text}");
        }
        assert!(!text.contains("no GPU") && !text.contains("no AMD GPU"), "{text}");
        let json = json_of(&text);
        assert_eq!(json["is_amd_gpu"], true);
        assert_eq!(json["parts"][1]["measured"][1]["gb_s"], 812.3456);
        assert_eq!(json["parts"][2]["state"], "not tried");
        assert_eq!(json["doctor"]["checks"][0]["advice"], "join the group");
        assert_eq!(json["device"]["arch"], "gfx1100");
    }

    #[test]
    fn a_gpu_that_is_not_amds_is_called_so() {
        for (gpu, words) in [
            (gpu(LOOKALIKE, "gfx1100"), "**This was no GPU.**"),
            (gpu("A card", "sm_90"), "**This was no AMD GPU.**"),
        ] {
            let text = page(Some(gpu)).text();
            assert!(text.lines().nth(2).is_some_and(|line| line.starts_with(words)), "{text}");
            assert_eq!(json_of(&text)["is_amd_gpu"], false);
        }
        let nothing = Page { outcomes: vec![], ..page(None) };
        let text = nothing.text();
        assert!(text.contains("No GPU that works was found; nothing was tried."), "{text}");
        assert!(text.contains("join the group") && json_of(&text)["device"].is_null(), "{text}");
    }
}
