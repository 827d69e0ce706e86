//! Prefill and decode speed of the CPU backend on one model, with the time of its parts and the longest time without a
//! pause. Also reports the share of the rate at which the same threads read the model's mapping. With `--whole`, every
//! second round never cuts a product.
//!
//! `cargo bench --bench cpu_step -- MODEL.gguf [--threads N] [--prompt N] [--tokens N] [--isa NAME] [--f32] [--chunk N]
//! [--whole] [--rounds N]`

use std::path::PathBuf;
use std::time::{Duration, Instant};

use rocmforge::backend::cpu::{CpuBackend, CpuOptions, Isa, Slices};
use rocmforge::backend::{
    ActivationType, Backend, DeviceTensor, KV_PAGE_TOKENS, ModelSlot, Progress, SampleRow, StepBatch,
    StepLimits, Storage, Weights,
};
use rocmforge::model::files::ModelFiles;
use rocmforge::model::gguf::Array;
use rocmforge::model::plan::ExecutionPlan;
use rocmforge::program::{Program, Residence};
use rocmforge::tensor::MappedFile;

type Failure = Box<dyn std::error::Error>;

struct Arguments {
    model: PathBuf,
    options: CpuOptions,
    prompt: usize,
    tokens: usize,
    chunk: usize,
    whole: bool,
    rounds: usize,
}

fn main() -> Result<(), Failure> {
    let Some(arguments) = arguments()? else {
        println!("cpu_step: no model given, nothing measured");
        return Ok(());
    };
    let files = ModelFiles::open(vec![std::fs::File::open(&arguments.model)?])?;
    let vocab = match files.header().array("tokenizer.ggml.tokens") {
        Some(Array::String(tokens)) => tokens.len(),
        _ => return Err("the file has no vocabulary".into()),
    };
    let plan = ExecutionPlan::build(&files, vocab)?;
    let mut backend = CpuBackend::new(arguments.options)?;
    println!("{:?}", backend.info());
    let file = files.mappings().next().ok_or("a model has files")?;
    let rate = read_rate(file, backend.info().threads);
    let mut run = Run::open(&mut backend, &plan, &arguments)?;

    for round in 0..arguments.rounds {
        let whole = arguments.whole && round % 2 == 1;
        let uncut = Slices { whole: usize::MAX, ..Slices::default() };
        run.backend.set_slices(if whole { uncut } else { Slices::default() });
        if arguments.whole {
            println!("{}", if whole { "whole" } else { "cut" });
        }
        let prompt: Vec<u32> =
            (0..arguments.prompt).map(|i| (i * 7919 + round) as u32 % vocab as u32).collect();
        let begin = Instant::now();
        let mut token = 0;
        for (start, chunk) in
            prompt.chunks(arguments.chunk).enumerate().map(|(i, c)| (i * arguments.chunk, c))
        {
            token = run.step(chunk, start)?;
        }
        let prefill = begin.elapsed();
        println!("pp{}: {:.1} tokens/s", prompt.len(), prompt.len() as f64 / prefill.as_secs_f64());
        run.report(prompt.len());

        let begin = Instant::now();
        let mut best = Duration::MAX;
        for position in prompt.len()..prompt.len() + arguments.tokens {
            let begin = Instant::now();
            token = run.step(&[token], position)?;
            best = best.min(begin.elapsed());
        }
        let decode = begin.elapsed().as_secs_f64() / arguments.tokens as f64;
        let bytes = bytes_per_token(&plan.program) as f64;
        println!(
            "tg{}: {:.1} tokens/s (best step {:.1}), {:.1} GB/s of weights, {:.0} % of the read rate of {:.1} GB/s",
            arguments.tokens,
            1.0 / decode,
            1.0 / best.as_secs_f64(),
            bytes / decode / 1e9,
            100.0 * bytes / decode / rate,
            rate / 1e9,
        );
        run.report(arguments.tokens);
        run.report_memory();
        run.release();
    }
    Ok(())
}

fn arguments() -> Result<Option<Arguments>, Failure> {
    let mut model = None;
    let mut parsed = Arguments {
        model: PathBuf::new(),
        options: CpuOptions::default(),
        prompt: 128,
        tokens: 32,
        chunk: 256,
        whole: false,
        rounds: 3,
    };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or(format!("{word} needs a value"));
        match word.as_str() {
            "--bench" => {}
            "--threads" => parsed.options.threads = Some(value()?.parse()?),
            "--isa" => parsed.options.isa = Some(value()?.parse::<Isa>()?),
            "--whole" => parsed.whole = true,
            "--rounds" => parsed.rounds = value()?.parse()?,
            "--f32" => parsed.options.activations = ActivationType::F32,
            "--prompt" => parsed.prompt = value()?.parse()?,
            "--tokens" => parsed.tokens = value()?.parse()?,
            "--chunk" => parsed.chunk = value()?.parse()?,
            path => model = Some(PathBuf::from(path)),
        }
    }
    if parsed.prompt == 0 || parsed.tokens == 0 || parsed.chunk == 0 {
        return Err("--prompt, --tokens and --chunk must be at least 1".into());
    }
    Ok(model.map(|model| Arguments { model, ..parsed }))
}

/// Bytes per second at which `threads` threads read the mapping, each its own part: the best of eight passes.
fn read_rate(file: &MappedFile, threads: usize) -> f64 {
    let bytes = file.bytes(0..file.len()).unwrap_or(&[]);
    let part = bytes.len().div_ceil(threads).max(1);
    let pass = || {
        let begin = Instant::now();
        let sum: u64 = std::thread::scope(|scope| {
            let parts: Vec<_> = bytes.chunks(part).map(|part| scope.spawn(move || sum(part))).collect();
            parts.into_iter().filter_map(|p| p.join().ok()).fold(0, u64::wrapping_add)
        });
        std::hint::black_box(sum);
        bytes.len() as f64 / begin.elapsed().as_secs_f64()
    };
    (0..8).map(|_| pass()).fold(0.0, f64::max)
}

fn sum(bytes: &[u8]) -> u64 {
    let mut sums = [0u64; 16];
    for chunk in bytes.as_chunks::<128>().0 {
        for (sum, word) in sums.iter_mut().zip(chunk.as_chunks::<8>().0) {
            *sum = sum.wrapping_add(u64::from_le_bytes(*word));
        }
    }
    sums.into_iter().fold(0, u64::wrapping_add)
}

/// Bytes of weights that a step of one row reads; counts all experts of a layer.
fn bytes_per_token(program: &Program) -> u64 {
    let read = program.tensors().iter().filter(|tensor| tensor.residence != Residence::Host);
    read.map(|tensor| tensor.lazy.byte_len()).sum()
}

const PARTS: [&str; 4] = ["embedding", "layers", "head", "sample"];

/// A model on a backend, and the time that each part of its steps took.
struct Run<'a> {
    backend: &'a mut CpuBackend,
    slot: ModelSlot,
    pages: Vec<u32>,
    program: &'a Program,
    tensors: Vec<Option<DeviceTensor>>,
    generations: Vec<u64>,
    spent: [Duration; PARTS.len()],
    /// The longest call of the backend.
    longest: Duration,
}

impl<'a> Run<'a> {
    fn open(
        backend: &'a mut CpuBackend,
        plan: &'a ExecutionPlan,
        arguments: &Arguments,
    ) -> Result<Self, Failure> {
        let program = &plan.program;
        let pages = (arguments.prompt + arguments.tokens).div_ceil(KV_PAGE_TOKENS) as u32;
        let slot =
            backend.open_model(program, StepLimits { rows: arguments.chunk, wanted_rows: 1 }, pages)?;
        // The CPU reads all tensors in place.
        let in_place = |lazy: &rocmforge::tensor::LazyTensor| DeviceTensor {
            tensor: lazy.clone(),
            storage: Storage::InPlace,
        };
        Ok(Self {
            slot,
            pages: (0..pages).collect(),
            tensors: program.tensors().iter().map(|tensor| Some(in_place(&tensor.lazy))).collect(),
            generations: vec![0; program.parts().len()],
            program,
            spent: Default::default(),
            longest: Duration::ZERO,
            backend,
        })
    }

    /// Runs one step over `tokens` from position `start` on; returns the token drawn after the last.
    fn step(&mut self, tokens: &[u32], start: usize) -> Result<u32, Failure> {
        let positions: Vec<u32> = (start..start + tokens.len()).map(|p| p as u32).collect();
        let batch = StepBatch {
            token_ids: tokens,
            positions: &positions,
            row_sequences: &vec![0; tokens.len()],
            page_tables: &self.pages,
            page_table_stride: self.pages.len(),
            logits_rows: &[tokens.len() as u32 - 1],
            recurrent: &[],
        };
        let (backend, spent, longest) = (&mut *self.backend, &mut self.spent, &mut self.longest);
        let mut clock = Instant::now();
        let mut lap = |part: usize| {
            let now = Instant::now();
            spent[part] += now - std::mem::replace(&mut clock, now);
        };
        backend.begin_step(self.slot, &batch)?;
        let weights = Weights { tensors: &self.tensors, generations: &self.generations };
        let mut run = |part: u32| {
            loop {
                let begun = Instant::now();
                let progress = backend.run(part, &weights)?;
                *longest = begun.elapsed().max(*longest);
                match progress {
                    Progress::Done => return Ok::<_, Failure>(()),
                    Progress::Needs(_) | Progress::Again => return Err("all experts are resident".into()),
                    Progress::Paused => {}
                }
            }
        };
        run(0)?;
        lap(0);
        let head = self.program.head_part();
        (1..head).try_for_each(&mut run)?;
        lap(1);
        run(head)?;
        lap(2);
        let greedy = SampleRow {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            seed: 0,
            position: (start + tokens.len()) as u32,
            top_logprobs: 0,
            changes: None,
            mask: None,
            chain: None,
        };
        let drawn = backend.sample(&[greedy])?;
        lap(3);
        match drawn.into_iter().next() {
            Some(drawn) => Ok(drawn?.id),
            None => Err("no token was drawn".into()),
        }
    }

    /// Prints the time of each part per token since the last report.
    fn report(&mut self, tokens: usize) {
        let all: Duration = self.spent.iter().sum();
        let times = PARTS.iter().zip(&self.spent).map(|(part, spent)| {
            let share = 100.0 * spent.as_secs_f64() / all.as_secs_f64();
            format!("{part} {:.1} us ({share:.0} %)", spent.as_secs_f64() * 1e6 / tokens as f64)
        });
        println!("  per token: {}", times.collect::<Vec<_>>().join(", "));
        println!("  longest without a pause: {:.1} ms", self.longest.as_secs_f64() * 1e3);
        (self.spent, self.longest) = Default::default();
    }

    /// Prints the process's anonymous memory, as Linux counts it, and the KV cache's share of it.
    fn report_memory(&self) {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
        let kib = line.and_then(|l| l.trim().split(' ').next()?.parse::<f64>().ok()).unwrap_or(f64::NAN);
        let kv = self.backend.kv_bytes(self.slot) as f64 / f64::from(1 << 20);
        println!("  memory beyond the file: {:.1} MiB, of which KV {kv:.1} MiB", kib / 1024.0);
    }

    fn release(&mut self) {
        self.backend.release_pages(self.slot, &self.pages);
    }
}
