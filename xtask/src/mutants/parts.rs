//! The parts of the project that are changed, and the packages that hold only them and their tests.

/// A part and its package.
pub struct Part {
    pub name: &'static str,
    /// Files that are changed, as a path pattern in the package.
    pub changed: &'static str,
    /// Files and folders that are copied to the same path.
    pub copied: &'static [&'static str],
    /// Files that only the package has. Crate versions are the workspace's, because its lock file is copied.
    pub written: &'static [(&'static str, &'static str)],
    /// Changes that do not alter behaviour, as name patterns, with the reason.
    pub same: &'static [(&'static str, &'static str)],
}

pub const PARTS: [Part; 2] = [
    Part {
        name: "parser",
        changed: "src/model/gguf/*.rs",
        copied: &[
            "src/lock.rs",
            "src/lock",
            "src/model/gguf",
            "src/tensor",
            "tests/adversarial/allocations.rs",
            "tests/adversarial/gguf.rs",
            "tests/adversarial/gguf_fields.rs",
            "tests/adversarial/gguf_values.rs",
            "tests/common",
            "tests/support/src/forge",
            "tests/models/tinystories-260k-f32.gguf",
        ],
        written: &[
            ("Cargo.toml", PARSER_MANIFEST),
            (
                "src/lib.rs",
                "//! The parser of model files.\npub mod lock;\npub mod model;\npub mod tensor;\n",
            ),
            ("src/model/mod.rs", "//! Model files.\npub mod gguf;\n"),
            ("tests/adversarial/main.rs", PARSER_TESTS),
            ("tests/adversarial/many.rs", PARSER_LONGER_TESTS),
        ],
        same: &[],
    },
    Part {
        name: "wire",
        changed: "client/src/wire/**/*.rs",
        copied: &["client/src/wire", "client/tests/adversarial/edges.rs", "client/tests/common"],
        written: &[
            ("Cargo.toml", WIRE_MANIFEST),
            ("client/src/lib.rs", "//! The protocol.\npub mod wire;\n"),
            ("client/tests/adversarial/main.rs", WIRE_TESTS),
        ],
        same: &[("replace fuzz_frame with", "the function for fuzzers returns nothing")],
    },
];

/// The tests that cover most files run first: they take milliseconds, and a failure ends the run.
const PARSER_MANIFEST: &str = r#"[workspace]
[package]
name = "rocmforge"
version = "0.1.0"
edition = "2024"
autotests = false
[lib]
test = false
doctest = false
[[test]]
name = "adversarial"
path = "tests/adversarial/main.rs"
[[test]]
name = "many"
path = "tests/adversarial/many.rs"
[features]
loom = []
[dependencies]
libc = "0.2"
memmap2 = "0.9.12"
parking_lot = "0.13.0"
rustix = { version = "1.1.6", features = ["event", "fs", "mm", "net", "param", "pipe", "process"] }
thiserror = "2.0.21"
[dev-dependencies]
tempfile = "3.27.0"
[profile.dev]
opt-level = 1
debug = false
"#;

const PARSER_TESTS: &str = r#"#![allow(dead_code, clippy::expect_used, clippy::panic, clippy::unwrap_used)]
mod allocations;
#[path = "../support/src/forge/mod.rs"]
mod forge;
mod gguf;
mod gguf_values;
"#;

const PARSER_LONGER_TESTS: &str = r#"#![allow(dead_code, clippy::expect_used, clippy::panic, clippy::unwrap_used)]
mod allocations;
#[path = "../common/mod.rs"]
mod common;
#[path = "../support/src/forge/mod.rs"]
mod forge;
mod gguf_fields;
"#;

/// Tests of single fields cover every limit by themselves; tests of all messages take long to build.
const WIRE_MANIFEST: &str = r#"[workspace]
[package]
name = "rocmforge-client"
version = "0.1.0"
edition = "2024"
autotests = false
[lib]
path = "client/src/lib.rs"
test = false
doctest = false
[[test]]
name = "adversarial"
path = "client/tests/adversarial/main.rs"
[dependencies]
bincode = { version = "=2.0.1", default-features = false, features = ["std", "serde"] }
crc32fast = "1.5.4"
serde = { version = "1.0.229", features = ["derive"] }
thiserror = "2.0.21"
zerocopy = { version = "0.8", features = ["derive"] }
[profile.dev]
opt-level = 0
debug = false
"#;

const WIRE_TESTS: &str = r#"#![allow(clippy::panic, clippy::unwrap_used)]
#[path = "../common/mod.rs"]
mod common;
mod edges;
"#;
