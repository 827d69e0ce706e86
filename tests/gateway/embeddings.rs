//! Embeddings, in the APIs of OpenAI and Ollama.

use rocmforge_client::wire::{EmbeddingOptions, GenerateRequest, Prompt};
use rocmforge_gateway::Settings;
use serde_json::{Value, json};

use crate::door::Door;
use crate::forge;
use crate::rig::{Rig, TINY};

const TEXTS: [&str; 3] = ["Once upon a time", "there was a little girl", "The dog sat."];

fn direct(door: &Door, prompt: Prompt, normalise: bool) -> Vec<f32> {
    let options = EmbeddingOptions { pooling: None, normalise };
    door.rig.client().embed(&GenerateRequest::new(TINY, prompt).with_embedding(options)).unwrap().values
}

fn numbers(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect()
}

/// The bytes of base64 text.
fn unpacked(text: &str) -> Vec<f32> {
    const ALPHABET: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let digit = |byte: &u8| ALPHABET.iter().position(|of| of == byte).unwrap() as u32;
    let digits: Vec<u32> = text.trim_end_matches('=').as_bytes().iter().map(digit).collect();
    let bits = digits.iter().flat_map(|digit| (0..6).rev().map(move |bit| (digit >> bit & 1) as u8));
    let bits: Vec<u8> = bits.collect();
    let bytes: Vec<u8> =
        bits.chunks_exact(8).map(|bits| bits.iter().fold(0, |all, bit| all << 1 | bit)).collect();
    bytes.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
}

#[test]
fn openais_embeddings_are_the_daemons() {
    let door = Door::open();
    let whole = door.post("/v1/embeddings", &json!({"model": TINY, "input": TEXTS, "user": "u"})).json();
    assert_eq!((&whole["object"], &whole["model"]), (&json!("list"), &json!(TINY)));
    let mut tokens = 0;
    for (index, text) in TEXTS.iter().enumerate() {
        let entry = &whole["data"][index];
        assert_eq!((&entry["object"], &entry["index"]), (&json!("embedding"), &json!(index)));
        assert_eq!(numbers(&entry["embedding"]), direct(&door, Prompt::Text((*text).into()), true));
        let ids = door
            .rig
            .client()
            .embed(&GenerateRequest::new(TINY, Prompt::Text((*text).into())))
            .unwrap()
            .prompt_ids;
        tokens += ids.len();
        let by_ids = door.post("/v1/embeddings", &json!({"model": TINY, "input": ids})).json();
        assert_eq!(by_ids["data"][0]["embedding"], entry["embedding"]);
        let lists = door.post("/v1/embeddings", &json!({"model": TINY, "input": [ids, ids]})).json();
        assert_eq!(lists["data"][1]["embedding"], entry["embedding"]);
    }
    assert_eq!(whole["usage"], json!({"prompt_tokens": tokens, "total_tokens": tokens}));
    let packed = json!({"model": TINY, "input": TEXTS[0], "encoding_format": "base64"});
    let packed = door.post("/v1/embeddings", &packed).json();
    assert_eq!(
        unpacked(packed["data"][0]["embedding"].as_str().unwrap()),
        numbers(&whole["data"][0]["embedding"])
    );
    // Shortened ones have length 1 again.
    let short =
        door.post("/v1/embeddings", &json!({"model": TINY, "input": TEXTS[0], "dimensions": 8})).json();
    let (short, long) = (numbers(&short["data"][0]["embedding"]), numbers(&whole["data"][0]["embedding"]));
    let length = long[..8].iter().map(|x| x * x).sum::<f32>().sqrt();
    assert_eq!(short.len(), 8);
    short.iter().zip(&long).for_each(|(a, b)| assert!((a - b / length).abs() < 1e-5));
    door.rig.assert_idle();
}

#[test]
fn ollamas_embeddings_are_the_daemons() {
    let door = Door::open();
    let model = format!("{TINY}:latest");
    let body = json!({"model": model, "input": TEXTS, "truncate": true, "options": {"num_ctx": 64}, "keep_alive": "5m"});
    let whole = door.post("/api/embed", &body).json();
    assert_eq!(whole["model"], TINY);
    assert!(
        whole["prompt_eval_count"].as_u64().unwrap() > 6 && whole["total_duration"].as_u64().unwrap() > 0
    );
    for (index, text) in TEXTS.iter().enumerate() {
        assert_eq!(numbers(&whole["embeddings"][index]), direct(&door, Prompt::Text((*text).into()), true));
    }
    let old = door.post("/api/embeddings", &json!({"model": model, "prompt": TEXTS[0]})).json();
    assert_eq!(numbers(&old["embedding"]), direct(&door, Prompt::Text(TEXTS[0].into()), false));
}

#[test]
fn an_encoder_answers_in_both_apis_and_refuses_to_chat() {
    let mut rig = Rig::idle();
    for (name, forge) in forge::encoders() {
        std::fs::write(rig.model(name), forge.build().bytes).unwrap();
    }
    rig.configure("[device]\nbackend = 'cpu'\n");
    rig.run();
    let door = Door::before(rig, "127.0.0.1:0", None, Settings::default());
    let texts = ["the cat sat", "on the mat."];
    for model in ["bert", "nomic-bert"] {
        let openai = door.post("/v1/embeddings", &json!({"model": model, "input": texts})).json();
        let ollama = door.post("/api/embed", &json!({"model": model, "input": texts})).json();
        for (index, text) in texts.iter().enumerate() {
            let request = GenerateRequest::new(model, Prompt::Text((*text).into()));
            let want = door.rig.client().embed(&request).unwrap().values;
            assert_eq!(numbers(&openai["data"][index]["embedding"]), want);
            assert_eq!(numbers(&ollama["embeddings"][index]), want);
        }
        let shown = door.post("/api/show", &json!({"model": model})).json();
        assert_eq!(shown["capabilities"], json!(["embedding"]));
        let refused = door.post("/v1/completions", &json!({"model": model, "prompt": "the cat"}));
        let message = refused.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!((400..500).contains(&refused.status) && message.contains("is an encoder"), "{message}");
    }
    door.rig.assert_idle();
}

#[test]
fn documents_are_ranked_by_their_relevance() {
    let mut rig = Rig::idle();
    for (name, forge) in forge::rankers() {
        std::fs::write(rig.model(name), forge.build().bytes).unwrap();
    }
    rig.configure("[device]\nbackend = 'cpu'\n");
    rig.run();
    let door = Door::before(rig, "127.0.0.1:0", None, Settings::default());
    let (query, documents) = ("the cat", ["the cat sat on the mat.", "the sky", "x y z", "the cat"]);
    let direct = |document: &str| {
        let request = GenerateRequest::new("bert-ranker", Prompt::Text(query.into())).with_document(document);
        let found = door.rig.client().rank(&request).unwrap();
        (found.value, found.prompt_ids.len())
    };
    let mut want: Vec<_> = documents.iter().map(|document| direct(document).0).enumerate().collect();
    want.sort_by(|one, other| other.1.total_cmp(&one.1));
    let tokens: usize = documents.iter().map(|document| direct(document).1).sum();
    let body = |more: Value| {
        let mut body = json!({"model": "bert-ranker", "query": query, "documents": documents});
        more.as_object().unwrap().iter().for_each(|(key, value)| body[key] = value.clone());
        body
    };
    for path in ["/v1/rerank", "/rerank", "/v1/reranking", "/reranking"] {
        let all = door.post(path, &body(json!({"user": "u"}))).json();
        assert_eq!((&all["model"], &all["object"]), (&json!("bert-ranker"), &json!("list")));
        assert_eq!(all["usage"], json!({"prompt_tokens": tokens, "total_tokens": tokens}));
        let results = all["results"].as_array().unwrap();
        assert_eq!(results.len(), documents.len());
        for (result, (index, value)) in results.iter().zip(&want) {
            assert_eq!(result["index"], *index);
            assert_eq!(result["relevance_score"].as_f64().unwrap() as f32, *value);
            assert_eq!(result.get("document"), None);
        }
    }
    let objects: Vec<Value> = documents.iter().map(|text| json!({"text": text})).collect();
    let two = json!({"top_n": 2, "return_documents": true, "documents": objects});
    let two = door.post("/v1/rerank", &body(two)).json();
    assert_eq!(two["results"].as_array().unwrap().len(), 2);
    assert_eq!(two["results"][0]["document"]["text"], documents[want[0].0]);
    for (more, field) in [
        (json!({"documents": []}), "documents"),
        (json!({"documents": [7]}), "documents[0]"),
        (json!({"documents": ["a", {"title": "b"}]}), "documents[1].text"),
        (json!({"query": null}), "query"),
        (json!({"top_n": 0}), "top_n"),
        (json!({"max_chunks_per_doc": 3}), "max_chunks_per_doc"),
        (json!({"model": "tiny"}), "classifier"),
    ] {
        let refused = door.post("/v1/rerank", &body(more));
        let message = refused.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!((400..500).contains(&refused.status) && message.contains(field), "{field}: {message}");
    }
    door.rig.assert_idle();
}

#[test]
fn embeddings_that_cannot_be_are_refused_by_the_field() {
    let door = Door::open();
    let refused = |body: Value, field: &str| {
        let response = door.post("/v1/embeddings", &body);
        assert_eq!(response.status, 400, "{body}");
        let message = response.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.contains(field), "{message}");
    };
    refused(json!({"model": TINY}), "input");
    refused(json!({"model": TINY, "input": []}), "input");
    refused(json!({"model": TINY, "input": {"a": 1}}), "input");
    refused(json!({"model": TINY, "input": [["a"]]}), "input");
    refused(json!({"model": TINY, "input": vec!["a"; 2049]}), "input");
    refused(json!({"model": TINY, "input": "a", "dimensions": 65}), "dimensions");
    refused(json!({"model": TINY, "input": "a", "dimensions": 0}), "dimensions");
    refused(json!({"model": TINY, "input": "a", "encoding_format": "hex"}), "encoding_format");
    refused(json!({"model": TINY, "input": "a", "pooling": "mean"}), "pooling");
    refused(json!({"model": TINY, "input": "dog ".repeat(4000)}), "tokens");
    assert_eq!(door.post("/v1/embeddings", &json!({"model": "none", "input": "a"})).status, 404);
    door.rig.assert_idle();
}
