//! Constraints whose masks take long. An engine that waited for them stopped all users for seconds: an attack found that.

use held::Held;

use super::*;
use crate::model::constraint::{ConstraintKind, ConstraintSource};
use crate::share::Taker;

/// A user whose masks do not come.
const UID: u32 = 4242;

/// Asks for an answer of a given form for a user.
fn ask_for_form(rig: &Rig, uid: u32, number: u32, tokens: u32) -> Asked {
    let source = ConstraintSource { kind: ConstraintKind::Regex, text: "(a|b){400}".to_owned() };
    let compiler = rig.model.tokenizer.constraints().unwrap();
    let (mut job, asked) = rig.job(&prompt(number, 20), tokens);
    job.uid = uid;
    job.steering.constraint =
        Some(compiler.compile_untried(&source, Taker { uid, privileged: false }).unwrap());
    rig.handle().submit(job).unwrap();
    asked
}

#[test]
fn masks_that_do_not_come_stop_nobody_else() {
    let rig = Rig::new(EngineOptions::default());
    let held = Held::of(UID);
    let waiting: Vec<_> = (0..3).map(|number| ask_for_form(&rig, UID, number, 8)).collect();
    // Another user's answer, and one of the same user.
    for uid in [1000, UID] {
        let (mut job, asked) = rig.job(&prompt(9, 40), 50);
        job.uid = uid;
        rig.handle().submit(job).unwrap();
        assert_eq!(asked.finish().ids, expected(&prompt(9, 40), 50));
    }
    assert_eq!(rig.handle().snapshot().sequences.len(), waiting.len(), "they still wait");
    // The engine computes the missed rows again when the masks are there.
    drop(held);
    for asked in waiting {
        assert_eq!(asked.finish().ids.len(), 8);
    }
    rig.assert_empty();
}

#[test]
fn sequences_whose_masks_do_not_come_can_be_cancelled() {
    let rig = Rig::new(EngineOptions::default());
    let held = Held::of(UID + 1);
    let asked = ask_for_form(&rig, UID + 1, 1, 8);
    assert!(rig.comes(|snapshot| snapshot.counters.steps > 0));
    rig.handle().cancel(asked.id);
    assert!(matches!(asked.finish().error(), JobError::Cancelled));
    drop(held);
    rig.assert_empty();
}

/// The last step kept the constraints of its answers until the next one, up to 200 MiB.
#[test]
fn an_idle_engine_holds_no_constraint() {
    let rig = Rig::new(EngineOptions::default());
    let compiler = rig.model.tokenizer.constraints().unwrap();
    rig.control.allow(4);
    let answers: Vec<_> = (0..3).map(|number| ask_for_form(&rig, UID + 2, number, 300)).collect();
    rig.control.wait_held();
    assert_eq!(compiler.followers(), 3);
    answers.iter().for_each(|asked| rig.handle().cancel(asked.id));
    rig.control.release();
    for asked in answers {
        assert!(matches!(asked.finish().error(), JobError::Cancelled));
    }
    assert!(rig.comes(|_| compiler.followers() == 0));
}

/// Holds masks back.
pub mod held {
    use std::collections::BTreeSet;

    use parking_lot::{Condvar, Mutex};

    static HELD: (Mutex<BTreeSet<u32>>, Condvar) = (Mutex::new(BTreeSet::new()), Condvar::new());

    /// The masks of a user, which do not come until this drops.
    pub struct Held(u32);

    impl Held {
        pub fn of(uid: u32) -> Self {
            HELD.0.lock().insert(uid);
            Self(uid)
        }
    }

    impl Drop for Held {
        fn drop(&mut self) {
            HELD.0.lock().remove(&self.0);
            HELD.1.notify_all();
        }
    }

    /// The thread that computes a user's masks waits here.
    pub fn wait(uid: u32) {
        let mut held = HELD.0.lock();
        while held.contains(&uid) {
            HELD.1.wait(&mut held);
        }
    }
}
