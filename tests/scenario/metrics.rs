//! The metrics page, read by a parser that knows only the format.

use std::io::Write;
use std::process::{Command, Stdio};

use rocmforge_client::metrics::prometheus;
use rocmforge_client::{Client, wire};
use serde_json::Value;

use crate::rig::{Rig, TINY, answer, story};

/// The page's values, as the parser reads them.
fn parsed(page: &str) -> Result<Vec<Value>, String> {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/scenario/metrics.py");
    let mut child = Command::new("python3")
        .arg(script)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("python3 cannot be run");
    child.stdin.take().unwrap().write_all(page.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned());
    }
    Ok(serde_json::from_slice(&output.stdout).unwrap())
}

fn value(values: &[Value], name: &str, label: (&str, &str)) -> f64 {
    let name = format!("rocmforge_{name}");
    let is =
        |value: &&Value| value["name"] == name && (label.0.is_empty() || value["labels"][label.0] == label.1);
    let found: Vec<_> = values.iter().filter(is).collect();
    assert_eq!(found.len(), 1, "{name} {label:?}");
    found[0]["value"].as_f64().unwrap()
}

fn page(client: &Client) -> String {
    prometheus(&client.status().unwrap(), &client.residency().unwrap())
}

#[test]
fn a_page_of_metrics_is_read_by_another_parser() {
    let rig = Rig::start_with("[device]\nbackend = 'cpu'");
    let client = rig.client();
    let idle = parsed(&page(&client)).unwrap();
    assert_eq!(value(&idle, "requests_total", ("outcome", "done")), 0.0);
    answer(&client, &story(8)).unwrap();
    let prompt = "a prompt that is nobody's business";
    let request = wire::GenerateRequest {
        max_tokens: 3,
        ignore_eog: true,
        ..wire::GenerateRequest::new(TINY, wire::Prompt::Text(prompt.into()))
    };
    answer(&client, &request).unwrap();
    let text = page(&client);
    assert!(!text.contains("nobody"), "the page contains a prompt: {text}");
    let values = parsed(&text).unwrap();
    let of = |name: &str, label: (&str, &str)| value(&values, name, label);
    assert_eq!(of("requests_total", ("outcome", "done")), 2.0);
    assert_eq!(of("requests_total", ("outcome", "failed")), 0.0);
    let status = client.status().unwrap();
    let device = &status.devices[0];
    assert_eq!(of("tokens_total", ("kind", "generated")), device.decode_rows as f64);
    assert_eq!(of("tokens_total", ("kind", "prompt")), device.prefill_rows as f64);
    assert_eq!(of("steps_total", ("", "")), device.steps as f64);
    assert_eq!((of("models_mapped", ("", "")), of("connections", ("", ""))), (1.0, 1.0));
    assert_eq!(of("requests", ("state", "queued")), 0.0);
    assert_eq!(of("model_requests", ("model", TINY)), 0.0);
    assert!(of("uptime_seconds", ("", "")) > 0.0);
}

#[test]
fn names_of_strangers_stay_inside_their_quotes() {
    let rig = Rig::start_with("[device]\nbackend = 'cpu'");
    let client = rig.client();
    answer(&client, &story(2)).unwrap();
    let (mut status, mut residency) = (client.status().unwrap(), client.residency().unwrap());
    let name = "a\"} 1\nrocmforge_connections 9\\n\u{1b}[2J\r模";
    residency.models[0].model = name.into();
    residency.models.push(wire::ResidencyEntry { id: 77, ..residency.models[0].clone() });
    status.version = name.into();
    let values = parsed(&prometheus(&status, &residency)).unwrap();
    let shown = name.replace(['\u{1b}', '\r'], "\u{fffd}");
    let named: Vec<_> = values.iter().filter(|value| value["labels"]["model"] == shown.as_str()).collect();
    assert_eq!(named.len(), 8, "the page does not have four values of each of two models");
    assert_eq!(value(&values, "build_info", ("version", &shown)), 1.0);
    // The parser rejects broken pages.
    for broken in [
        "rocmforge_x 1\n",
        "# HELP a b\n# TYPE a gauge\na 1\na 1\n",
        "# HELP a b\n# TYPE a gauge\na{b=\"c} 1\n",
        "# HELP a b\n# TYPE a counter\na 1\n",
        "# HELP a b\n# TYPE a gauge\na NaN\n",
        "# HELP a b\n# TYPE a gauge\na 1",
    ] {
        assert!(parsed(broken).is_err(), "{broken:?}");
    }
}
