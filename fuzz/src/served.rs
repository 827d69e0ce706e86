//! A daemon in this process, with one small model.

use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use rocmforge::backend::Backend;
use rocmforge::backend::cpu::{CpuBackend, CpuOptions};
use rocmforge::config::{Config, PolicyConfig};
use rocmforge::daemon::Daemon;

use crate::forge::{Value, tiny_llama};

/// Longest time for the daemon to answer or close; more is a hang.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// The model's name.
pub const MODEL: &str = "m";

/// The first uid and the number of the users that this process may act for: more than it has uids.
const SUBORDINATES: (u32, u32) = (3_000_000_000, 1 << 20);

const TEMPLATE: &str = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}";

/// A running daemon. Its directory and its tasks last as long.
pub struct Served {
    dir: tempfile::TempDir,
    /// For what else shall run beside it.
    pub runtime: tokio::runtime::Runtime,
    _daemon: Daemon,
}

impl Served {
    /// Starts it. The model has a context of 64 tokens and a chat template.
    pub fn start() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let model = tiny_llama(1).set("tokenizer.chat_template", Value::string(TEMPLATE));
        let file = dir.path().join(format!("{MODEL}.gguf"));
        std::fs::write(file, model.build().bytes).expect("a small file");
        let socket = dir.path().join("api.sock");
        let policy =
            PolicyConfig { subordinates: [(own_uid(), SUBORDINATES)].into(), ..PolicyConfig::default() };
        let config = Config { socket, models: vec![dir.path().into()], policy, ..Config::default() };
        let factory = || -> Result<Box<dyn Backend>, _> {
            Ok(Box::new(CpuBackend::new(CpuOptions { threads: Some(1), ..CpuOptions::default() })?))
        };
        let mut runtime = tokio::runtime::Builder::new_multi_thread();
        let runtime = runtime.worker_threads(1).enable_all().build().expect("a runtime");
        let daemon = runtime.block_on(Daemon::start(&config, None, factory)).expect("a daemon");
        Self { dir, runtime, _daemon: daemon }
    }

    /// A path in its directory.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// A connection to this socket in its directory.
    pub fn connect(&self, name: &str) -> UnixStream {
        let stream = UnixStream::connect(self.path(name)).expect("somebody listens");
        for set in [UnixStream::set_read_timeout, UnixStream::set_write_timeout] {
            set(&stream, Some(PATIENCE)).expect("a time that is not 0");
        }
        stream
    }
}

/// This process's user, as the configuration names it.
fn own_uid() -> String {
    rustix::process::geteuid().as_raw().to_string()
}
