//! What happens to models, for who watches.

use tokio::sync::broadcast;

use crate::model::{Model, ModelId};
use crate::tensor::MapError;

/// Events that a watcher may be behind.
const EVENTS_KEPT: usize = 256;

/// What happened to a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ModelEvent {
    Mapped(ModelId),
    Unmapped(ModelId),
    /// Its file lost bytes or changed; why.
    Poisoned(ModelId, String),
}

/// Tells what happens to models; clones share it. Telling never waits.
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
    /// What happens from now on.
    pub(super) fn subscribe(&self) -> broadcast::Receiver<ModelEvent> {
        self.sender.subscribe()
    }

    pub(super) fn mapped(&self, id: ModelId) {
        self.tell(ModelEvent::Mapped(id));
    }

    /// A mapping is gone.
    pub fn unmapped(&self, id: ModelId) {
        self.tell(ModelEvent::Unmapped(id));
    }

    /// A request on the model failed: tells where its file is the reason. Each such request tells it again. Asks the file:
    /// off the runtime's threads.
    pub(super) fn note_poison(&self, model: &Model) {
        let whole = model.files.check_poison().and_then(|()| model.files.check_unchanged());
        if let Err(error @ (MapError::Poisoned | MapError::Changed)) = whole {
            self.tell(ModelEvent::Poisoned(model.id, error.to_string()));
        }
    }

    fn tell(&self, event: ModelEvent) {
        let _ = self.sender.send(event); // nobody may be watching
    }
}
