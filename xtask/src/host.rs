//! The machine on which the commands run: paths, installed programs, and how to install missing ones.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use std::{env, thread};

use crate::error::{Error, Result};

/// Set by Ctrl-C and SIGTERM. Waits check it, so that temporary files and daemons are cleaned up before exit.
static INTERRUPTED: OnceLock<std::sync::Arc<AtomicBool>> = OnceLock::new();

/// Turns Ctrl-C and SIGTERM into [`Error::Interrupted`] at the next wait. A second signal ends the process at once.
pub fn watch_interrupts() -> Result<()> {
    let flag = INTERRUPTED.get_or_init(Default::default);
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register_conditional_shutdown(signal, 130, flag.clone())
            .and_then(|_| signal_hook::flag::register(signal, flag.clone()))
            .map_err(Error::io("signal handler"))?;
    }
    Ok(())
}

/// Fails once the user has asked to stop.
pub fn check_interrupted() -> Result<()> {
    match INTERRUPTED.get() {
        Some(flag) if flag.load(Ordering::Relaxed) => Err(Error::Interrupted),
        _ => Ok(()),
    }
}

/// The workspace's root.
pub fn root() -> &'static Path {
    // The manifest's directory is <root>/xtask; if it has no parent, return it as is.
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest.parent().unwrap_or(manifest)
}

/// `$CARGO_TARGET_DIR`, else `<root>/target`.
pub fn target_dir() -> PathBuf {
    env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), |dir| root().join(dir))
}

/// Directory of models: `$ROCMFORGE_MODELS_CACHE`, else `$XDG_CACHE_HOME/rocmforge/models`, else
/// `~/.cache/rocmforge/models`. The tests use it too.
pub fn models_dir() -> PathBuf {
    if let Some(dir) = env::var_os("ROCMFORGE_MODELS_CACHE") {
        return dir.into();
    }
    cache_dir().join("models")
}

/// Directory of what tests read beside models, some of it made to be refused: beside [`models_dir`], which a newcomer's daemon
/// serves whole. The tests use it too.
pub fn test_data_dir() -> PathBuf {
    models_dir().with_file_name("test-data")
}

/// Directory of compilers and other tools that are fetched by version.
pub fn tools_dir() -> PathBuf {
    cache_dir().join("tools")
}

/// `$XDG_CACHE_HOME/rocmforge`, else `~/.cache/rocmforge`.
fn cache_dir() -> PathBuf {
    let cache = env::var_os("XDG_CACHE_HOME")
        .map_or_else(|| PathBuf::from(env::var_os("HOME").unwrap_or_default()).join(".cache"), PathBuf::from);
    cache.join("rocmforge")
}

/// True with `ROCMFORGE_STRICT=1`: skipped checks then count as failed.
pub fn strict() -> bool {
    env::var_os("ROCMFORGE_STRICT").is_some_and(|v| v == "1")
}

/// The `cargo` that runs this program, in the workspace's root.
pub fn cargo() -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root());
    command
}

/// True when `program` is found in `$PATH`.
pub fn have(program: &str) -> bool {
    let dirs = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&dirs).any(|dir| dir.join(program).is_file())
}

/// True for the superuser, who may install packages.
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Makes sure that `program` exists: installs Debian's `package` if run by root and `apt-get` exists.
///
/// # Errors
/// [`Error::ToolMissing`], which names the package.
pub fn ensure(program: &str, package: &'static str) -> Result<()> {
    if have(program) {
        return Ok(());
    }
    install(package)?;
    if have(program) { Ok(()) } else { Err(Error::ToolMissing { program: program.into(), package }) }
}

/// A program that a command calls.
#[derive(Clone, Copy, Debug)]
pub struct Need {
    /// Its name.
    pub program: &'static str,
    /// Whether it is there.
    pub is_there: fn() -> bool,
    /// Debian's packages that bring it.
    pub packages: &'static [&'static str],
}

/// Makes sure that all programs exist that `what` needs: installs their packages if run by root and `apt-get` exists.
///
/// # Errors
/// [`Error::ToolsMissing`], which names all that are missing and their packages; [`Error::Command`].
pub fn ensure_all(what: &'static str, needs: &[Need]) -> Result<()> {
    let missing = || needs.iter().filter(|need| !(need.is_there)()).collect::<Vec<_>>();
    let mut lacks = missing();
    if !lacks.is_empty() && is_root() && have("apt-get") {
        lacks.iter().flat_map(|need| need.packages).try_for_each(|package| install(package))?;
        lacks = missing();
    }
    if lacks.is_empty() {
        return Ok(());
    }
    let programs = lacks.iter().map(|need| need.program).collect::<Vec<_>>().join(", ");
    let packages = lacks.iter().flat_map(|need| need.packages).copied().collect::<Vec<_>>().join(" ");
    Err(Error::ToolsMissing { what, programs, packages })
}

/// Installs Debian's `package` if run by root and `apt-get` exists.
///
/// # Errors
/// [`Error::ToolMissing`], [`Error::Command`].
pub fn install(package: &'static str) -> Result<()> {
    static LISTS_ARE_FRESH: AtomicBool = AtomicBool::new(false);
    if !is_root() || !have("apt-get") {
        return Err(Error::ToolMissing { program: package.into(), package });
    }
    eprintln!("installing {package} with apt-get");
    let apt = |arguments: &[&str]| {
        let mut command = Command::new("apt-get");
        command
            .env("DEBIAN_FRONTEND", "noninteractive")
            // A stage beside this one may be installing.
            .args(["-qq", "-y", "-o", "DPkg::Lock::Timeout=600"])
            .args(arguments)
            .stdout(Stdio::null());
        run(&mut command)
    };
    if !LISTS_ARE_FRESH.swap(true, Ordering::Relaxed) {
        apt(&["update"])?;
    }
    apt(&["install", "--no-install-recommends", package])
}

/// How the programs that a command runs are built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Programs {
    /// As they are shipped
    Release,
    /// As the tests run them: with all arithmetic checks, and without a second build of the library
    Tested,
}

impl Programs {
    /// Folder below the target folder.
    pub fn folder(self) -> &'static str {
        match self {
            Self::Release => "release",
            Self::Tested => "debug",
        }
    }

    /// Builds those that are out of date; returns their folder.
    ///
    /// # Errors
    /// [`Error::Command`], [`Error::Interrupted`].
    pub fn build(self) -> Result<PathBuf> {
        match self {
            Self::Release => build_release()?,
            Self::Tested => build_tested(&["--bins"])?,
        }
        Ok(target_dir().join(self.folder()))
    }
}

/// Builds programs of the workspace with a test. Then dependencies have the features that they have in `cargo test`, so
/// that the library is compiled once for both. `tidy` is the smallest test.
///
/// # Errors
/// [`Error::Command`], [`Error::Interrupted`].
pub fn build_tested(programs: &[&str]) -> Result<()> {
    run(cargo().args(["build", "--quiet", "--workspace", "--test", "tidy"]).args(programs))
}

/// Builds the release programs: those of the workspace's default members. Always builds the same set of packages:
/// another set could enable other features of their dependencies and cause a second build of them.
///
/// # Errors
/// [`Error::Command`], [`Error::Interrupted`].
pub fn build_release() -> Result<()> {
    run(cargo().args(["build", "--release"]))
}

/// Installs a Rust program, `NAME@VERSION`. Built with little optimisation: some release profiles optimise all their
/// packages as one, which takes almost ten minutes on two processors and saves seconds.
///
/// # Errors
/// [`Error::Command`], [`Error::Interrupted`].
pub fn install_crate(package: &str) -> Result<()> {
    let profile =
        [r#"lto="off""#, "codegen-units=16", "opt-level=1"].map(|key| format!("profile.release.{key}"));
    let profile = profile.iter().flat_map(|key| ["--config", key]);
    run(cargo().args(["install", "--locked", "--quiet"]).args(profile).arg(package))
}

/// Runs `command` to its end; its output goes where ours goes.
///
/// # Errors
/// [`Error::Command`] if it does not end with success, [`Error::Interrupted`] if the user stopped it.
pub fn run(command: &mut Command) -> Result<()> {
    let shown = shown(command);
    let status = command.status().map_err(Error::io(shown.clone()))?;
    check_interrupted()?;
    succeeded(shown, status)
}

/// Runs `command` to its end and returns its standard output; its error output goes where ours goes.
///
/// # Errors
/// As [`run`].
pub fn read(command: &mut Command) -> Result<String> {
    let shown = shown(command);
    let Output { status, stdout, .. } =
        command.stderr(Stdio::inherit()).output().map_err(Error::io(shown.clone()))?;
    check_interrupted()?;
    succeeded(shown, status)?;
    Ok(String::from_utf8_lossy(&stdout).into_owned())
}

/// True if `command` runs and ends with success; its output is dropped.
pub fn works(command: &mut Command) -> bool {
    let quiet = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    quiet.status().is_ok_and(|status| status.success())
}

/// Waits for `child` and calls `tick` at the interval `every`; kills it if the user asks to stop.
///
/// # Errors
/// [`Error::Interrupted`], [`Error::Io`].
pub fn wait(child: &mut Child, every: Duration, mut tick: impl FnMut()) -> Result<ExitStatus> {
    loop {
        if let Some(status) = child.try_wait().map_err(Error::io("wait"))? {
            return Ok(status);
        }
        if let Err(stop) = check_interrupted() {
            // The child may have ended already; the wait reaps it in any case.
            let _ = child.kill();
            let _ = child.wait();
            return Err(stop);
        }
        tick();
        thread::sleep(every);
    }
}

/// The command as typed in a shell.
pub fn shown(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(OsStr::to_string_lossy).collect::<Vec<_>>().join(" ")
}

fn succeeded(command: String, status: ExitStatus) -> Result<()> {
    if status.success() { Ok(()) } else { Err(Error::Command { command, status }) }
}
