//! Requests to receive events about weights and models.
//!
//! A subscriber's events wait in bounded channels that overwrite the oldest. A slow subscriber loses events, learns how
//! many, and delays no other client. Events are taken out only when the client has credit for an item.

use std::collections::HashMap;

use rocmforge_client::wire::{
    self, ErrorCode, EventEntry, EventKind, Ext, SubscribeEnd, SubscribeItem, limits,
};
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::{RecvError, TryRecvError};

use super::Call;
use super::error::{Failure, failure};
use super::events::ModelEvent;
use super::responder::Responder;
use crate::model::ModelId;
use crate::scheduler::EngineEvent;

/// Models that a subscriber remembers, to name them after they are gone.
const REMEMBERED: usize = 4096;

/// Answers one request until the client cancels it or the daemon stops.
pub(super) async fn run(call: &Call, responder: &Responder) -> Result<SubscribeEnd, Failure> {
    call.service().refuse_while_draining()?;
    let _ticket = call.service().ticket(call.peer().uid)?;
    let mut watch = Watch::new(call);
    tokio::select! {
        told = watch.tell(responder) => told.map(|()| SubscribeEnd::default()),
        () = call.service().engine.drained() => Ok(SubscribeEnd::default()),
        () = call.control.cancel.cancelled() => Err(failure(ErrorCode::Cancelled, "cancelled")),
    }
}

/// One event of either kind.
enum Event {
    Model(ModelEvent),
    Engine(EngineEvent),
    Missed(u64),
}

/// Facts about a model that events need.
#[derive(Clone, Debug, Default)]
struct Known {
    name: String,
    parts: u32,
    poisoned: bool,
}

struct Watch<'a> {
    call: &'a Call,
    models: Receiver<ModelEvent>,
    engine: Receiver<EngineEvent>,
    known: HashMap<ModelId, Known>,
}

impl<'a> Watch<'a> {
    fn new(call: &'a Call) -> Self {
        let service = call.service();
        let (models, engine) = (service.events.subscribe(), service.engine.events());
        Self { call, models, engine, known: HashMap::new() }
    }

    /// Sends events until no more can happen.
    async fn tell(&mut self, responder: &Responder) -> Result<(), Failure> {
        self.call.control.wait_credit().await;
        self.learn_mapped();
        self.learn();
        responder.item(&SubscribeItem::default())?;
        while let Some(first) = self.next().await {
            self.call.control.wait_credit().await;
            self.learn();
            let mut item = SubscribeItem::default();
            let mut event = Some(first);
            while let Some(now) = event {
                self.add(&mut item, now);
                event = if item.events.len() < limits::EVENTS_MAX { self.at_hand() } else { None };
            }
            if item.missed > 0 || !item.events.is_empty() {
                responder.item(&item)?;
            }
        }
        Ok(())
    }

    async fn next(&mut self) -> Option<Event> {
        fn of<T>(received: Result<T, RecvError>, event: impl Fn(T) -> Event) -> Option<Event> {
            match received {
                Ok(received) => Some(event(received)),
                Err(RecvError::Lagged(missed)) => Some(Event::Missed(missed)),
                Err(RecvError::Closed) => None,
            }
        }
        tokio::select! {
            biased;
            event = self.models.recv() => of(event, Event::Model),
            event = self.engine.recv() => of(event, Event::Engine),
        }
    }

    fn at_hand(&mut self) -> Option<Event> {
        match self.models.try_recv() {
            Ok(event) => return Some(Event::Model(event)),
            Err(TryRecvError::Lagged(missed)) => return Some(Event::Missed(missed)),
            Err(TryRecvError::Empty | TryRecvError::Closed) => {}
        }
        match self.engine.try_recv() {
            Ok(event) => Some(Event::Engine(event)),
            Err(TryRecvError::Lagged(missed)) => Some(Event::Missed(missed)),
            Err(TryRecvError::Empty | TryRecvError::Closed) => None,
        }
    }

    /// Records the names of the models that are mapped now: after it is unmapped, a model has none.
    fn learn_mapped(&mut self) {
        let mapped = self.call.service().store.mapped_names().into_iter();
        let ids: Vec<ModelId> = mapped.map(|(_, _, id)| id).take(REMEMBERED).collect();
        for (id, name) in self.names(&ids) {
            self.known.entry(id).or_default().name = name;
        }
    }

    /// Records the models that the device holds, so that events can name them after they are gone.
    fn learn(&mut self) {
        let snapshot = self.call.service().engine.snapshot();
        let new: Vec<_> = snapshot.models.iter().filter(|model| !self.is_named(model.model)).collect();
        let ids: Vec<ModelId> = new.iter().map(|model| model.model).collect();
        let names = self.names(&ids);
        for model in new {
            let known = self.known.entry(model.model).or_default();
            known.parts = u32::try_from(model.parts.len()).unwrap_or(u32::MAX);
            known.name = names.get(&model.model).cloned().unwrap_or_default();
        }
    }

    fn is_named(&self, id: ModelId) -> bool {
        self.known.get(&id).is_some_and(|known| known.parts > 0 && !known.name.is_empty())
    }

    fn names(&self, ids: &[ModelId]) -> HashMap<ModelId, String> {
        let (peer, store) = (self.call.peer(), &self.call.service().store);
        if ids.is_empty() { HashMap::new() } else { store.names_of(peer.uid, peer.sees, ids) }
    }

    fn known(&mut self, id: ModelId) -> &mut Known {
        if self.known.len() >= REMEMBERED {
            self.known.clear();
        }
        if self.known.get(&id).is_none_or(|known| known.name.is_empty()) {
            let name = self.names(&[id]).remove(&id).unwrap_or_default();
            self.known.entry(id).or_default().name = name;
        }
        self.known.entry(id).or_default()
    }

    fn add(&mut self, item: &mut SubscribeItem, event: Event) {
        let (kind, id, part, device_bytes, text) = match event {
            Event::Missed(missed) => return item.missed += missed,
            Event::Engine(EngineEvent::Loaded { model, part, bytes }) => {
                (EventKind::Loaded, model, part, bytes, String::new())
            }
            Event::Engine(EngineEvent::Evicted { model, part, bytes }) => {
                (EventKind::Evicted, model, part, bytes, String::new())
            }
            Event::Engine(EngineEvent::DeviceLost { text }) => {
                (EventKind::DeviceLost, ModelId(0), 0, 0, text)
            }
            Event::Model(ModelEvent::Mapped(model)) => (EventKind::ModelMapped, model, 0, 0, String::new()),
            Event::Model(ModelEvent::Unmapped(model)) => {
                (EventKind::ModelUnmapped, model, 0, 0, String::new())
            }
            Event::Model(ModelEvent::Poisoned(model, why)) => {
                // Each failing request on a poisoned model publishes the event again; a client gets it once.
                if std::mem::replace(&mut self.known(model).poisoned, true) {
                    return;
                }
                (EventKind::ModelPoisoned, model, 0, 0, why)
            }
        };
        let known = if id == ModelId(0) { Known::default() } else { self.known(id).clone() };
        // The files and loads of other users are theirs.
        if known.name.is_empty() && id != ModelId(0) && !self.call.peer().sees {
            return;
        }
        item.events.push(EventEntry {
            kind,
            id: id.0,
            model: known.name,
            part,
            parts: known.parts,
            device_bytes,
            text: wire::cut_text(&text, limits::ERROR_BYTES_MAX).to_owned(),
            ext: Ext::new(),
        });
    }
}
