//! Time to load a model's weights to a GPU, beside the rates of link and disk measured in the same run. Covers the
//! first token of a cold start, loading all weights in advance, a start from disk, and a budget too small for the
//! model.
//!
//! `residency MODEL.gguf [MORE.gguf ...] [--stream FRACTION] [--no-disk] [--tokens N] [--device N] [--threads N]
//! [--upload auto|ring|copy|registered] [--json]`
//!
//! - `cold`: the file is in the page cache, no weights on the device; the bound is bytes / link rate plus a warm first
//!   token.
//! - `all`: the same by `preload_all`.
//! - `disk`: the file is dropped from the page cache; the bound is bytes / the rate of one sequential direct read.
//! - `stream`: the budget is that fraction of the weights plus the model's other memory; the bound is bytes of a step /
//!   link rate.
//! - `lazy` and `eager`: from the file's name to the first token, with weights loaded when a step needs them, or all
//!   loaded first. Also prints the memory that process and device hold then.
//!
//! With `--json`, each value is also printed as a line `measured {...}` for programs.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rocmforge::backend::Backend;
use rocmforge::backend::hip::{
    Device, DeviceOptions, HipBackend, HipOptions, Purpose, Runtime, StreamPriority, UploadPath,
};
use rocmforge::model::{Model, ModelId};
use rocmforge::scheduler::{Engine, EngineHandle, EngineOptions, Reuse};
use serde_json::json;

use common::{Failure, run};

mod common;

/// Rows of a step: the bench uses prompts of only eight tokens.
const ROWS: usize = 32;

/// Bytes of the copy that measures the link.
const LINK_BYTES: usize = 256 << 20;

/// Wait after clearing weights: a driver then wipes the freed memory, which takes up to a seventh of the link's rate.
const WIPED: Duration = Duration::from_millis(500);

/// Bytes of a direct read: with fewer, a fast disk idles between reads.
const READ_BYTES: usize = 16 << 20;

struct Arguments {
    models: Vec<PathBuf>,
    options: HipOptions,
    stream: Option<f64>,
    disk: bool,
    tokens: u32,
    json: bool,
}

fn main() -> Result<(), Failure> {
    let arguments = arguments()?;
    if arguments.models.is_empty() {
        println!("residency: no model given, nothing measured");
        return Ok(());
    }
    let runtime = Runtime::find()?;
    let device = runtime.describe(arguments.options.index)?;
    let link = link_rate(&runtime, arguments.options.index)?;
    println!(
        "{}, runtime {}: link {:.1} GB/s from pinned memory",
        device.name,
        runtime.version(),
        link / 1e9
    );
    println!(
        "{:24} {:>8} {:>8} {:>8} {:>8} {:>7} {:>12} {:>12}",
        "", "GB", "seconds", "GB/s", "bound s", "ratio", "anon MiB", "device MiB"
    );
    let begin = Instant::now();
    let model = open(&arguments, 1)?;
    let opened = begin.elapsed().as_secs_f64();
    let before = anonymous_bytes();
    let engine = engine(&arguments, 0)?;
    let handle = engine.handle();
    let row = |name: &str, bytes: u64, seconds: f64, bound: f64, handle: &EngineHandle| {
        let used = handle.snapshot().memory.used();
        let (anon, gb) = (anonymous_bytes().saturating_sub(before) >> 20, bytes as f64 / 1e9);
        println!(
            "{name:24} {gb:8.2} {seconds:8.3} {:8.1} {bound:8.3} {:7.2} {anon:12} {:12}",
            gb / seconds,
            seconds / bound,
            used >> 20
        );
        if arguments.json {
            let line = json!({ "what": name, "gb": gb, "s": seconds, "bound_s": bound, "anon_mib": anon });
            println!("measured {line}");
        }
    };
    println!("{:24} {:8} {opened:8.3}", "register", "");

    let loaded = || handle.snapshot().device.upload_bytes;
    let clear = || {
        wait(handle.evict_weights(Some(model.id)))?;
        std::thread::sleep(WIPED);
        Ok::<_, Failure>(())
    };
    // A process's first start also warms up threads and pages; in the daemon only the first load pays for that.
    for name in ["cold, of the process", "cold", "cold again"] {
        clear()?;
        let before = loaded();
        let cold = run(&handle, &model, 1, 8, 2, 0)?;
        let warm = run(&handle, &model, 1, 8, 2, 1)?.first.as_secs_f64();
        let bytes = loaded() - before;
        row(name, bytes, cold.first.as_secs_f64(), bytes as f64 / link + warm, &handle);
    }
    clear()?;
    let (before_all, begin) = (loaded(), Instant::now());
    wait(async { handle.preload_all(&model)?.wait().await.map(drop) })?;
    let (bytes, seconds) = (loaded() - before_all, begin.elapsed().as_secs_f64());
    row("all, in advance", bytes, seconds, bytes as f64 / link, &handle);
    let first = run(&handle, &model, 1, 8, 2, 2)?.first.as_secs_f64();
    println!("{:24} {:8} {first:8.3}", "first token after that", "");
    clear()?;
    lazy_and_eager(&arguments, &handle, &clear)?;
    if arguments.disk {
        let rate = disk_rate(&arguments.models)?;
        println!("read in one go from disk: {:.2} GB/s", rate / 1e9);
        for name in ["cold, from disk", "again, from disk"] {
            clear()?;
            forget_pages(&arguments.models)?;
            let before = loaded();
            let cold = run(&handle, &model, 1, 8, 2, 0)?;
            let bytes = loaded() - before;
            row(name, bytes, cold.first.as_secs_f64(), bytes as f64 / rate, &handle);
        }
    }
    if let Some(fraction) = arguments.stream {
        run(&handle, &model, 1, 8, 2, 0)?;
        let memory = handle.snapshot().memory;
        clear()?;
        engine.stop();
        let rest = memory.taken - memory.weights;
        let budget = rest + (memory.weights as f64 * fraction) as u64;
        let small = self::engine(&arguments, budget)?;
        let handle = small.handle();
        run(&handle, &model, 1, 8, 2, 0)?;
        let before = handle.snapshot();
        let done = run(&handle, &model, 1, 8, arguments.tokens, 1)?;
        let after = handle.snapshot();
        let bytes = after.device.upload_bytes - before.device.upload_bytes;
        let seconds = (done.first + done.decode).as_secs_f64();
        row(
            &format!("{fraction} of it, {} tokens", arguments.tokens),
            bytes,
            seconds,
            bytes as f64 / link,
            &handle,
        );
        println!(
            "{:.2} tokens/s; {:.2} of the weights a step where {:.2} have no room; {} parts left",
            f64::from(arguments.tokens - 1) / done.decode.as_secs_f64(),
            bytes as f64 / f64::from(arguments.tokens) / memory.weights as f64,
            1.0 - fraction,
            after.counters.evictions - before.counters.evictions,
        );
        small.stop();
    }
    Ok(())
}

/// Measures both ways from a file's name to its first token: time until the model is usable, and until the answer
/// begins. Also prints the host and device memory held then.
fn lazy_and_eager(
    arguments: &Arguments,
    handle: &EngineHandle,
    clear: &dyn Fn() -> Result<(), Failure>,
) -> Result<(), Failure> {
    println!(
        "{:24} {:>12} {:>14} {:>12} {:>12}",
        "", "registered s", "first token s", "anon MiB", "device MiB"
    );
    for eager in [false, true] {
        let (begin, before) = (Instant::now(), anonymous_bytes());
        let model = open(arguments, 2 + u64::from(eager))?;
        if eager {
            wait(async { handle.preload_all(&model)?.wait().await.map(drop) })?;
        }
        let registered = begin.elapsed().as_secs_f64();
        let first = registered + run(handle, &model, 1, 8, 2, 3)?.first.as_secs_f64();
        let anon = anonymous_bytes().saturating_sub(before) >> 20;
        let weights = handle.snapshot().memory.weights >> 20;
        let name = if eager { "eager" } else { "lazy" };
        println!("{name:24} {registered:12.3} {first:14.3} {anon:12} {weights:12}");
        handle.model_gone(model.id);
        clear()?;
    }
    Ok(())
}

fn wait<T, E: std::error::Error + 'static>(future: impl Future<Output = Result<T, E>>) -> Result<T, Failure> {
    Ok(tokio::runtime::Builder::new_current_thread().enable_time().build()?.block_on(future)?)
}

fn open(arguments: &Arguments, id: u64) -> Result<Arc<Model>, Failure> {
    let files = arguments.models.iter().map(File::open).collect::<Result<_, _>>()?;
    Ok(Arc::new(Model::open(ModelId(id), "measured", files)?))
}

fn engine(arguments: &Arguments, memory_bytes: u64) -> Result<Engine, Failure> {
    let options = HipOptions { memory_bytes, ..arguments.options.clone() };
    let factory = move || Ok(Box::new(HipBackend::open(options.clone())?) as Box<dyn Backend>);
    let engine_options = EngineOptions {
        rows_max: Some(ROWS),
        sequences_max: Some(1),
        reuse: Reuse::Off,
        ..EngineOptions::default()
    };
    Ok(Engine::start(engine_options, factory)?)
}

/// Bytes per second from pinned memory to the device: the best of ten copies.
fn link_rate(runtime: &Runtime, index: u32) -> Result<f64, Failure> {
    let device = Device::open(runtime, &DeviceOptions { index, ..DeviceOptions::default() })?;
    let (stream, to) = (device.stream(StreamPriority::Low)?, device.take(LINK_BYTES, Purpose::Scratch)?);
    let mut from = device.pinned(LINK_BYTES)?;
    from.bytes_mut()?.fill(1);
    let mut best: f64 = 0.0;
    for _ in 0..10 {
        let begin = Instant::now();
        stream.upload_pinned(to.all(), &mut from, 0)?;
        stream.synchronize()?;
        best = best.max(LINK_BYTES as f64 / begin.elapsed().as_secs_f64());
    }
    Ok(best)
}

/// Drops the files' pages from the page cache.
fn forget_pages(files: &[PathBuf]) -> Result<(), Failure> {
    for path in files {
        let file = File::open(path)?;
        file.sync_all()?;
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
    }
    Ok(())
}

/// Bytes per second of one sequential read past the page cache, from the first file's beginning.
fn disk_rate(files: &[PathBuf]) -> Result<f64, Failure> {
    forget_pages(files)?;
    let direct = rustix::fs::OFlags::DIRECT.bits() as i32;
    let mut file = File::options().read(true).custom_flags(direct).open(&files[0])?;
    let mut buffer = vec![0u8; READ_BYTES + 4096];
    let aligned = buffer.as_ptr().align_offset(4096);
    let buffer = &mut buffer[aligned..aligned + READ_BYTES];
    let (begin, mut bytes) = (Instant::now(), 0);
    while bytes < 4 << 30 {
        match file.read(buffer)? {
            0 => break,
            read => bytes += read as u64,
        }
    }
    Ok(bytes as f64 / begin.elapsed().as_secs_f64())
}

/// Bytes of this process's anonymous memory.
fn anonymous_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}

fn arguments() -> Result<Arguments, Failure> {
    let mut parsed = Arguments {
        models: Vec::new(),
        options: HipOptions { upload_threads: 8, ..HipOptions::default() },
        stream: None,
        disk: true,
        tokens: 8,
        json: false,
    };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or(format!("{word} needs a value"));
        match word.as_str() {
            "--bench" => {}
            "--json" => parsed.json = true,
            "--no-disk" => parsed.disk = false,
            "--stream" => parsed.stream = Some(value()?.parse()?),
            "--tokens" => parsed.tokens = value()?.parse()?,
            "--device" => parsed.options.index = value()?.parse()?,
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
            path => parsed.models.push(PathBuf::from(path)),
        }
    }
    if parsed.tokens < 2 || parsed.stream.is_some_and(|fraction| !(0.0..1.0).contains(&fraction)) {
        return Err("--tokens must be at least 2, --stream at least 0 and below 1".into());
    }
    Ok(parsed)
}
