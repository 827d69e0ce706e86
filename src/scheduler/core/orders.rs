//! Orders about weights on the device: evictions and rules that clients request, and evictions of idle models.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use super::Core;
use crate::lock;
use crate::model::{Model, ModelId};
use crate::scheduler::JobError;
use crate::scheduler::prefixes::RestoreOrder;
use crate::scheduler::residency::ResidencyRules;
use crate::scheduler::snapshot::EngineEvent;

/// Parts and bytes that an order freed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cleared {
    /// Parts evicted.
    pub parts: u64,
    /// Device bytes freed, with activations of closed models.
    pub bytes: u64,
}

/// A change of [`ResidencyRules`]; `None` leaves a rule as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)] // the fields of `ResidencyRules`
pub struct RulesChange {
    pub pinned: Option<bool>,
    pub priority: Option<u8>,
    pub parts_min: Option<u32>,
    pub idle_max: Option<Option<Duration>>,
}

/// A client's order. `done` gets the answer after the order is executed.
#[derive(Debug)]
pub(in crate::scheduler) enum Order {
    Clear { model: Option<ModelId>, done: oneshot::Sender<Cleared> },
    ReleaseIdle { done: oneshot::Sender<Cleared> },
    Rules { model: Arc<Model>, change: RulesChange, done: oneshot::Sender<ResidencyRules> },
    Restore(RestoreOrder),
}

impl Core {
    /// Executes an order between steps.
    pub(super) fn obey(&mut self, order: Order) {
        match order {
            Order::Clear { model, done } => {
                let ids = match model {
                    Some(id) => vec![id],
                    None => self.device.residency.order(None),
                };
                let before = self.sums();
                self.device.drop_cached(model, &mut self.schedule);
                for id in ids {
                    self.fail_loads(Some(id), &|| JobError::Cancelled);
                    self.device.evict(id);
                }
                self.owe_cleared(before, done);
            }
            Order::ReleaseIdle { done } => {
                let before = self.sums();
                self.device.drop_cached(None, &mut self.schedule);
                while self.device.close_idle(None, &mut self.schedule) {}
                for id in self.device.residency.order(None) {
                    if self.idle_since(id).is_some() {
                        self.device.evict(id);
                    }
                }
                self.owe_cleared(before, done);
            }
            Order::Restore(order) => self.restores.push_back(order.into()),
            Order::Rules { model, change, done } => {
                self.device.enter(&model, lock::now());
                if let Some(rules) = self.device.residency.rules_mut(model.id) {
                    change.apply(rules);
                }
                self.publish();
                let _ = done.send(self.device.residency.rules(model.id)); // the requester may have disconnected
            }
        }
    }

    /// Evictions so far, and bytes in use.
    fn sums(&self) -> (u64, u64) {
        (self.device.residency.counters().evictions, self.device.backend.memory().used())
    }

    fn owe_cleared(&mut self, before: (u64, u64), done: oneshot::Sender<Cleared>) {
        let (evictions, used) = self.sums();
        let cleared = Cleared { parts: evictions - before.0, bytes: before.1.saturating_sub(used) };
        self.cleared.push((cleared, done));
    }

    /// Answers the orders that freed memory, after a snapshot is published that shows it.
    ///
    /// The models unloaded by the same commands must have left before: else their bytes are in that snapshot, and on the
    /// device no longer.
    pub(super) fn answer_cleared(&mut self) {
        if self.cleared.is_empty() {
            return;
        }
        self.device.backend.trim();
        self.publish();
        for (cleared, done) in self.cleared.drain(..) {
            let _ = done.send(cleared); // the requester may have disconnected
        }
    }

    fn idle_since(&self, id: ModelId) -> Option<Instant> {
        self.device.models.get(id)?.life.idle_since()
    }

    /// Evicts the weights of models that were idle for as long as their rules say.
    pub(super) fn expire_idle(&mut self, now: Instant) {
        let residency = &self.device.residency;
        let expired = self.device.models.iter().filter(|(id, hosted)| {
            let (most, since) = (residency.rules(*id).idle_max, hosted.life.idle_since());
            let long = most.zip(since).is_some_and(|(most, t)| now.saturating_duration_since(t) >= most);
            long && residency.held(*id).next().is_some()
        });
        for id in expired.map(|(id, _)| id).collect::<Vec<_>>() {
            self.device.evict(id);
        }
    }

    /// Notifies watchers of the parts that were loaded and evicted.
    pub(super) fn tell_events(&mut self) {
        self.device.look();
        for part in self.device.residency.take_came() {
            let model = part.model;
            let bytes = self.device.residency.held_part(part).bytes;
            self.tell(EngineEvent::Loaded { model, part: part.part, bytes });
        }
        for gone in self.device.residency.take_gone() {
            self.tell(EngineEvent::Evicted { model: gone.model, part: gone.part, bytes: gone.bytes });
        }
    }

    pub(super) fn tell(&self, event: EngineEvent) {
        let _ = self.shared.events.send(event); // fails only without watchers
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
