//! Bytes on their way from files to the device: a queue, threads that read into pinned memory, streams.
//!
//! A staging thread takes the next piece of the tensor at the front, or as many small tensors as one of its pinned buffers holds,
//! reads them into it (or has the driver pin the file's own pages; `routes` says which), and submits: one copy on a copy stream,
//! then on a layout stream the kernels that make the planes. So the link and the kernels work
//! at the same time, and a buffer is free again when its copy is done. An event behind a tensor's last piece is what steps
//! wait for. One more thread waits for these events and says who is resident.

mod job;
mod routes;
mod staging;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Instant;

pub use job::Job;
use routes::{CopyRates, Routes};
use staging::Staging;

use super::{Device, Event, HipError, Stream, StreamPriority};
use crate::backend::{BackendError, UploadRate};
use crate::lock::{Condvar, Mutex, Rank};

/// Bytes of a pinned buffer: where the link's rate was reached with several threads, and more brought less.
pub const BUFFER_BYTES: usize = 4 << 20;

/// Bytes of a file that are registered at once: in pieces of 64 to 256 MiB each copied as soon as it is registered, the link's
/// rate was reached, and no more than two of them are a thread's.
const REGISTERED_BYTES: u64 = 64 << 20;

/// Staging threads where the configuration names no number. Of a PCIe 5 link of 55 GB/s, 8 threads filled 42, 16 filled 47, and
/// 4 filled 25.
const THREADS_MAX: usize = 12;

/// Pinned buffers of a staging thread: one is read into while the other crosses the link.
const BUFFERS: usize = 2;

/// Pairs of streams: threads that submit small tensors wait for each other's calls. With two, 18 GB of experts of 1 MB came at
/// 52 GB/s of a link's 55 (one: 51; four, where calls wait within the driver: 50), and the eight of each layer that a first token
/// needs at 42 (33; 41).
const STREAMS: usize = 2;

/// How bytes get from a file to the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum UploadPath {
    /// The ring, or copies where the device takes ordinary memory faster.
    #[default]
    Auto,
    /// Through pinned buffers, filled by several threads.
    Ring,
    /// Through ordinary memory, which the driver stages by itself.
    Copy,
    /// From the file's own pages, which the driver pins; the ring where it does not.
    Registered,
}

impl UploadPath {
    /// As the configuration calls it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Ring => "ring",
            Self::Copy => "copy",
            Self::Registered => "registered",
        }
    }
}

/// How files are read for a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FileReads {
    /// Through the page cache, where the next load finds what is still there.
    #[default]
    Cached,
    /// Past it where the file's system can: what else is in there stays, and each load comes from the disk.
    Direct,
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
    routes: Mutex<Routes>,
    /// Pairs of streams, each some threads'. Locked while what belongs together is submitted.
    streams: Vec<Mutex<Streams>>,
    counts: Counts,
    reads: FileReads,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Arc<Job>>,
    /// Of these jobs, those that no thread has taken.
    bytes: u64,
    stop: bool,
}

/// Copies, and the kernels that lay out what they brought.
struct Streams {
    copy: Stream,
    layout: Stream,
}

/// Tensors all of whose pieces were submitted, or given up; each with its failure, if it failed.
struct Ended {
    jobs: Vec<(Arc<Job>, Option<BackendError>)>,
    /// Behind their last copies; without one nothing can be waited for, and the loads failed.
    event: Option<Arc<Event>>,
}

/// Takes loads, and carries them out in the order they came.
pub struct Uploader {
    shared: Arc<Shared>,
    /// Until it is dropped.
    ended: Option<Sender<Ended>>,
    threads: Vec<JoinHandle<()>>,
}

impl Uploader {
    /// Starts `threads` staging threads, at least one, each with pinned buffers of its own; 0 for three quarters of the
    /// processor's cores and at most 12.
    ///
    /// # Errors
    /// [`BackendError`] when streams, pinned memory or threads cannot be had.
    pub fn start(
        device: &Device,
        path: UploadPath,
        reads: FileReads,
        threads: usize,
    ) -> Result<Self, BackendError> {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let threads = if threads == 0 { (cores * 3 / 4).clamp(1, THREADS_MAX) } else { threads };
        let (ended, ends) = channel();
        let streams = (0..STREAMS.min(threads))
            .map(|_| {
                let (copy, layout) =
                    (device.stream(StreamPriority::Low)?, device.stream(StreamPriority::Low)?);
                Ok(Mutex::new(Rank::UploadStreams, Streams { copy, layout }))
            })
            .collect::<Result<_, HipError>>()?;
        let shared = Arc::new(Shared {
            device: device.clone(),
            queue: Mutex::new(Rank::UploadQueue, Queue::default()),
            work: Condvar::new(),
            routes: Mutex::new(Rank::UploadRoutes, Routes::new(path, threads, None)),
            streams,
            reads,
            counts: Counts::default(),
        });
        let mut uploader =
            Self { shared: Arc::clone(&shared), ended: Some(ended.clone()), threads: Vec::new() };
        let (mut stagings, mut pinned) = (Vec::new(), true);
        for number in 0..threads {
            let staging = match Staging::new(device, number, path != UploadPath::Copy, reads) {
                Err(error) if path == UploadPath::Auto && !error.is_lost() => {
                    tracing::warn!(%error, "no pinned memory is to be had: weights go through ordinary memory");
                    shared.routes.lock().refuse(UploadPath::Ring);
                    pinned = false;
                    Staging::new(device, number, false, reads)?
                }
                staging => staging?,
            };
            stagings.push(staging);
        }
        // Only pinned memory is placed so that it can be read into past the page cache.
        if path == UploadPath::Auto
            && pinned
            && reads == FileReads::Cached
            && let Some(first) = stagings.first_mut()
        {
            let rates = first.copy_rates(&device.stream(StreamPriority::Low)?)?;
            if let Some(CopyRates { pinned, plain }) = rates {
                let (pinned, plain) = (pinned / 1e9, plain / 1e9);
                tracing::debug!(pinned, plain, "GB/s of one buffer to the device");
            }
            *shared.routes.lock() = Routes::new(path, threads, rates);
        }
        for (number, staging) in stagings.into_iter().enumerate() {
            let (shared, ended) = (Arc::clone(&shared), ended.clone());
            uploader.spawn(format!("upload-{number}"), move || staging.run(&shared, &ended))?;
        }
        let counted = Arc::clone(&shared);
        uploader.spawn("uploaded".into(), move || tell(&ends, &counted))?;
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
        let mut queue = self.shared.queue.lock();
        queue.bytes += job.bytes();
        queue.jobs.push_back(Arc::new(job));
        drop(queue);
        self.shared.work.notify_all();
    }

    /// Ways to the device, and what was seen of them.
    pub fn rates(&self) -> [UploadRate; 4] {
        self.shared.routes.lock().rates()
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
        if let Err(lost) = self.shared.device.alive() {
            // A thread may hang in the driver for good, with the streams locked: nothing is recorded behind these any more.
            for job in left {
                job.arrival.decide(Err(lost.clone().into()));
            }
            return;
        }
        // The last sender goes here, and with the last staging thread.
        let (telling, ended) = (self.threads.pop(), self.ended.take());
        for job in left {
            if let Some(ended) = &ended {
                job.give_up(&self.shared, ended, "the device was closed");
            }
        }
        drop(ended);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
        if let Some(thread) = telling {
            let _ = thread.join();
        }
    }
}

/// Says of each tensor that it is resident once its event has happened. Holds the weight until then, so that its memory is
/// nobody else's while a copy is under way. Bytes of a file that changed meanwhile, or that is shorter now, do not count.
fn tell(ends: &Receiver<Ended>, shared: &Shared) {
    let mut last = Instant::now();
    for Ended { jobs, event } in ends {
        let ended = event.map_or(Ok(()), |event| event.synchronize()).map_err(BackendError::from);
        let now = Instant::now();
        let mut bytes = 0;
        let mut way = None;
        for (job, failed) in jobs {
            let file = job.tensor.file();
            let whole = || file.check_poison().and_then(|()| file.check_unchanged());
            let result = ended.clone().and(failed.map_or(Ok(()), Err));
            let result = result.and_then(|()| whole().map_err(|error| job.failure(error.to_string())));
            let counts = &shared.counts;
            let count = if result.is_ok() { &counts.uploads } else { &counts.failures };
            count.fetch_add(1, Ordering::Relaxed);
            if let (Ok(()), Some(begun)) = (&result, job.begun()) {
                bytes += job.bytes();
                way = way.or(Some(begun));
            }
            let tensor = job.tensor.name();
            match &result {
                Ok(()) => tracing::debug!(tensor, bytes = job.bytes(), "a tensor is on the device"),
                Err(error) => {
                    tracing::debug!(tensor, bytes = job.bytes(), %error, "a tensor did not get to the device");
                }
            }
            job.decide(result);
        }
        if let Some((way, begun)) = way {
            // They arrive in order: from the last one's arrival on, or from its own beginning, this one was under way.
            let busy = now.saturating_duration_since(begun.max(last));
            shared.routes.lock().arrived(way, bytes, busy);
        }
        last = now;
    }
}
