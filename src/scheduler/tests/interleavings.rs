//! Runs the engine's thread against its clients and an uploader in every order of the threads. The tests set pins
//! against evictions and loads, cancels against ends, and drains against new work. No wait has a time limit here, so a
//! missing wake-up is found.

use std::collections::VecDeque;

use super::memory::Upload;
use super::*;
use crate::lock::checker::{JoinHandle, block_on, explore, spawn};
use crate::lock::{Condvar, Mutex, Rank};
use crate::model::Model;
use crate::scheduler::RulesChange;
use crate::scheduler::core::Core;
use crate::scheduler::handle::Shared;

const TENSOR: &str = "blk.0.ffn_up.weight";

/// A long time that never passes in these tests.
const HOUR: Duration = Duration::from_secs(3600);

/// An engine on a thread of the checker. It caches no pages, so an ended request gives its own back at once.
fn start(control: &Control) -> (EngineHandle, JoinHandle<()>) {
    let options = EngineOptions { reuse: Reuse::Off, ..EngineOptions::default() };
    let factory = control.factory();
    let backend = factory().unwrap();
    let shared = Arc::new(Shared::new(backend.as_ref(), &options));
    let handle = EngineHandle { shared: Arc::clone(&shared) };
    (handle, spawn(move || Core::new(options, shared, backend, Box::new(factory)).run()))
}

fn stop(handle: &EngineHandle, engine: JoinHandle<()>) {
    handle.shared.inbox.lock().stop = true;
    handle.shared.wake.notify_one();
    engine.join().unwrap();
}

/// The inbox keeps nothing of ended sequences.
fn assert_quiet(handle: &EngineHandle) {
    let inbox = handle.shared.inbox.lock();
    assert_eq!((inbox.live.len(), handle.shared.queue.held(), inbox.jobs.len()), (0, 0, 0));
    assert_eq!((inbox.cancels.len(), inbox.credits.len()), (0, 0));
}

/// Completes the loads.
#[derive(Clone)]
struct Uploader(Arc<(Mutex<(VecDeque<Upload>, bool)>, Condvar)>);

impl Uploader {
    fn start(control: &Control) -> (Self, JoinHandle<()>) {
        let queue = Mutex::new(Rank::UploadQueue, (VecDeque::new(), false));
        let uploader = Self(Arc::new((queue, Condvar::new())));
        let takes = uploader.clone();
        control.memory().upload_by(move |upload| {
            takes.0.0.lock().0.push_back(upload);
            takes.0.1.notify_all();
        });
        let works = uploader.clone();
        (uploader, spawn(move || works.work()))
    }

    fn work(&self) {
        loop {
            let upload = {
                let mut queue = self.0.0.lock();
                loop {
                    match queue.0.pop_front() {
                        Some(upload) => break upload,
                        None if queue.1 => return,
                        None => self.0.1.wait(&mut queue),
                    }
                }
            };
            upload.decide(Ok(()));
        }
    }

    fn stop(&self, thread: JoinHandle<()>) {
        self.0.0.lock().1 = true;
        self.0.1.notify_all();
        thread.join().unwrap();
    }
}

fn held(handle: &EngineHandle, model: &Model) -> u64 {
    let snapshot = handle.snapshot();
    snapshot.models.iter().filter(|room| room.model == model.id).map(|room| room.weight_bytes).sum()
}

#[test]
fn pins_hold_against_evictions_and_every_load_ends() {
    explore(1, || {
        let control = Control::default();
        let (pinned, other) = (open(1, &kept_model()), open(2, &kept_model()));
        let bytes =
            pinned.plan.program.tensors().iter().find(|t| t.lazy.name() == TENSOR).unwrap().lazy.byte_len();
        control.memory().limit(bytes * 3 / 2); // room for one of the two
        let (handle, engine) = start(&control);
        let (uploader, uploads) = Uploader::start(&control);
        let others = async {
            let loaded = handle.preload_tensor(&other, TENSOR).await;
            assert!(
                matches!(loaded, Ok(_) | Err(JobError::NoRoom { .. } | JobError::Cancelled)),
                "{loaded:?}"
            );
        };
        let pins = async {
            let pin = RulesChange { pinned: Some(true), ..RulesChange::default() };
            assert!(handle.set_rules(&pinned, pin).await.unwrap().pinned);
            let loaded = handle.preload_tensor(&pinned, TENSOR).await.unwrap();
            assert_eq!(loaded.bytes, bytes);
            handle.evict_weights(None).await.unwrap();
        };
        block_on(futures_util::future::join(others, pins));
        assert_eq!(held(&handle, &pinned), bytes, "pinned weights stay");
        assert_eq!(
            control.memory().used(),
            bytes + held(&handle, &other),
            "the ledger matches the live copies"
        );
        stop(&handle, engine);
        uploader.stop(uploads);
        assert_eq!(control.memory().wrongs(), [""; 0]);
        assert_eq!(control.memory().used(), 0, "all memory is freed");
    });
}

/// Collects all events of a request, without a time limit.
fn finish(mut asked: Asked) -> Vec<Event> {
    let mut events = Vec::new();
    while let Some(event) = block_on(asked.events.recv()) {
        events.push(event);
    }
    events
}

fn lasts(events: &[Event]) -> usize {
    events.iter().filter(|event| !matches!(event, Event::Tokens(_))).count()
}

#[test]
fn a_cancelled_request_ends_once_and_gives_all_back() {
    explore(1, || {
        let control = Control::default();
        let model = open(1, &kept_model());
        let (handle, engine) = start(&control);
        let (job, asked) = greedy(handle.new_sequence_id(), &model, &prompt(1, 3), 1);
        let id = asked.id;
        handle.submit(job).unwrap();
        let cancels = {
            let handle = handle.clone();
            spawn(move || {
                handle.cancel(id);
                handle.credit(id, 1);
            })
        };
        let events = finish(asked);
        assert_eq!(lasts(&events), 1, "one end: {events:?}");
        assert!(!matches!(events.last(), Some(Event::Tokens(_))), "the end is the last event");
        assert!(handle.snapshot().sequences.is_empty(), "the snapshot lists no ended sequence");
        assert_eq!(control.holds().0, 0, "its pages are free");
        cancels.join().unwrap();
        assert_quiet(&handle);
        stop(&handle, engine);
    });
}

#[test]
fn a_drain_empties_the_engine_and_lets_nothing_in() {
    explore(1, || {
        let control = Control::default();
        let model = open(1, &kept_model());
        let (handle, engine) = start(&control);
        let asks = {
            let (handle, model) = (handle.clone(), Arc::clone(&model));
            spawn(move || {
                let (job, asked) = greedy(handle.new_sequence_id(), &model, &prompt(1, 3), 2);
                match handle.submit(job) {
                    Ok(()) => {
                        let events = finish(asked);
                        assert_eq!(lasts(&events), 1, "{events:?}");
                    }
                    Err(error) => assert!(matches!(error, JobError::Draining), "{error}"),
                }
            })
        };
        handle.drain(Instant::now() + HOUR);
        block_on(handle.drained());
        assert!(handle.shared.inbox.lock().live.is_empty(), "a drained engine is empty");
        let (job, _asked) = greedy(handle.new_sequence_id(), &model, &prompt(1, 3), 1);
        assert!(matches!(handle.submit(job), Err(JobError::Draining)), "and stays empty");
        asks.join().unwrap();
        assert_quiet(&handle);
        stop(&handle, engine);
    });
}
