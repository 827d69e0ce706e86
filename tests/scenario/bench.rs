//! `rocmforge-client bench` on a real daemon: its counts add up, whatever the speed of the machine.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::{Value, json};

use crate::common;
use crate::rig::{Rig, TINY};

/// The command, built beside the daemon; `None` after [`common::skip`].
fn command(rig: &Rig, arguments: &[&str]) -> Option<Command> {
    let program = Path::new(env!("CARGO_BIN_EXE_rocmforged")).with_file_name("rocmforge-client");
    if !program.exists() {
        common::skip(&format!(
            "{} is missing; `cargo build -p rocmforge-client` makes it",
            program.display()
        ));
        return None;
    }
    let mut command = Command::new(program);
    command.arg("--socket").arg(rig.socket()).arg("bench").args(arguments);
    Some(command)
}

/// The exit code, the JSON on standard output, and standard error.
fn bench(rig: &Rig, arguments: &[&str]) -> Option<(i32, Value, String)> {
    let mut command = command(rig, arguments)?;
    let Output { status, stdout, stderr } = command.arg("--json").output().unwrap();
    let stderr = String::from_utf8(stderr).unwrap();
    let figures = serde_json::from_slice(&stdout).unwrap_or(Value::Null);
    Some((status.code().unwrap(), figures, stderr))
}

fn cpu() -> Rig {
    Rig::start_with("[device]\nbackend = 'cpu'")
}

fn count(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is no count"))
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

/// Checks relations that hold at any speed, and returns the tokens of prompts, of reused ones, and of answers.
fn checked(figures: &Value) -> (u64, u64, u64) {
    for times in ["ttft_ms", "inter_token_ms", "request_ms", "queue_ms", "sent_late_ms"] {
        let at = ["p50", "p90", "p99", "max"].map(|name| number(&figures[times][name]));
        assert!(at[0] >= 0.0 && at.windows(2).all(|two| two[0] <= two[1]), "{times}: {at:?}");
    }
    for name in ["p50", "p90", "p99", "max"] {
        let [first, whole] = ["ttft_ms", "request_ms"].map(|times| number(&figures[times][name]));
        assert!(first <= whole, "{name}: the first token after {first} ms, the last after {whole} ms");
    }
    let [gap, whole] = ["inter_token_ms", "request_ms"].map(|times| number(&figures[times]["max"]));
    assert!(gap <= whole, "{gap} ms between tokens of a request of at most {whole} ms");
    let window_s = number(&figures["window_s"]);
    assert!(number(&figures["request_ms"]["max"]) <= window_s * 1e3 + 1e-6);
    let tokens = &figures["tokens"];
    for (name, rate) in [("prompt", "prompt_per_s"), ("answer", "answer_per_s")] {
        let expected = count(&tokens[name]) as f64 / window_s;
        assert!((number(&tokens[rate]) - expected).abs() <= expected * 1e-9, "{rate}");
    }
    let (prompt, reused) = (count(&tokens["prompt"]), count(&tokens["reused"]));
    assert_eq!(number(&tokens["reused_share"]), reused as f64 / prompt as f64);
    (prompt, reused, count(&tokens["answer"]))
}

#[test]
fn clients_with_a_shared_prefix_are_counted_as_the_daemon_counts() {
    const SHARED: u64 = 64;
    const CLIENTS: u64 = 3;
    const REQUESTS: u64 = 12;
    let rig = cpu();
    let before = rig.client().status().unwrap().devices.remove(0);
    let plot = rig.dir.path().join("plot.svg");
    let arguments = [
        TINY,
        "--clients",
        "3",
        "--requests",
        "12",
        "--prompt-tokens",
        "9",
        "--answer-tokens",
        "5",
        "--shared-prefix",
        "64",
        "--seed",
        "7",
        "--plot",
        plot.to_str().unwrap(),
    ];
    let Some((code, figures, stderr)) = bench(&rig, &arguments) else { return };
    assert_eq!((code, stderr.as_str()), (0, ""));
    let shape =
        [("model", json!(TINY)), ("clients", json!(3)), ("arrivals", json!("closed")), ("seed", json!(7))];
    for (name, value) in shape {
        assert_eq!(figures[name], value, "{name}");
    }
    let requests = &figures["requests"];
    let ended = ["done", "failed", "cancelled"].map(|name| count(&requests[name]));
    assert_eq!((ended, &figures["errors"]), ([REQUESTS, 0, 0], &json!([])));
    let (prompt, reused, answer) = checked(&figures);
    assert_eq!((prompt, answer), (REQUESTS * (SHARED + 9), REQUESTS * 5));
    // All but a client's first request come after the prefix was computed, and prompts share nothing else.
    let least = SHARED * (REQUESTS - CLIENTS);
    assert!((least..=SHARED * (REQUESTS - 1)).contains(&reused), "{reused} of {prompt} tokens reused");
    let after = rig.client().status().unwrap().devices.remove(0);
    assert_eq!(after.prefill_rows - before.prefill_rows, prompt - reused);
    assert_eq!(after.reused_tokens() - before.reused_tokens(), reused);
    assert_eq!(after.sequences_done - before.sequences_done, REQUESTS);
    let picture = std::fs::read_to_string(plot).unwrap();
    assert!(
        picture.starts_with("<svg ") && picture.contains("(12 samples)") && picture.contains("(48 samples)")
    );
    rig.assert_idle();
}

#[test]
fn open_arrivals_are_all_answered_and_lengths_repeat_by_seed() {
    let rig = cpu();
    let arguments = |seed| {
        let load = ["--clients", "3", "--arrivals", "poisson:200", "--requests", "20", "--seed", seed];
        [&[TINY, "--prompt-tokens", "lognormal:20,0.7,90", "--answer-tokens", "2-9"][..], &load].concat()
    };
    let run = |seed| {
        let (code, figures, stderr) = bench(&rig, &arguments(seed))?;
        assert_eq!((code, count(&figures["requests"]["done"]), stderr.as_str()), (0, 20, ""));
        Some(checked(&figures))
    };
    let Some((prompt, reused, answer)) = run("1") else { return };
    assert_eq!(reused, 0, "prompts without a shared prefix differ from their first token on");
    assert!((20..=20 * 90).contains(&prompt) && (40..=180).contains(&answer), "{prompt}, {answer}");
    let again = run("1").unwrap();
    assert_eq!((again.0, again.2), (prompt, answer));
    assert_eq!(
        again.1,
        prompt - 20,
        "the daemon has the same prompts already, and computes their last tokens"
    );
    assert_ne!(run("2").unwrap().0, prompt);
}

/// The same load with a form and without shows the cost of masks. All clients bring the form at once, and it is compiled for all.
#[test]
fn answers_of_a_form_are_measured_like_others() {
    let rig = cpu();
    let schema = rig.dir.path().join("schema.json");
    let names: Vec<String> = (0..200).map(|i| format!("\"p{i}\": {{\"type\": \"integer\"}}")).collect();
    std::fs::write(
        &schema,
        format!(
            "{{\"type\": \"array\", \"minItems\": 9, \"items\": {{\"properties\": {{{}}}}}}}",
            names.join(",")
        ),
    )
    .unwrap();
    let load = ["--clients", "16", "--requests", "32", "--prompt-tokens", "5", "--answer-tokens", "6"];
    let form = ["--schema", schema.to_str().unwrap()];
    let Some((code, figures, stderr)) = bench(&rig, &[&[TINY][..], &load, &form].concat()) else { return };
    assert_eq!((code, stderr.as_str(), &figures["errors"]), (0, "", &json!([])), "{figures}");
    assert_eq!(figures["schema"], json!(schema.to_str().unwrap()));
    let (_, _, answer) = checked(&figures);
    assert_eq!(answer, 32 * 6, "nine items take more than six tokens");
    let wrong = bench(&rig, &[TINY, "--schema", "/nonexistent.json"]).unwrap();
    assert_eq!(wrong.0, 2, "{}", wrong.2);
}

#[test]
fn times_count_from_the_intended_arrival() {
    let rig = cpu();
    let load = ["--clients", "1", "--arrivals", "bursts:6/1", "--requests", "6"];
    let lengths = ["--prompt-tokens", "30", "--answer-tokens", "10"];
    let Some((code, figures, _)) = bench(&rig, &[&[TINY][..], &load, &lengths].concat()) else { return };
    assert_eq!(code, 0);
    checked(&figures);
    // All six arrived at once, and one client sent them one after the other: the last waited for five.
    let [whole, first, late] = ["request_ms", "ttft_ms", "sent_late_ms"].map(|times| &figures[times]);
    let window_ms = number(&figures["window_s"]) * 1e3;
    assert!((number(&whole["max"]) - window_ms).abs() < 1e-6, "{figures}");
    assert!(number(&late["max"]) >= number(&whole["p50"]), "{figures}");
    assert!(number(&first["max"]) >= number(&late["max"]), "{figures}");
}

#[test]
fn single_requests_have_a_rate_of_prompts_and_of_answers() {
    let rig = cpu();
    let before = rig.client().status().unwrap().devices.remove(0);
    let lengths = ["--prompt-tokens", "40", "--answer-tokens", "6", "--repetitions", "3"];
    let Some((code, figures, stderr)) = bench(&rig, &[&[TINY, "--single"][..], &lengths].concat()) else {
        return;
    };
    assert_eq!((code, stderr.as_str()), (0, ""));
    let tests = figures["tests"].as_array().unwrap();
    assert_eq!(tests.iter().map(|test| &test["test"]).collect::<Vec<_>>(), [&json!("pp40"), &json!("tg6")]);
    for test in tests {
        let rates: Vec<f64> = test["tokens_per_s"].as_array().unwrap().iter().map(number).collect();
        assert_eq!(rates.len(), 3);
        let [mean, deviation] = ["mean_tokens_per_s", "stddev_tokens_per_s"].map(|name| number(&test[name]));
        let between = rates.iter().any(|rate| *rate <= mean) && rates.iter().any(|rate| *rate >= mean);
        assert!(between && mean > 0.0 && deviation >= 0.0, "{test}");
    }
    let after = rig.client().status().unwrap().devices.remove(0);
    assert_eq!(after.sequences_done - before.sequences_done, 8, "one before each three");
    assert_eq!(after.prefill_rows - before.prefill_rows, 4 * 40 + 4, "nothing was reused");
    let mut text =
        command(&rig, &[TINY, "--single", "--prompt-tokens", "8", "--answer-tokens", "2"]).unwrap();
    let text = String::from_utf8(text.output().unwrap().stdout).unwrap();
    assert!(text.starts_with("MODEL  TEST  TOKENS/S\ntiny   pp8   ") && text.contains(" ± "), "{text}");
}

#[test]
fn errors_have_their_exit_codes_and_messages() {
    let rig = cpu();
    let Some((code, figures, stderr)) = bench(&rig, &["nobody"]) else { return };
    let error: Value = serde_json::from_str(&stderr).unwrap();
    assert_eq!((code, figures, &error["error"]["name"]), (4, Value::Null, &json!("ModelNotFound")));

    let (code, figures, stderr) = bench(&rig, &[TINY, "--requests", "3", "--prompt-tokens", "600"]).unwrap();
    assert_eq!((code, &figures["requests"]["failed"]), (1, &json!(3)));
    assert_eq!((&figures["errors"][0]["name"], &figures["ttft_ms"]), (&json!("PromptTooLong"), &Value::Null));
    assert!(stderr.contains("3 of 3 requests failed"), "{stderr}");

    for (arguments, part) in [
        (&["--arrivals", "poisson:-1"][..], "requests a second"),
        (&["--prompt-tokens", "9-3"], "smaller number first"),
        (&["--single", "--prompt-tokens", "3-9"], "--single needs one length"),
        (&["--single", "--clients", "2"], "cannot be used with"),
        (&["--requests", "2", "--duration", "2"], "cannot be used with"),
        (&["--duration", "0"], "not above 0"),
        (&["--clients", "0"], "not in 1..=4096"),
    ] {
        let (code, _, stderr) = bench(&rig, &[&[TINY][..], arguments].concat()).unwrap();
        assert!(code == 2 && stderr.contains(part), "{arguments:?}: {code}, {stderr}");
    }
    rig.assert_idle();
}
