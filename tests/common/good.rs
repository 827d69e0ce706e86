//! Good files of an independent writer: where they are.

use std::path::PathBuf;

use sha2::{Digest, Sha256};

use crate::common;

/// What writes them, and what describes them: the directory is named after both, so that other files are never taken for these.
const SCRIPTS: [&[u8]; 2] =
    [include_bytes!("../models/describe-gguf.py"), include_bytes!("../models/write-gguf.py")];

/// The directory that `cargo xtask models` has them written to: `headers` and `models`, each file with its writer's own account
/// of it; `None` after saying that the test is skipped.
pub fn written() -> Option<PathBuf> {
    let hash = Sha256::digest(SCRIPTS.concat());
    let name: String = hash.iter().take(6).map(|byte| format!("{byte:02x}")).collect();
    common::cached(&format!("written-{name}"))
}
