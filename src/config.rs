//! The daemon's configuration: a TOML file and its drop-ins, overridden by the command line.
//!
//! Unknown keys and values out of range are errors: a typing error must not silently mean the default.
//! `systemd/config.toml` shows every key with its default; a test keeps it and this file in step.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use serde::Deserialize;

use crate::backend::ActivationType;
use crate::backend::hip::{FileReads, UploadPath};
use crate::model::pages::{HostPolicy, PageResidency};

mod error;
mod files;
mod kv;
mod limits;

pub use error::{ConfigError, SubordinatesFault};
pub use files::{Origins, read};
pub use kv::Kv;
pub use limits::{Limits, UserConfig};

/// Largest context: the ids of a prompt of this length take half of the largest frame.
pub const CONTEXT_TOKENS_MAX: u32 = 131_072;

/// All settings of a daemon.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Path of the socket, unless systemd passes one.
    pub socket: PathBuf,
    /// Directories whose `*.gguf` files are served by name.
    pub models: Vec<PathBuf>,
    /// Bounds on client requests.
    pub limits: Limits,
    /// Rights of users.
    pub policy: PolicyConfig,
    /// The device that computes.
    pub device: Device,
    /// The CPU backend.
    pub cpu: Cpu,
    /// Model files in the machine's memory.
    pub host: Host,
    /// Weights on a device.
    pub weights: Weights,
    /// KV pages.
    pub kv: Kv,
    /// The log.
    pub log: Log,
}

/// Rights of users that may connect.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PolicyConfig {
    /// Have every right, as root and the daemon's own user have.
    pub administrators: Vec<Party>,
    /// Ask models for tokens.
    pub run: Vec<Party>,
    /// Map models and pass files.
    pub load: Vec<Party>,
    /// Load weights to a device before they are needed.
    pub preload: Vec<Party>,
    /// Unmap own models and evict their weights.
    pub unload: Vec<Party>,
    /// Change the rules of own models.
    pub pin: Vec<Party>,
    /// Unmap, evict and pin models of the directories, and limit other users.
    pub manage: Vec<Party>,
    /// Lock models' files in the machine's memory.
    pub lock: Vec<Party>,
    /// See other users' requests, and names of models that they passed.
    pub see: Vec<Party>,
    /// Users that a user may act for, by its name or uid: the first of their uids, and how many they are.
    pub subordinates: BTreeMap<String, (u32, u32)>,
}

/// A user or a group.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
pub enum Party {
    /// A user by uid.
    Uid(u32),
    /// A user by name or uid, a group likewise behind an `@`, or everyone as `*`.
    Name(String),
}

impl Default for PolicyConfig {
    fn default() -> Self {
        let everyone = || vec![Party::Name("*".into())];
        Self {
            administrators: vec![],
            run: everyone(),
            load: everyone(),
            preload: everyone(),
            unload: everyone(),
            pin: everyone(),
            manage: vec![],
            lock: vec![],
            see: vec![],
            subordinates: BTreeMap::new(),
        }
    }
}

/// The device that computes.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Device {
    /// The backend.
    pub backend: BackendChoice,
    /// Index of the GPU.
    pub index: u32,
    /// Type of the activations that quantised weights are multiplied with on a GPU.
    pub activations: ActivationType,
    /// Method of uploading weights to a GPU.
    pub upload: UploadPath,
    /// Method of reading model files for uploads.
    pub reads: FileReads,
    /// Threads that read model files for a GPU; 0: three quarters of the processor's cores, at most 12.
    pub upload_threads: usize,
    /// Whether decode steps are replayed from recorded graphs.
    pub graphs: Graphs,
    /// Whether a GPU's results do not depend on the requests that it computes together.
    pub deterministic: bool,
    /// Most memory of the GPU to use, in MiB; 0: all of it.
    pub memory_mib: u64,
    /// Seconds after which a GPU that does not answer counts as lost.
    pub patience_s: u32,
}

impl Default for Device {
    fn default() -> Self {
        Self {
            backend: BackendChoice::default(),
            index: 0,
            activations: ActivationType::default(),
            upload: UploadPath::default(),
            reads: FileReads::default(),
            upload_threads: 0,
            graphs: Graphs::default(),
            deterministic: false,
            memory_mib: 0,
            patience_s: 60,
        }
    }
}

/// The backend that computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BackendChoice {
    /// A GPU if one works, else the CPU.
    #[default]
    Auto,
    /// A GPU; without one the start fails.
    Hip,
    /// The CPU, even if a GPU works.
    Cpu,
}

/// Whether decode steps are replayed from recorded graphs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Graphs {
    /// If replays were found to give the same results as single launches.
    #[default]
    Auto,
    /// Never.
    Off,
}

/// The CPU backend.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Cpu {
    /// Threads that compute; 0: one per core.
    pub threads: usize,
    /// Instruction set: the best that the processor has, or a lower one for comparison.
    pub simd: Simd,
    /// Type of the activations that quantised weights are multiplied with.
    pub activations: ActivationType,
}

/// Instruction set of the CPU backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Simd {
    /// The best that the processor has.
    #[default]
    Auto,
    /// No vector instructions beyond the compiler's own: the reference path.
    Portable,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ, VL and VNNI.
    Avx512Vnni,
    /// NEON with dot products.
    Neon,
}

/// Which model files are kept in the machine's memory.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Host {
    /// For mapped models.
    pub residency: PageResidency,
    /// Most memory to lock for all models together, in MiB; 0: three quarters of the machine's memory.
    pub lock_mib: u64,
    /// Exceptions by model name; models to be kept in memory are mapped at start.
    pub models: BTreeMap<String, PageResidency>,
}

/// Weights on a device.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Weights {
    /// Settings by model name, applied from the start on; these models are mapped at start.
    pub models: BTreeMap<String, ModelWeights>,
}

/// Settings for one model's weights.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ModelWeights {
    /// Weights to load to the device at start.
    pub preload: Option<PreloadChoice>,
    /// The weights are evicted only on request.
    pub pinned: bool,
    /// Weights of models with a lower priority are evicted first.
    pub priority: u8,
    /// Number of first layers that stay resident when other models need room.
    pub layers_min: u32,
    /// Evict the weights after the model was idle for this many seconds; 0: never.
    pub idle_s: u32,
    /// Name of a smaller model that drafts for it.
    pub draft: Option<String>,
}

/// Weights to load to the device at start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
pub enum PreloadChoice {
    /// This many first layers.
    Layers(u32),
    /// A named choice.
    Named(PreloadName),
}

/// Named choices of weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PreloadName {
    /// All weights.
    All,
    /// The embedding, the head and the first layer.
    Critical,
}

/// The log.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Log {
    /// Least important level that is logged.
    pub level: LogLevel,
    /// Text or JSON lines.
    pub format: LogFormat,
}

/// Importance of a message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)]
pub enum LogLevel {
    Error,
    Warn,
    #[default]
    Info,
    Debug,
    Trace,
}

/// Format of a message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// Readable text, and fields for the journal.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            socket: default_socket(),
            models: Vec::new(),
            limits: Limits::default(),
            policy: PolicyConfig::default(),
            device: Device::default(),
            cpu: Cpu::default(),
            host: Host::default(),
            weights: Weights::default(),
            kv: Kv::default(),
            log: Log::default(),
        }
    }
}

/// `/run/rocmforge/api.sock` for root, else a path in the user's own runtime directory.
fn default_socket() -> PathBuf {
    rocmforge_client::user_socket().unwrap_or_else(|| PathBuf::from(rocmforge_client::DEFAULT_SOCKET))
}

impl Config {
    /// Parses a file's text without checking its values.
    ///
    /// # Errors
    /// The position of the fault and its reason.
    pub fn parse(text: &str) -> Result<Self, Box<toml::de::Error>> {
        toml::from_str(text).map_err(Box::new)
    }

    /// Checks what types cannot: ranges, and that no path depends on the working directory.
    ///
    /// # Errors
    /// [`ConfigError::Range`], [`ConfigError::Relative`].
    pub fn check(&self) -> Result<(), ConfigError> {
        let l = &self.limits;
        let d = &self.device;
        let ranges: [(&'static str, u64, u64, u64); 21] = [
            ("limits.context_tokens", l.context_tokens.into(), 16, CONTEXT_TOKENS_MAX.into()),
            ("limits.connections", l.connections.into(), 1, 60_000),
            ("limits.connections_per_uid", l.connections_per_uid.into(), 1, 60_000),
            ("limits.queued", l.queued.into(), 1, 1 << 20),
            ("limits.requests_per_uid", l.requests_per_uid.into(), 1, 1 << 20),
            ("limits.running", l.running.into(), 0, 1024),
            ("limits.step_rows", l.step_rows.into(), 0, 4096),
            // Less than 8 MiB would leave some users no room for one of the largest frames.
            ("limits.request_mib", l.request_mib, 8, 1 << 20),
            ("limits.header_mib", l.header_mib, 8, 1 << 20),
            ("limits.passed_models_per_uid", l.passed_models_per_uid.into(), 0, 4096),
            ("limits.drain_s", l.drain_s.into(), 0, 3600),
            ("device.index", d.index.into(), 0, 63),
            ("device.upload_threads", d.upload_threads as u64, 0, 64),
            ("device.memory_mib", d.memory_mib, 0, 1 << 24),
            ("device.patience_s", d.patience_s.into(), 1, 3600),
            ("cpu.threads", self.cpu.threads as u64, 0, 1024),
            ("host.lock_mib", self.host.lock_mib, 0, 1 << 24),
            ("kv.budget_mib", self.kv.budget_mib, 0, 1 << 24),
            ("kv.percent_per_uid", self.kv.percent_per_uid.into(), 1, 100),
            ("kv.swap_mib", self.kv.swap_mib, 0, 1 << 24),
            ("kv.keep_mib", self.kv.keep_mib, 0, 1 << 24),
        ];
        for (key, value, min, max) in ranges {
            if !(min..=max).contains(&value) {
                return Err(ConfigError::Range { key, value, min, max });
            }
        }
        l.check_users()?;
        let keep_dir =
            Some(("kv.keep_dir", &self.kv.keep_dir)).filter(|(_, dir)| !dir.as_os_str().is_empty());
        let models = self.models.iter().map(|dir| ("models", dir));
        let paths = [("socket", &self.socket)].into_iter().chain(models).chain(keep_dir);
        for (key, path) in paths {
            if !path.is_absolute() {
                return Err(ConfigError::Relative { key, path: path.clone() });
            }
        }
        Ok(())
    }

    /// Memory for KV pages in bytes.
    pub fn kv_budget_bytes(&self) -> u64 {
        if self.kv.budget_mib > 0 {
            return self.kv.budget_mib << 20;
        }
        memory_bytes() / 4
    }

    /// Settings for model files in the machine's memory.
    pub fn host_policy(&self) -> HostPolicy {
        let lock_bytes_max = match self.host.lock_mib {
            0 => memory_bytes() / 4 * 3,
            mib => mib << 20,
        };
        HostPolicy { residency: self.host.residency, models: self.host.models.clone(), lock_bytes_max }
    }

    /// Time that running answers get to finish when the daemon stops.
    pub fn drain(&self) -> Duration {
        Duration::from_secs(self.limits.drain_s.into())
    }
}

/// The machine's memory in bytes.
fn memory_bytes() -> u64 {
    let info = rustix::system::sysinfo();
    (info.totalram as u64).saturating_mul(u64::from(info.mem_unit.max(1)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_example_shows_every_key_with_its_default() {
        let example = include_str!("../systemd/config.toml");
        // The example has all keys commented out, each with its default.
        let text: String = example
            .lines()
            .map(|line| line.strip_prefix('#').filter(|rest| !rest.starts_with(' ')).unwrap_or(line))
            .filter(|line| !line.starts_with('#'))
            .map(|line| format!("{line}\n"))
            .collect();
        let config = Config::parse(&text).expect("the example parses with all keys set");
        let packaged = Config {
            socket: "/run/rocmforge/api.sock".into(),
            models: vec!["/var/lib/rocmforge/models".into()],
            ..Config::default()
        };
        assert_eq!(config, packaged);
        config.check().expect("the example is valid");

        let table: toml::Table = text.parse().unwrap();
        let keys: usize = table.values().map(|v| v.as_table().map_or(1, toml::Table::len)).sum();
        assert_eq!(
            keys, 51,
            "socket, models, 13 limits, 10 policy, 10 device, 3 cpu, 3 host, 1 weights, 7 kv, 2 log: a new key needs its line in the example"
        );
    }

    #[test]
    fn rules_of_weights_are_read_by_model() {
        let text = "[weights.models]\na = { preload = 'all', pinned = true }\nb = { preload = 3, idle_s = 60, draft = 'a' }\nc = {}";
        let models = Config::parse(text).unwrap().weights.models;
        let named = Some(PreloadChoice::Named(PreloadName::All));
        assert_eq!((models["a"].preload, models["a"].pinned), (named, true));
        assert_eq!((models["b"].preload, models["b"].idle_s), (Some(PreloadChoice::Layers(3)), 60));
        assert_eq!((models["a"].draft.as_deref(), models["b"].draft.as_deref()), (None, Some("a")));
        assert_eq!(models["c"], ModelWeights::default());
        for text in ["preload = 'most'", "preload = -1", "priority = 256", "pin = true"] {
            assert!(Config::parse(&format!("[weights.models]\na = {{ {text} }}")).is_err(), "{text}");
        }
    }

    #[test]
    fn unknown_keys_and_values_out_of_range_are_refused() {
        for text in ["sockt = '/x'", "[limits]\ncontext = 1", "[cpu]\nsimd = 'sse9'", "[kv]\ntype = 'q8'"] {
            assert!(Config::parse(text).is_err(), "{text}");
        }
        for text in ["[limits]\ncontext_tokens = 15", "[limits]\nconnections = 0", "socket = 'api.sock'"] {
            let config = Config::parse(text).expect(text);
            assert!(config.check().is_err(), "{text}");
        }
    }

    #[test]
    fn limits_of_single_users_are_read_and_checked() {
        let text = "[limits.users.alice]\nrequests = 0\nshare = 50\n[limits.users.\"1000\"]\nconnections = 3";
        let config = Config::parse(text).unwrap();
        let alice = config.limits.users["alice"].limits();
        assert_eq!((alice.requests, alice.share, alice.connections), (Some(0), Some(50), None));
        assert_eq!(config.limits.users["1000"].connections, Some(3));
        config.check().unwrap();
        let wrong = Config::parse("[limits.users.alice]\nshare = 1001").unwrap().check().unwrap_err();
        assert_eq!(wrong.to_string(), "limits.users.\"alice\": share = 1001 is not in 1..=1000");
        assert!(Config::parse("[limits.users.alice]\nrunning = 1").is_err());
    }

    #[test]
    fn a_budget_left_out_is_a_quarter_of_memory() {
        let mut config = Config::default();
        assert_eq!(config.kv_budget_bytes(), memory_bytes() / 4);
        assert!(config.kv_budget_bytes() > 1 << 20);
        config.kv.budget_mib = 3;
        assert_eq!(config.kv_budget_bytes(), 3 << 20);
    }

    #[test]
    fn models_are_kept_in_memory_by_name() {
        let text = "[host]\nresidency = 'populate'\nlock_mib = 2\nmodels = { a = 'lock', \"b.c\" = 'none' }";
        let policy = Config::parse(text).unwrap().host_policy();
        assert_eq!((policy.residency, policy.lock_bytes_max), (PageResidency::Populate, 2 << 20));
        assert_eq!((policy.models["a"], policy.models["b.c"]), (PageResidency::Lock, PageResidency::None));
        let all = Config::default().host_policy();
        assert_eq!((all.residency, all.models.len()), (PageResidency::None, 0));
        assert_eq!(all.lock_bytes_max, memory_bytes() / 4 * 3);
        assert!(Config::parse("[host]\nresidency = 'always'").is_err());
    }
}
