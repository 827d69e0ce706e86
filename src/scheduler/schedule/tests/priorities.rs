//! Priorities order the requests of one user, and give nothing over other users.

use super::*;

fn of(uid: u32, id: u64, priority: u8) -> Request {
    Request { uid, priority, ..request(id, 1, 20, 60) }
}

fn ids(ids: &[u64]) -> Vec<SequenceId> {
    ids.iter().map(|id| SequenceId(*id)).collect()
}

#[test]
fn the_highest_priority_is_served_first_and_takes_the_place_of_a_lower_one() {
    let (mut schedule, now) = (Schedule::new(Limits { sequences_max: 1, ..limits() }), Instant::now());
    submit(&mut schedule, of(1000, 1, 128));
    assert_eq!(schedule.admit(now).admitted, ids(&[1]));
    for (id, priority) in [(2, 128), (3, 10), (4, 200), (5, 201), (6, 200)] {
        submit(&mut schedule, of(1000, id, priority));
    }
    let admission = schedule.admit(now);
    assert_eq!((admission.admitted, admission.parked), (ids(&[5]), ids(&[1])));
    let mut order = Vec::new();
    for id in [5, 4, 6, 1, 2] {
        schedule.remove(SequenceId(id));
        order.extend(schedule.admit(now).admitted);
    }
    assert_eq!(order, ids(&[4, 6, 1, 2, 3]), "equal ones in the order of arrival");
}

#[test]
fn one_behind_a_thousand_of_another_connection_is_found() {
    let (mut schedule, now) = (Schedule::new(Limits { sequences_max: 1, ..limits() }), Instant::now());
    for id in 1..1000 {
        submit(&mut schedule, of(1000, id, 7));
    }
    schedule.admit(now);
    submit(&mut schedule, of(1000, 1000, 8));
    assert_eq!(schedule.admit(now).admitted, ids(&[1000]));
}

#[test]
fn rows_of_a_user_go_to_its_higher_priorities_first() {
    let (mut schedule, now) = (Schedule::new(limits()), Instant::now());
    submit(&mut schedule, Request { prompt_tokens: 3, ..of(1000, 1, 0) });
    schedule.admit(now);
    assert_eq!(step(&mut schedule, now).1, [(1, 0, 3, true)]);
    submit(&mut schedule, of(1000, 2, 200));
    schedule.admit(now);
    assert_eq!(step(&mut schedule, now).1, [(2, 0, 8, false)], "an answer of a lower priority waits");
    assert_eq!(step(&mut schedule, now).1, [(2, 8, 8, false)]);
    assert_eq!(step(&mut schedule, now).1, [(2, 16, 4, true), (1, 3, 1, true)]);
    assert_eq!(step(&mut schedule, now).1, [(2, 20, 1, true), (1, 4, 1, true)]);
}

#[test]
fn the_lowest_priority_gives_its_pages_up_first() {
    let budget = Limits { kv_budget_bytes: 10 << 10, rows_max: 64, ..limits() };
    let (mut schedule, now) = (Schedule::new(budget), Instant::now());
    submit(&mut schedule, Request { positions: 8 * PAGE, ..of(1000, 1, 10) });
    submit(&mut schedule, Request { positions: 8 * PAGE, ..of(1000, 2, 200) });
    assert_eq!(schedule.admit(now).admitted, ids(&[2, 1]));
    while schedule.queued().is_empty() {
        let plan = schedule.next_step(now).expect("both can run");
        complete(&mut schedule, &plan, now);
        schedule.credit(SequenceId(1), 1);
        schedule.credit(SequenceId(2), 1);
    }
    assert_eq!(schedule.queued(), ids(&[1]), "the older one has the lower priority");
}

/// The places and rows that users get in each turn.
fn turns_of_users(priority: impl Fn(u64) -> u8) -> Vec<(Vec<u32>, BTreeMap<u32, u32>)> {
    let many = Limits { sequences_max: 6, rows_max: 256, kv_budget_bytes: 24 << 10, ..limits() };
    let (mut schedule, now) = (Schedule::new(many), Instant::now());
    for id in 0..60 {
        submit(&mut schedule, of(1000 + (id % 3) as u32, id + 1, priority(id)));
    }
    let mut turns = Vec::new();
    while !schedule.is_empty() {
        let admitted = schedule.admit(now).admitted;
        let uids = admitted.iter().map(|id| schedule.get(*id).expect("live").request.uid).collect();
        let plan = schedule.next_step(now).expect("a sequence can run");
        schedule.charge(&plan, Duration::from_millis(10));
        let mut rows: BTreeMap<u32, u32> = BTreeMap::new();
        for work in &plan.work {
            *rows.entry(work.uid).or_default() += work.rows;
            let sequence = schedule.advance(work, work.samples.then_some(0), now).expect("live");
            if sequence.token_count() == sequence.request.positions {
                schedule.remove(work.id);
            }
        }
        turns.push((uids, rows));
    }
    turns
}

#[test]
fn priorities_of_one_user_change_nothing_for_others() {
    let plain = turns_of_users(|_| 128);
    let mut random = Random(7);
    let mut drawn = || random.below(256) as u8;
    let mixed: Vec<u8> = (0..60).map(|_| drawn()).collect();
    assert!(turns_of_users(|id| mixed[id as usize]) == plain, "priorities at random");
    assert!(turns_of_users(|id| if id % 3 == 0 { 255 } else { 0 }) == plain, "one user has the highest");
}
