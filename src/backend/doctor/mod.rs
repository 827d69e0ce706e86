//! What of GPUs was found here, what is missing, and what to do about it.
//!
//! A GPU's runtime may hang or end its process where something is broken, and it keeps what it opened. So it is looked at in a
//! process of its own: this program, started again with [`SUBCOMMAND`]. It has the daemon's user, groups and confinement, so
//! what it finds is what the daemon would.

mod gpus;
mod nodes;
mod process;

use serde::{Deserialize, Serialize};

pub use process::{Doctor, SUBCOMMAND, child_main};

/// How a thing is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum State {
    /// As it should be.
    Good,
    /// Worth knowing, nothing to mend.
    Note,
    /// Keeps a GPU from being used.
    Problem,
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Check {
    /// What.
    pub name: String,
    /// How it is.
    pub state: State,
    /// What was found.
    pub found: String,
    /// What to do; empty where nothing is to be done.
    pub advice: String,
}

/// A GPU that the runtime sees.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpu {
    /// Its number.
    pub index: u32,
    /// As sold.
    pub name: String,
    /// Architecture with its features, as `gfx90a:sramecc+:xnack-`.
    pub arch: String,
    /// Where it is plugged in.
    pub pci: String,
    /// Bytes of memory.
    pub memory_bytes: u64,
    /// Free ones.
    pub memory_free_bytes: u64,
    /// Compute units.
    pub units: u32,
    /// Lanes of a wave.
    pub wave: u32,
    /// Code that runs on it; empty without any.
    pub code: String,
    /// A kernel ran on it and gave the right result.
    pub works: bool,
}

/// All that was looked at.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// One by one.
    pub checks: Vec<Check>,
    /// What the runtime sees.
    pub gpus: Vec<Gpu>,
}

impl Check {
    fn new(
        name: impl Into<String>,
        state: State,
        found: impl Into<String>,
        advice: impl Into<String>,
    ) -> Self {
        Self { name: name.into(), state, found: found.into(), advice: advice.into() }
    }
}

/// Looks at everything, in this process.
fn examine() -> Report {
    let nodes = nodes::Nodes::read(std::path::Path::new("/"));
    let (runtime, gpus) = gpus::examine(nodes.has_amd());
    let works = gpus.iter().any(|gpu| gpu.works);
    let mut checks = nodes.checks(works);
    checks.extend(runtime);
    Report { checks, gpus }
}
