//! Uploads from files to the device: a queue, threads that read into pinned memory, and streams.
//!
//! A staging thread takes the next piece of the front tensor, or as many small tensors as fit one pinned buffer. It
//! reads them into the buffer, or has the driver pin the file's own pages; `routes` decides. Then it submits one copy
//! on a copy stream and the kernels that make the planes on a layout stream. So the link and the kernels work at the
//! same time, and a buffer is free when its copy is done. Steps wait for an event after a tensor's last piece. One more
//! thread waits for these events and marks tensors as resident.

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

use crate::backend::hip::{Device, Event, HipError, Stream, StreamPriority};
use crate::backend::{BackendError, UploadRate, cause};
use crate::lock::{Condvar, Mutex, Rank};

/// Bytes per pinned buffer. Several threads reached the link's rate with this size; larger buffers were slower.
pub const BUFFER_BYTES: usize = 4 << 20;

/// Bytes of a file that are registered at once. Pieces of 64 to 256 MiB, each copied once registered, reached the
/// link's rate. A thread holds at most two of them.
const REGISTERED_BYTES: u64 = 64 << 20;

/// Most staging threads when the configuration sets no number. On a PCIe 5 link of 55 GB/s, 4 threads reached 25, 8
/// reached 42 and 16 reached 47.
const THREADS_MAX: usize = 12;

/// Pinned buffers per staging thread: one is filled while the other is copied.
const BUFFERS: usize = 2;

/// Pairs of streams. Threads that submit small tensors wait for each other's calls, so one pair is too few. Measured on
/// a link of 55 GB/s with 18 GB of 1 MB experts: 51 GB/s with one pair, 52 with two. With four it was 50, because calls
/// wait within the driver. The eight experts per layer of a first token loaded at 33 GB/s (one pair), 42 (two) and 41
/// (four).
const STREAMS: usize = 2;

/// Path of bytes from a file to the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum UploadPath {
    /// The ring, or copies on a device that copies ordinary memory faster.
    #[default]
    Auto,
    /// Through pinned buffers that several threads fill.
    Ring,
    /// Through ordinary memory, which the driver stages itself.
    Copy,
    /// From the file's own pages, pinned by the driver; the ring where pinning fails.
    Registered,
}

impl UploadPath {
    /// The name in the configuration.
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
    /// Through the page cache, where the next load finds pages that are still cached.
    #[default]
    Cached,
    /// Past the page cache where the filesystem supports it. Other cached data stays, and each load reads the disk.
    Direct,
}

/// Totals since the device was opened.
#[derive(Debug, Default)]
pub struct Counts {
    uploads: AtomicU64,
    bytes: AtomicU64,
    failures: AtomicU64,
}

impl Counts {
    /// Tensors loaded, bytes read, and loads that failed.
    pub fn read(&self) -> (u64, u64, u64) {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        (read(&self.uploads), read(&self.bytes), read(&self.failures))
    }
}

/// State that the staging threads share.
struct Shared {
    device: Device,
    queue: Mutex<Queue>,
    work: Condvar,
    routes: Mutex<Routes>,
    /// Pairs of streams, each used by some threads. A thread holds the lock while it submits work that belongs
    /// together.
    streams: Vec<Mutex<Streams>>,
    counts: Counts,
    reads: FileReads,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Arc<Job>>,
    /// Bytes of these jobs that no thread has taken.
    bytes: u64,
    stop: bool,
}

/// A copy stream, and the stream of the kernels that repack the copied bytes.
struct Streams {
    copy: Stream,
    layout: Stream,
}

/// Tensors whose pieces were all submitted or abandoned, each with its failure.
struct Ended {
    jobs: Vec<(Arc<Job>, Option<BackendError>)>,
    /// Recorded after their last copies. With `None` nothing can be waited for, and the loads have failed.
    event: Option<Arc<Event>>,
}

/// Accepts loads and carries them out in order.
pub struct Uploader {
    shared: Arc<Shared>,
    /// `None` only while dropping.
    ended: Option<Sender<Ended>>,
    threads: Vec<JoinHandle<()>>,
}

impl Uploader {
    /// Starts `threads` staging threads (at least one), each with its own pinned buffers. 0 means three quarters of the
    /// processor's cores, at most 12.
    ///
    /// # Errors
    /// [`BackendError`] when streams, pinned memory or threads cannot be created.
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
                    tracing::warn!(%error, "pinned memory could not be allocated: weights are uploaded through ordinary memory");
                    shared.routes.lock().refuse(UploadPath::Ring);
                    pinned = false;
                    Staging::new(device, number, false, reads)?
                }
                staging => staging?,
            };
            stagings.push(staging);
        }
        // Only pinned memory is aligned for reads past the page cache.
        if path == UploadPath::Auto
            && pinned
            && reads == FileReads::Cached
            && let Some(first) = stagings.first_mut()
        {
            let rates = first.copy_rates(&device.stream(StreamPriority::Low)?)?;
            if let Some(CopyRates { pinned, plain }) = rates {
                let (pinned, plain) = (pinned / 1e9, plain / 1e9);
                tracing::debug!(pinned, plain, "upload rate of one buffer, in GB/s");
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
        let start = |e: std::io::Error| BackendError::Start {
            what: "an upload thread cannot start",
            source: cause(e),
        };
        let thread = std::thread::Builder::new().name(name).spawn(run).map_err(start)?;
        self.threads.push(thread);
        Ok(())
    }

    /// Queues a load. It starts after all earlier ones.
    pub fn submit(&self, job: Job) {
        let mut queue = self.shared.queue.lock();
        queue.bytes += job.bytes();
        queue.jobs.push_back(Arc::new(job));
        drop(queue);
        self.shared.work.notify_all();
    }

    /// The ways to the device, with their measured rates.
    pub fn rates(&self) -> [UploadRate; 4] {
        self.shared.routes.lock().rates()
    }

    /// Totals since the device was opened.
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
            // A thread may hang in the driver forever with the streams locked. So nothing is recorded on these streams
            // any more.
            for job in left {
                job.arrival.decide(Err(lost.clone().into()));
            }
            return;
        }
        // Drop this sender; the other senders end with the staging threads.
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

/// Marks each tensor as resident after its event. Holds the weight until then, so that its memory has no other purpose
/// while a copy is in flight. The load fails if the file has changed or shrunk meanwhile.
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
            let result = result.and_then(|()| whole().map_err(|error| job.failure(error)));
            let counts = &shared.counts;
            let count = if result.is_ok() { &counts.uploads } else { &counts.failures };
            count.fetch_add(1, Ordering::Relaxed);
            if let (Ok(()), Some(begun)) = (&result, job.begun()) {
                bytes += job.bytes();
                way = way.or(Some(begun));
            }
            let tensor = job.tensor.name();
            match &result {
                Ok(()) => tracing::debug!(tensor, bytes = job.bytes(), "tensor loaded"),
                Err(error) => {
                    tracing::debug!(tensor, bytes = job.bytes(), %error, "tensor load failed");
                }
            }
            job.decide(result);
        }
        if let Some((way, begun)) = way {
            // Tensors arrive in order. So this one was in progress from the last arrival, or from its own start if that
            // was later.
            let busy = now.saturating_duration_since(begun.max(last));
            shared.routes.lock().arrived(way, bytes, busy);
        }
        last = now;
    }
}
