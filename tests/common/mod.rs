//! What tests share: where models are, and how a test that cannot run says so.

#![allow(dead_code)] // each test binary uses its own part

use std::io::Write;
use std::path::{Path, PathBuf};

/// The trained model kept in the repository: F32, SentencePiece.
pub fn tinystories() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/models/tinystories-260k-f32.gguf")
}

/// SmolLM2-135M-Instruct Q4_1, fetched by `cargo xtask models`; `None` after saying that the test is skipped.
pub fn smollm2() -> Option<PathBuf> {
    cached("smollm2-135m-instruct-q4_1.gguf")
}

/// Qwen2.5-Coder-0.5B-Instruct Q4_K_M, fetched by `cargo xtask models --only qwen2.5-coder-0.5b`; `None` after saying that it
/// is not there. That is no failure anywhere: the file is a third party's upload, which may be gone tomorrow.
pub fn qwen() -> Option<PathBuf> {
    let path = models_dir().join("qwen2.5-coder-0.5b-instruct-q4_k_m.gguf");
    if path.is_file() {
        return Some(path);
    }
    not_run(&format!("{} is not there; `cargo xtask models --only {QWEN}` fetches it", path.display()));
    None
}

/// What `cargo xtask` calls that model, and tests/reference its answers.
pub const QWEN: &str = "qwen2.5-coder-0.5b";

/// A fetched model, or a directory of several, by name; `None` after [`skip`].
pub fn cached(file: &str) -> Option<PathBuf> {
    let path = models_dir().join(file);
    if path.exists() {
        return Some(path);
    }
    skip(&format!("{} is not there; `cargo xtask models` fetches it", path.display()));
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

/// Says why a test does not run; with `ROCMFORGE_STRICT=1` (as CI sets) that is a failure.
pub fn skip(why: &str) {
    assert!(std::env::var_os("ROCMFORGE_STRICT").is_none_or(|v| v != "1"), "may not be skipped here: {why}");
    tell("skipped", why);
}

/// Says why a test does not run where that is no failure anywhere: not every machine can.
pub fn not_run(why: &str) {
    tell("not-run", why);
}

/// `cargo xtask check` lists lines of what was skipped. They go straight to stderr: what the print macros write is dropped
/// when a test passes.
fn tell(what: &str, why: &str) {
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("a test");
    writeln!(std::io::stderr(), "rocmforge-test-{what}: {test}: {why}").expect("stderr can be written");
}
