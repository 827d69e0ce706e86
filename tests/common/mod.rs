//! Shared by tests: paths of models, and how a test reports that it cannot run.

#![allow(dead_code)] // each test binary uses a part

use std::io::Write;
use std::path::{Path, PathBuf};

/// The trained model in the repository: F32, SentencePiece.
pub fn tinystories() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/models/tinystories-260k-f32.gguf")
}

/// SmolLM2-135M-Instruct Q4_1, fetched by `cargo xtask models`; `None` after [`skip`].
pub fn smollm2() -> Option<PathBuf> {
    fetched(models_dir().join("smollm2-135m-instruct-q4_1.gguf"))
}

/// Qwen2.5-Coder-0.5B-Instruct Q4_K_M, fetched by `cargo xtask models --only qwen2.5-coder-0.5b`; `None` after
/// [`not_run`]. A missing file is never a failure: it is a third party's upload, which may disappear.
pub fn qwen() -> Option<PathBuf> {
    named(QWEN, "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf")
}

/// Gemma 3 270M Q4_K_M, as [`qwen`]. Its licence is no open one, so nobody has to have it.
pub fn gemma() -> Option<PathBuf> {
    named(GEMMA, "gemma-3-270m-q4_k_m.gguf")
}

fn named(name: &str, file: &str) -> Option<PathBuf> {
    let path = models_dir().join(file);
    if path.is_file() {
        return Some(path);
    }
    not_run(&format!("{} is missing; `cargo xtask models --only {name}` fetches it", path.display()));
    None
}

/// Name of that model in `cargo xtask` and in tests/reference.
pub const QWEN: &str = "qwen2.5-coder-0.5b";
/// As [`QWEN`].
pub const GEMMA: &str = "gemma3-270m";

/// The path of a file or directory of test data, fetched by `cargo xtask models`; `None` after [`skip`]. They lie beside the
/// models: a newcomer's daemon serves all of those.
pub fn cached(file: &str) -> Option<PathBuf> {
    fetched(models_dir().with_file_name("test-data").join(file))
}

fn fetched(path: PathBuf) -> Option<PathBuf> {
    if path.exists() {
        return Some(path);
    }
    skip(&format!("{} is missing; `cargo xtask models` fetches it", path.display()));
    None
}

/// `$ROCMFORGE_MODELS_CACHE`, else `$XDG_CACHE_HOME/rocmforge/models`, else `~/.cache/rocmforge/models`.
pub fn models_dir() -> PathBuf {
    if let Some(dir) = std::env::var_os("ROCMFORGE_MODELS_CACHE") {
        return dir.into();
    }
    let cache = std::env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .unwrap_or_else(|| PathBuf::from(std::env::var_os("HOME").unwrap_or_default()).join(".cache"));
    cache.join("rocmforge/models")
}

/// Reports why a test does not run. With `ROCMFORGE_STRICT=1`, which CI sets, that is a failure.
pub fn skip(why: &str) {
    assert!(
        std::env::var_os("ROCMFORGE_STRICT").is_none_or(|v| v != "1"),
        "ROCMFORGE_STRICT=1 forbids skipping: {why}"
    );
    tell("skipped", why);
}

/// Reports why a test does not run, for tests that not every machine can run. It is never a failure.
pub fn not_run(why: &str) {
    tell("not-run", why);
}

/// Writes the line that `cargo xtask check` lists. It goes straight to stderr: the test harness drops output of the
/// print macros when a test passes.
fn tell(what: &str, why: &str) {
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("a test");
    writeln!(std::io::stderr(), "rocmforge-test-{what}: {test}: {why}").expect("writing to stderr failed");
}

/// Whether `ROCMFORGE_LONG=1` asks for what takes minutes or nearly repeats other tests; tests/README.md lists it.
pub fn is_long() -> bool {
    std::env::var_os("ROCMFORGE_LONG").is_some_and(|value| value == "1")
}
