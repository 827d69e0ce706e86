//! Reports which GPUs work, what is missing, and what to do about it.
//!
//! A broken GPU runtime may hang or end its process, and a runtime keeps what it opened. So a separate process
//! examines it: this program, started again with [`SUBCOMMAND`]. It has the daemon's user, groups and confinement,
//! and therefore finds what the daemon would find.

mod gpus;
mod nodes;
mod process;

use serde::{Deserialize, Serialize};

pub use process::{Doctor, SUBCOMMAND, child_main};

/// Result of one check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum State {
    /// Works as required.
    Good,
    /// Worth knowing; needs no repair.
    Note,
    /// Prevents the use of a GPU.
    Problem,
}

/// One examined item.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Check {
    /// Name of the item.
    pub name: String,
    /// Result.
    pub state: State,
    /// The observation.
    pub found: String,
    /// Advice; empty if nothing needs to be done.
    pub advice: String,
}

/// A GPU that the runtime reports.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpu {
    /// The runtime's device number.
    pub index: u32,
    /// Product name.
    pub name: String,
    /// Architecture with its features, as `gfx90a:sramecc+:xnack-`.
    pub arch: String,
    /// PCI address.
    pub pci: String,
    /// Memory in bytes.
    pub memory_bytes: u64,
    /// Free memory in bytes.
    pub memory_free_bytes: u64,
    /// Compute units.
    pub units: u32,
    /// Lanes per wave.
    pub wave: u32,
    /// Code object that runs on it; empty if there is none.
    pub code: String,
    /// True if a kernel ran on it and returned the right result.
    pub works: bool,
}

/// All checks and GPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// Checks, in the order they were made.
    pub checks: Vec<Check>,
    /// GPUs that the runtime reports.
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

/// Runs all checks in this process.
fn examine() -> Report {
    let nodes = nodes::Nodes::read(std::path::Path::new("/"));
    let (runtime, gpus) = gpus::examine(nodes.has_amd());
    let works = gpus.iter().any(|gpu| gpu.works);
    let mut checks = nodes.checks(works);
    checks.extend(runtime);
    Report { checks, gpus }
}
