//! A look at every model of the directories, without serving any: what a configuration is worth is known before it is taken.
//!
//! Headers are read and checked as a first request would check them. No weight byte is read, one model is open at a time, and
//! nothing is kept. Files whose server may hang are left out: to serve one takes a copy of it in memory.

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use super::Store;
use super::acquire::Fault;
use super::directory::Entry;
use super::error::OpenError;
use crate::aside;
use crate::model::{Model, ModelId};
use crate::tensor::is_shortage;

/// The models of the directories, as a request for each would find them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Survey {
    /// Names whose files would be served.
    pub served: BTreeSet<String>,
    /// Those that would not.
    pub unserved: Vec<Unserved>,
    /// Names that were not looked at: time was short, or memory, or their server may hang.
    pub unseen: BTreeSet<String>,
}

/// A model that would not be served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unserved {
    /// Its name.
    pub name: String,
    /// Its file; of a split model, the first that is there.
    pub path: PathBuf,
    /// The reason, as a request would be told it.
    pub reason: String,
}

impl std::fmt::Display for Unserved {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} would not be served: {}; replace or remove the file", self.path.display(), self.reason)
    }
}

/// Why a model was not opened: the reason that a request would be told, or none if it says nothing about the file.
type NotOpened = Option<String>;

impl Store {
    /// Scans the directories and looks at their models, until that time at most.
    pub fn survey(self: &Arc<Self>, until: Instant) -> Survey {
        self.rescan();
        let entries = self.tables.lock().entries();
        let mut survey = Survey::default();
        // Kept until the next one is open: models of the same vocabulary share it.
        let mut last = None;
        for (name, entry) in entries {
            let opened = if Instant::now() < until { self.look_at(&name, &entry) } else { Err(None) };
            match opened {
                Ok(model) => {
                    last.replace(model);
                    survey.served.insert(name);
                }
                Err(Some(reason)) => {
                    let path = entry.paths.into_iter().next().unwrap_or_default();
                    survey.unserved.push(Unserved { name, path, reason });
                }
                Err(None) => {
                    survey.unseen.insert(name);
                }
            }
        }
        survey
    }

    fn look_at(self: &Arc<Self>, name: &str, entry: &Entry) -> Result<Model, NotOpened> {
        if let Some(reason) = &entry.unusable {
            return Err(Some(reason.clone()));
        }
        // After one that hangs, others of its device would only cost time.
        if self.aside.silent(name, entry.device).is_some() {
            return Err(None);
        }
        let files = match self.open_entry(name, entry, true).map_err(|_| None)? {
            Ok(handed) => handed.files.unwrap_or_default(),
            Err(fault) => return Err(told(&fault)),
        };
        if files.iter().any(|file| file.served.is_some()) {
            self.close(Some(files));
            return Err(None);
        }
        let files = files.into_iter().map(|file| file.file).collect();
        let open = || (self.open)(ModelId(self.numbers.draw()), name, files, None);
        let opened = catch_unwind(AssertUnwindSafe(open))
            .unwrap_or_else(|panic| Err(OpenError::Panicked(aside::panic_text(&*panic))));
        opened.map_err(|error| match &error {
            OpenError::Model(fault) if fault.is_shortage() => None,
            _ => Some(error.to_string()),
        })
    }
}

fn told(fault: &Fault) -> NotOpened {
    match fault {
        Fault::Open(source) if is_shortage(source) => None,
        Fault::Open(source) => Some(source.to_string()),
        Fault::Inspect(source) if source.is_shortage() => None,
        Fault::Inspect(source) => Some(source.to_string()),
        Fault::Remote(_) | Fault::InMemory => None,
    }
}
