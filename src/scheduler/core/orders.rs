//! What is done about weights on the device because somebody asked, or because a model was idle for long.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use super::{Core, StepPlan};
use crate::backend::BackendError;
use crate::model::{Model, ModelId};
use crate::scheduler::residency::{ResidencyRules, Room, Window};
use crate::scheduler::snapshot::EngineEvent;
use crate::scheduler::{Bytes, JobError};

/// How often what is on its way is looked at between steps: there may be other work.
const ARRIVAL: Duration = Duration::from_millis(1);

/// What left.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cleared {
    /// Parts of models.
    pub parts: u64,
    /// Bytes of the device's memory, activations of closed models among them.
    pub bytes: u64,
}

/// A change of [`ResidencyRules`]; what is none stays as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)] // as there
pub struct RulesChange {
    pub pinned: Option<bool>,
    pub priority: Option<u8>,
    pub parts_min: Option<u32>,
    pub idle_max: Option<Option<Duration>>,
}

/// What somebody asked for; they get the answer when it is done.
#[derive(Debug)]
pub(in crate::scheduler) enum Order {
    Clear { model: Option<ModelId>, done: oneshot::Sender<Cleared> },
    ReleaseIdle { done: oneshot::Sender<Cleared> },
    Rules { model: Arc<Model>, change: RulesChange, done: oneshot::Sender<ResidencyRules> },
}

impl Core {
    /// Does what was asked, between steps.
    pub(super) fn obey(&mut self, order: Order) {
        match order {
            Order::Clear { model, done } => {
                let ids = match model {
                    Some(id) => vec![id],
                    None => self.residency.order(None),
                };
                let before = self.sums();
                for id in ids {
                    self.fail_loads(Some(id), &|| JobError::Cancelled);
                    self.send_away(id);
                }
                self.tell_cleared(before, done);
            }
            Order::ReleaseIdle { done } => {
                let before = self.sums();
                while self.close_idle_room(None) {}
                for id in self.residency.order(None) {
                    if self.rooms.get(&id).is_some_and(|room| room.idle_since.is_some()) {
                        self.send_away(id);
                    }
                }
                self.tell_cleared(before, done);
            }
            Order::Rules { model, change, done } => {
                self.residency.enter(&model);
                let room =
                    || super::Room { idle_since: Some(crate::lock::now()), ..super::Room::new(&model) };
                self.rooms.entry(model.id).or_insert_with(room);
                if let Some(rules) = self.residency.rules_mut(model.id) {
                    change.apply(rules);
                }
                self.publish();
                let _ = done.send(self.residency.rules(model.id)); // who went away needs no answer
            }
        }
    }

    /// Evictions so far, and bytes in use.
    fn sums(&self) -> (u64, u64) {
        (self.residency.counters().evictions, self.backend.memory().used())
    }

    fn tell_cleared(&mut self, before: (u64, u64), done: oneshot::Sender<Cleared>) {
        let (evictions, used) = self.sums();
        self.backend.trim();
        self.publish();
        let cleared = Cleared { parts: evictions - before.0, bytes: before.1.saturating_sub(used) };
        let _ = done.send(cleared); // as above
    }

    /// Sends all weights of a model away.
    fn send_away(&mut self, id: ModelId) {
        if let Err(error) = self.residency.evict_model(id, self.backend.as_mut()) {
            tracing::warn!(model = id.0, %error, "weights could not be sent away");
        }
    }

    /// Sends the weights of models away that were idle for as long as their rules say.
    pub(super) fn expire_idle(&mut self, now: Instant) {
        let expired = |(id, room): (&ModelId, &super::Room)| {
            let most = self.residency.rules(*id).idle_max?;
            let idle = now.saturating_duration_since(room.idle_since?);
            (idle >= most && self.residency.held(*id).next().is_some()).then_some(*id)
        };
        let ids: Vec<ModelId> = self.rooms.iter().filter_map(expired).collect();
        for id in ids {
            self.send_away(id);
        }
    }

    /// Gives back the activations of the model that has been idle longest. False when there is none.
    pub(super) fn close_idle_room(&mut self, but: Option<ModelId>) -> bool {
        let idle = self.rooms.iter().filter(|(id, room)| Some(**id) != but && room.slot.is_some());
        let oldest = idle.filter_map(|(id, room)| Some((room.idle_since?, *id))).min();
        let Some((_, id)) = oldest else { return false };
        if let Some(slot) = self.rooms.get_mut(&id).and_then(|room| room.slot.take()) {
            self.backend.close_model(slot);
            self.policy.close_pool(id);
        }
        true
    }

    /// Between steps: one thing leaves so that there is more room for a model. False when nothing may.
    ///
    /// # Errors
    /// [`BackendError::DeviceLost`].
    fn make_room(&mut self, window: &Window) -> Result<bool, BackendError> {
        if self.close_idle_room(Some(window.model)) {
            return Ok(true);
        }
        match self.residency.make_room(window, self.backend.as_mut())? {
            Room::Made => Ok(true),
            Room::None => Ok(false),
            Room::OnItsWay(_) => {
                crate::lock::pause(ARRIVAL);
                Ok(true)
            }
        }
    }

    /// Memory was short for a step: something leaves and the next turn tries again, or the step's requests fail.
    pub(super) fn out_of_memory(&mut self, step: &StepPlan, error: &BackendError) {
        // Weights for which parts of the same model would have to leave find no more room the next time.
        let room = match self.residency.take_starved() {
            true => Ok(self.close_idle_room(Some(step.model))),
            false => self.make_room(&Window::none(step.model)),
        };
        match room {
            Ok(true) => {}
            Ok(false) => {
                let error = self.no_room(step.model, error);
                tracing::warn!(model = step.model.0, %error, "a step found no room");
                for work in &step.work {
                    self.fail(work.id, error.clone());
                }
            }
            Err(lost) => self.replace_device(&lost),
        }
    }

    /// Why there is no room, with who has it.
    pub(super) fn no_room(&self, id: ModelId, error: &BackendError) -> JobError {
        let memory = self.backend.memory();
        let Some((what, need_bytes)) = error.needs() else { return JobError::Backend(error.clone()) };
        // No names: a file that one user passed is nothing to another. Who may see them asks for the residency.
        let (mut own, mut others, mut pinned, mut count) = (0, 0, 0, 0);
        for other in self.rooms.keys() {
            let bytes: u64 = self.residency.held(*other).map(|(_, held)| held.bytes).sum();
            if *other == id {
                own = bytes;
            } else if bytes > 0 {
                count += 1;
                others += bytes;
                pinned += if self.residency.rules(*other).pinned { bytes } else { 0 };
            }
        }
        let models = if count == 1 { "model" } else { "models" };
        let held = [
            format!("the model itself has {}", Bytes(own)),
            format!("{count} other {models} {} ({} pinned)", Bytes(others), Bytes(pinned)),
            format!("KV pages {}", Bytes(memory.kv)),
            format!("activations {}", Bytes(memory.scratch)),
            format!("upload buffers {}", Bytes(memory.staging)),
            format!("other programs {}", Bytes(memory.others())),
        ];
        JobError::NoRoom {
            what,
            need_bytes,
            free_bytes: memory.available(),
            budget_bytes: memory.budget,
            held: held.join(", "),
        }
    }

    /// Tells who watches what came and went.
    pub(super) fn tell_events(&mut self) {
        if let Err(error) = self.residency.look(self.backend.as_mut()) {
            tracing::warn!(%error, "weights that came late could not be sent away");
        }
        for part in self.residency.take_came() {
            let model = ModelId(part.owner.0);
            let bytes = self.residency.held_part(part).bytes;
            self.tell(EngineEvent::Loaded { model, part: part.number, bytes });
        }
        for gone in self.residency.take_gone() {
            self.tell(EngineEvent::Evicted { model: gone.model, part: gone.part, bytes: gone.bytes });
        }
    }

    pub(super) fn tell(&self, event: EngineEvent) {
        let _ = self.shared.events.send(event); // nobody may be watching
    }
}

impl RulesChange {
    fn apply(self, rules: &mut ResidencyRules) {
        rules.pinned = self.pinned.unwrap_or(rules.pinned);
        rules.priority = self.priority.unwrap_or(rules.priority);
        rules.parts_min = self.parts_min.unwrap_or(rules.parts_min);
        rules.idle_max = self.idle_max.unwrap_or(rules.idle_max);
    }
}
