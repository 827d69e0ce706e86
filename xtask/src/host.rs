//! The machine the commands run on: where things lie, which programs are there, how to get those that are not.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use std::{env, thread};

use crate::error::{Error, Result};

/// Set by Ctrl-C and SIGTERM. Waits look at it, so that temporary files and daemons are cleaned up on the way out.
static INTERRUPTED: OnceLock<std::sync::Arc<AtomicBool>> = OnceLock::new();

/// Turns Ctrl-C and SIGTERM into [`Error::Interrupted`] at the next wait. A second one ends the process at once.
pub fn watch_interrupts() -> Result<()> {
    let flag = INTERRUPTED.get_or_init(Default::default);
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register_conditional_shutdown(signal, 130, flag.clone())
            .and_then(|_| signal_hook::flag::register(signal, flag.clone()))
            .map_err(Error::io("signal handler"))?;
    }
    Ok(())
}

/// Fails once the user asked to stop.
pub fn check_interrupted() -> Result<()> {
    match INTERRUPTED.get() {
        Some(flag) if flag.load(Ordering::Relaxed) => Err(Error::Interrupted),
        _ => Ok(()),
    }
}

/// The workspace's root.
pub fn root() -> &'static Path {
    // The manifest's directory is <root>/xtask; a root of "/" has no better answer than itself.
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest.parent().unwrap_or(manifest)
}

/// `$CARGO_TARGET_DIR`, else `<root>/target`.
pub fn target_dir() -> PathBuf {
    env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), |dir| root().join(dir))
}

/// Where models are kept: `$ROCMFORGE_MODELS_CACHE`, else `$XDG_CACHE_HOME/rocmforge/models`, else
/// `~/.cache/rocmforge/models`. The tests look there too.
pub fn models_dir() -> PathBuf {
    if let Some(dir) = env::var_os("ROCMFORGE_MODELS_CACHE") {
        return dir.into();
    }
    cache_dir().join("models")
}

/// Where compilers and the like are kept that are fetched by version.
pub fn tools_dir() -> PathBuf {
    cache_dir().join("tools")
}

/// `$XDG_CACHE_HOME/rocmforge`, else `~/.cache/rocmforge`.
fn cache_dir() -> PathBuf {
    let cache = env::var_os("XDG_CACHE_HOME")
        .map_or_else(|| PathBuf::from(env::var_os("HOME").unwrap_or_default()).join(".cache"), PathBuf::from);
    cache.join("rocmforge")
}

/// True with `ROCMFORGE_STRICT=1`: what would be skipped fails.
pub fn strict() -> bool {
    env::var_os("ROCMFORGE_STRICT").is_some_and(|v| v == "1")
}

/// The `cargo` that runs us, in the workspace's root.
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

/// Makes sure that `program` is there: installs Debian's `package` when we are root and `apt-get` is there.
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

/// Installs Debian's `package` when we are root and `apt-get` is there.
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
            .args(["-qq", "-y"])
            .args(arguments)
            .stdout(Stdio::null());
        run(&mut command)
    };
    if !LISTS_ARE_FRESH.swap(true, Ordering::Relaxed) {
        apt(&["update"])?;
    }
    apt(&["install", "--no-install-recommends", package])
}

/// Builds the release programs. Always the same packages together: others would choose other features of what they depend on, and
/// all of that would be built once more.
///
/// # Errors
/// [`Error::Command`], [`Error::Interrupted`].
pub fn build_release() -> Result<()> {
    run(cargo().args(["build", "--release", "--workspace", "--exclude", "xtask"]))
}

/// Installs a program that comes as a package of Rust, `NAME@VERSION`. Built soon instead of for speed: the release profile of some
/// optimises all of their packages as one, which takes most of ten minutes on two processors and saves seconds.
///
/// # Errors
/// [`Error::Command`], [`Error::Interrupted`].
pub fn install_crate(package: &str) -> Result<()> {
    let profile =
        [r#"lto="off""#, "codegen-units=16", "opt-level=1"].map(|key| format!("profile.release.{key}"));
    let profile = profile.iter().flat_map(|key| ["--config", key]);
    run(cargo().args(["install", "--locked", "--quiet"]).args(profile).arg(package))
}

/// Runs `command` to its end, its output going where ours goes.
///
/// # Errors
/// [`Error::Command`] when it does not end with success, [`Error::Interrupted`] when the user stopped us.
pub fn run(command: &mut Command) -> Result<()> {
    let shown = shown(command);
    let status = command.status().map_err(Error::io(shown.clone()))?;
    check_interrupted()?;
    succeeded(shown, status)
}

/// Runs `command` to its end and returns what it printed; its messages go where ours go.
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

/// True when `command` runs and ends with success; its output is dropped.
pub fn works(command: &mut Command) -> bool {
    let quiet = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    quiet.status().is_ok_and(|status| status.success())
}

/// Waits for `child`, calling `tick` every `every`; ends it when the user stops us.
///
/// # Errors
/// [`Error::Interrupted`], [`Error::Io`].
pub fn wait(child: &mut Child, every: Duration, mut tick: impl FnMut()) -> Result<ExitStatus> {
    loop {
        if let Some(status) = child.try_wait().map_err(Error::io("wait"))? {
            return Ok(status);
        }
        if let Err(stop) = check_interrupted() {
            // It is gone already, or goes now; either way it is reaped by the wait.
            let _ = child.kill();
            let _ = child.wait();
            return Err(stop);
        }
        tick();
        thread::sleep(every);
    }
}

/// A command as one would type it.
pub fn shown(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(OsStr::to_string_lossy).collect::<Vec<_>>().join(" ")
}

fn succeeded(command: String, status: ExitStatus) -> Result<()> {
    if status.success() { Ok(()) } else { Err(Error::Command { command, status }) }
}
