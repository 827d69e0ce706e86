//! Threads that ask the daemon: one takes samples, one listens to events. If the daemon goes away, both wait until it
//! is back.

use std::sync::mpsc::{Receiver, SyncSender, channel, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use rocmforge_client::wire::SubscribeItem;
use rocmforge_client::{Client, ClientError, Options};

use crate::Failure;
use crate::sample::Sample;

/// Pause before a daemon that does not answer is asked again.
const AGAIN: Duration = Duration::from_millis(500);

/// Longest wait of the first sample for the event subscription, so that later events are seen.
const FIRST: Duration = Duration::from_secs(2);

/// Most updates that wait to be drawn; then the threads wait.
const UPDATES_MAX: usize = 64;

/// An update for the view.
#[derive(Debug)]
pub enum Update {
    /// A sample, and when it was taken.
    Sample(Box<Sample>, Instant),
    /// Why the daemon gave no sample.
    Gone(ClientError),
    /// Events of weights and models.
    Events(SubscribeItem),
}

/// Starts both threads. They end at their next update after the receiver is dropped.
///
/// # Errors
/// [`Failure::Thread`].
pub fn start(options: &Options, interval: Duration) -> Result<Receiver<Update>, Failure> {
    let (sender, receiver) = sync_channel(UPDATES_MAX);
    let (events, of_events) = (sender.clone(), options.clone());
    let (begun, first) = channel();
    let begins = move || {
        // This fails once the first sample no longer waits.
        let _ = begun.send(());
    };
    spawn("events", move || while listen(&Client::new(of_events.clone()), &events, &begins).is_some() {})?;
    let client = Client::new(options.clone());
    spawn("samples", move || {
        // Without events, samples still come.
        let _ = first.recv_timeout(FIRST);
        drop(first);
        while sample(&client, interval, &sender).is_some() {}
    })?;
    Ok(receiver)
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<(), Failure> {
    thread::Builder::new().name(name.to_owned()).spawn(run).map(drop).map_err(Failure::Thread)
}

/// `None` once the receiver is dropped.
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
    // The sampling thread reports why there are no events.
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
