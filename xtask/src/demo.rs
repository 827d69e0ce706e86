//! `cargo xtask demo`: from nothing to a streamed answer of a real model, in one command.

use std::path::{Path, PathBuf};

use serde_json::json;

use crate::bench::model_name;
use crate::daemon::{self, Daemon};
use crate::error::{Error, Result};
use crate::{host, models};

#[derive(clap::Args)]
pub struct Args {
    /// A GGUF file instead of SmolLM2
    #[arg(long, value_name = "FILE")]
    model: Option<PathBuf>,
    /// What to ask
    #[arg(long, default_value = "What is the capital of France? Tell me two things about it.")]
    prompt: String,
    /// Most tokens of the answer
    #[arg(long, default_value_t = 128)]
    max_tokens: u32,
    /// Print one JSON object at the end; the answer is not streamed
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let step = |text: &str| eprintln!("\x1b[1m== {text}\x1b[0m");
    step("building the daemon and the client");
    let binaries = daemon::build()?;
    step("getting a model");
    let model = match &args.model {
        Some(path) => path.canonicalize().map_err(Error::at(path))?,
        None => models::ensure(models::SMOLLM2)?,
    };
    eprintln!("{}", model.display());
    step("starting rocmforged on a private socket");
    let dir = model.parent().unwrap_or(Path::new("."));
    let daemon = Daemon::start(&binaries, dir, "")?;
    eprintln!("ready after {:.0} ms", daemon.ready_after.as_secs_f64() * 1e3);
    ask(args, &daemon, &model_name(&model))?;
    step("stopping the daemon");
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
    let mut command = daemon.client();
    command.args(question).arg("--stats");
    eprintln!("\x1b[1m$ {}\x1b[0m", host::shown(&command));
    host::run(&mut command)?;
    eprintln!("\x1b[1m$ rocmforge-client status\x1b[0m");
    host::run(daemon.client().arg("status"))
}
