//! Embeddings of prompts, through the socket.

use std::path::Path;
use std::process::Command;

use rocmforge_client::wire::{EmbeddingOptions, ErrorCode, GenerateRequest, Pooling, Prompt};
use rocmforge_client::{Client, Connection, Options};

use crate::common;
use crate::gpu;
use crate::rig::{Rig, TINY, answer, code, collect};

const RAW: EmbeddingOptions = EmbeddingOptions { pooling: Some(Pooling::Mean), normalise: false };

fn request(prompt: Prompt, options: EmbeddingOptions) -> GenerateRequest {
    GenerateRequest::new(TINY, prompt).with_embedding(options)
}

fn values(client: &Client, ids: &[u32], options: EmbeddingOptions) -> Vec<f32> {
    let embedding = client.embed(&request(Prompt::Ids(ids.to_vec()), options)).unwrap();
    assert_eq!(embedding.prompt_ids, ids);
    assert_eq!((embedding.end.usage.generated_tokens, embedding.end.text.as_str()), (0, ""));
    embedding.values
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

fn some_ids(count: usize) -> Vec<u32> {
    (0..count as u32).map(|at| 3 + at * 7 % 500).collect()
}

#[test]
fn a_mean_is_that_of_the_last_rows_of_all_beginnings() {
    let rig = Rig::start();
    let client = rig.client();
    let ids = some_ids(40);
    let mut sum = vec![0f64; 64];
    for end in 1..=ids.len() {
        let last =
            values(&client, &ids[..end], EmbeddingOptions { pooling: Some(Pooling::Last), normalise: false });
        assert_eq!(last.len(), sum.len());
        sum.iter_mut().zip(&last).for_each(|(sum, x)| *sum += f64::from(*x));
    }
    let mean = values(&client, &ids, RAW);
    for (sum, x) in sum.iter().zip(&mean) {
        assert!((sum / 40.0 - f64::from(*x)).abs() < 1e-2, "{sum} {x}");
    }
    let length = |values: &[f32]| values.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
    let normal = values(&client, &ids, EmbeddingOptions { normalise: true, ..RAW });
    assert!((length(&normal) - 1.0).abs() < 1e-5 && length(&mean) > 1.5);
    assert!(cosine(&normal, &mean) > 0.999_999);
    // The file states no pooling.
    let last = EmbeddingOptions { pooling: Some(Pooling::Last), normalise: true };
    assert_eq!(values(&client, &ids, EmbeddingOptions::default()), values(&client, &ids, last));
    assert!(cosine(&values(&client, &ids, last), &mean) < 0.99);
    rig.assert_idle();
}

/// The file that `tests/reference/make_embeddings.py` wrote.
#[derive(serde::Deserialize)]
struct Expected {
    texts: Vec<String>,
    mean: Vec<Vec<f32>>,
    last: Vec<Vec<f32>>,
}

#[test]
fn embeddings_are_those_of_llama_cpp() {
    let expected = include_str!("../reference/expected/embeddings.json");
    let expected: Expected = serde_json::from_str(expected).unwrap();
    let rig = Rig::start();
    let client = rig.client();
    assert_eq!(expected.texts.len(), 5);
    for (pooling, all) in [(Pooling::Mean, &expected.mean), (Pooling::Last, &expected.last)] {
        assert_eq!(all.len(), expected.texts.len());
        for (text, want) in expected.texts.iter().zip(all) {
            let options = EmbeddingOptions { pooling: Some(pooling), normalise: true };
            let got = client.embed(&request(Prompt::Text(text.clone()), options)).unwrap().values;
            let off = got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
            assert_eq!(got.len(), want.len());
            // Keys and values have 11 bits here. A wrong norm or another row is off by 0.1.
            assert!(1.0 - cosine(&got, want) < 1e-4 && off < 5e-3, "{pooling:?} of {text:?}: off by {off}");
        }
    }
}

#[test]
fn embeddings_are_the_same_beside_answers_in_small_steps_and_after_a_known_prefix() {
    let ids = some_ids(300);
    let mut alone: Vec<Vec<f32>> = Vec::new();
    for running in [1, 2, 64] {
        let mut rig = Rig::start_with(&format!(
            "[device]\nbackend = 'cpu'\n[limits]\nrunning = {running}\ncontext_tokens = 512\n"
        ));
        let client = rig.client();
        let poolings = [Pooling::Mean, Pooling::Last]
            .map(|pooling| EmbeddingOptions { pooling: Some(pooling), normalise: false });
        if alone.is_empty() {
            alone = poolings.iter().map(|options| values(&client, &ids, *options)).collect();
        }
        // An answer leaves pages of the same tokens, of which a mean can take none.
        answer(
            &client,
            &GenerateRequest { max_tokens: 1, ..GenerateRequest::new(TINY, Prompt::Ids(ids.clone())) },
        )
        .unwrap();
        let connection = Connection::connect(&rig.options()).unwrap();
        let mut wanted: Vec<_> = (0..6)
            .map(|i| connection.generate(&request(Prompt::Ids(ids.clone()), poolings[i % 2])).unwrap())
            .collect();
        let mut others: Vec<_> = (0..4)
            .map(|i| {
                let request = GenerateRequest::new(TINY, Prompt::Ids(ids[i..i + 150].to_vec()));
                let request = GenerateRequest { max_tokens: 20, ignore_eog: true, ..request };
                connection.generate(&request.with_priority(200)).unwrap()
            })
            .collect();
        for other in &mut others {
            assert_eq!(collect(other).unwrap().ids.len(), 20);
        }
        for (number, stream) in wanted.iter_mut().enumerate() {
            while stream.next_item().unwrap().is_some() {}
            let got = stream.end().unwrap().embedding().unwrap();
            let same = cosine(&got, &alone[number % 2]);
            assert!(same > 0.999_99, "{running} running, number {number}: cosine {same}");
            let reused = stream.end().unwrap().reused_tokens();
            assert!(number % 2 == 1 || reused == 0, "the mean lacks {reused} rows");
        }
        rig.assert_serves();
    }
}

#[test]
fn embeddings_on_a_gpu_are_those_of_the_cpu() {
    let Some(library) = gpu::library() else { return };
    let on_cpu = Rig::start();
    let mut rig = Rig::idle();
    rig.configure("[device]\nbackend = 'hip'\n");
    let mut command = rig.command();
    command.env("ROCMFORGE_HIP_LIB", library);
    std::fs::copy(common::tinystories(), rig.model(TINY)).unwrap();
    rig.spawn(&mut command);
    for pooling in [Pooling::Mean, Pooling::Last] {
        let options = EmbeddingOptions { pooling: Some(pooling), normalise: true };
        // Few rows, many, and more than a tile.
        for count in [1, 2, 33, 300] {
            let ids = some_ids(count);
            let (gpu, cpu) = (values(&rig.client(), &ids, options), values(&on_cpu.client(), &ids, options));
            let same = cosine(&gpu, &cpu);
            assert!(same > 0.9999, "{pooling:?} of {count} tokens: cosine {same}");
        }
    }
    rig.assert_idle();
}

#[test]
fn an_embedding_of_a_session_or_of_no_text_is_refused() {
    let rig = Rig::start();
    let client = rig.client();
    let text = || Prompt::Text("Once upon a time".into());
    let refused = |request: &GenerateRequest| code(client.embed(request).map(|_| ()));
    for with in [
        request(text(), RAW).with_session("s"),
        request(text(), RAW).with_scores(1),
        request(text(), RAW).with_context_shift(4),
    ] {
        assert_eq!(refused(&with), ErrorCode::InvalidArgument as u16);
    }
    let empty = request(Prompt::Ids(Vec::new()), RAW);
    assert_eq!(refused(&empty), ErrorCode::EmptyPrompt as u16);
    let long = request(Prompt::Ids(some_ids(5000)), RAW);
    assert_eq!(refused(&long), ErrorCode::PromptTooLong as u16);
    rig.assert_idle();
}

#[test]
fn the_command_prints_a_line_for_each_text() {
    let rig = Rig::start();
    let Options { socket, .. } = rig.options();
    let program = Path::new(env!("CARGO_BIN_EXE_rocmforged")).with_file_name("rocmforge-client");
    if !program.exists() {
        common::skip(&format!(
            "{} is missing; `cargo build -p rocmforge-client` makes it",
            program.display()
        ));
        return;
    }
    let run = |arguments: &[&str]| {
        let mut command = Command::new(&program);
        let output = command.arg("--socket").arg(&socket).args(arguments).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let lines = run(&["embed", TINY, "--pooling", "mean", "Once upon", "a time"]);
    let numbers: Vec<Vec<f32>> =
        lines.lines().map(|line| line.split(' ').map(|x| x.parse().unwrap()).collect()).collect();
    assert_eq!(numbers.iter().map(Vec::len).collect::<Vec<_>>(), [64, 64]);
    let normal = EmbeddingOptions { normalise: true, ..RAW };
    let direct = rig.client().embed(&request(Prompt::Text("a time".into()), normal)).unwrap();
    assert_eq!(numbers[1], direct.values);
    let json: serde_json::Value =
        serde_json::from_str(&run(&["--json", "embed", TINY, "a time", "--raw"])).unwrap();
    assert_eq!(json["texts"][0]["embedding"].as_array().unwrap().len(), 64);
    assert_eq!(json["texts"][0]["prompt_tokens"], direct.end.usage.prompt_tokens);
}
