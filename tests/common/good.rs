//! Finds good files that an independent writer wrote.

use std::path::PathBuf;

use sha2::{Digest, Sha256};

use crate::common;

/// The scripts that write and describe the files. The directory name is their hash, so that files of other versions are
/// never used.
const SCRIPTS: [&[u8]; 2] =
    [include_bytes!("../models/describe-gguf.py"), include_bytes!("../models/write-gguf.py")];

/// The directory where `cargo xtask models` has the files written. It holds `headers` and `models`, each file beside
/// its writer's description. `None` after reporting that the test is skipped.
pub fn written() -> Option<PathBuf> {
    let hash = Sha256::digest(SCRIPTS.concat());
    let name: String = hash.iter().take(6).map(|byte| format!("{byte:02x}")).collect();
    common::cached(&format!("written-{name}"))
}
