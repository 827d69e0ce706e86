//! Several users on one engine: none changes another's tokens, and none keeps the device.

use super::*;
use crate::share::limits::{OfOneUser, UserLimits};

const ALICE: u32 = 1001;
const BOB: u32 = 1002;

impl Rig {
    fn ask_as(&self, uid: u32, model: &Arc<Model>, prompt: &[u32], max_tokens: u32) -> Asked {
        self.ask_on((uid, 1), model, prompt, max_tokens)
    }

    fn ask_on(
        &self,
        (uid, connection): (u32, u64),
        model: &Arc<Model>,
        prompt: &[u32],
        max_tokens: u32,
    ) -> Asked {
        let (mut job, asked) = self.job(prompt, max_tokens);
        (job.uid, job.connection, job.model) = (uid, connection, Arc::clone(model));
        self.handle().submit(job).unwrap();
        asked
    }
}

#[test]
fn a_slow_step_makes_way_for_another_users_model() {
    let rig = Rig::new(EngineOptions::default());
    let slow = open(2, &kept_model());
    rig.control.slow_down(1, Duration::from_millis(100)); // 7 parts
    let mut slow_one = rig.ask_as(ALICE, &slow, &prompt(1, 20), 3);
    assert!(rig.comes(|s| s.sequences.first().is_some_and(|s| s.state == SequenceState::Prefill)));
    let begun = Instant::now();
    let answer = rig.ask_as(BOB, &rig.model, &prompt(2, 20), 8).finish();
    let time = begun.elapsed();
    assert_eq!(answer.ids, expected(&prompt(2, 20), 8));
    assert!(rig.control.suspensions() > 0 && time < Duration::from_millis(400), "{time:?}");
    assert!(slow_one.events.try_recv().is_err(), "the slow step was not over");
    assert_eq!(slow_one.take(1), expected(&prompt(1, 20), 1));
    let is_charged = |s: &EngineSnapshot| s.sequences[0].device_time >= Duration::from_millis(700);
    assert!(rig.comes(is_charged), "its step took 7 x 100 ms");
    assert_eq!(slow_one.finish().ids, expected(&prompt(1, 20), 3)[1..]);
    rig.assert_empty();
}

#[test]
fn a_part_that_takes_long_makes_way_inside_it() {
    let rig = Rig::new(EngineOptions::default());
    let slow = open(2, &kept_model());
    rig.control.slow_down(1, Duration::from_millis(25));
    rig.control.pause_inside_parts(200); // each part takes 5 s
    let mut slow_one = rig.ask_as(ALICE, &slow, &prompt(1, 20), 3);
    assert!(rig.comes(|s| s.sequences.first().is_some_and(|s| s.state == SequenceState::Prefill)));
    let answer = rig.ask_as(BOB, &rig.model, &prompt(2, 20), 2).finish();
    assert_eq!(answer.ids, expected(&prompt(2, 20), 2));
    assert!(
        rig.control.suspensions() > 0 && slow_one.events.try_recv().is_err(),
        "its first part was not over"
    );
    rig.control.pause_inside_parts(1);
    assert_eq!(slow_one.finish().ids, expected(&prompt(1, 20), 3));
    rig.assert_empty();
}

#[test]
fn shares_that_change_at_run_time_reach_the_schedule() {
    let users: Arc<UserLimits> = Arc::default();
    let rig = Rig::new(EngineOptions { users: Arc::clone(&users), ..EngineOptions::default() });
    rig.control.slow_down(1, Duration::from_millis(1));
    // Tokens that Alice has when Bob has all of his.
    let beside_bob = || {
        let alice = rig.ask_as(ALICE, &rig.model, &prompt(1, 20), 4000);
        assert!(rig.comes(|s| s.sequences.iter().any(|s| s.uid == ALICE && s.generated_tokens > 0)));
        assert_eq!(rig.ask_as(BOB, &rig.model, &prompt(2, 20), 60).finish().ids.len(), 60);
        rig.handle().cancel(alice.id);
        alice.finish().ids.len()
    };
    let equal = beside_bob();
    assert!(equal >= 45, "{equal}");
    users.request(ALICE, false, OfOneUser { share: Some(10), ..OfOneUser::default() });
    let less = beside_bob();
    assert!(less <= 30, "{less}, with equal shares {equal}");
    users.request(ALICE, true, OfOneUser::default());
    let again = beside_bob();
    assert!(again >= 45, "{again}");
    rig.assert_empty();
}

#[test]
fn a_suspended_step_whose_sequences_are_cancelled_leaves_nothing() {
    let rig = Rig::new(EngineOptions::default());
    let slow = open(2, &kept_model());
    rig.control.slow_down(1, Duration::from_millis(50));
    let slow_ones: Vec<Asked> = (0..3).map(|i| rig.ask_as(ALICE, &slow, &prompt(i, 20), 50)).collect();
    assert!(rig.comes(|s| s.kv_pages_used > 0));
    let bob = rig.ask_as(BOB, &rig.model, &prompt(2, 20), 4000);
    assert!(rig.comes(|s| s.sequences.iter().any(|s| s.uid == BOB && s.generated_tokens > 10)));
    for (asked, left) in slow_ones.into_iter().zip([2, 1, 0]) {
        rig.handle().cancel(asked.id);
        assert!(matches!(asked.finish().error(), JobError::Cancelled));
        assert!(rig.comes(|s| s.sequences.iter().filter(|s| s.uid == ALICE).count() == left));
    }
    let again = rig.ask_as(ALICE, &slow, &prompt(7, 20), 3).finish();
    assert_eq!(again.ids, expected(&prompt(7, 20), 3));
    rig.handle().cancel(bob.id);
    bob.finish();
    assert!(rig.control.suspensions() > 0);
    rig.assert_empty();
}

#[test]
fn a_sequence_that_gave_its_place_up_gets_the_same_tokens() {
    let page_bytes = 5 * 4 * 8 * 1000;
    // Places, or KV bytes, of which a user alone takes all.
    for (sequences_max, kv_budget_bytes) in [(4, 1 << 40), (32, 28 * page_bytes)] {
        let rig = Rig::new(EngineOptions {
            sequences_max: Some(sequences_max),
            kv_budget_bytes,
            ..Default::default()
        });
        rig.control.slow_down(1, Duration::from_millis(1));
        let alice: Vec<Asked> = (0..8).map(|i| rig.ask_as(ALICE, &rig.model, &prompt(i, 30), 180)).collect(); // 7 pages each
        // For bytes nobody waits until they are used.
        let running = if sequences_max == 4 { 4 } else { 8 };
        assert!(rig.comes(|s| s.running_and_queued() == (running, 8 - running)));
        let bob: Vec<Asked> = (0..3).map(|i| rig.ask_as(BOB, &rig.model, &prompt(i, 40), 20)).collect();
        for (i, asked) in bob.into_iter().enumerate() {
            assert_eq!(asked.finish().ids, expected(&prompt(i as u32, 40), 20));
        }
        let of_alice = rig.handle().snapshot().sequences.iter().filter(|s| s.uid == ALICE).count();
        assert_eq!(of_alice, 8, "nobody of Alice's was done before Bob was served");
        assert!(rig.handle().snapshot().counters.sequences_parked > 0);
        for (i, asked) in alice.into_iter().enumerate() {
            assert_eq!(asked.finish().ids, expected(&prompt(i as u32, 30), 180), "sequence {i}");
        }
        rig.assert_empty();
    }
}

#[test]
fn a_suspended_step_keeps_the_pages_that_its_sequences_give_up() {
    let rig = Rig::new(EngineOptions { sequences_max: Some(4), ..Default::default() });
    rig.control.slow_down(1, Duration::from_millis(25)); // each part is a turn: somebody always waits for a place
    let alice: Vec<Asked> = (0..8).map(|i| rig.ask_as(ALICE, &rig.model, &prompt(i, 30), 3)).collect();
    assert!(rig.comes(|s| s.kv_pages_used == 4), "all four prefill");
    let bob: Vec<Asked> = (0..2).map(|i| rig.ask_as(BOB, &rig.model, &prompt(i, 40), 2)).collect();
    for (i, asked) in bob.into_iter().enumerate() {
        assert_eq!(asked.finish().ids, expected(&prompt(i as u32, 40), 2));
    }
    for (i, asked) in alice.into_iter().enumerate() {
        assert_eq!(asked.finish().ids, expected(&prompt(i as u32, 30), 3), "sequence {i}");
    }
    assert!(rig.handle().snapshot().counters.sequences_parked > 0 && rig.control.suspensions() > 0);
    rig.assert_empty();
}

#[test]
fn users_models_and_cancels_at_random_change_no_token() {
    let rig = Rig::new(EngineOptions {
        sequences_max: Some(5),
        rows_max: Some(32),
        privileged: vec![0],
        ..Default::default()
    });
    let models = [Arc::clone(&rig.model), open(2, &kept_model()), open(3, &kept_model())];
    rig.control.slow_down(2, Duration::from_millis(8));
    rig.control.slow_down(3, Duration::from_millis(1));
    let mut asked = Vec::new();
    for i in 0..60u32 {
        let (uid, model) = (i * 7 % 5, &models[(i * 5 % 3) as usize]);
        let user = (uid, u64::from(i * 3 % 4));
        asked.push((i, rig.ask_on(user, model, &prompt(i, 5 + i * 13 % 90), 3 + i % 11)));
        if i % 4 == 3 {
            rig.handle().cancel(asked[(i as usize * 11) % asked.len()].1.id);
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    let mut done = 0;
    for (i, asked) in asked {
        let (answer, prompt) = (asked.finish(), prompt(i, 5 + i * 13 % 90));
        assert_eq!(answer.ids, expected(&prompt, answer.ids.len()), "sequence {i}");
        match &answer.end {
            Some(Ok(_)) => done += usize::from(answer.ids.len() == 3 + i as usize % 11),
            end => assert!(matches!(end, Some(Err(JobError::Cancelled))), "{end:?}"),
        }
    }
    assert!(done >= 40 && rig.control.suspensions() > 0, "{done} {}", rig.control.suspensions());
    rig.assert_empty();
}

#[test]
fn sequences_beside_suspended_ones_of_their_model_get_their_tokens() {
    // Also with hardly any pages, where sequences are parked.
    for kv_budget_bytes in [1 << 40, 40 * 5 * 4 * 8 * 1000] {
        let control = Control::default();
        control.read_in_place();
        let rig =
            Rig::with(control, EngineOptions { kv_budget_bytes, rows_max: Some(64), ..Default::default() });
        let other = open(2, &kept_model());
        // Steps of many rows take longer than a newcomer waits.
        rig.control.slow_rows(1, Duration::from_millis(2), Duration::from_millis(1));
        rig.control.slow_down(2, Duration::from_millis(2));
        let mut asked = Vec::new();
        for i in 0..36u32 {
            let (user, model) =
                ((1 + i / 30, u64::from(i % 2)), if i % 5 == 4 { &other } else { &rig.model });
            asked.push((i, rig.ask_on(user, model, &prompt(i, 3 + i * 37 % 120 * (i % 2)), 2 + i % 7)));
            if i % 6 == 5 {
                rig.handle().cancel(asked[(i as usize * 11) % asked.len()].1.id);
            }
            std::thread::sleep(Duration::from_millis(u64::from(i * 31 % 120)));
        }
        for (i, asked) in asked {
            let (answer, prompt) = (asked.finish(), prompt(i, 3 + i * 37 % 120 * (i % 2)));
            assert_eq!(answer.ids, expected(&prompt, answer.ids.len()), "sequence {i}");
            match &answer.end {
                Some(Ok(_)) => assert_eq!(answer.ids.len(), 2 + i as usize % 7),
                end => assert!(matches!(end, Some(Err(JobError::Cancelled))), "{end:?}"),
            }
        }
        assert!(rig.control.beside() >= 5, "{} steps of {}", rig.control.beside(), rig.control.suspensions());
        rig.assert_empty();
    }
}
