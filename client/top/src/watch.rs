//! Threads that ask the daemon: one takes samples, one listens to events. Both go on when it is gone, until it is back.

use std::sync::mpsc::{Receiver, SyncSender, channel, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use rocmforge_client::wire::SubscribeItem;
use rocmforge_client::{Client, ClientError, Options};

use crate::sample::Sample;

/// Pause before a daemon that does not answer is asked again.
const AGAIN: Duration = Duration::from_millis(500);

/// How long the first sample waits for the events to begin, so that what happens after it is told.
const FIRST: Duration = Duration::from_secs(2);

/// Updates that may wait for the one who draws; threads wait beyond.
const UPDATES_MAX: usize = 64;

/// What came.
#[derive(Debug)]
pub enum Update {
    /// A sample, and when it was taken.
    Sample(Box<Sample>, Instant),
    /// The daemon gave none.
    Gone(ClientError),
    /// Something happened.
    Events(SubscribeItem),
}

/// Starts both. They end when the receiver is gone, at their next update.
pub fn start(options: &Options, interval: Duration) -> Receiver<Update> {
    let (sender, receiver) = sync_channel(UPDATES_MAX);
    let (events, of_events) = (sender.clone(), options.clone());
    let (begun, first) = channel();
    let begins = move || {
        // It fails once nobody waits for the first sample any more.
        let _ = begun.send(());
    };
    thread::spawn(move || while listen(&Client::new(of_events.clone()), &events, &begins).is_some() {});
    let client = Client::new(options.clone());
    thread::spawn(move || {
        // Without events there are samples all the same.
        let _ = first.recv_timeout(FIRST);
        drop(first);
        while sample(&client, interval, &sender).is_some() {}
    });
    receiver
}

/// None once nobody receives any more.
fn sample(client: &Client, interval: Duration, sender: &SyncSender<Update>) -> Option<()> {
    let begun = Instant::now();
    match Sample::take(client) {
        Ok(sample) => sender.send(Update::Sample(Box::new(sample), Instant::now())).ok()?,
        Err(error) => {
            sender.send(Update::Gone(error)).ok()?;
            thread::sleep(AGAIN);
        }
    }
    thread::sleep(interval.saturating_sub(begun.elapsed()));
    Some(())
}

/// As [`sample`], until the connection ends.
fn listen(client: &Client, sender: &SyncSender<Update>, begins: &dyn Fn()) -> Option<()> {
    // Why there are no events is told by who takes samples.
    for item in client.events().into_iter().flatten() {
        let Ok(item) = item else { break };
        begins();
        if item.missed > 0 || !item.events.is_empty() {
            sender.send(Update::Events(item)).ok()?;
        }
    }
    begins();
    thread::sleep(AGAIN);
    Some(())
}
