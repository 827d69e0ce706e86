//! What the fuzzers start from and what they once found (`fuzz/corpus`), run through the same checks without a fuzzer.
//!
//! Seeds carry names; findings are added under the name of their fault. `ROCMFORGE_WRITE_SEEDS=1` writes the seeds again.

use std::path::{Path, PathBuf};

use rocmforge_client::wire::{
    ClientHello, FEATURE_CHECKSUM, Flags, GenerateItem, GenerateRequest, Message, Op, PAYLOAD_BYTES_MAX,
    PingRequest, Prompt, ServerOffer, VERSION_MAJOR, encode_frame,
};

use crate::forge::{Forge, Value, every_type, ggml};

fn folder(target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(target)
}

fn files() -> Vec<(&'static str, Vec<u8>)> {
    let short =
        || Forge::new(1).set("general.architecture", Value::string("llama")).set("a.number", Value::u32(1));
    let mut old = short();
    old.version = 2;
    let tokens = Value::strings(&["<s>", "a", "\u{2581}b"]);
    vec![
        ("every-type", every_type(1).build().bytes),
        ("short", short().build().bytes),
        ("version-2", old.build().bytes),
        ("tokens", short().set("t.tokens", tokens).build().bytes),
        ("tensors", short().tensor("a", &[32, 2], ggml::Q4_0).tensor("b", &[4], ggml::F32).build().bytes),
    ]
}

fn frames() -> Vec<(&'static str, Vec<u8>)> {
    let hello = ClientHello {
        min_major: VERSION_MAJOR,
        max_major: VERSION_MAJOR,
        minor: 0,
        max_frame: PAYLOAD_BYTES_MAX,
        features: FEATURE_CHECKSUM,
        name: "seed".to_owned(),
    };
    let generate = GenerateRequest {
        stop: vec!["\n".to_owned()],
        ..GenerateRequest::new("model", Prompt::Ids(vec![1, 2, 3]))
    };
    let item = GenerateItem {
        ids: vec![5],
        text: "a".to_owned(),
        logprobs: Vec::new(),
        prompt_ids: vec![1],
        ext: Vec::new(),
    };
    let ping = PingRequest { payload: b"echo".into(), ext: Vec::new() };
    vec![
        ("client-hello", hello.to_bytes().unwrap().into()),
        ("server-hello", ServerOffer::default().answer(&hello).to_bytes().into()),
        ("ping", frame(Op::Ping, Flags::NONE, &ping)),
        ("ping-checksum", frame(Op::Ping, Flags::CRC, &PingRequest::default())),
        ("generate", frame(Op::Generate, Flags::NONE, &generate)),
        ("item", frame(Op::Item, Flags::NONE, &item)),
    ]
}

fn frame(op: Op, flags: Flags, message: &impl Message) -> Vec<u8> {
    encode_frame(1, op, flags, PAYLOAD_BYTES_MAX, message).unwrap()
}

#[test]
fn the_seeds_are_what_the_forge_and_the_codec_write() {
    for (target, seeds) in [("gguf_parse", files()), ("frame_header", frames())] {
        for (name, bytes) in seeds {
            let path = folder(target).join(name);
            if std::env::var_os("ROCMFORGE_WRITE_SEEDS").is_some() {
                std::fs::create_dir_all(folder(target)).unwrap();
                std::fs::write(&path, &bytes).unwrap();
            }
            let kept = std::fs::read(&path).unwrap_or_default();
            assert!(kept == bytes, "{} is stale: run with ROCMFORGE_WRITE_SEEDS=1", path.display());
        }
    }
}

#[test]
fn the_corpus_of_model_files_keeps_the_parsers_promises() {
    let mut accepted = 0;
    for entry in std::fs::read_dir(folder("gguf_parse")).unwrap() {
        accepted += usize::from(crate::gguf_fields::parse(&std::fs::read(entry.unwrap().path()).unwrap()));
    }
    assert!(accepted >= files().len(), "all seeds are good files");
}
