//! Model events for watching clients.

use tokio::sync::broadcast;

use crate::model::{Model, ModelId};
use crate::tensor::MapError;

/// Events that a watcher may lag behind; older ones are lost to it.
const EVENTS_KEPT: usize = 256;

/// A change of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ModelEvent {
    Mapped(ModelId),
    Unmapped(ModelId),
    /// The file lost bytes or changed; the text says which.
    Poisoned(ModelId, String),
}

/// Publishes model events; clones share one channel. Publishing never blocks.
#[derive(Clone, Debug)]
pub struct ModelEvents {
    sender: broadcast::Sender<ModelEvent>,
}

impl Default for ModelEvents {
    fn default() -> Self {
        Self { sender: broadcast::Sender::new(EVENTS_KEPT) }
    }
}

impl ModelEvents {
    /// Receives all events from now on.
    pub(super) fn subscribe(&self) -> broadcast::Receiver<ModelEvent> {
        self.sender.subscribe()
    }

    pub(super) fn mapped(&self, id: ModelId) {
        self.tell(ModelEvent::Mapped(id));
    }

    /// Publishes that a mapping is gone.
    pub fn unmapped(&self, id: ModelId) {
        self.tell(ModelEvent::Unmapped(id));
    }

    /// Call when a request on the model failed: publishes `Poisoned` if the model's file is the reason. Each such
    /// request publishes it again. Reads the file's state: call it off the runtime's threads.
    pub(super) fn note_poison(&self, model: &Model) {
        let whole = model.files.check_poison().and_then(|()| model.files.check_unchanged());
        if let Err(error @ (MapError::Poisoned | MapError::Changed)) = whole {
            self.tell(ModelEvent::Poisoned(model.id, error.to_string()));
        }
    }

    fn tell(&self, event: ModelEvent) {
        let _ = self.sender.send(event); // fails only without watchers
    }
}
