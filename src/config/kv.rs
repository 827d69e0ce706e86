//! The table `kv`: memory for keys and values, and how long they last.

use std::path::PathBuf;

use serde::Deserialize;

use crate::backend::KvType;
use crate::scheduler::Reuse;

/// Keys and values of sequences.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Kv {
    /// Element type.
    #[serde(rename = "type")]
    pub kind: KvType,
    /// Memory for all KV pages and recurrent states in MiB; 0: a quarter of the machine's memory.
    pub budget_mib: u64,
    /// Most of that memory that one uid's running requests may hold, in percent.
    pub percent_per_uid: u32,
    /// The users whose prompts a request may share keys and values with.
    pub reuse: Reuse,
    /// Most host memory for pages and recurrent states of parked requests of a GPU, in MiB; 0: their tokens are computed again.
    pub swap_mib: u64,
    /// Most MiB of keys, values and recurrent states that files keep over restarts and idle times; 0: none are kept.
    pub keep_mib: u64,
    /// Folder of these files; empty: `prefixes` in the service's cache directory.
    pub keep_dir: PathBuf,
}

impl Default for Kv {
    fn default() -> Self {
        Self {
            kind: KvType::default(),
            budget_mib: 0,
            // A user that holds more than its equal share gives way to others in any case.
            percent_per_uid: 100,
            reuse: Reuse::default(),
            swap_mib: 1024,
            keep_mib: 0,
            keep_dir: PathBuf::new(),
        }
    }
}
