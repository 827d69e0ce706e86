//! Answers that arrive in items: generated tokens, load progress, events.

use std::marker::PhantomData;
use std::time::{Duration, Instant};

use crate::connection::{Connection, Ticket};
use crate::error::ClientError;
use crate::wire::{
    GenerateEnd, GenerateItem, INITIAL_CREDIT, LoadToDeviceEnd, LoadToDeviceItem, Message, Op, SubscribeEnd,
    SubscribeItem,
};

/// Items taken before the client grants as many again: half of the initial credit, so the server never waits for a
/// client that reads.
const GRANT_ITEMS: u32 = INITIAL_CREDIT / 2;

/// Counts the items taken of a stream, and says when to grant as many again.
#[derive(Debug)]
pub(crate) struct Grants {
    taken: u32,
    every: u32,
}

impl Grants {
    /// For a stream that began with `initial_credit`.
    pub fn new(initial_credit: u32) -> Self {
        Self { taken: 0, every: GRANT_ITEMS.min(initial_credit) }
    }

    /// An item was taken; returns the credit to grant now.
    pub fn took_one(&mut self) -> Option<u32> {
        self.taken += 1;
        (self.taken >= self.every).then(|| std::mem::take(&mut self.taken))
    }
}

/// The client waits this much longer than the request's own deadline, so that the daemon's error arrives first.
pub(crate) const GRACE: Duration = Duration::from_secs(5);

/// A running answer.
pub type Generation = Items<GenerateItem, GenerateEnd>;

/// A load to the device in progress.
pub type DeviceLoading = Items<LoadToDeviceItem, LoadToDeviceEnd>;

/// Events of weights and models, as they happen.
pub type Events = Items<SubscribeItem, SubscribeEnd>;

/// An answer in progress: an iterator over its items, then [`Items::end`]. Dropping it cancels the request.
#[derive(Debug)]
pub struct Items<I, E> {
    ticket: Ticket,
    deadline: Option<Instant>,
    grants: Grants,
    end: Option<E>,
    failed: bool,
    items: PhantomData<fn() -> I>,
}

impl<I: Message, E: Message> Items<I, E> {
    /// A `timeout_ms` of 0 means no deadline.
    pub(crate) fn new(ticket: Ticket, timeout_ms: u32) -> Self {
        let timeout = Duration::from_millis(timeout_ms.into());
        let deadline = (timeout_ms > 0).then(|| Instant::now() + timeout + GRACE);
        let grants = Grants::new(ticket.connection().hello().limits.initial_credit);
        Self { ticket, deadline, grants, end: None, failed: false, items: PhantomData }
    }

    /// The request's stream, for [`Connection::cancel`].
    pub fn stream(&self) -> u32 {
        self.ticket.stream()
    }

    /// The connection it runs on.
    pub fn connection(&self) -> &Connection {
        self.ticket.connection()
    }

    /// How the answer ended; `None` until all items were taken.
    pub fn end(&self) -> Option<&E> {
        self.end.as_ref()
    }

    /// The next item; `None` once the answer has ended. Grants credit as items are taken.
    ///
    /// # Errors
    /// As [`Connection::call`]; after an error there are no more items.
    pub fn next_item(&mut self) -> Result<Option<I>, ClientError> {
        if self.end.is_some() || self.failed {
            return Ok(None);
        }
        let outcome = self.take();
        self.failed = outcome.is_err();
        outcome
    }

    fn take(&mut self) -> Result<Option<I>, ClientError> {
        let frame = self.ticket.next_frame(self.deadline)?;
        if frame.header.known_op() == Some(Op::End) {
            self.end = Some(self.ticket.decode(&frame)?);
            return Ok(None);
        }
        let item = self.ticket.decode(&frame)?;
        if let Some(items) = self.grants.took_one() {
            self.connection().grant(self.stream(), items)?;
        }
        Ok(Some(item))
    }
}

impl<I: Message, E: Message> Iterator for Items<I, E> {
    type Item = Result<I, ClientError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.next_item().transpose()
    }
}
