//! Prefill and decode speed of a GPU on one model, through the engine as the daemon runs it. Weights are loaded when
//! first needed, and steps are replayed from graphs if enabled. The same run also measures the rate at which the device
//! reads its memory.
//!
//! `gpu_step MODEL.gguf [MORE.gguf ...] [--prompt N] [--tokens N] [--sequences N] [--users N] [--rows N] [--rounds N] [--device N]
//! [--graphs off] [--resident] [--threads N] [--upload auto|ring|copy|registered] [--f32] [--deterministic] [--read-mib N]
//! [--json]`
//!
//! With `--resident`, all weights are loaded after the first answers: else a model of experts loads those that no token chose yet.
//!
//! With `--json`, each value is also printed as a line `measured {...}` for programs.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use rocmforge::backend::hip::kernels::probe::ProbeRead;
use rocmforge::backend::hip::{
    Device, DeviceOptions, Grid, HipBackend, HipOptions, Purpose, Runtime, StreamPriority, UploadPath,
};
use rocmforge::backend::{ActivationType, Backend};
use rocmforge::model::{Model, ModelId};
use rocmforge::program::{Op, Residence, TensorId};
use rocmforge::scheduler::{Engine, EngineOptions, Reuse};
use serde_json::json;

use common::{Failure, run, run_of_users};

mod common;

struct Arguments {
    models: Vec<PathBuf>,
    options: HipOptions,
    prompt: usize,
    tokens: u32,
    sequences: usize,
    /// Users that the sequences belong to, in turn.
    users: u32,
    rows: usize,
    rounds: u32,
    /// Loads all weights before the rounds.
    resident: bool,
    /// Bytes of device memory that are read to measure the rate.
    read_bytes: usize,
    json: bool,
}

impl Arguments {
    /// Prints a JSON line for programs.
    fn measured(&self, value: &serde_json::Value) {
        if self.json {
            println!("measured {value}");
        }
    }
}

fn main() -> Result<(), Failure> {
    let arguments = arguments()?;
    if arguments.models.is_empty() {
        println!("gpu_step: no model given, nothing measured");
        return Ok(());
    }
    let runtime = Runtime::find()?;
    let stream = read_rate(&runtime, arguments.options.index, arguments.read_bytes)?;
    println!("read stream: {:.1} GB/s", stream / 1e9);
    let device = runtime.describe(arguments.options.index)?;
    arguments.measured(&json!({ "what": "device", "device": format!("{} at {}", device.name, device.pci) }));
    arguments.measured(&json!({ "what": "memory", "gb_s": stream / 1e9 }));

    let files = arguments.models.iter().map(std::fs::File::open).collect::<Result<_, _>>()?;
    let begin = Instant::now();
    let model = Arc::new(Model::open(ModelId(1), "measured", files)?);
    println!("model: {} opened in {:.1} ms", arguments.models[0].display(), milliseconds(begin));
    let begin = Instant::now();
    let (options, rows) = (arguments.options.clone(), arguments.rows);
    let factory = move || Ok(Box::new(HipBackend::open(options.clone())?) as Box<dyn Backend>);
    let engine_options = EngineOptions {
        rows_max: Some(rows),
        sequences_max: Some(arguments.sequences.max(1)),
        kv_budget_bytes: 64 << 30,
        reuse: Reuse::Off,
        ..EngineOptions::default()
    };
    let engine = Engine::start(engine_options, factory)?;
    let handle = engine.handle();
    let info = handle.info();
    println!("backend: {}, device: {}, {}", info.kind, info.device, info.isa);
    info.notes.iter().for_each(|(name, value)| println!("{name}: {value}"));
    println!("device opened in {:.1} ms", milliseconds(begin));

    let cold = run(&handle, &model, 1, 8, 2, 0)?;
    let first = cold.first.as_secs_f64();
    println!("cold: first token of an 8-token prompt after {first:.3} s, weights uploaded meanwhile");
    println!("cold: of that {:.3} s waiting for weights", cold.load.as_secs_f64());
    let rates = handle.snapshot().device.upload_rates;
    for rate in rates.iter().filter(|rate| rate.bytes > 0 || rate.refused) {
        println!("upload{}: {rate}", if rate.in_use { "" } else { " tried" });
    }
    let warm = run(&handle, &model, 1, 8, 2, 1)?;
    println!("warm: first token of an 8-token prompt after {:.1} ms", warm.first.as_secs_f64() * 1e3);
    let bytes = handle.snapshot().device.upload_bytes as f64;
    // A small model's upload takes no measurable time.
    let seconds = (first - warm.first.as_secs_f64()).max(1e-6);
    println!(
        "upload: {:.2} GB at {:.2} GB/s, by the difference of these two",
        bytes / 1e9,
        bytes / 1e9 / seconds
    );
    let used = rates.iter().find(|rate| rate.in_use).copied().unwrap_or_default();
    arguments.measured(&json!({
        "what": "upload", "path": used.path, "threads": used.threads,
        "gb": bytes / 1e9, "gb_s": bytes / 1e9 / seconds,
        "cold_s": first, "warm_s": warm.first.as_secs_f64(),
    }));

    if arguments.resident {
        let runtime = tokio::runtime::Builder::new_current_thread().build()?;
        runtime.block_on(handle.preload_all(&model)?.wait())?;
    }
    let weights = bytes_per_step(&model);
    for round in 0..arguments.rounds {
        let Arguments { prompt, tokens, sequences, users, .. } = arguments;
        let done = run_of_users(&handle, &model, sequences, users, prompt, tokens, 2 + round as usize)?;
        let prefill = (prompt * sequences) as f64 / done.first.as_secs_f64();
        let steps = f64::from(tokens - 1) / done.decode.as_secs_f64();
        println!(
            "round {round}: pp{prompt} x{sequences} {prefill:.1} tok/s; tg{tokens} x{sequences} {:.2} tok/s, \
             {:.3} ms a step, weights at {:.1} GB/s = {:.2} of the read stream",
            steps * sequences as f64,
            1e3 / steps,
            weights * steps / 1e9,
            weights * steps / stream,
        );
        if sequences > 1 {
            println!(
                "round {round}: {:.1} tok/s while all {sequences} answer and no prompt comes in",
                done.together_tok_s
            );
        }
        arguments.measured(&json!({
            "what": "step", "prompt": prompt, "tokens": tokens, "sequences": sequences, "users": users, "round": round,
            "prefill_tok_s": prefill, "decode_tok_s": steps * sequences as f64, "decode_ms": 1e3 / steps,
            "together_tok_s": done.together_tok_s,
            "all_s": done.all.as_secs_f64(),
            "gb_s": weights * steps / 1e9, "of_reading": weights * steps / stream,
        }));
    }
    let snapshot = handle.snapshot();
    let device = snapshot.device;
    println!(
        "graphs: {} recorded, {} replays in {} steps, {} run again; uploads: {} tensors, {} bytes; {} MiB of the device \
         in use",
        device.graphs,
        device.graph_replays,
        snapshot.counters.steps,
        device.steps_repeated,
        device.uploads,
        device.upload_bytes,
        device.used_bytes >> 20
    );
    arguments.measured(&json!({
        "what": "graphs", "backend": info.kind, "code": info.isa, "recorded": device.graphs,
        "replays": device.graph_replays, "steps": snapshot.counters.steps,
    }));
    engine.stop();
    Ok(())
}

fn arguments() -> Result<Arguments, Failure> {
    let mut parsed = Arguments {
        models: Vec::new(),
        options: HipOptions { upload_threads: 8, ..HipOptions::default() },
        prompt: 4096,
        tokens: 128,
        sequences: 1,
        users: 1,
        rows: 1024,
        rounds: 3,
        resident: false,
        read_bytes: 1 << 30,
        json: false,
    };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or(format!("{word} needs a value"));
        match word.as_str() {
            "--bench" => {}
            "--read-mib" => parsed.read_bytes = value()?.parse::<usize>()?.saturating_mul(1 << 20),
            "--json" => parsed.json = true,
            "--resident" => parsed.resident = true,
            "--prompt" => parsed.prompt = value()?.parse()?,
            "--tokens" => parsed.tokens = value()?.parse()?,
            "--sequences" => parsed.sequences = value()?.parse()?,
            "--users" => parsed.users = value()?.parse()?,
            "--rows" => parsed.rows = value()?.parse()?,
            "--rounds" => parsed.rounds = value()?.parse()?,
            "--device" => parsed.options.index = value()?.parse()?,
            "--graphs" => parsed.options.graphs = value()? != "off",
            "--threads" => parsed.options.upload_threads = value()?.parse()?,
            "--upload" => {
                parsed.options.upload = match value()?.as_str() {
                    "ring" => UploadPath::Ring,
                    "copy" => UploadPath::Copy,
                    "registered" => UploadPath::Registered,
                    "auto" => UploadPath::Auto,
                    other => return Err(format!("{other} is not an upload path").into()),
                }
            }
            "--deterministic" => parsed.options.deterministic = true,
            "--f32" => parsed.options.activations = ActivationType::F32,
            path => parsed.models.push(PathBuf::from(path)),
        }
    }
    if parsed.read_bytes == 0 {
        return Err("--read-mib must be at least 1".into());
    }
    if parsed.prompt == 0 || parsed.tokens < 2 || parsed.rows == 0 || parsed.sequences == 0 {
        return Err("--prompt, --rows and --sequences must be at least 1, --tokens at least 2".into());
    }
    Ok(parsed)
}

fn milliseconds(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}

/// Bytes per second at which the device reads its memory: the best of ten passes over `bytes` bytes.
fn read_rate(runtime: &Runtime, index: u32, bytes: usize) -> Result<f64, Failure> {
    let device = Device::open(runtime, &DeviceOptions { index, ..DeviceOptions::default() })?;
    let bytes = bytes.min((device.memory()?.0 / 4) as usize) / 4096 * 4096;
    let stream = device.stream(StreamPriority::High)?;
    let blocks = device.description().units * 16;
    let (input, output) =
        (device.take(bytes, Purpose::Scratch)?, device.take(blocks as usize * 4, Purpose::Scratch)?);
    stream.fill(input.all(), 0x5a)?;
    let arguments = ProbeRead { input: input.ptr(), output: output.ptr(), count: bytes as u64 / 16 };
    let (start, end) = (device.event(true)?, device.event(true)?);
    let mut best: f64 = 0.0;
    for _ in 0..10 {
        stream.record(&start)?;
        device.launch(&stream, ProbeRead::probe_read, Grid::x(blocks), &arguments)?;
        stream.record(&end)?;
        stream.synchronize()?;
        best = best.max(bytes as f64 / f64::from(end.milliseconds_since(&start)?) * 1e3);
    }
    Ok(best)
}

/// Bytes of weights that a decode step of one row reads, as stored in the file: of experts those that a row chooses, on average.
fn bytes_per_step(model: &Model) -> f64 {
    let program = &model.plan.program;
    let bytes = |id: TensorId| program.tensor(id).map_or(0, |tensor| tensor.lazy.byte_len()) as f64;
    let always = program.tensors().iter().filter(|tensor| tensor.residence == Residence::Device);
    let always = always.map(|tensor| tensor.lazy.byte_len()).sum::<u64>() as f64;
    let ops = program.parts().iter().flat_map(|part| &part.ops);
    let chosen = ops.map(|op| match op {
        Op::Experts { experts, choice, .. } => {
            let used = program.values().get(choice.0 as usize).map_or(0, |value| value.width);
            let all: f64 = (0..experts.count).flat_map(|expert| experts.tensors(expert)).map(bytes).sum();
            all * f64::from(used) / f64::from(experts.count.max(1))
        }
        _ => 0.0,
    });
    always + chosen.sum::<f64>()
}
