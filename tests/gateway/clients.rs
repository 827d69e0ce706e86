//! Frameworks and further packages that people use: they know nothing of this project.
//!
//! `ROCMFORGE_LONG=1` installs and runs them, which takes minutes.

use std::path::{Path, PathBuf};
use std::process::Command;

use rocmforge_client::wire::{ChatMessage, GenerateRequest, Prompt};

use crate::common;
use crate::door::{CHATTY, Door};
use crate::packages::{installed, python, works};
use crate::rig::collect;
use crate::routers::{KEY, Routed, Site, assert_none_lost};

/// True if the packages shall be installed; otherwise the test says that it does not run.
fn is_long() -> bool {
    let long = std::env::var_os("ROCMFORGE_LONG").is_some_and(|value| value == "1");
    if !long {
        common::not_run("ROCMFORGE_LONG=1 installs the packages");
    }
    long
}

/// Runs a script before a gateway: it gets the address, the model, and the text that the daemon answers. Returns name and version
/// of each package that it used, joined as its installer wants them.
#[track_caller]
pub fn run(program: &Path, script: &Path, join: &str) -> Vec<String> {
    let door = Door::open();
    let messages = vec![ChatMessage { role: "user".into(), content: "ab".into() }];
    let request = GenerateRequest { max_tokens: 8, ..GenerateRequest::new(CHATTY, Prompt::Chat(messages)) };
    let text = collect(&mut door.rig.client().generate(&request).unwrap()).unwrap().text;
    // The forged model's answer holds a NUL, which no argument may have.
    let text = serde_json::to_string(&text).unwrap();
    let base = format!("http://{}", door.address);
    let output =
        Command::new(program).arg(script).args([base.as_str(), CHATTY, text.as_str()]).output().unwrap();
    let (told, complaint) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{told}{complaint}");
    door.rig.assert_idle();
    told.lines().map(|line| line.replace(' ', join)).collect()
}

fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/gateway/clients").join(name)
}

/// Runs the script of a Python package.
#[track_caller]
fn with_python(name: &str, packages: &[&str]) {
    if !is_long() {
        return;
    }
    let Some(python) = python(&format!("gateway-{name}"), packages) else { return };
    let used = run(&python, &script(&format!("ask_{name}.py")), "==");
    assert_eq!(used, packages);
}

#[test]
fn aider_edits_a_file() {
    with_python("aider", &["aider-chat==0.86.2"]);
}

#[test]
fn langchain_chats_calls_tools_and_embeds() {
    with_python("langchain", &["langchain-openai==1.7.4"]);
}

#[test]
fn agents_call_tools_and_keep_to_forms() {
    with_python("agents", &["openai-agents==0.24.0", "pydantic-ai-slim[openai,anthropic]==2.68.0"]);
}

#[test]
fn litellm_speaks_all_three_apis() {
    with_python("litellm", &["litellm==1.110.2"]);
}

#[test]
fn litellms_proxy_spreads_requests_and_repeats_those_that_no_gateway_has_begun() {
    if !is_long() {
        return;
    }
    // Its newer versions ask for a distribution of the proxy that no registry has.
    let Some(python) = python("gateway-litellm-proxy", &["litellm[proxy]==1.106.12"]) else { return };
    let changes = |sites: &[Site; 2], _: &str| {
        vec![
            ("openai/smollm2-135m-instruct-q4_1".to_owned(), format!("openai/{CHATTY}")),
            ("http://127.0.0.1:11435".to_owned(), format!("http://{}", sites[0].address)),
            ("http://127.0.0.2:11435".to_owned(), format!("http://{}", sites[1].address)),
        ]
    };
    let mut routed = Routed::start("litellm.yaml", ["chat", "chat"], changes, |file, address| {
        let (host, port) = address.rsplit_once(':').unwrap();
        let mut command = Command::new(python.with_file_name("litellm"));
        command.arg("--config").arg(file).args(["--host", host, "--port", port]);
        // Otherwise it downloads prices.
        command.env("LITELLM_LOCAL_MODEL_COST_MAP", "True");
        command.env("LITELLM_MASTER_KEY", KEY).env("ROCMFORGE_TOKEN", "unused");
        command
    });
    // It reads ahead of its clients, so answers that had begun may be whole in its memory.
    assert_none_lost(&routed.a_daemon_is_killed());
}

#[test]
fn llama_index_chats_calls_tools_and_embeds() {
    with_python(
        "llama_index",
        &["llama-index-llms-openai-like==0.8.1", "llama-index-embeddings-openai-like==0.4.0"],
    );
}

#[test]
fn node_packages_get_the_daemons_answers_and_its_errors() {
    const PACKAGES: [&str; 2] = ["openai@6.49.0", "@anthropic-ai/sdk@1.14.0"];
    if !is_long() {
        return;
    }
    let needs = "they need node 20 or later with npm, and a package registry";
    let directory = installed("gateway-node", &PACKAGES, needs, |directory| {
        let install = ["install", "--silent", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix"];
        std::fs::write(directory.join("package.json"), "{\"private\": true}").is_ok()
            && works(Command::new("npm").args(install).arg(directory).args(PACKAGES))
    });
    let Some(directory) = directory else { return };
    // Node looks for packages beside the script.
    let beside = directory.join("ask_node.mjs");
    std::fs::copy(script("ask_node.mjs"), &beside).unwrap();
    let used = run(Path::new("node"), &beside, "@");
    assert_eq!(used, PACKAGES);
}

#[test]
fn the_tests_of_llama_cpps_server_pass_or_are_known() {
    if !is_long() {
        return;
    }
    let packages = [
        "cmake==4.4.5",
        "filelock==4.3.1",
        "gguf==0.19.0",
        "ninja==1.13.2",
        "openai==2.14.0",
        "pytest==9.2.0",
        "requests==2.34.2",
        "scikit-build-core==1.1.2",
        "wget==3.2",
    ];
    let Some(python) = python("gateway-llama-server", &packages) else { return };
    assert!(works(Command::new(env!("CARGO")).args(["build", "--package", "rocmforge-gateway"])));
    let programs = Path::new(env!("CARGO_BIN_EXE_rocmforged")).parent().unwrap();
    let mut run = Command::new(python);
    run.arg(script("llama_server/run.py")).arg(programs).arg(common::tinystories());
    let output = run.output().unwrap();
    let (told, complaint) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{told}{complaint}");
    println!("{}", told.lines().last().unwrap_or_default());
}
