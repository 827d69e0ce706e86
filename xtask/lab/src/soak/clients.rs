//! The clients of the soak.

use std::collections::BTreeSet;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use rocmforge_client::wire::{GenerateRequest, Prompt};
use rocmforge_client::{Client, ClientError, Options};
use xtask::daemon::Daemon;
use xtask::error::{Error, Result};

use super::MODELS;

/// Tokens per answer.
const TOKENS: u32 = 48;

const PROMPT: &str = "Once upon a time";

/// Most distinct errors that are reported; equal errors count once.
const ERRORS_MAX: usize = 8;

/// Counts of the clients' actions.
#[derive(Clone, Debug, Default)]
pub struct Done {
    pub answers: u64,
    pub wrong: u64,
    pub cancelled: u64,
    pub slow: u64,
    pub killed: u64,
    pub loads: u64,
    pub errors: Vec<String>,
}

/// Resources that the daemon still holds when no client is active; our own connection is not counted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Left {
    pub running: u32,
    pub queued: u32,
    pub kv_pages: u32,
    pub kv_bytes: u64,
    pub connections: u32,
}

#[derive(Default)]
struct Counts {
    answers: AtomicU64,
    wrong: AtomicU64,
    cancelled: AtomicU64,
    slow: AtomicU64,
    killed: AtomicU64,
    loads: AtomicU64,
}

/// State that all clients share.
pub struct Shared {
    options: Options,
    client: std::path::PathBuf,
    /// The answer to the same request without other clients.
    alone: Vec<u32>,
    counts: Counts,
    errors: Mutex<BTreeSet<String>>,
    stop: AtomicBool,
}

struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % bound
    }
}

fn request(model: &str) -> GenerateRequest {
    let prompt = Prompt::Text(PROMPT.to_owned());
    GenerateRequest { max_tokens: TOKENS, ignore_eog: true, ..GenerateRequest::new(model, prompt) }
}

fn whole(client: &Client, model: &str) -> std::result::Result<Vec<u32>, ClientError> {
    let mut ids = Vec::new();
    for item in &mut client.generate(&request(model))? {
        ids.extend(item?.ids);
    }
    Ok(ids)
}

impl Shared {
    /// Requests the answer that all others must equal.
    pub fn new(daemon: &Daemon) -> Result<Self> {
        // With sixteen clients on two cores, a reply may take long.
        let patience = Duration::from_secs(120);
        let options = Options {
            socket: daemon.socket(),
            connect_timeout: patience,
            reply_timeout: patience,
            ..Options::default()
        };
        let alone = whole(&Client::new(options.clone()), MODELS[0]).map_err(client_error)?;
        if alone.len() != TOKENS as usize {
            return Err(Error::Unexpected { what: "the daemon", text: format!("{} tokens", alone.len()) });
        }
        let shared = Self {
            options,
            client: daemon.client_program().to_owned(),
            alone,
            counts: Counts::default(),
            errors: Mutex::default(),
            stop: AtomicBool::new(false),
        };
        shared.map_all()?;
        Ok(shared)
    }

    /// Maps every model: the number of open files depends on it, and the last client may have unloaded any.
    pub fn map_all(&self) -> Result<()> {
        let client = Client::new(self.options.clone());
        for model in MODELS {
            if whole(&client, model).map_err(client_error)? != self.alone {
                return Err(Error::Unexpected {
                    what: "the daemon",
                    text: format!("{model} gave a different answer"),
                });
            }
        }
        Ok(())
    }

    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Runs one client until it is stopped.
    pub fn run(&self, seed: u64) {
        let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        let mut client = Client::new(self.options.clone());
        while !self.stop.load(Ordering::Relaxed) {
            if let Err(error) = self.act(&client, &mut random) {
                let mut errors = self.errors.lock().unwrap_or_else(PoisonError::into_inner);
                if errors.len() < ERRORS_MAX {
                    errors.insert(error.to_string());
                }
                drop(errors);
                thread::sleep(Duration::from_millis(100));
            }
            if random.below(10) == 0 {
                client = Client::new(self.options.clone()); // closes the old connection
            }
        }
    }

    fn act(&self, client: &Client, random: &mut Random) -> std::result::Result<(), ClientError> {
        let model = MODELS[random.below(MODELS.len() as u64) as usize];
        let count = |count: &AtomicU64| {
            count.fetch_add(1, Ordering::Relaxed);
        };
        match random.below(20) {
            0..8 => {
                let right = whole(client, model)? == self.alone;
                count(if right { &self.counts.answers } else { &self.counts.wrong });
            }
            8..13 => {
                let mut generation = client.generate(&request(model))?;
                for _ in 0..random.below(6) {
                    generation.next_item()?;
                }
                count(&self.counts.cancelled); // dropping it cancels the request
            }
            13..16 => {
                let mut generation = client.generate(&request(model))?;
                while generation.next_item()?.is_some() && !self.stop.load(Ordering::Relaxed) {
                    thread::sleep(Duration::from_millis(random.below(40)));
                }
                count(&self.counts.slow);
            }
            16..19 => {
                client.load(model)?;
                client.unload(model)?;
                count(&self.counts.loads);
            }
            _ => {
                self.kill_one(model, Duration::from_millis(random.below(300)));
                count(&self.counts.killed);
            }
        }
        Ok(())
    }

    /// Starts a client process and kills it in the middle of its answer.
    fn kill_one(&self, model: &str, after: Duration) {
        let mut command = std::process::Command::new(&self.client);
        command.arg("--socket").arg(&self.options.socket).args(["run", model, PROMPT, "--max-tokens", "400"]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        if let Ok(mut child) = command.spawn() {
            thread::sleep(after);
            let _ = child.kill(); // it may have ended already
            let _ = child.wait();
        }
    }

    /// Resources still held once the daemon has noticed the last disconnect.
    pub fn left(&self) -> Result<Left> {
        let client = Client::new(self.options.clone());
        let mut left = Left::default();
        for _ in 0..500 {
            let status = client.status().map_err(client_error)?;
            left = Left { connections: status.connections.saturating_sub(1), ..Left::default() };
            for device in &status.devices {
                left.running += device.sequences_running;
                left.queued += device.sequences_queued;
                left.kv_pages += device.kv_pages_used;
                left.kv_bytes += device.kv_bytes.saturating_sub(device.kv_cached_bytes());
            }
            if left == Left::default() {
                break;
            }
            thread::sleep(Duration::from_millis(20));
        }
        Ok(left)
    }

    pub fn done(&self) -> Done {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let Counts { answers, wrong, cancelled, slow, killed, loads } = &self.counts;
        Done {
            answers: read(answers),
            wrong: read(wrong),
            cancelled: read(cancelled),
            slow: read(slow),
            killed: read(killed),
            loads: read(loads),
            errors: self.errors.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect(),
        }
    }
}

fn client_error(error: ClientError) -> Error {
    Error::Unexpected { what: "the daemon", text: error.to_string() }
}
