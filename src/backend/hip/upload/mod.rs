//! Bytes on their way from files to the device: a queue, threads that read into pinned memory, two streams.
//!
//! A staging thread takes the next piece of the tensor at the front, reads it into one of its pinned buffers, and submits:
//! the copy on the copy stream, then on the layout stream the kernel that makes the planes. So the link and the kernels work
//! at the same time, and a buffer is free again when its copy is done. An event behind a tensor's last piece is what steps
//! wait for. One more thread waits for these events and says who is resident.

mod job;
mod staging;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

pub use job::Job;
use staging::Staging;

use super::weights::Weight;
use super::{Device, Event, Stream, StreamPriority};
use crate::backend::BackendError;
use crate::lock::{Condvar, Mutex, Rank};

/// Bytes of a pinned buffer: where the link's rate was reached with several threads, and more brought less.
pub const BUFFER_BYTES: usize = 4 << 20;

/// Pinned buffers of a staging thread: one is read into while the other crosses the link.
const BUFFERS: usize = 2;

/// How bytes get from a file to the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum UploadPath {
    /// The ring: a file that fails does so on our own threads, and no driver has to pin its pages.
    #[default]
    Auto,
    /// Through pinned buffers, filled by several threads.
    Ring,
    /// Through ordinary memory, which the driver stages by itself.
    Copy,
}

/// Sums since the device was opened.
#[derive(Debug, Default)]
pub struct Counts {
    uploads: AtomicU64,
    bytes: AtomicU64,
    failures: AtomicU64,
}

impl Counts {
    /// Tensors brought, bytes read for them, loads that failed.
    pub fn read(&self) -> (u64, u64, u64) {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        (read(&self.uploads), read(&self.bytes), read(&self.failures))
    }
}

/// What staging threads share.
struct Shared {
    device: Device,
    queue: Mutex<Queue>,
    work: Condvar,
    streams: Mutex<Streams>,
    counts: Counts,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Arc<Job>>,
    stop: bool,
}

/// Held while a piece is submitted, so that what belongs together stands together.
struct Streams {
    copy: Stream,
    layout: Stream,
    ended: Sender<Ended>,
}

/// A tensor all of whose pieces were submitted, or given up.
struct Ended {
    weight: Arc<Weight>,
    /// Behind its last copy; without one nothing can be waited for, and the load failed.
    event: Option<Arc<Event>>,
    result: Result<(), BackendError>,
}

/// Takes loads, and carries them out in the order they came.
pub struct Uploader {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Uploader {
    /// Starts `threads` staging threads, at least one, each with pinned buffers of its own.
    ///
    /// # Errors
    /// [`BackendError`] when streams, pinned memory or threads cannot be had.
    pub fn start(device: &Device, path: UploadPath, threads: usize) -> Result<Self, BackendError> {
        let (ended, ends) = channel();
        let streams = Streams {
            copy: device.stream(StreamPriority::Low)?,
            layout: device.stream(StreamPriority::Low)?,
            ended,
        };
        let shared = Arc::new(Shared {
            device: device.clone(),
            queue: Mutex::new(Rank::UploadQueue, Queue::default()),
            work: Condvar::new(),
            streams: Mutex::new(Rank::UploadStreams, streams),
            counts: Counts::default(),
        });
        let mut uploader = Self { shared: Arc::clone(&shared), threads: Vec::new() };
        for number in 0..threads.max(1) {
            let staging = Staging::new(device, path)?;
            let shared = Arc::clone(&shared);
            uploader.spawn(format!("upload-{number}"), move || staging.run(&shared))?;
        }
        let counted = Arc::clone(&shared);
        uploader.spawn("uploaded".into(), move || tell(&ends, &counted.counts))?;
        Ok(uploader)
    }

    fn spawn(&mut self, name: String, run: impl FnOnce() + Send + 'static) -> Result<(), BackendError> {
        let start = |e: std::io::Error| BackendError::Start { what: "an upload thread", why: e.to_string() };
        let thread = std::thread::Builder::new().name(name).spawn(run).map_err(start)?;
        self.threads.push(thread);
        Ok(())
    }

    /// Takes a load. It is carried out after all that came before.
    pub fn submit(&self, job: Job) {
        self.shared.queue.lock().jobs.push_back(Arc::new(job));
        self.shared.work.notify_all();
    }

    /// What was done.
    pub fn counts(&self) -> &Counts {
        &self.shared.counts
    }
}

impl Drop for Uploader {
    fn drop(&mut self) {
        let left = {
            let mut queue = self.shared.queue.lock();
            queue.stop = true;
            std::mem::take(&mut queue.jobs)
        };
        self.shared.work.notify_all();
        for job in left {
            job.give_up(&self.shared, "the device was closed");
        }
        if self.shared.device.alive().is_err() {
            return; // a thread may hang in the driver for good
        }
        // The last sender goes with the streams, which end with the last staging thread.
        let telling = self.threads.pop();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
        self.shared.streams.lock().ended = channel().0;
        if let Some(thread) = telling {
            let _ = thread.join();
        }
    }
}

/// Says of each tensor that it is resident once its event has happened. Holds the weight until then, so that its memory is
/// nobody else's while a copy is under way.
fn tell(ends: &Receiver<Ended>, counts: &Counts) {
    for Ended { weight, event, result } in ends {
        let ended = event.map_or(Ok(()), |event| event.synchronize());
        let result = ended.map_err(BackendError::from).and(result);
        let count = if result.is_ok() { &counts.uploads } else { &counts.failures };
        count.fetch_add(1, Ordering::Relaxed);
        weight.decide(result);
    }
}
