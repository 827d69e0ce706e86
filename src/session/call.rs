//! One request in flight: which handler answers it, and what handlers need of it.

use std::collections::BTreeMap;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use futures_util::FutureExt;
use rocmforge_client::wire::{self, ClientMessage, ErrorCode, Op};

use super::budget::Held;
use super::control::Control;
use super::error::{Failure, failure, of_store};
use super::policy::Right;
use super::responder::Responder;
use super::{
    Connection, Peer, Service, continued, daemon, device_load, doctor, generate, limit, models, residency,
    subscribe, text, users,
};
use crate::aside::ReceivedFd;
use crate::model::store::Lease;

/// One request in flight: its connection, and the handles that steer it.
#[derive(Clone, Debug)]
pub(super) struct Call {
    pub(super) connection: Arc<Connection>,
    pub(super) control: Arc<Control>,
    /// Given back when no task and no thread works on the request any more.
    pub(super) _held: Arc<Held>,
}

impl Call {
    /// Answers a request that may run: at once if that takes no time, else in a task of its own.
    pub(super) fn answer(
        self,
        message: ClientMessage,
        responder: Responder,
        fds: Vec<ReceivedFd>,
        payload: Vec<u8>,
    ) {
        match message {
            ClientMessage::Ping(request) => responder.reply(&daemon::ping(request)),
            ClientMessage::Fail(request) => responder.fail_as_asked(&daemon::fail(&request)),
            ClientMessage::Info(_) => responder.reply(&daemon::info(&self)),
            ClientMessage::Ps(request) => self.spawn(responder, daemon::ps(self.clone(), request)),
            ClientMessage::CancelRequests(request) => {
                self.spawn(responder, daemon::cancel(self.clone(), request));
            }
            ClientMessage::LimitUser(request) => self.spawn(responder, limit::limit(self.clone(), request)),
            ClientMessage::Users(request) => self.spawn(responder, users::users(self.clone(), request)),
            ClientMessage::Sessions(_) => self.spawn(responder, continued::sessions(self.clone())),
            ClientMessage::ForgetSession(request) => {
                self.spawn(responder, continued::forget(self.clone(), request));
            }
            ClientMessage::Status(_) => self.spawn(responder, daemon::status(self.clone())),
            ClientMessage::Doctor(_) => self.spawn(responder, doctor::doctor(self.clone())),
            ClientMessage::List(request) => self.spawn(responder, models::list(self.clone(), request)),
            ClientMessage::Show(request) => self.spawn(responder, models::show(self.clone(), request)),
            ClientMessage::Load(request) => {
                let fd = fds.into_iter().next();
                self.spawn(responder, models::load(self.clone(), request, fd, payload));
            }
            ClientMessage::LoadToDevice(request) => self.spawn_device_load(responder, request),
            ClientMessage::ClearCache(request) => {
                self.spawn(responder, residency::clear(self.clone(), request))
            }
            ClientMessage::SetRules(request) => {
                self.spawn(responder, residency::set_rules(self.clone(), request))
            }
            ClientMessage::Subscribe(_) => self.spawn_subscribe(responder),
            ClientMessage::Plan(request) => self.spawn(responder, residency::plan(self.clone(), request)),
            ClientMessage::Residency(request) => {
                self.spawn(responder, residency::residency(self.clone(), request));
            }
            ClientMessage::Unload(request) => {
                self.spawn(responder, models::unload(self.clone(), request, payload));
            }
            ClientMessage::Tokenize(request) => self.spawn(responder, text::tokenize(self.clone(), request)),
            ClientMessage::Detokenize(request) => {
                self.spawn(responder, text::detokenize(self.clone(), request))
            }
            ClientMessage::Generate(request) => self.spawn_generate(responder, request),
            ClientMessage::Cancel(_) | ClientMessage::Credit(_) => {} // handled by `steer`
        }
    }

    pub(super) fn service(&self) -> &Arc<Service> {
        &self.connection.service
    }

    pub(super) fn peer(&self) -> Peer {
        let (credentials, policy) = (&self.connection.peer, self.service().policy());
        Peer {
            uid: credentials.uid,
            administrator: policy.is_administrator(credentials),
            sees: policy.allows(credentials, Right::See),
        }
    }

    /// True if the policy allows the client that.
    pub(super) fn may(&self, right: Right) -> bool {
        self.service().policy().allows(&self.connection.peer, right)
    }

    /// The client's rights as text for display.
    pub(super) fn rights(&self) -> String {
        self.service().policy().rights(&self.connection.peer)
    }

    /// Runs a request with one reply in a task of its own. Cancelling drops the future; blocking work it started runs
    /// to its end, and its result is discarded.
    pub(super) fn spawn<T: wire::Message + Send>(
        &self,
        responder: Responder,
        work: impl Future<Output = Result<T, Failure>> + Send + 'static,
    ) {
        let cancel = self.control.cancel.clone();
        let (service, uid) = (Arc::clone(self.service()), self.connection.peer.uid);
        self.service().tasks.spawn(async move {
            let work = AssertUnwindSafe(service.pace.paid(uid, work)).catch_unwind();
            let result = tokio::select! {
                result = work => result.unwrap_or_else(|_| Err(panicked())),
                () = cancel.cancelled() => Err(failure(ErrorCode::Cancelled, "cancelled")),
            };
            responder.in_turn(Op::Reply, result).await;
        });
    }

    fn spawn_generate(self, responder: Responder, request: wire::GenerateRequest) {
        let tasks = self.service().tasks.clone();
        tasks.spawn(async move {
            let work =
                self.service().pace.paid(self.connection.peer.uid, generate::run(&self, &responder, request));
            let work = AssertUnwindSafe(work).catch_unwind();
            let result = work.await.unwrap_or_else(|_| Err(panicked()));
            responder.in_turn(Op::End, result).await;
        });
    }

    fn spawn_device_load(self, responder: Responder, request: wire::LoadToDeviceRequest) {
        let tasks = self.service().tasks.clone();
        tasks.spawn(async move {
            let work = AssertUnwindSafe(device_load::run(&self, &responder, request)).catch_unwind();
            let result = work.await.unwrap_or_else(|_| Err(panicked()));
            responder.in_turn(Op::End, result).await;
        });
    }

    fn spawn_subscribe(self, responder: Responder) {
        let tasks = self.service().tasks.clone();
        tasks.spawn(async move {
            let work = AssertUnwindSafe(subscribe::run(&self, &responder)).catch_unwind();
            let result = work.await.unwrap_or_else(|_| Err(panicked()));
            responder.in_turn(Op::End, result).await;
        });
    }

    /// Call when a request on that model failed: notifies watchers if the model's file is the reason.
    pub(super) async fn note_poison(&self, lease: Arc<Lease>) {
        if lease.model().files.are_as_mapped() {
            return;
        }
        let noted = self.blocking(move |call| {
            call.service().events.note_poison(lease.model());
            Ok(())
        });
        let _ = noted.await; // the request reports its own failure
    }

    /// The model of that name, mapped if necessary; true when this call mapped it. Blocks.
    pub(super) fn acquire(&self, name: &str) -> Result<(Lease, bool), Failure> {
        let acquired = self.service().store.acquire(self.peer().uid, name);
        let (lease, mapped_now) = acquired.map_err(|error| of_store(&error))?;
        if mapped_now {
            self.service().events.mapped(lease.model().id);
        }
        Ok((lease, mapped_now))
    }

    /// Numbers of the user's own requests by model; `None` if it may see those of all users.
    pub(super) fn own_sequences(&self) -> Option<BTreeMap<String, u32>> {
        (!self.peer().sees).then(|| self.service().sequences_of(self.peer().uid))
    }

    /// Runs blocking work off the runtime's threads, once it is this uid's turn. Work that has begun runs to its end
    /// and keeps its turn, even if no caller waits for it any more.
    pub(super) async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Call) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, Failure> {
        let call = self.clone();
        let turn = self.service().blocking.take(self.peer().uid).await;
        let work = move || {
            let result = work(&call);
            drop(turn);
            result
        };
        match tokio::task::spawn_blocking(work).await {
            Ok(result) => result,
            Err(_) => Err(panicked()),
        }
    }
}

/// The failure sent for a request that panicked: a bug of the daemon. The log has the panic's text.
pub(super) fn panicked() -> Failure {
    failure(ErrorCode::Internal, "a bug in the daemon ended this request; see the daemon's log")
}
