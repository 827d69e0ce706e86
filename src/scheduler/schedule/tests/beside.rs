//! Short steps beside a suspended one, on the simulated device of `users`, and the bytes of all steps in flight.

use super::users::{CPU, Device, Speed};
use super::*;

/// A large model on a processor of two cores: a long prompt alone takes steps of 11 s.
const SLOW: Speed = Speed { fixed: Duration::from_millis(360), row: Duration::from_millis(150), parts: 1000 };

const SECOND: Duration = Duration::from_secs(1);

/// A device whose user 1 has computed a part of a long step alone, and the sequence of that.
fn amid_a_long_step(speed: Speed) -> (Device, SequenceId) {
    let mut device = Device::new(speed);
    // The first steps teach what rows cost.
    device.short_request(1, 1);
    device.ask(1, 1, 70, 1);
    device.run_for(20 * SECOND);
    let long = device.ask(1, 1, 1000, 1);
    device.within_the_next_step();
    (device, long)
}

impl Device {
    /// Runs until a step was suspended by a command that came after a second.
    fn within_the_next_step(&mut self) {
        self.interrupt = Some(self.now + SECOND);
        while self.interrupt.is_some() {
            self.turn();
        }
    }

    /// Time until a request of so many tokens has its first one.
    fn first_token(&mut self, uid: u32, connection: u64, prompt: u32) -> Duration {
        let (id, begun) = (self.ask_on((uid, connection), 1, prompt, 20), self.now);
        while self.schedule.get(id).is_some_and(|s| s.generated_tokens() == 0) {
            self.turn();
        }
        self.now - begun
    }
}

#[test]
fn a_newcomer_does_not_wait_for_a_long_step_of_its_model() {
    for (uid, connection) in [(2, 7), (1, 7), (1, 1)] {
        let (mut device, long) = amid_a_long_step(SLOW);
        let step = device.schedule.suspended[&ModelId(1)].clone();
        assert!(step.rows() >= 60 && step.has(long), "a long step: {} rows", step.rows());
        let time = device.first_token(uid, connection, 2);
        // Two rows take 660 ms; the long step has 10 s to go.
        assert!(time < 2 * SECOND, "user {uid}, connection {connection}: {time:?}");
        assert!(device.schedule.suspended.contains_key(&ModelId(1)), "the long step still waits");
        device.run_for(400 * SECOND);
        assert!(device.ended.contains_key(&long.0), "the long prompt ends");
        assert_eq!(device.schedule.kv.held_bytes(), 0);
    }
}

#[test]
fn a_newcomer_that_needs_longer_than_the_rest_of_a_step_waits_for_it() {
    let (mut device, long) = amid_a_long_step(SLOW);
    let late = device.ask_on((1, 7), 1, 500, 1);
    while device.schedule.get(long).unwrap().computed == 0 {
        device.turn();
        assert_eq!(device.schedule.get(late).unwrap().computed, 0);
    }
}

#[test]
fn a_suspended_step_gets_as_much_time_as_the_steps_of_its_user_beside_it() {
    let (mut device, long) = amid_a_long_step(SLOW);
    for connection in 2..6 {
        device.ask_on((1, connection), 1, 2, 20_000);
    }
    let begun = device.now;
    let in_step = |device: &Device| device.schedule.get(long).is_some_and(|s| s.computed == 0);
    while in_step(&device) {
        device.turn();
    }
    // It had about 10 s to go.
    let time = device.now - begun;
    assert!((15 * SECOND..25 * SECOND).contains(&time), "{time:?}");
}

#[test]
fn sequences_of_a_suspended_step_keep_their_pages() {
    let (mut device, long) = amid_a_long_step(SLOW);
    let pages = device.schedule.pages(long).to_vec();
    let other = device.ask_on((2, 1), 1, 2, 60);
    device.schedule.admit(device.now);
    // No page is left for it.
    device.set_budget(device.schedule.kv.held_bytes());
    while device.schedule.get(long).unwrap().computed == 0 {
        assert_eq!(device.schedule.pages(long), pages);
        device.turn();
    }
    let computed = device.schedule.get(other).unwrap().computed;
    assert_eq!((computed, device.schedule.preempted), (0, 0), "it waits for a page");
    device.set_budget(1 << 20);
    device.run_for(400 * SECOND);
    assert!(device.ended.contains_key(&other.0) && device.ended.contains_key(&long.0));
}

#[test]
fn no_step_begins_beside_one_whose_sequence_left() {
    let (mut device, _) = amid_a_long_step(SLOW);
    let second = device.ask_on((1, 2), 1, 30, 1);
    device.run_for(400 * SECOND);
    assert!(device.ended.contains_key(&second.0));
    // Two sequences in a step, of which one leaves: its pages are free, and the step still writes them.
    let (a, b) = (device.ask(1, 1, 40, 1), device.ask(1, 1, 41, 1));
    device.within_the_next_step();
    let step = device.schedule.suspended[&ModelId(1)].clone();
    assert!(step.has(a) && step.has(b));
    device.schedule.remove(a);
    device.ask(2, 1, 2, 4);
    device.schedule.admit(device.now);
    let next = device.schedule.next_step(device.now).unwrap();
    assert!(next.resumed && !next.beside);
}

#[test]
fn a_step_beside_another_makes_way_for_other_models() {
    let (mut device, _) = amid_a_long_step(SLOW);
    device.speeds.insert(ModelId(2), CPU);
    device.ask(1, 1, 30, 40); // beside the long step, in steps of 510 ms and more
    device.run_for(SECOND / 10);
    let mut suspended = 0;
    for _ in 0..20 {
        let time = device.short_request(2, 2);
        // Alone it takes 90 ms.
        assert!(time < SECOND / 4, "{time:?}");
        suspended += device.schedule.suspended_beside.len();
    }
    assert!(suspended > 0, "no step beside the long one made way");
}

#[test]
fn where_steps_do_not_make_way_none_runs_beside_another() {
    let (mut device, _) = amid_a_long_step(SLOW);
    device.schedule.limits.suspends = false;
    device.ask(2, 1, 2, 4);
    device.schedule.admit(device.now);
    let next = device.schedule.next_step(device.now).unwrap();
    assert!(next.resumed && !next.beside);
}

#[test]
fn values_of_all_steps_in_flight_have_a_bound() {
    const ROW: u64 = 1 << 10;
    let mut device = Device::new(SLOW);
    device.schedule.limits.values_bytes = 100 * ROW;
    let text = |device: &mut Device, uid: u32, model: u64, tokens: u32| {
        device.speeds.entry(ModelId(model)).or_insert(SLOW);
        device.ask_as(Request { uid, row_bytes: ROW, whole: true, ..request(0, model, tokens, tokens + 1) })
    };
    let most = |device: &Device| device.schedule.suspended.values().map(|step| step.bytes).sum::<u64>();
    // Each user's text alone fits; two do not.
    let ids: Vec<SequenceId> = (1..=8).map(|n| text(&mut device, n, u64::from(n), 60)).collect();
    let small = text(&mut device, 9, 9, 30);
    let mut in_flight = 0;
    while device.ended.len() < 9 {
        device.turn();
        in_flight = in_flight.max(most(&device));
        if device.ended.contains_key(&small.0) {
            continue;
        }
        assert!(device.ended.len() < 4, "the small text waited for the large ones");
    }
    assert!(ids.iter().all(|id| device.ended.contains_key(&id.0)));
    assert!((60 * ROW..=100 * ROW).contains(&in_flight), "{in_flight}");
}

#[test]
fn random_steps_beside_others_write_no_page_of_theirs() {
    let mut beside = 0;
    for seed in 0..300 {
        let mut random = Random(seed);
        let mut device = Device::new(SLOW);
        device.set_budget((20 + random.below(60)) << 10);
        device.schedule.limits.sequences_max = 2 + random.below(8) as u32;
        let mut asked: Vec<SequenceId> = Vec::new();
        for _ in 0..60 {
            match random.below(8) {
                0 | 1 => {
                    let user = (1 + random.below(2) as u32, random.below(3));
                    let prompt = if random.below(2) == 0 { 2 } else { 200 };
                    asked.push(device.ask_on(user, 1, prompt + random.below(9) as u32, 40));
                }
                2 if !asked.is_empty() => {
                    let gone = asked.swap_remove(random.below(asked.len() as u64) as usize);
                    device.schedule.remove(gone);
                }
                _ => {}
            }
            device.schedule.drop_unwanted();
            let written = written_by_suspended(&device);
            device.check = Some(Box::new(move |schedule, step| {
                let pages = step.work.iter().flat_map(|work| written_pages(schedule, work));
                let clash = pages.filter(|page| written.contains(page)).count();
                assert!(step.resumed || clash == 0, "seed {seed}: {step:?}");
            }));
            device.turn();
            beside += usize::from(device.last_beside);
        }
        asked.into_iter().for_each(|id| drop(device.schedule.remove(id)));
        device.schedule.drop_unwanted();
        assert_eq!(device.schedule.kv.held_bytes(), 0, "seed {seed}");
    }
    assert!(beside > 300, "{beside} steps");
}

/// Pages that the rows of a sequence in a step are written to.
pub(super) fn written_pages(schedule: &Schedule<()>, work: &Work) -> Vec<u32> {
    let of_rows = (work.start / PAGE) as usize..(work.start + work.rows).div_ceil(PAGE) as usize;
    schedule.pages(work.id).get(of_rows).unwrap_or_default().to_vec()
}

/// The same of all suspended steps, as they began: some of their sequences may have left since.
fn written_by_suspended(device: &Device) -> BTreeSet<u32> {
    let schedule = &device.schedule;
    let steps = schedule.suspended.values().chain(schedule.suspended_beside.values());
    let noted =
        steps.flat_map(|step| device.written.get(&(step.model, step.beside)).cloned().unwrap_or_default());
    noted.collect()
}
