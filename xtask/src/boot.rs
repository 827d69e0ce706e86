//! `cargo xtask boot`: tests the Debian package under a real systemd, in a temporary container.
//!
//! `tests/boot/container` boots a small Debian. There, `tests/boot/inside.py` installs the package and does what
//! administrators do: socket activation, reload, kills, restarts under load, a hung daemon, drain, upgrade, purge.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::{Error, Result};
use crate::host::{self, Programs};
use crate::lab;
use crate::lookalike::{self, Variant};
use crate::release::deb;

pub const MODEL: &str = "tinystories-260k-f32.gguf";

#[derive(clap::Args)]
pub struct Args {
    /// How often to kill the daemon while eight clients send requests
    #[arg(long, default_value_t = 10)]
    kills: u32,
    /// How often to restart it while eight clients send requests
    #[arg(long, default_value_t = 20)]
    restarts: u32,
    /// Run only these scenarios, after the installation
    #[arg(long, num_args = 1..)]
    only: Vec<String>,
    /// Debian release to boot instead of this machine's own, to test another version of systemd
    #[arg(long)]
    suite: Option<String>,
    /// Most seconds that a client may wait for an answer meanwhile; use 1 on an idle machine
    #[arg(long, default_value_t = 5.0)]
    gap: f64,
    /// Time limit in seconds for boot and scenarios together
    #[arg(long, default_value_t = 600)]
    timeout: u32,
}

impl Default for Args {
    fn default() -> Self {
        Self { kills: 10, restarts: 20, only: Vec::new(), suite: None, gap: 5.0, timeout: 600 }
    }
}

/// Builds the package from release programs and runs the scenarios.
///
/// # Errors
/// An error of the build; [`Error::Command`] if a scenario failed.
pub fn run(args: &Args) -> Result<()> {
    run_with(args, Programs::Release)
}

/// As [`run`], with a package of these programs.
///
/// # Errors
/// As [`run`].
pub fn run_with(args: &Args, programs: Programs) -> Result<()> {
    let mut command = container()?;
    let files = stage(programs)?;
    command
        .args(["--timeout", &args.timeout.to_string()])
        .args(args.suite.iter().flat_map(|suite| ["--suite", suite]))
        .arg(&files)
        .args(["python3", "/opt/boot/inside.py"])
        .args(["--kills", &args.kills.to_string(), "--restarts", &args.restarts.to_string()])
        .args(["--gap", &args.gap.to_string()]);
    if !args.only.is_empty() {
        command.arg("--only").args(&args.only);
    }
    host::run(&mut command)
}

/// Makes sure that the container's root is there.
///
/// # Errors
/// [`Error::Root`], [`Error::Command`].
pub fn prepare() -> Result<()> {
    host::run(container()?.arg("--prepare"))
}

fn container() -> Result<Command> {
    if !host::is_root() {
        return Err(Error::Root { what: "a container with its own systemd" });
    }
    Ok(Command::new(host::root().join("tests/boot/container")))
}

/// Prepares the files that are laid over the container's root: the package, the scenarios, a model.
fn stage(programs: Programs) -> Result<PathBuf> {
    let files = host::target_dir().join("boot");
    let folder = files.join("opt/boot");
    fs::create_dir_all(&folder).map_err(Error::io(folder.display().to_string()))?;
    package(&folder.join("rocmforge.deb"), programs)?;
    for (from, to) in [
        (host::root().join("tests/boot/inside.py"), "inside.py"),
        (host::root().join("tests/boot/steps.py"), "steps.py"),
        (host::root().join("tests/boot/gateway.py"), "gateway.py"),
        (host::root().join("tests/boot/probe.py"), "probe.py"),
        (host::root().join("README.md"), "README.md"),
        (host::root().join("tests/models").join(MODEL), MODEL),
    ] {
        fs::copy(&from, folder.join(to)).map_err(Error::io(from.display().to_string()))?;
    }
    // If no compiler for the look-alike exists, its scenario reports that.
    let copy = folder.join("libamdhip64.so");
    match lookalike::build(Variant::Wave32) {
        Ok(library) => {
            fs::copy(&library, &copy).map_err(Error::io(library.display().to_string()))?;
        }
        Err(Error::ToolMissing { .. }) => {
            let _ = fs::remove_file(&copy); // it may not exist
        }
        Err(error) => return Err(error),
    }
    Ok(files)
}

/// Builds the Debian package from these programs.
///
/// # Errors
/// Errors of the builds.
pub fn package(to: &Path, programs: Programs) -> Result<()> {
    let docs = programs.build()?.join("docs");
    lab::run(["docs".as_ref(), "--out".as_ref(), docs.as_os_str()])?;
    deb::write(to, programs, None)
}
