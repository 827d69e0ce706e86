//! The fuzzers' seeds and findings (`fuzz/corpus`), run through the fuzzers' checks without a fuzzer.
//!
//! A seed has a plain name; a finding has the name of its fault. `ROCMFORGE_WRITE_SEEDS=1` writes the seeds again.

use std::path::{Path, PathBuf};

use rocmforge_client::wire::{
    ClientHello, ErrorCode, FEATURE_CHECKSUM, Flags, ForgetSessionRequest, GenerateItem, GenerateRequest,
    Message, Op, PAYLOAD_BYTES_MAX, PingReply, PingRequest, Prompt, ServerOffer, SessionScope, StatusRequest,
    VERSION_MAJOR, WireError, encode, encode_frame,
};

use serde_json::{Value as Json, json};

use crate::forge::{Forge, Value, every_type, ggml};

fn folder(target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(target)
}

fn files() -> Seeds {
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

fn frames() -> Seeds {
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
        ("acting-hello", hello.acting_as(7).to_bytes().unwrap().into()),
        ("ping", frame(Op::Ping, Flags::NONE, &ping)),
        ("ping-checksum", frame(Op::Ping, Flags::CRC, &PingRequest::default())),
        ("generate", frame(Op::Generate, Flags::NONE, &generate)),
        ("item", frame(Op::Item, Flags::NONE, &item)),
    ]
}

fn frame(op: Op, flags: Flags, message: &impl Message) -> Vec<u8> {
    encode_frame(1, op, flags, PAYLOAD_BYTES_MAX, message).unwrap()
}

fn messages() -> Seeds {
    // The first byte indexes `Op::ALL`. Adding 22 keeps the op and selects another reply type.
    let of = |op: Op, message: Vec<u8>| {
        let place = Op::ALL.iter().position(|one| *one == op).unwrap();
        [vec![place as u8], message].concat()
    };
    let generate = GenerateRequest::new("model", Prompt::Text("text".to_owned()));
    let named = generate.clone().with_session("name");
    let forget = ForgetSessionRequest { scope: SessionScope::Name("name".to_owned()), ext: Vec::new() };
    let reply = PingReply { payload: b"echo".into(), ..PingReply::default() };
    vec![
        ("ping", of(Op::Ping, encode(&PingRequest { payload: b"echo".into(), ext: Vec::new() }).unwrap())),
        ("generate", of(Op::Generate, encode(&generate).unwrap())),
        ("session", of(Op::Generate, encode(&named).unwrap())),
        ("forget", of(Op::ForgetSession, encode(&forget).unwrap())),
        ("status", of(Op::Status, encode(&StatusRequest::default()).unwrap())),
        ("error", of(Op::Error, encode(&WireError::new(ErrorCode::Busy, "later")).unwrap())),
        ("reply", of(Op::Reply, encode(&reply).unwrap())),
    ]
}

fn changed_models() -> Seeds {
    // The first byte chooses a model; each 10 bytes after it choose a number and its new value or its shift.
    let far = [0x10, 0x40, 1, 0, 0, 0, 0, 0, 0, 0];
    vec![
        ("unchanged", vec![0]),
        ("one-number", [vec![1, 7, 0], vec![2; 8]].concat()),
        ("two-numbers", [vec![11, 30, 0], vec![0; 8], far.to_vec()].concat()),
    ]
}

fn vocabularies() -> Seeds {
    let text = |settings: u8, text: &str| [vec![settings], text.as_bytes().to_vec()].concat();
    vec![
        ("byte-pairs", text(0, "a\nb\nc\nab\nabc\n<|end|>\n\na b\nab c\n\nabcab <|end|> d")),
        ("qwen", text(0x2c, "\u{120}\na\nb\n\u{120}a\n<|im_start|>\n\n\u{120} a\n\n a<|im_start|>12")),
        ("sentencepiece", text(9, "<unk>\n<s>\n</s>\n<0x41>\n\u{2581}\na\n\u{2581}a\n\n\n\n a<s>aA")),
    ]
}

fn chat_templates() -> Seeds {
    let sources = [
        ("first", "{{ bos_token }}{{ messages[0].content.strip()|upper }}"),
        ("choice", "{% if messages[0].role == 'user' %}a{% elif tools %}b{% else %}c{% endif %}"),
        ("loop", "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"),
        ("time", "{{ strftime_now('%Y-%m-%d') }}{%- generation -%}x{%- endgeneration %}"),
        ("set", "{% set ns = namespace(x=1) %}{% set ns.x = 2 %}{{ ns.x }}{{ {'a': [1, none]} }}"),
        ("refusal", "{{ raise_exception('no') }}"),
    ];
    sources.into_iter().map(|(name, source)| (name, source.as_bytes().to_vec())).collect()
}

fn configurations() -> Seeds {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("systemd/config.toml");
    // The file's keys with their defaults, without the comments about them.
    let text = std::fs::read_to_string(file).unwrap();
    let keys: Vec<&str> = text.lines().filter(|line| !line.starts_with("# ")).collect();
    vec![
        ("shipped", keys.join("\n").into_bytes()),
        ("socket", b"socket = \"/a/socket.sock\"\nmodels = [\"/m\"]\n".to_vec()),
        ("limits", b"[limits]\nconnections = 3\n[kv]\nbudget_mib = 7\n[log]\nformat = 'json'\n".to_vec()),
    ]
}

/// Scripts of a connection; fuzz/src/session.rs says what each byte does.
fn scripts() -> Seeds {
    let ask = |op: Op| {
        let mut header = vec![0; 16];
        header[4] = 3;
        header[8] = op as u8;
        header
    };
    vec![
        ("asks", vec![0, 0, b'e', b'c', b'h', b'o', 1, 2, 3, 4]),
        ("answer", vec![0, 6, 19, 11, 7, b'a', b' ', b'b', 0, 0, 0, 0, 0, 4]),
        ("credit", vec![0, 5, 13, 1, 40, 13, 1, 2, 3]),
        ("descriptors", vec![0, 34, 9, 54, 9, 34, 0, 1, 2, 3, 4]),
        ("ends", vec![0, 5, 18, 2]),
        ("no-hello", vec![0xff, 0x70, 1, 2, 3, 4, 18]),
        ("acts", vec![0xfe, 7, 5, 1, 34, 9, 4]),
        ("acts-for-nobody", vec![0xfe, 0xff, 0, 1, 5]),
        ("unloads", vec![0, 10, 9, 8, 9, 6, 8, 3]),
        ("headers", [vec![0, 15], ask(Op::List), vec![15], ask(Op::Cancel), vec![17, 20, 3]].concat()),
    ]
}

/// Bodies of HTTP: the first byte is the place of the path.
fn bodies() -> Seeds {
    let of = |path: &str, body: Json| {
        let place = crate::body::PATHS.iter().position(|one| *one == path).unwrap();
        [vec![place as u8], body.to_string().into_bytes()].concat()
    };
    let messages = json!([{"role": "system", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "b"}]}]);
    let function = json!({"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}});
    let schema = json!({"type": "object", "properties": {"k": {"enum": ["a", "b"]}}, "required": ["k"]});
    let chat = json!({
        "model": "m", "messages": messages, "max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "seed": 1, "stop": ["x"],
        "logprobs": true, "top_logprobs": 2, "frequency_penalty": 0.5, "logit_bias": {"3": -1}, "n": 2, "min_p": 0.1,
    });
    let stream = json!({
        "model": "m", "messages": messages, "max_tokens": 4, "stream": true, "stream_options": {"include_usage": true},
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": true}},
    });
    let called = json!([
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": null, "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{\"x\": 1}"}}]},
        {"role": "tool", "tool_call_id": "c", "content": "2"},
    ]);
    let tools = json!([{"type": "function", "function": function}]);
    let with_tools =
        json!({"model": "m", "messages": called, "tools": tools, "tool_choice": "auto", "max_tokens": 4});
    let anthropics = json!([{"name": "f", "description": "d", "input_schema": schema}]);
    let parts = json!([
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"k": "a"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "2"}]},
    ]);
    let message = json!({
        "model": "m", "max_tokens": 4, "system": "s", "messages": parts, "tools": anthropics, "tool_choice": {"type": "auto"},
        "stop_sequences": ["x"], "metadata": {"user_id": "u"}, "stream": true,
    });
    let items = json!([
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "b"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "2"},
    ]);
    let response = json!({
        "model": "m", "input": items, "instructions": "s", "max_output_tokens": 16, "store": true, "stream": true,
        "text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"},
    });
    let options = json!({"num_predict": 4, "temperature": 0, "seed": 1, "top_k": 3, "repeat_penalty": 1.1, "stop": ["x"]});
    vec![
        ("chat", of("/v1/chat/completions", chat)),
        ("chat-stream", of("/v1/chat/completions", stream)),
        ("chat-tools", of("/v1/chat/completions", with_tools)),
        (
            "completion",
            of(
                "/v1/completions",
                json!({"model": "m", "prompt": [3, 4], "max_tokens": 3, "echo": true, "logprobs": 1}),
            ),
        ),
        (
            "embeddings",
            of("/v1/embeddings", json!({"model": "m", "input": ["a", "b"], "encoding_format": "base64"})),
        ),
        (
            "rerank",
            of(
                "/v1/rerank",
                json!({"model": "m", "query": "a", "documents": ["b", {"text": "c"}], "top_n": 1}),
            ),
        ),
        ("response", of("/v1/responses", response)),
        ("message", of("/v1/messages", message)),
        (
            "count",
            of(
                "/v1/messages/count_tokens",
                json!({"model": "m", "messages": [{"role": "user", "content": "b"}]}),
            ),
        ),
        (
            "ollama-chat",
            of(
                "/api/chat",
                json!({"model": "m", "messages": [{"role": "user", "content": "b"}], "options": options, "format": schema, "keep_alive": "5m"}),
            ),
        ),
        (
            "ollama-generate",
            of(
                "/api/generate",
                json!({"model": "m", "prompt": "b", "options": options, "raw": true, "stream": false}),
            ),
        ),
        ("ollama-embed", of("/api/embed", json!({"model": "m", "input": ["a"], "truncate": true}))),
        ("ollama-embeddings", of("/api/embeddings", json!({"model": "m", "prompt": "a"}))),
        ("show", of("/api/show", json!({"model": "m", "verbose": true}))),
    ]
}

type Target = fn(&[u8], bool);

/// Inputs with their names.
type Seeds = Vec<(&'static str, Vec<u8>)>;

/// Each target of fuzz/src with its seeds.
fn targets() -> [(&'static str, Target, Seeds); 9] {
    [
        ("gguf_parse", crate::gguf_parse::gguf_parse, files()),
        ("frame_header", crate::frame::frame_header, frames()),
        ("message", crate::message::message, messages()),
        ("gguf_semantic", crate::semantic::gguf_semantic, changed_models()),
        ("tokenizer", crate::tokenizer::tokenizer, vocabularies()),
        ("chat_template", crate::rendered::chat_template, chat_templates()),
        ("config", crate::config::config, configurations()),
        ("session", crate::session::session, scripts()),
        ("http_body", crate::body::http_body, bodies()),
    ]
}

#[test]
fn the_seeds_are_what_the_forge_and_the_codec_write() {
    for (target, _, seeds) in targets() {
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

/// Runs the fuzzers' own checks on each file in the corpus.
#[test]
fn every_target_takes_its_corpus() {
    for (target, run, seeds) in targets() {
        let mut taken = 0;
        for entry in std::fs::read_dir(folder(target)).unwrap() {
            run(&std::fs::read(entry.unwrap().path()).unwrap(), false);
            taken += 1;
        }
        assert!(taken >= seeds.len(), "{target}");
        assert!(
            Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("fuzz/src/bin/{target}_planted.rs")).exists()
        );
    }
}

#[test]
fn the_corpus_of_model_files_keeps_the_parsers_promises() {
    let mut accepted = 0;
    for entry in std::fs::read_dir(folder("gguf_parse")).unwrap() {
        accepted += usize::from(crate::gguf_fields::parse(&std::fs::read(entry.unwrap().path()).unwrap()));
    }
    assert!(accepted >= files().len(), "a seed that is a good file was refused: {accepted} accepted");
}
