//! A gateway in a thread of the test, before a daemon of its own.

use std::thread::JoinHandle;
use std::time::Instant;

use rocmforge_client::Options;
use rocmforge_gateway::{Address, Gateway, Listener, Settings, Tokens, serve};
use serde_json::Value;
use tokio::sync::oneshot;

use crate::forge::{Value as Meta, tiny_llama};
use crate::http::{Connection, Response};
use crate::rig::{PATIENCE, Rig};

/// Name of the model with a chat template.
pub const CHATTY: &str = "chatty";

/// Name of one that answers for long: it never ends an answer by itself, and its context is long.
pub const ENDLESS: &str = "endless";

const TEMPLATE: &str = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}";

/// A gateway, and the daemon behind it.
pub struct Door {
    pub rig: Rig,
    /// IP address and port, or `unix:` and a path.
    pub address: String,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// A daemon with small models of these names, contexts and chat templates.
fn rig_of(models: &[(&str, u32, &str)], limits: &str) -> Rig {
    let mut rig = Rig::idle();
    for (name, context, template) in models {
        let model = tiny_llama(3)
            .set("llama.context_length", Meta::u32(*context))
            .set("tokenizer.chat_template", Meta::string(template));
        std::fs::write(rig.model(name), model.build().bytes).unwrap();
    }
    rig.configure(&format!("[device]\nbackend = 'cpu'\n[limits]\n{limits}\n"));
    rig.run();
    rig
}

/// A daemon with the kept model, one with a chat template, and one that answers for long, and with these limits.
pub fn small_rig(limits: &str) -> Rig {
    rig_of(&[(CHATTY, 2048, TEMPLATE), (ENDLESS, 32768, TEMPLATE)], limits)
}

impl Door {
    /// A gateway on a port of its own; the daemon has the kept model, and one with a chat template.
    pub fn open() -> Self {
        Self::open_with("127.0.0.1:0", None, Settings::default())
    }

    pub fn open_with(address: &str, tokens: Option<Tokens>, settings: Settings) -> Self {
        Self::before(small_rig(""), address, tokens, settings)
    }

    /// A gateway before a daemon whose models differ in their names and chat templates.
    pub fn of_templates(templates: &[(&str, &str)]) -> Self {
        let models: Vec<_> = templates.iter().map(|(name, template)| (*name, 4096, *template)).collect();
        Self::before(rig_of(&models, ""), "127.0.0.1:0", None, Settings::default())
    }

    /// A gateway before this daemon.
    pub fn before(rig: Rig, address: &str, tokens: Option<Tokens>, settings: Settings) -> Self {
        let (stop, stopped) = oneshot::channel();
        let (tell, told) = std::sync::mpsc::channel();
        let address: Address = address.parse().unwrap();
        // The daemon answers already: once it is gone, requests fail as soon as they do for people.
        let absent_timeout = Options::default().absent_timeout;
        let options = Options { absent_timeout, ..rig.options() };
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
            runtime.unwrap().block_on(async {
                let listener = Listener::open(&address, tokens).unwrap();
                tell.send(listener.address()).unwrap();
                let stop = async { stopped.await.unwrap_or(()) };
                serve(Gateway::new(options, settings), listener, stop).await;
            });
        });
        let address = told.recv().unwrap().trim_start_matches("http://").to_owned();
        Self { rig, address, stop: Some(stop), thread: Some(thread) }
    }

    /// Has the gateway stop as a signal does, and does not wait for its end.
    pub fn stop(&mut self) {
        drop(self.stop.take());
    }

    pub fn connect(&self) -> Connection {
        Connection::open(&self.address)
    }

    #[track_caller]
    pub fn get(&self, path: &str) -> Response {
        let mut connection = self.connect();
        connection.get(path);
        connection.response().expect("a response")
    }

    #[track_caller]
    pub fn post(&self, path: &str, body: &Value) -> Response {
        let mut connection = self.connect();
        connection.post(path, &body.to_string());
        connection.response().expect("a response")
    }

    /// Waits until the gateway's metrics have this line.
    #[track_caller]
    pub fn await_metric(&self, line: &str) {
        let until = Instant::now() + PATIENCE;
        loop {
            let page = self.get("/metrics").body;
            if page.lines().any(|found| found == line) {
                return;
            }
            assert!(Instant::now() < until, "{line} never came:\n{page}");
        }
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            assert!(ended.is_ok() || std::thread::panicking(), "the gateway panicked");
        }
    }
}
