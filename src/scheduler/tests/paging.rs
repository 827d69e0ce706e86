//! Pages of weights that a device reads in the mapped file: they come before the step, and others do not wait for them.

use std::collections::BTreeSet;
use std::ops::Range;

use parking_lot::{Condvar, Mutex};

use super::*;
use crate::aside::{Aside, Limits};
use crate::backend::KV_PAGE_TOKENS;
use crate::program::FIRST_PART;
use crate::tensor::MappedFile;

/// A disk that keeps the readers of one file waiting.
#[derive(Debug, Default)]
struct Disk {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Length of the file whose readers wait.
    stands: Option<u64>,
    waiting: usize,
    read: Vec<Range<u64>>,
}

impl Disk {
    fn reader(self: &Arc<Self>, patience: Duration) -> PageReader {
        let disk = Arc::clone(self);
        let read = move |file: &MappedFile, range: Range<u64>, _next| {
            let mut state = disk.state.lock();
            state.waiting += 1;
            while state.stands == Some(file.len()) {
                disk.changed.wait(&mut state);
            }
            state.waiting -= 1;
            state.read.push(range);
        };
        let limits = Limits { patience, ..Limits::default() };
        PageReader { aside: Aside::new(limits), read: Arc::new(read) }
    }

    fn stand_still_for(&self, file: Option<u64>) {
        self.state.lock().stands = file;
        self.changed.notify_all();
    }

    fn read(&self) -> Vec<Range<u64>> {
        self.state.lock().read.clone()
    }
}

/// Its readers are released, so that their threads end with the test.
struct Released(Arc<Disk>);

impl Drop for Released {
    fn drop(&mut self) {
        self.0.stand_still_for(None);
    }
}

fn rig(patience: Duration) -> (Rig, Released, Arc<Disk>) {
    let disk: Arc<Disk> = Arc::default();
    let options = EngineOptions { page_reader: disk.reader(patience), ..EngineOptions::default() };
    let rig = Rig::new(options);
    rig.control.read_in_place();
    (rig, Released(Arc::clone(&disk)), disk)
}

/// The same model in a file of another length.
fn on_another_disk(id: u64) -> (Arc<Model>, tempfile::NamedTempFile) {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::copy(kept_model(), file.path()).unwrap();
    file.as_file().set_len(file.as_file().metadata().unwrap().len() + 1).unwrap();
    (open(id, file.path()), file)
}

impl Rig {
    fn ask_of(&self, uid: u32, model: &Arc<Model>, prompt: &[u32], max_tokens: u32) -> Asked {
        let (mut job, asked) = self.job(prompt, max_tokens);
        (job.uid, job.model) = (uid, Arc::clone(model));
        self.handle().submit(job).unwrap();
        asked
    }
}

#[test]
fn every_page_that_a_step_uses_is_read_before_it_and_once() {
    let (rig, _released, disk) = rig(Duration::from_secs(10));
    let ids = rig.ask(&prompt(1, 20), 3).finish().ids;
    assert_eq!(ids, expected(&prompt(1, 20), 3));
    let read: BTreeSet<u64> = disk.read().into_iter().flat_map(|range| range.step_by(64)).collect();
    let program = &rig.model.plan.program;
    for part in FIRST_PART + 1..program.part_count() {
        for (_, tensor) in program.part_tensors(part) {
            assert!(read.contains(&tensor.lazy.range().start), "{} was not read", tensor.lazy.name());
        }
    }
    let (before, again) = (disk.read().len(), rig.ask(&prompt(1, 20), 3).finish().ids);
    assert_eq!((again, disk.read().len()), (ids, before), "the same rows and parts are not read again");
    rig.assert_empty();
}

#[test]
fn a_model_whose_pages_come_slowly_delays_no_other() {
    let (rig, _released, disk) = rig(Duration::from_secs(60));
    let (slow, file) = on_another_disk(2);
    disk.stand_still_for(Some(file.as_file().metadata().unwrap().len()));
    let mut waits = rig.ask_of(1001, &slow, &prompt(1, 20), 3);
    assert!(rig.comes(|_| disk.state.lock().waiting > 0));
    // The disk gives nothing before the end of this answer: an engine that waits would never give it.
    let answer = rig.ask_of(1002, &rig.model, &prompt(2, 20), 8).finish();
    assert_eq!(answer.ids, expected(&prompt(2, 20), 8));
    assert!(waits.events.try_recv().is_err());
    // One that nobody waits for any more leaves nothing behind.
    let gone = rig.ask_of(1001, &slow, &prompt(3, 20), 3);
    rig.handle().cancel(gone.id);
    assert!(matches!(gone.finish().error(), JobError::Cancelled));
    std::thread::sleep(Duration::from_millis(20));
    disk.stand_still_for(None);
    let answer = waits.finish();
    assert_eq!(answer.ids, expected(&prompt(1, 20), 3));
    assert!(answer.outcome().load >= Duration::from_millis(20), "the wait counts as a load");
    rig.assert_empty();
}

#[test]
fn requests_that_are_cancelled_while_pages_come_leave_nothing_and_later_ones_are_served() {
    let (rig, _released, disk) = rig(Duration::from_secs(60));
    disk.stand_still_for(Some(rig.model.files.bytes()));
    let gone = rig.ask(&prompt(1, 2 * KV_PAGE_TOKENS as u32), 3);
    assert!(rig.comes(|_| disk.state.lock().waiting > 0));
    rig.handle().cancel(gone.id);
    assert!(matches!(gone.finish().error(), JobError::Cancelled));
    rig.assert_empty();
    disk.stand_still_for(None);
    assert_eq!(rig.ask(&prompt(1, 20), 3).finish().ids, expected(&prompt(1, 20), 3));
    rig.assert_empty();
}

#[test]
fn a_disk_that_never_answers_fails_its_models_requests_alone() {
    let (rig, _released, disk) = rig(Duration::from_millis(100));
    let (dead, file) = on_another_disk(2);
    disk.stand_still_for(Some(file.as_file().metadata().unwrap().len()));
    for _ in 0..2 {
        let answer = rig.ask_of(1001, &dead, &prompt(1, 20), 3).finish();
        assert!(answer.error().to_string().contains("has not answered"), "{:?}", answer.end);
    }
    assert_eq!(
        (rig.handle().lost_readers(), disk.state.lock().waiting),
        (1, 1),
        "one thread is lost, not two"
    );
    let answer = rig.ask_of(1002, &rig.model, &prompt(2, 20), 8).finish();
    assert_eq!(answer.ids, expected(&prompt(2, 20), 8));
    rig.assert_empty();
}
