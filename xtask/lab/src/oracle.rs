//! `cargo xtask oracle`: makes the expected answers of tests/reference again, with another engine.
//!
//! A separate Python environment below the target directory holds the engine (llama.cpp, prebuilt) and the
//! independent GGUF reader, at fixed versions. tests/reference/oracle.py does the work and uses none of our code.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use rocmforge_test_support::forge;
use xtask::error::{Error, Result};
use xtask::{host, models, python};

/// Packages of the environment. The expected files name the first two.
const PACKAGES: [&str; 3] = [python::LLAMA_CPP, python::GGUF, "numpy"];

#[derive(clap::Args)]
pub struct Args {
    /// Write here instead of to tests/reference/expected, to compare
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Only this model, or only the small random decoders, the newer ones, or the encoders. Qwen and Gemma take long and run only if named
    #[arg(long, value_name = "NAME", value_parser = ["tinystories", "smollm2", "decoders", "newer", "encoders", models::QWEN, models::GEMMA])]
    only: Option<String>,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let out = args.out.clone().unwrap_or_else(|| host::root().join("tests/reference/expected"));
    let work = work_dir();
    fs::create_dir_all(&work).map_err(Error::at(&work))?;
    let wanted = |name: &str| args.only.as_deref().is_none_or(|only| only == name);
    let mut inputs = Vec::new();
    if wanted("tinystories") {
        let kept = host::root().join("tests/models/tinystories-260k-f32.gguf");
        inputs.push(format!("tinystories={}", kept.display()));
    }
    if wanted("smollm2") {
        inputs.push(format!("smollm2={}", models::ensure(models::SMOLLM2)?.display()));
    }
    for name in [models::QWEN, models::GEMMA] {
        if args.only.as_deref() == Some(name) {
            inputs.push(format!("{name}={}", models::ensure(name)?.display()));
        }
    }
    let python = environment()?;
    let script = host::root().join("tests/reference/oracle.py");
    if !inputs.is_empty() {
        host::run(Command::new(&python).arg(&script).arg(&out).arg(&work).args(inputs))?;
    }
    for (list, made) in [("decoders", forge::decoders()), ("newer", forge::newer_decoders())] {
        if wanted(list) {
            let inputs = write_decoders(&work, made)?;
            let mut command = Command::new(&python);
            command.arg(&script).args(["--decoders", list]).arg(&out).arg(&work).args(inputs);
            host::run(&mut command)?;
        }
    }
    if wanted("encoders") {
        let made = forge::encoders().into_iter().chain(forge::rankers()).collect();
        let inputs = write_decoders(&work, made)?;
        host::run(Command::new(&python).arg(&script).arg("--encoders").arg(&out).arg(&work).args(inputs))?;
    }
    Ok(())
}

/// Writes the files of small random decoders, byte for byte as the tests make them.
fn write_decoders(work: &Path, made: Vec<(&str, forge::Forge)>) -> Result<Vec<String>> {
    let mut inputs = Vec::new();
    for (name, forge) in made {
        let path = work.join(name).with_extension("gguf");
        fs::write(&path, forge.build().bytes).map_err(Error::at(&path))?;
        inputs.push(format!("{name}={}", path.display()));
    }
    Ok(inputs)
}

fn work_dir() -> PathBuf {
    host::target_dir().join("oracle")
}

/// Path of Python in the other engine's environment.
///
/// # Errors
/// As [`python::environment`].
pub fn environment() -> Result<PathBuf> {
    python::environment(&work_dir().join("venv"), &PACKAGES)
}
