//! `cargo xtask bench`: our prefill and decode beside llama.cpp's own bench, on one model, with the same number of
//! threads.
//!
//! Our side takes a user's path: daemon, socket, client. Rounds are interleaved, so that other load on the machine
//! affects both sides; medians are compared. The greedy tokens must be the same in every round.

mod llama;
mod memory;

use std::path::{Path, PathBuf};
use std::process::Stdio;

use serde_json::Value;

use crate::daemon::{self, Daemon};
use crate::error::{Error, Result};
use crate::{host, models};
use llama::{LlamaBench, Measured, What};
use memory::Memory;

#[derive(clap::Args)]
pub struct Args {
    /// A GGUF file instead of SmolLM2
    #[arg(long, value_name = "FILE")]
    model: Option<PathBuf>,
    /// Threads of both sides; default: one per core this process may run on
    #[arg(long)]
    threads: Option<usize>,
    /// Interleaved rounds; medians are shown
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Your own llama-bench program
    #[arg(long, value_name = "PROGRAM")]
    llama_bench: Option<PathBuf>,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

/// The measurements: a name for the table, and what to measure.
const CASES: [(&str, What); 3] = [
    ("prefill 128", What::Prefill(128)),
    ("prefill 512", What::Prefill(512)),
    ("decode 64", What::Decode(64)),
];

/// Values of one case in all rounds.
#[derive(Default)]
struct Series {
    ours: Vec<f64>,
    theirs: Vec<f64>,
    what_ran: Option<Measured>,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let model = match &args.model {
        Some(path) => path.canonicalize().map_err(Error::at(path))?,
        None => models::ensure(models::SMOLLM2)?,
    };
    let binaries = daemon::build()?;
    let work = host::target_dir().join("bench");
    let peer = match LlamaBench::get(args.llama_bench.as_deref(), &work) {
        Ok(peer) => Some(peer),
        Err(Error::Unavailable { what, why }) => {
            eprintln!("{what} is not available: {why}; measuring only our side");
            None
        }
        Err(error) => return Err(error),
    };
    let threads = match args.threads {
        Some(threads) => threads,
        None => std::thread::available_parallelism().map_err(Error::io("number of threads"))?.get(),
    };
    warn_of_company(threads);
    let dir = model.parent().unwrap_or(Path::new("."));
    // Each round computes the whole prompt, as the other engine does.
    let config = format!("[cpu]\nthreads = {threads}\n[kv]\nreuse = 'off'\n");
    let daemon = Daemon::start(&binaries, dir, &config)?;
    let bench = Bench { name: model_name(&model), model, daemon, threads };
    let result = bench.measure(peer.as_ref(), args.rounds.max(1))?;
    result.print(args.json);
    bench.daemon.stop()
}

/// Warns if other programs keep the processors busy. Load affects the two engines differently, so ratios then mean
/// little.
fn warn_of_company(threads: usize) {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load: Option<f64> = text.split_whitespace().next().and_then(|word| word.parse().ok());
    if let Some(load) = load.filter(|load| *load > 0.3 * threads as f64) {
        eprintln!("other programs are running (load average {load}): do not trust the ratios");
    }
}

/// A model's name is its file name without `.gguf`.
pub fn model_name(model: &Path) -> String {
    model.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}

struct Bench {
    name: String,
    model: PathBuf,
    daemon: Daemon,
    threads: usize,
}

struct Report {
    series: Vec<Series>,
    device: Value,
    weight_bytes: f64,
    read_rates: Vec<f64>,
}

impl Bench {
    fn measure(&self, peer: Option<&LlamaBench>, rounds: usize) -> Result<Report> {
        let memory = Memory::new(self.threads);
        let mut series: Vec<Series> = CASES.iter().map(|_| Series::default()).collect();
        let mut read_rates = Vec::new();
        let mut answer = None;
        // The first request maps the model and faults its pages in; llama-bench warms up by itself.
        self.ours(What::Decode(4))?;
        for round in 1..=rounds {
            eprintln!("round {round} of {rounds}");
            read_rates.push(memory.read_rate());
            for ((_, what), series) in CASES.iter().zip(&mut series) {
                let (speed, ids) = self.ours(*what)?;
                series.ours.push(speed);
                if let What::Decode(_) = what
                    && answer.get_or_insert_with(|| ids.clone()) != &ids
                {
                    return Err(Error::Unexpected {
                        what: "the daemon",
                        text: format!("a round gave different tokens: {ids}"),
                    });
                }
                if let Some(peer) = peer {
                    let measured = peer.measure(&self.model, self.threads, *what)?;
                    series.theirs.push(measured.tokens_per_s());
                    series.what_ran = Some(measured);
                }
            }
        }
        let status = self.daemon.ask(&["status"])?;
        let shown = self.daemon.ask(&["show", &self.name])?;
        Ok(Report {
            series,
            device: status["devices"][0].clone(),
            weight_bytes: number(&shown, "/weight_bytes")?,
            read_rates,
        })
    }

    /// Tokens per second of one request, and the ids it returned.
    fn ours(&self, what: What) -> Result<(f64, Value)> {
        // Ids of ordinary words; the choice does not affect the time.
        let (prompt, generated) = match what {
            What::Prefill(n) => (n, 1),
            What::Decode(n) => (1, n + 1),
        };
        let ids: Vec<String> = (0..prompt).map(|i| (300 + i * 7 % 4000).to_string()).collect();
        let ids = ids.join(" ");
        let max_tokens = generated.to_string();
        let words = ["--ids", "--max-tokens", &max_tokens, "--temperature", "0", "--ignore-eog", "--json"];
        let mut command = self.daemon.client();
        command.args(["run", &self.name, &ids]).args(words).stdin(Stdio::null());
        let text = host::read(&mut command)?;
        let answer: Value =
            serde_json::from_str(&text).map_err(|_| Error::Unexpected { what: "the client", text })?;
        let seconds = |stage: &str| Ok::<_, Error>(number(&answer, &format!("/timings/{stage}"))? / 1e3);
        let speed = match what {
            What::Prefill(n) => n as f64 / seconds("prefill")?,
            // From the first token, which comes from prefill, to the last.
            What::Decode(n) => n as f64 / seconds("decode")?,
        };
        Ok((speed, answer["ids"].clone()))
    }
}

impl Report {
    fn print(&self, json: bool) {
        let read_rate = median(&self.read_rates);
        let rows: Vec<Row> = CASES
            .iter()
            .zip(&self.series)
            .map(|((name, what), series)| {
                let ours = median(&series.ours);
                let theirs = (!series.theirs.is_empty()).then(|| median(&series.theirs));
                // Decode reads every weight once per token.
                let share = matches!(what, What::Decode(_)).then(|| ours * self.weight_bytes / read_rate);
                let flags = series.what_ran.as_ref().map(Measured::flags).unwrap_or_default();
                Row { case: name, ours, theirs, ratio: theirs.map(|t| ours / t), share, flags }
            })
            .collect();
        let peer = self.series.iter().find_map(|series| series.what_ran.as_ref()).map(Measured::build);
        if json {
            let all = serde_json::json!({
                "rows": rows, "device": self.device, "llama_bench": peer,
                "weight_bytes": self.weight_bytes, "memory_read_bytes_per_s": read_rate,
            });
            println!("{all:#}");
            return;
        }
        let device = |key: &str| self.device[key].to_string().trim_matches('"').to_owned();
        println!(
            "ours:      {} {}, {} threads, {}",
            device("kind"),
            device("isa"),
            device("threads"),
            device("device")
        );
        println!("llama.cpp: {}", peer.as_deref().unwrap_or("not measured"));
        println!(
            "memory:    {:.1} GB/s read by all threads; weights {:.1} MB",
            read_rate / 1e9,
            self.weight_bytes / 1e6
        );
        println!(
            "\n{:12} {:>10} {:>10} {:>7}  tokens/s, medians of {}",
            "",
            "ours",
            "llama.cpp",
            "ratio",
            self.read_rates.len()
        );
        for row in rows {
            let number =
                |value: Option<f64>, digits: usize| value.map_or("-".into(), |v| format!("{v:.digits$}"));
            let share =
                row.share.map_or(String::new(), |s| format!("  {:.0} % of the memory read rate", s * 100.0));
            let (theirs, ratio) = (number(row.theirs, 1), number(row.ratio, 2));
            println!("{:12} {:10.1} {theirs:>10} {ratio:>7}  {}{share}", row.case, row.ours, row.flags);
        }
    }
}

#[derive(serde::Serialize)]
struct Row {
    case: &'static str,
    ours: f64,
    theirs: Option<f64>,
    ratio: Option<f64>,
    /// Share of the memory read rate.
    share: Option<f64>,
    flags: String,
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

fn number(value: &Value, pointer: &str) -> Result<f64> {
    let found = value.pointer(pointer).and_then(Value::as_f64);
    found.ok_or_else(|| Error::Unexpected {
        what: "the client",
        text: format!("there is no number at {pointer} in {value}"),
    })
}
