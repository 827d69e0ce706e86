//! Encoders through the socket: their embeddings, and what they refuse.

use rocmforge_client::wire::{
    DetokenizeRequest, EmbeddingOptions, ErrorCode, GenerateRequest, Pooling, Prompt,
};
use rocmforge_client::{Client, Connection};

use crate::forge::Value;
use crate::rig::{Rig, TINY, answer, code, collect, refusal, story};
use crate::{forge, gpu};

/// Tokens that the small encoders' texts have at most.
const CONTEXT: usize = 128;

/// A directory with the small encoders by their names.
fn rig(config: &str) -> Rig {
    let rig = Rig::idle();
    for (name, forge) in forge::encoders().into_iter().chain(forge::rankers()) {
        std::fs::write(rig.model(name), forge.build().bytes).unwrap();
        if name == "qwen3-ranker" {
            let twice = Value::string("{query} {document} {document}");
            let forge = forge.set("tokenizer.chat_template.rerank", twice);
            std::fs::write(rig.model("broken-ranker"), forge.build().bytes).unwrap();
        }
    }
    rig.configure(config);
    rig
}

fn served(config: &str) -> Rig {
    let mut rig = rig(&format!("[device]\nbackend = 'cpu'\n{config}"));
    rig.run();
    rig
}

fn request(model: &str, prompt: Prompt) -> GenerateRequest {
    GenerateRequest::new(model, prompt).with_embedding(EmbeddingOptions::default())
}

fn some_ids(seed: u32, count: usize) -> Vec<u32> {
    (0..count as u32).map(|at| 5 + (at * 37 + seed * 11) % 250).collect()
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

fn of_ids(client: &Client, model: &str, ids: &[u32]) -> Vec<f32> {
    let embedding = client.embed(&request(model, Prompt::Ids(ids.to_vec()))).unwrap();
    assert_eq!((embedding.prompt_ids.as_slice(), embedding.end.usage.generated_tokens), (ids, 0));
    embedding.values
}

#[test]
fn a_text_stands_between_the_class_and_the_separator() {
    let rig = served("");
    let client = rig.client();
    let text = "The cat, the DOG sat\u{301} on 天空!";
    let embedding = client.embed(&request("bert", Prompt::Text(text.into()))).unwrap();
    let ids = embedding.prompt_ids.clone();
    let request = DetokenizeRequest { model: "bert".into(), ids, show_special: false, ext: Vec::new() };
    let tokens = client.detokenize(&request).unwrap().text;
    assert_eq!((embedding.prompt_ids.first(), embedding.prompt_ids.last()), (Some(&2), Some(&3)));
    assert_eq!(tokens.trim_start(), "the cat , the dog sat on 天 空 !");
    assert_eq!(embedding.values, of_ids(&client, "bert", &embedding.prompt_ids));
    rig.assert_idle();
}

#[test]
fn the_file_says_which_row_is_the_embedding() {
    let rig = served("");
    let client = rig.client();
    let ids = some_ids(1, 50);
    for (model, pooling) in [
        ("bert", Pooling::Mean),
        ("bert-first", Pooling::First),
        ("bert-last", Pooling::Last),
        ("nomic-bert", Pooling::Mean),
        ("nomic-bert-parts", Pooling::First),
    ] {
        let all = [Pooling::Mean, Pooling::First, Pooling::Last].map(|pooling| {
            let options = EmbeddingOptions { pooling: Some(pooling), normalise: true };
            let request = GenerateRequest::new(model, Prompt::Ids(ids.clone())).with_embedding(options);
            (pooling, client.embed(&request).unwrap().values)
        });
        let usual = of_ids(&client, model, &ids);
        for (other, values) in all {
            assert_eq!(values == usual, other == pooling, "{model}: {other:?}");
        }
    }
    rig.assert_idle();
}

#[test]
fn texts_are_never_cut_however_small_steps_are() {
    let lengths = [1, 16, 17, 100, 127, 128];
    let alone: Vec<Vec<f32>> = {
        let rig = served("");
        let client = rig.client();
        lengths.iter().map(|length| of_ids(&client, "bert", &some_ids(2, *length))).collect()
    };
    for config in [
        "[limits]\nstep_rows = 16\nrunning = 8\n",
        "[limits]\nstep_rows = 130\nrunning = 64\n",
        "[kv]\nreuse = 'all'\n",
    ] {
        let mut rig = served(config);
        let connection = Connection::connect(&rig.options()).unwrap();
        let told = |turn: usize| {
            (0..lengths.len()).map(move |number| (number + turn) % lengths.len()).collect::<Vec<_>>()
        };
        for turn in 0..4 {
            let mut answers: Vec<_> = (0..3).map(|_| connection.generate(&story(20)).unwrap()).collect();
            let mut asked: Vec<_> = told(turn)
                .into_iter()
                .map(|number| {
                    let ids = some_ids(2, lengths[number]);
                    (number, connection.generate(&request("bert", Prompt::Ids(ids))).unwrap())
                })
                .collect();
            for (number, stream) in &mut asked {
                while stream.next_item().unwrap().is_some() {}
                let end = stream.end().unwrap();
                assert_eq!(end.embedding().unwrap(), alone[*number], "{config}: {} tokens", lengths[*number]);
                assert_eq!(end.reused_tokens(), 0, "{config}");
            }
            for answer in &mut answers {
                assert_eq!(collect(answer).unwrap().ids.len(), 20);
            }
        }
        rig.assert_serves();
        rig.assert_idle();
    }
}

#[test]
fn an_encoder_leaves_no_pages_behind() {
    let rig = served("");
    let client = rig.client();
    of_ids(&client, "bert", &some_ids(3, 100));
    rig.assert_idle();
    let device = &client.status().unwrap().devices[0];
    assert_eq!((device.kv_bytes, device.kv_cached_bytes()), (0, 0));
}

#[test]
fn answers_scores_and_long_texts_are_refused_by_name() {
    let mut rig = served("");
    let client = rig.client();
    let text = || Prompt::Text("the cat sat".into());
    for request in [
        GenerateRequest::new("bert", text()),
        GenerateRequest::new("nomic-bert", text()).with_scores(1),
        GenerateRequest::new("bert", text()).with_session("s"),
    ] {
        let error = refusal(answer(&client, &request));
        assert_eq!(error.code, ErrorCode::ModelUnsupported as u16);
        assert!(error.message.contains("is an encoder") && error.message.contains("embeddings"), "{error:?}");
    }
    let error = refusal(answer(&client, &GenerateRequest::new("qwen3-ranker", text())));
    assert_eq!(error.code, ErrorCode::ModelUnsupported as u16);
    assert!(error.message.contains("is a reranker (qwen3)"), "{error:?}");
    assert_eq!(of_ids(&client, "bert", &some_ids(4, CONTEXT)).len(), 64);
    let error = refusal(client.embed(&request("bert", Prompt::Ids(some_ids(4, CONTEXT + 1)))));
    assert_eq!(error.code, ErrorCode::PromptTooLong as u16);
    assert!(error.message.contains("129 tokens") && error.message.contains("text whole"), "{error:?}");
    let chat = client.embed(&request("bert", Prompt::Chat(Vec::new())));
    assert_eq!(code(chat), ErrorCode::NoChatTemplate as u16);
    rig.assert_serves();
    rig.assert_idle();
}

/// A small file's layers are so wide that a long text's step would take gigabytes.
#[test]
fn a_text_whose_step_has_no_room_is_refused_with_its_bytes() {
    const WIDE: u64 = 16384;
    const LONG: usize = 8000;
    let mut rig = rig("[device]\nbackend = 'cpu'\n");
    let (_, mut forge) = forge::encoders().into_iter().find(|(name, _)| *name == "bert-last").unwrap();
    forge = forge.set("bert.context_length", Value::u32(8192));
    forge = forge.set("bert.feed_forward_length", Value::u32(WIDE as u32));
    for tensor in &mut forge.tensors {
        let name = String::from_utf8_lossy(&tensor.name).into_owned();
        match name.as_str() {
            "position_embd.weight" => tensor.dims[1] = 8192,
            _ if name.ends_with("ffn_up.weight") => tensor.dims[1] = WIDE,
            _ if name.ends_with("ffn_up.bias") || name.ends_with("ffn_down.weight") => tensor.dims[0] = WIDE,
            _ => continue,
        }
        tensor.data = None;
    }
    std::fs::write(rig.model("wide"), forge.build().bytes).unwrap();
    rig.run();
    let client = rig.client();
    assert_eq!(of_ids(&client, "wide", &some_ids(6, 40)).len(), 64);
    let error = refusal(client.embed(&request("wide", Prompt::Ids(some_ids(6, LONG)))));
    assert_eq!(error.code, ErrorCode::DoesNotFit as u16, "{error:?}");
    let detail = |key: &str| {
        let entry = error.detail.iter().find(|entry| entry.key == key);
        entry
            .and_then(|entry| entry.value.parse::<u64>().ok())
            .unwrap_or_else(|| panic!("no {key}: {error:?}"))
    };
    // The values between the two products alone are f32.
    assert!(detail("need_bytes") >= LONG as u64 * WIDE * 4 && detail("most_bytes") < detail("need_bytes"));
    assert!(error.message.contains("8000 tokens") && error.message.contains("shorter text"), "{error:?}");
    rig.assert_serves();
}

/// The part of the file of another engine's answers with scores.
#[derive(serde::Deserialize)]
struct Expected {
    rankers: Vec<Ranker>,
}

#[derive(serde::Deserialize)]
struct Ranker {
    name: String,
    pairs: Vec<(String, String)>,
    ids: Vec<Vec<u32>>,
    scores: Vec<f32>,
}

#[test]
fn relevance_is_that_of_the_pair() {
    let mut rig = served("");
    let client = rig.client();
    let expected: Expected =
        serde_json::from_str(include_str!("../reference/expected/encoders.json")).unwrap();
    assert_eq!(expected.rankers.len(), 5);
    for Ranker { name, pairs, ids, scores } in &expected.rankers {
        for (((query, document), ids), score) in pairs.iter().zip(ids).zip(scores) {
            let request = GenerateRequest::new(name, Prompt::Text(query.clone())).with_document(document);
            let found = client.rank(&request).unwrap();
            assert_eq!((&found.prompt_ids, found.end.usage.generated_tokens), (ids, 0));
            // Keys and values have 11 bits here.
            assert!((found.value - score).abs() < 5e-3, "{name}: {} {score}", found.value);
        }
    }
    let broken = GenerateRequest::new("broken-ranker", Prompt::Text("the cat".into())).with_document("sat");
    let error = refusal(client.rank(&broken));
    assert_eq!(error.code, ErrorCode::TemplateFailed as u16);
    assert!(error.message.contains("{document} 2 times"), "{error:?}");
    let ask = |model: &str| GenerateRequest::new(model, Prompt::Text("the cat".into())).with_document("sat");
    for model in ["bert", TINY] {
        let error = refusal(client.rank(&ask(model)));
        assert_eq!(error.code, ErrorCode::ModelUnsupported as u16);
        assert!(error.message.contains("no classifier"), "{error:?}");
    }
    let ranker = "bert-ranker";
    for request in [
        ask(ranker).with_embedding(EmbeddingOptions::default()),
        ask(ranker).with_session("s"),
        ask(ranker).with_scores(1),
        ask(ranker).with_context_shift(1),
        GenerateRequest::new(ranker, Prompt::Ids(vec![5])).with_document("sat"),
    ] {
        assert_eq!(code(client.rank(&request)), ErrorCode::InvalidArgument as u16);
    }
    let long = client.rank(&ask(ranker).with_document(&"cat ".repeat(CONTEXT)));
    assert_eq!(code(long), ErrorCode::PromptTooLong as u16);
    assert_eq!(of_ids(&client, ranker, &some_ids(7, 9)).len(), 64, "it embeds too");
    rig.assert_serves();
    rig.assert_idle();
}

#[test]
fn a_gpu_gives_the_embeddings_of_the_cpu() {
    let Some(library) = gpu::library() else { return };
    let on_cpu = served("");
    let mut rig = rig("[device]\nbackend = 'hip'\n");
    let mut command = rig.command();
    command.env("ROCMFORGE_HIP_LIB", library);
    rig.spawn(&mut command);
    for (model, _) in forge::encoders().into_iter().chain(forge::rankers()) {
        // Few rows, many, and more than a tile; two at a time.
        for count in [1, 2, 7, 33, 128] {
            let ids = some_ids(5, count);
            let connection = Connection::connect(&rig.options()).unwrap();
            let beside = some_ids(6, 60);
            let mut other = connection.generate(&request(model, Prompt::Ids(beside.clone()))).unwrap();
            let (gpu, cpu) = (of_ids(&rig.client(), model, &ids), of_ids(&on_cpu.client(), model, &ids));
            assert!(cosine(&gpu, &cpu) > 0.9999, "{model}: {count} tokens");
            while other.next_item().unwrap().is_some() {}
            let second = of_ids(&on_cpu.client(), model, &beside);
            assert!(cosine(&other.end().unwrap().embedding().unwrap(), &second) > 0.9999, "{model}");
        }
    }
    rig.assert_idle();
}
