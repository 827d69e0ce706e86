//! Opens many models with one large vocabulary, one after the other, and keeps all open: time and memory of each.
//!
//! `registry [--models N] [--tokens N]`: by default 100 models that share a made-up vocabulary of 152,000 tokens and as
//! many merges. Prints the figures of the first model, which builds the tokenizer, and of each further one. Then the time of a
//! hit: a lookup of a tensor that a device's cache has, beside a plain lookup of a hash map of as many entries.

use std::collections::HashMap;
use std::fs::File;
use std::hint::black_box;
use std::io::Write;
use std::time::Instant;

use rocmforge::backend::cpu::{CpuBackend, CpuOptions};
use rocmforge::cache::TensorCache;
use rocmforge::model::tokenizer::Tokenizers;
use rocmforge::model::{Model, ModelId};
use rocmforge::program::PartId;

use rocmforge_test_support::forge::{Value, tiny_llama};

type Failure = Box<dyn std::error::Error>;

/// Bytes of this process's anonymous memory.
fn anonymous() -> Result<u64, Failure> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).ok_or("no RssAnon")?;
    Ok(line.trim().trim_end_matches(" kB").parse::<u64>()? << 10)
}

/// Processor time of this thread in seconds.
fn processor_s() -> Result<f64, Failure> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat")?;
    Ok(text.split_whitespace().next().ok_or("no schedstat")?.parse::<f64>()? / 1e9)
}

/// A small model's file with that many tokens. Each but the 26 letters is made of two shorter tokens.
fn file(tokens: u64) -> Result<tempfile::NamedTempFile, Failure> {
    let mut texts: Vec<String> = (b'a'..=b'z').map(|letter| char::from(letter).to_string()).collect();
    let mut merges = Vec::new();
    let mut from = 0;
    while (texts.len() as u64) < tokens {
        for letter in 0..26 {
            let text = format!("{}{}", texts[from], texts[letter]);
            merges.push(format!("{} {}", texts[from], texts[letter]));
            texts.push(text);
        }
        from += 1;
    }
    texts.truncate(usize::try_from(tokens)?);
    merges.truncate(texts.len() - 26);
    let mut model = tiny_llama(3);
    model.entries.retain(|(key, _)| !key.starts_with(b"tokenizer."));
    model = model
        .set("tokenizer.ggml.model", Value::string("gpt2"))
        .set("tokenizer.ggml.pre", Value::string("qwen2"))
        .set("tokenizer.ggml.tokens", Value::strings(&texts))
        .set("tokenizer.ggml.token_type", Value::i32s(&vec![1; texts.len()]))
        .set("tokenizer.ggml.merges", Value::strings(&merges))
        .set("tokenizer.ggml.eos_token_id", Value::u32(0));
    let mut offset = 0;
    for tensor in &mut model.tensors {
        if tensor.name == b"token_embd.weight" || tensor.name == b"output.weight" {
            tensor.dims[1] = tokens;
        }
        // No weight is read: the file has a hole in their place.
        tensor.data = Some(Vec::new());
        tensor.offset = Some(offset);
        offset += (4 * tensor.dims.iter().product::<u64>()).next_multiple_of(32);
    }
    let header = model.build().bytes;
    let mut file = tempfile::NamedTempFile::new()?;
    file.write_all(&header)?;
    file.as_file().set_len(header.len() as u64 + offset)?;
    Ok(file)
}

/// Rounds over all tensors.
const ROUNDS: usize = 20_000;

/// Prints the time of a hit, and of a lookup in a hash map of as many entries.
fn hits() -> Result<(), Failure> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/models/tinystories-260k-f32.gguf");
    let model = Model::open(ModelId(0), "stories", vec![File::open(path)?])?;
    let (mut backend, mut cache) = (CpuBackend::new(CpuOptions::default())?, TensorCache::new());
    let program = &model.plan.program;
    let part = |part| PartId { model: model.id, part };
    let all: Vec<_> = (0..program.part_count())
        .flat_map(|number| program.part_tensors(number).map(move |(_, tensor)| (part(number), tensor)))
        .collect();
    let mut round = |rounds: usize| -> Result<f64, Failure> {
        let begun = Instant::now();
        for _ in 0..rounds {
            for (part, tensor) in &all {
                black_box(cache.load(&mut backend, tensor, *part)?);
            }
        }
        Ok(begun.elapsed().as_secs_f64() * 1e9 / (rounds * all.len()).max(1) as f64)
    };
    round(1)?; // loads
    let hit_ns = round(ROUNDS)?;
    let plain: HashMap<usize, usize> = (0..all.len()).map(|number| (number * 4096, number)).collect();
    let begun = Instant::now();
    for _ in 0..ROUNDS {
        for number in 0..all.len() {
            black_box(plain.get(&black_box(number * 4096)));
        }
    }
    let plain_ns = begun.elapsed().as_secs_f64() * 1e9 / (ROUNDS * all.len()).max(1) as f64;
    println!("a hit among {} tensors: {hit_ns:.0} ns; a plain lookup: {plain_ns:.0} ns", all.len());
    Ok(())
}

fn main() -> Result<(), Failure> {
    let (mut models, mut tokens) = (100, 152_000);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let number =
            || -> Result<u64, Failure> { Ok(arguments.next().ok_or("a number is missing")?.parse()?) };
        let mut number = number;
        match argument.as_str() {
            "--models" => models = number()?,
            "--tokens" => tokens = number()?,
            "--bench" => {} // passed by cargo
            other => return Err(format!("{other}: no such option").into()),
        }
    }
    let file = file(tokens)?;
    rocmforge::daemon::allocator::trim(); // frees what building the file took
    let tokenizers = Tokenizers::default();
    let mut opened = Vec::new();
    let mut open = |count: u64| -> Result<[f64; 2], Failure> {
        let (begun, processor) = (Instant::now(), processor_s()?);
        for number in 0..count {
            let file = File::open(file.path())?;
            opened.push(Model::open_beside(ModelId(number), "many", vec![file], &tokenizers, None)?);
        }
        Ok([begun.elapsed().as_secs_f64() * 1e3, (processor_s()? - processor) * 1e3])
    };
    let before = anonymous()?;
    let [first_ms, first_busy] = open(1)?;
    let first_bytes = anonymous()?.saturating_sub(before);
    let more = models.saturating_sub(1);
    let [ms, busy] = open(more)?;
    let bytes = anonymous()?.saturating_sub(before).saturating_sub(first_bytes);
    let header = opened.first().map_or(0, |model| model.files.header().header_bytes());
    println!("headers of {} KiB; {} tokenizers", header >> 10, tokenizers.living());
    println!("the first: {first_ms:.0} ms, of a processor {first_busy:.0}; {} KiB", first_bytes >> 10);
    println!("{more} more: {ms:.0} ms, of a processor {busy:.0}; {} KiB each", (bytes / more.max(1)) >> 10);
    hits()
}
