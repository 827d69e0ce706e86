//! Many models, and models that are loaded and unloaded: their cost in the daemon's memory.

use std::fs::{self, File};
use std::path::Path;
use std::time::{Duration, Instant};

use rocmforge::model::gguf::{Array, Gguf, Value as Read};
use rocmforge_client::wire::{GenerateRequest, TokenizeRequest};

use crate::common;
use crate::forge::{Built, Value, tiny_llama};
use crate::pressure;
use crate::rig::{PATIENCE, Rig, TINY, anonymous, answer, story};

const MODELS: u64 = 100;
const MIB: u64 = 1 << 20;

/// A small model's header with the vocabulary of the file at `path`, and the full length of its file.
fn with_vocabulary(path: &Path) -> (Vec<u8>, u64) {
    let (vocabulary, _) = Gguf::open(File::open(path).unwrap()).unwrap();
    let mut model = tiny_llama(3);
    model.entries.retain(|(key, _)| !key.starts_with(b"tokenizer."));
    for (key, value) in vocabulary.metadata().filter(|(key, _)| key.starts_with("tokenizer.")) {
        let value = match value {
            Read::String(text) => Value::string(text),
            Read::U32(number) => Value::u32(*number),
            Read::Bool(yes) => Value::bool(*yes),
            Read::Array(Array::String(texts)) => Value::strings(&texts.iter().collect::<Vec<_>>()),
            Read::Array(Array::I32(numbers)) => Value::i32s(numbers),
            Read::Array(Array::F32(numbers)) => Value::f32s(numbers),
            other => panic!("{key}: {}", other.describe()),
        };
        model = model.set(key, value);
    }
    let tokens = vocabulary.strings("tokenizer.ggml.tokens").unwrap().len() as u64;
    let mut offset = 0;
    for tensor in &mut model.tensors {
        if tensor.name == b"token_embd.weight" || tensor.name == b"output.weight" {
            tensor.dims[1] = tokens;
        }
        tensor.data = Some(Vec::new());
        tensor.offset = Some(offset);
        offset += (4 * tensor.dims.iter().product::<u64>()).next_multiple_of(32); // F32
    }
    let Built { bytes, .. } = model.build();
    let length = bytes.len() as u64 + offset;
    (bytes, length)
}

/// Maps [`MODELS`] files of those bytes; returns the daemon's memory growth per model after the first.
fn each_takes(header: &[u8], length: u64) -> u64 {
    let name = |number: u64| format!("m{number}");
    let mut rig = Rig::idle();
    for number in 0..MODELS {
        fs::write(rig.model(&name(number)), header).unwrap();
        File::options().write(true).open(rig.model(&name(number))).unwrap().set_len(length).unwrap();
    }
    rig.configure("[device]\nbackend = 'cpu'");
    rig.run();
    let client = rig.client();
    let none = anonymous(&rig);
    client.load(&name(0)).unwrap();
    let one = anonymous(&rig);
    let begun = Instant::now();
    for number in 1..MODELS {
        assert!(client.load(&name(number)).unwrap().mapped_now);
    }
    let elapsed = begun.elapsed();
    let each = anonymous(&rig).saturating_sub(one) / (MODELS - 1);
    println!(
        "headers of {} KiB: the first takes {} KiB, {} more in {elapsed:?} take {each} bytes each",
        header.len() >> 10,
        (one - none) >> 10,
        MODELS - 1
    );
    assert_eq!(client.status().unwrap().models_mapped, MODELS as u32);
    let tokens = |number| {
        let request = TokenizeRequest {
            model: name(number),
            text: "Es war einmal".into(),
            add_special: false,
            parse_special: false,
            ext: Default::default(),
        };
        client.tokenize(&request).unwrap().ids
    };
    assert!(!tokens(0).is_empty());
    assert_eq!(tokens(0), tokens(MODELS - 1));
    each
}

#[test]
fn a_hundred_models_of_one_vocabulary_share_it() {
    let small = fs::read(common::tinystories()).unwrap();
    let length = small.len() as u64;
    let each = each_takes(&small, length);
    assert!(each <= MIB, "{each} bytes per further model");
    let Some(vocabulary) = common::cached("vocab/ggml-vocab-qwen2.gguf") else { return };
    let (header, length) = with_vocabulary(&vocabulary);
    let each = each_takes(&header, length);
    assert!(each <= MIB, "{each} bytes per further model");
}

#[test]
fn a_thousand_loads_and_unloads_leave_nothing() {
    let mut rig = Rig::idle();
    // The allocator's store of each thread fills for ten thousand cycles, up to 0.6 MiB in all: without it, 0.1 MiB.
    let no_stores = [("GLIBC_TUNABLES", Path::new("glibc.malloc.tcache_count=0"))];
    let pipe = pressure::start_with(&mut rig, "[device]\nbackend = 'cpu'", &no_stores);
    let client = rig.client();
    let request = GenerateRequest { model: TINY.into(), ..story(2) };
    let cycle = || {
        let text = answer(&client, &request).unwrap().text;
        client.unload(TINY).unwrap();
        text
    };
    // Fills a fixed cache first: the daemon keeps its last 1,024 answers to such requests, for repeats.
    for _ in 0..1024 {
        client.load(TINY).unwrap();
    }
    let text = cycle();
    for _ in 1..100 {
        assert_eq!(cycle(), text);
    }
    let gone = |rig: &Rig| {
        rig.eventually("the model is unmapped", |status| status.models_mapped == 0);
        rig.assert_idle();
        // The free part of the heap differs by some hundred KiB with the time since its last trim.
        let trims = || rig.log_text().matches("free pages of the heap").count();
        let (trimmed, begun) = (trims(), Instant::now());
        pressure::tell(&pipe);
        while trims() == trimmed {
            assert!(begun.elapsed() < PATIENCE, "the daemon did not trim its heap");
            std::thread::sleep(Duration::from_millis(10));
        }
        anonymous(rig)
    };
    let first = gone(&rig);
    for number in 1..=1000 {
        assert_eq!(cycle(), text);
        if number % 250 == 0 {
            println!("{} KiB after {number} more cycles", anonymous(&rig) >> 10);
        }
    }
    let last = gone(&rig);
    // Stacks of threads vary by 0.1 MiB; a leak of 256 bytes per cycle would exceed the limit.
    println!("{} KiB, {} KiB after 1000 more cycles", first >> 10, last >> 10);
    assert!(last <= first + MIB / 4, "memory grew from {first} to {last} bytes in 1000 cycles");
    rig.assert_serves();
}
