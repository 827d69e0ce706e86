//! Effects of users on each other, on a simulated device whose steps take `fixed + row * rows`.

use super::*;
use crate::scheduler::schedule::admission::PATIENCE;

/// Time of the simulated device's steps.
#[derive(Clone, Copy)]
pub(super) struct Speed {
    pub fixed: Duration,
    pub row: Duration,
    pub parts: u32,
}

/// A processor of a few cores with a small model: rows cost more than weights.
pub(super) const CPU: Speed =
    Speed { fixed: Duration::from_millis(5), row: Duration::from_micros(1500), parts: 30 };
/// A GPU: rows cost next to nothing.
const GPU: Speed = Speed { fixed: Duration::from_millis(8), row: Duration::from_micros(100), parts: 30 };

/// Looks at a step that is planned.
type Check = Box<dyn Fn(&Schedule<()>, &StepPlan)>;

pub(super) struct Device {
    pub schedule: Schedule<()>,
    pub now: Instant,
    /// Speed by model.
    pub speeds: BTreeMap<ModelId, Speed>,
    /// Device time of each user, by rows beside an equal part of the weights.
    times: BTreeMap<u32, Duration>,
    /// Parts that suspended steps have run.
    suspended: BTreeMap<(ModelId, bool), (u32, Duration)>,
    /// When each sequence ended.
    pub ended: BTreeMap<u64, Instant>,
    /// When a command comes that a step makes way for.
    pub interrupt: Option<Instant>,
    /// Looks at each step before it runs.
    pub check: Option<Check>,
    /// Pages that each suspended step writes.
    pub written: BTreeMap<(ModelId, bool), Vec<u32>>,
    /// The last step ran beside a suspended one.
    pub last_beside: bool,
    parked: usize,
    next_id: u64,
}

impl Device {
    pub fn new(speed: Speed) -> Self {
        Self::with_reuse(speed, Reuse::User)
    }

    fn with_reuse(speed: Speed, reuse: Reuse) -> Self {
        let limits = Limits { rows_max: 256, sequences_max: 32, kv_budget_bytes: 1 << 20, reuse, ..limits() };
        Self {
            schedule: Schedule::new(limits),
            now: Instant::now(),
            speeds: BTreeMap::from([(ModelId(1), speed)]),
            times: BTreeMap::new(),
            suspended: BTreeMap::new(),
            ended: BTreeMap::new(),
            interrupt: None,
            check: None,
            written: BTreeMap::new(),
            last_beside: false,
            parked: 0,
            next_id: 1,
        }
    }

    pub fn set_budget(&mut self, bytes: u64) {
        (self.schedule.limits.kv_budget_bytes, self.schedule.kv.budget_bytes) = (bytes, bytes);
    }

    pub fn ask(&mut self, uid: u32, model: u64, prompt: u32, answer: u32) -> SequenceId {
        self.ask_on((uid, 1), model, prompt, answer)
    }

    pub fn ask_on(
        &mut self,
        (uid, connection): (u32, u64),
        model: u64,
        prompt: u32,
        answer: u32,
    ) -> SequenceId {
        self.ask_as(Request { uid, connection, ..request(0, model, prompt, prompt + answer) })
    }

    pub fn ask_as(&mut self, request: Request) -> SequenceId {
        let id = self.next_id;
        self.next_id += 1;
        let request = Request { id: SequenceId(id), credit: u32::MAX, ..request };
        let prompt = vec![id as u32; request.prompt_tokens as usize];
        let sequence = Sequence::new(request, prompt, ());
        self.schedule.submit(Sequence { queued: Some(self.now), ..sequence });
        SequenceId(id)
    }

    /// One turn of the engine, as `Core` does it.
    pub fn turn(&mut self) {
        self.parked += self.schedule.admit(self.now).parked.len();
        let Some(step) = self.schedule.next_step(self.now) else {
            self.now += Duration::from_millis(1);
            return;
        };
        self.last_beside = step.beside;
        if let Some(check) = &self.check {
            check(&self.schedule, &step);
        }
        if !step.resumed {
            let pages = step.work.iter().flat_map(|work| beside::written_pages(&self.schedule, work));
            self.written.insert((step.model, step.beside), pages.collect());
        }
        let speed = self.speeds[&step.model];
        let whole = speed.fixed + speed.row * step.rows();
        let kept = if step.resumed { self.suspended.remove(&(step.model, step.beside)) } else { None };
        let (first, before) = kept.unwrap_or_default();
        let mut time = Duration::ZERO;
        for part in first..speed.parts {
            let comes = self.interrupt.is_some_and(|at| self.now + time >= at);
            if part > first
                && time >= Duration::from_millis(20)
                && (comes || self.schedule.is_due(&step, time))
            {
                self.interrupt = self.interrupt.filter(|_| !comes);
                self.suspended.insert((step.model, step.beside), (part, before + time));
                self.account(&step, time, speed);
                return self.schedule.suspend(step, time);
            }
            time += whole / speed.parts;
        }
        self.account(&step, time, speed);
        self.schedule.observe(&step, before + time);
        for work in &step.work {
            let drawn = work.samples.then_some(0);
            let Some(sequence) = self.schedule.advance(work, drawn, self.now) else { continue };
            if sequence.token_count() >= sequence.request.positions {
                self.schedule.remove(work.id);
                self.ended.insert(work.id.0, self.now);
            }
        }
    }

    fn account(&mut self, step: &StepPlan, time: Duration, speed: Speed) {
        self.now += time;
        self.schedule.charge(step, time);
        let users: BTreeSet<u32> = step.work.iter().map(|w| w.uid).collect();
        let whole = speed.fixed + speed.row * step.rows();
        for uid in &users {
            let rows: u32 = step.work.iter().filter(|w| w.uid == *uid).map(|w| w.rows).sum();
            let part = speed.fixed / users.len() as u32 + speed.row * rows;
            *self.times.entry(*uid).or_default() += time.mul_f64(part.as_secs_f64() / whole.as_secs_f64());
        }
    }

    pub fn run_for(&mut self, time: Duration) {
        let until = self.now + time;
        while self.now < until {
            self.turn();
        }
    }

    /// Time of a request of 16 prompt tokens and 8 of an answer.
    pub fn short_request(&mut self, uid: u32, model: u64) -> Duration {
        let (id, begun) = (self.ask(uid, model, 16, 8), self.now);
        while !self.ended.contains_key(&id.0) {
            self.turn();
            assert!(self.now - begun < Duration::from_secs(60), "the request starves");
        }
        self.now - begun
    }
}

/// Median and worst time of short requests, one after another with pauses.
fn times(device: &mut Device, uid: u32, model: u64) -> (Duration, Duration) {
    let mut times: Vec<Duration> = (0..40u32)
        .map(|i| {
            device.run_for(Duration::from_millis(u64::from(37 * i % 101)));
            device.short_request(uid, model)
        })
        .collect();
    times.sort();
    (times[20], times[39])
}

/// Times of a user beside a fair neighbour: one answer after another. Every token is computed, also of a sequence that
/// lost its place: this measures turns.
fn beside_a_fair_neighbour(speed: Speed) -> (Duration, Duration) {
    let mut device = Device::with_reuse(speed, Reuse::Off);
    for _ in 0..20 {
        device.ask(2, 1, 16, 800);
    }
    device.schedule.limits.sequences_max = 2;
    device.run_for(Duration::from_secs(1));
    times(&mut device, 1, 1)
}

#[test]
fn shares_of_device_time_are_equal_whatever_users_ask_for() {
    for speed in [CPU, GPU] {
        for users in [1u32, 2, 8, 32] {
            let mut device = Device::new(speed);
            for uid in 0..users {
                // From one long answer to many, and prompts of up to 2000 tokens.
                for _ in 0..1 + uid % 7 {
                    device.ask(uid, 1, 1 + 331 * (uid % 7), 20_000);
                }
            }
            device.set_budget(u64::MAX);
            device.run_for(Duration::from_secs(2));
            device.times.clear();
            device.run_for(Duration::from_secs(10));
            let all: Duration = device.times.values().sum();
            assert!(all >= Duration::from_secs(10), "the device stands still");
            let fair = all / users;
            // A user with one answer cannot use more than a row of every step.
            for (uid, time) in &device.times {
                let wants_more = 1 + uid % 7 > 1;
                let ratio = time.as_secs_f64() / fair.as_secs_f64();
                assert!(
                    ratio < 1.1 && (!wants_more || ratio > 0.9),
                    "fixed {:?}: {users} users, {uid}: {ratio}",
                    speed.fixed
                );
            }
        }
    }
}

/// Users with answers or prompts that come one after another, on one to eight connections; each asks again when it is answered.
#[test]
fn shares_of_device_time_are_equal_where_requests_end_and_come_again() {
    for speed in [CPU, GPU] {
        let mut device = Device::with_reuse(speed, Reuse::Off);
        device.set_budget(u64::MAX);
        let mut open: Vec<(u32, u64, SequenceId)> = Vec::new();
        let ask = |device: &mut Device, uid: u32, connection: u64| {
            let (prompt, answer) = if uid.is_multiple_of(2) { (8, 400) } else { (360, 4) };
            (uid, connection, device.ask_on((uid, connection), 1, prompt, answer))
        };
        for uid in 1000..1032u32 {
            for connection in 0..8u64 >> (uid / 2 % 4) {
                open.push(ask(&mut device, uid, connection));
            }
        }
        let mut run = |device: &mut Device, seconds| {
            let until = device.now + Duration::from_secs(seconds);
            while device.now < until {
                device.turn();
                for (uid, connection, id) in &mut open {
                    if device.ended.contains_key(&id.0) {
                        *id = ask(device, *uid, *connection).2;
                    }
                }
            }
        };
        run(&mut device, 5);
        device.times.clear();
        run(&mut device, 10);
        let fair = device.times.values().sum::<Duration>() / 32;
        let ratios = device.times.iter().map(|(uid, time)| (*uid, time.as_secs_f64() / fair.as_secs_f64()));
        let off: Vec<(u32, f64)> = ratios.filter(|(_, ratio)| !(0.9..1.1).contains(ratio)).collect();
        assert!(off.is_empty() && device.times.len() == 32, "fixed {:?}: {off:?}", speed.fixed);
    }
}

#[test]
fn a_user_with_half_the_share_gets_half_of_the_time_and_alone_all() {
    for speed in [CPU, GPU] {
        for (prompt, answer) in [(16, 20_000), (2000, 20_000)] {
            let mut device = Device::new(speed);
            device.set_budget(u64::MAX);
            device.schedule.set_shares(BTreeMap::from([(1, 50)]));
            for uid in [1, 2] {
                for _ in 0..8 {
                    device.ask(uid, 1, prompt, answer);
                }
            }
            let ratio_of_times = |device: &mut Device| {
                device.times.clear();
                device.run_for(Duration::from_secs(10));
                let time = |uid| device.times.get(&uid).copied().unwrap_or_default().as_secs_f64();
                time(2) / time(1)
            };
            device.run_for(Duration::from_secs(2));
            let ratio = ratio_of_times(&mut device);
            assert!((1.8..2.2).contains(&ratio), "fixed {:?}, prompts of {prompt}: {ratio}", speed.fixed);
            device.schedule.set_shares(BTreeMap::new());
            device.run_for(Duration::from_secs(2));
            let ratio = ratio_of_times(&mut device);
            assert!((0.9..1.1).contains(&ratio), "fixed {:?}, prompts of {prompt}: {ratio}", speed.fixed);
            device.schedule.set_shares(BTreeMap::from([(1, 1)]));
            (9..=16).for_each(|id| drop(device.schedule.remove(SequenceId(id))));
            device.times.clear();
            device.run_for(Duration::from_secs(2));
            assert!(device.times[&1] >= Duration::from_secs(2), "{:?}", device.times);
        }
    }
}

#[test]
fn a_user_with_many_requests_costs_another_what_a_fair_neighbour_costs() {
    for speed in [CPU, GPU] {
        let (median, worst) = beside_a_fair_neighbour(speed);
        // Long answers in all places, and a thousand short ones that wait.
        for (requests, prompt, answer) in [(1000, 16, 8), (64, 16, 20_000), (100, 1000, 100)] {
            let mut device = Device::with_reuse(speed, Reuse::Off);
            device.set_budget(1 << 40);
            for _ in 0..requests {
                device.ask(2, 1, prompt, answer);
            }
            device.run_for(Duration::from_secs(1));
            let (m, w) = times(&mut device, 1, 1);
            let case = format!(
                "{requests} requests of {prompt} and {answer}: {m:?} {w:?} beside {median:?} {worst:?}"
            );
            assert!(m <= 2 * median && w <= 3 * worst, "{case}");
        }
    }
}

/// Time of a short request on a connection of its own, beside 30 requests of the same user's other connection.
fn beside_another_connection(speed: Speed, own: u64, prompt: u32, places: u32) -> Duration {
    let mut device = Device::new(speed);
    device.set_budget(1 << 40);
    device.schedule.limits.sequences_max = places;
    for _ in 0..30 {
        device.ask_on((1, 1), 1, prompt, 20_000);
    }
    device.run_for(Duration::from_secs(1));
    let (id, begun) = (device.ask_on((1, own), 1, 16, 8), device.now);
    while !device.ended.contains_key(&id.0) && device.now - begun < Duration::from_secs(120) {
        device.turn();
    }
    device.now - begun
}

#[test]
fn a_connection_with_many_requests_does_not_starve_another_of_the_same_user() {
    for speed in [CPU, GPU] {
        // No place is free; and long prompts, which would go first in order of admission.
        for (prompt, places) in [(16, 8), (2000, 8), (2000, 31)] {
            let same = beside_another_connection(speed, 1, prompt, places);
            let other = beside_another_connection(speed, 2, prompt, places);
            let case = format!("fixed {:?}, prompts of {prompt}, {places} places: {other:?}", speed.fixed);
            assert!(other < Duration::from_secs(5), "{case}, on the same connection {same:?}");
            assert!(
                places == 31 || same >= Duration::from_secs(120),
                "{case}, on the same connection {same:?}"
            );
        }
    }
}

#[test]
fn connections_of_a_user_get_equal_places_and_leave_none_free() {
    let mut device = Device::new(GPU);
    device.set_budget(1 << 40);
    device.schedule.limits.sequences_max = 9;
    let places = |device: &Device| {
        let of = |connection| {
            device.schedule.running.iter().filter(|s| s.request.connection == connection).count()
        };
        [of(1), of(2), of(3)]
    };
    for _ in 0..20 {
        device.ask_on((1, 1), 1, 16, 20_000);
    }
    device.run_for(Duration::from_secs(1));
    assert_eq!(places(&device), [9, 0, 0]);
    for _ in 0..20 {
        device.ask_on((1, 2), 1, 16, 20_000);
    }
    device.run_for(Duration::from_secs(1));
    assert_eq!(places(&device), [5, 4, 0]);
    let parked = device.parked;
    device.run_for(Duration::from_secs(20));
    assert_eq!(
        (places(&device), device.parked),
        ([5, 4, 0], parked),
        "they do not take places back and forth"
    );
    device.ask_on((1, 3), 1, 16, 20_000);
    device.run_for(Duration::from_secs(1));
    assert_eq!(places(&device), [4, 4, 1]);
    assert_eq!(
        device.schedule.connections[&1].of(9),
        device.schedule.connections[&1].of(10),
        "no account of strangers"
    );
}

#[test]
fn a_slow_model_of_another_user_delays_a_fast_one_by_little() {
    let (median, worst) = beside_a_fair_neighbour(CPU);
    let mut device = Device::new(CPU);
    // A step of 8 s, as that of a file larger than memory.
    let slow = Speed { fixed: Duration::from_secs(8), row: Duration::from_millis(100), parts: 200 };
    device.speeds.insert(ModelId(2), slow);
    for _ in 0..4 {
        device.ask(2, 2, 8, 100);
    }
    device.run_for(Duration::from_secs(1));
    let (m, w) = times(&mut device, 1, 1);
    assert!(m <= 2 * median && w <= 3 * worst, "{m:?} {w:?} beside {median:?} {worst:?}");
    let before = device.times.get(&2).copied().unwrap_or_default();
    for _ in 0..200 {
        device.short_request(1, 1);
    }
    let slow_share = device.times[&2] - before;
    assert!(slow_share > Duration::from_secs(1), "the slow model runs on: {slow_share:?}");
}

#[test]
fn sequences_without_credit_give_way_and_come_back() {
    let mut device = Device::new(GPU);
    device.schedule.limits.sequences_max = 4;
    for _ in 0..4 {
        let id = device.ask(2, 1, 4, 100);
        device.schedule.get_mut(id).unwrap().credit = 1;
    }
    device.run_for(Duration::from_secs(1));
    let mine = device.ask(2, 1, 4, 4);
    device.run_for(Duration::from_secs(2));
    assert!(device.ended.contains_key(&mine.0), "also for a request of the same user");
    assert!(device.parked > 0);
    for id in 1..=4 {
        device.schedule.credit(SequenceId(id), 1000);
    }
    device.run_for(Duration::from_secs(5));
    assert_eq!(device.ended.len(), 5, "parked sequences end");
    assert_eq!((device.schedule.page_sums().used, device.schedule.claimed_bytes()), (0, 0));
}

#[test]
fn a_request_for_most_of_the_cache_takes_turns_and_root_waits_for_nobody() {
    let mut device = Device::new(GPU);
    let most = 600 * PAGE; // of 1024 pages; its prompt takes 2 s
    device.ask(2, 1, most, 20_000);
    device.run_for(Duration::from_secs(1));
    let id = device.ask(3, 1, most, 20_000);
    device.run_for(PATIENCE + Duration::from_secs(4));
    assert!(device.schedule.get(id).unwrap().computed > 0, "it got its turn");
    let (root, begun) = (device.ask(ROOT, 1, most, 20_000), device.now);
    while device.schedule.get(root).unwrap().computed == 0 {
        device.turn();
    }
    assert!(device.now - begun < Duration::from_millis(100), "{:?}", device.now - begun);
    device.schedule.remove(root);
    let progress = |device: &Device, id: u64| device.schedule.get(SequenceId(id)).unwrap().generated_tokens();
    let before = [progress(&device, 1), progress(&device, 2)];
    device.run_for(Duration::from_secs(40));
    assert!(progress(&device, 1) > before[0] + 100 && progress(&device, 2) > before[1] + 100);
}

#[test]
fn a_user_that_comes_and_goes_gets_no_more_places_than_those_that_stay() {
    let mut device = Device::new(GPU);
    device.schedule.limits.sequences_max = 1;
    let (mut asked, mut away): (BTreeMap<u32, Vec<u64>>, bool) = (BTreeMap::new(), false);
    let until = device.now + Duration::from_secs(60);
    while device.now < until {
        // The third user asks a turn after it got its answer, when the place is taken. The others always have requests that
        // wait.
        for (uid, most) in [(1, 3), (2, 3), (3, 1)] {
            let of_user = asked.entry(uid).or_default();
            of_user.retain(|id| !device.ended.contains_key(id));
            let gone_now = uid == 3 && of_user.is_empty() && !away;
            if !gone_now {
                (of_user.len()..most).for_each(|_| of_user.push(device.ask(uid, 1, 4, 30).0));
            }
            away = if uid == 3 { gone_now } else { away };
        }
        device.turn();
    }
    let all: Duration = device.times.values().sum();
    for (uid, time) in &device.times {
        let part = time.as_secs_f64() / all.as_secs_f64();
        assert!((0.28..0.39).contains(&part), "{uid} got {part:.2} of the time: {:?}", device.times);
    }
}

#[test]
fn beside_a_privileged_user_that_has_all_pages_a_sequence_without_any_leads_no_step() {
    let mut device = Device::new(GPU);
    device.set_budget(8 << 10); // 8 pages
    let waits = device.ask(2, 1, 4, 20);
    device.schedule.get_mut(waits).unwrap().credit = 0;
    device.schedule.get_mut(waits).unwrap().request.positions = PAGE;
    let root = device.ask(ROOT, 1, 5 * PAGE, 3 * PAGE);
    while device.schedule.pages(root).len() < 8 {
        device.turn();
    }
    assert!(device.schedule.get(waits).is_some_and(|s| s.admitted.is_some() && s.kv.pages.is_empty()));
    device.schedule.credit(waits, 100);
    let leads = device.schedule.accounts.of(2) < device.schedule.accounts.of(ROOT);
    assert!(leads, "it has the right to the next step");
    let (before, steps) = (device.schedule.get(root).unwrap().token_count(), 10);
    (0..steps).for_each(|_| device.turn());
    assert_eq!(device.schedule.get(root).unwrap().token_count(), before + steps, "each step is root's");
    assert_eq!((device.schedule.take_preempted(), device.schedule.queued()), (1, vec![waits]));
    device.run_for(Duration::from_secs(10));
    assert_eq!(device.ended.keys().copied().collect::<BTreeSet<_>>(), [waits.0, root.0].into());
}

#[test]
fn prefixes_of_another_user_count_for_those_that_use_them() {
    let mut device = Device::with_reuse(GPU, Reuse::All);
    device.schedule.limits.kv_user_bytes = 10 << 10; // of 1024 pages
    let submit = |device: &mut Device, uid: u32| {
        let id = device.next_id;
        device.next_id += 1;
        let request = Request { uid, credit: u32::MAX, ..request(id, 1, 6 * PAGE, 10 * PAGE) };
        device.schedule.submit(Sequence::new(request, vec![7; 6 * PAGE as usize], ()));
        SequenceId(id)
    };
    let first = submit(&mut device, 1);
    device.run_for(Duration::from_millis(100));
    let second = submit(&mut device, 2);
    device.run_for(Duration::from_millis(50));
    device.schedule.copied(second);
    let held = |device: &Device| [1, 2].map(|uid| device.schedule.kv().held_by(uid) >> 10);
    assert_eq!(held(&device), [7, 7], "both hold six pages of the prompt, and one of their answer");
    device.schedule.remove(first);
    assert_eq!(held(&device), [0, 7]);
    // The pages that the second user goes on with leave the first one all of its part.
    let own = device.ask(1, 1, 7 * PAGE, 10);
    device.run_for(Duration::from_millis(20));
    assert!(device.schedule.get(own).is_some_and(|s| s.admitted.is_some()));
    device.run_for(Duration::from_secs(10));
    assert_eq!(device.ended.keys().copied().collect::<BTreeSet<_>>(), [second.0, own.0].into());
    assert_eq!((device.schedule.page_sums().used, device.schedule.claimed_bytes()), (0, 0));
}

#[test]
fn answers_that_outgrow_the_cache_take_turns_and_all_end() {
    let mut device = Device::new(GPU);
    device.set_budget(100 << 10); // 100 pages
    // Each grows to 64 pages, and has at most 2 at first.
    let asked: Vec<SequenceId> = (0..9).map(|i| device.ask(1 + i % 3, 1, 8, 2000)).collect();
    device.run_for(Duration::from_millis(200));
    assert!(device.schedule.queued().is_empty(), "all run at once");
    device.run_for(Duration::from_secs(400));
    assert_eq!(device.ended.len(), asked.len(), "{:?}", device.schedule.queued());
    assert_eq!((device.schedule.page_sums().used, device.schedule.claimed_bytes()), (0, 0));
    assert!(device.schedule.take_preempted() > 0);
}

#[test]
fn late_sequences_stay_out_of_steps_while_other_users_can_run() {
    let (mut schedule, now) = (Schedule::new(limits()), Instant::now());
    for (id, uid) in [(1, 1000), (2, 1001), (3, 1000)] {
        submit(&mut schedule, Request { uid, ..request(id, 1, 1, 50) });
    }
    assert_eq!(schedule.admit(now).admitted.len(), 3);
    let ids = |schedule: &mut Schedule<()>, late: &[u64]| {
        let beside_others = late.iter().map(|id| SequenceId(*id)).collect();
        schedule.set_late(Late { beside_others, ..Late::default() });
        let mut ids: Vec<u64> = step(schedule, now).1.into_iter().map(|(id, ..)| id).collect();
        ids.sort_unstable();
        ids
    };
    assert_eq!(ids(&mut schedule, &[]), [1, 2, 3]);
    assert_eq!(ids(&mut schedule, &[1]), [2, 3]);
    assert_eq!(ids(&mut schedule, &[1, 3]), [2]);
    assert_eq!(ids(&mut schedule, &[1, 2, 3]), [1, 2, 3], "nobody else can run");
    assert_eq!(ids(&mut schedule, &[1, 2]), [1, 3], "another one of the same user does not count");
    schedule.remove(SequenceId(2));
    assert_eq!(ids(&mut schedule, &[1]), [1, 3]);
    // Those that a step missed stay out in any case.
    schedule.set_late(Late { missed: [SequenceId(1)].into(), ..Late::default() });
    assert_eq!(step(&mut schedule, now).1.len(), 1);
    schedule.set_late(Late { missed: [1, 3].map(SequenceId).into(), ..Late::default() });
    assert!(schedule.next_step(now).is_none());
}

#[test]
fn late_sequences_earn_their_user_no_device_time() {
    let (mut schedule, now) = (Schedule::new(limits()), Instant::now());
    for (id, uid) in [(1, 1000), (2, 1001)] {
        submit(&mut schedule, Request { uid, ..request(id, 1, 1, 50) });
    }
    assert_eq!(schedule.admit(now).admitted.len(), 2);
    let ids = |schedule: &mut Schedule<()>, late: &[u64]| {
        let beside_others = late.iter().map(|id| SequenceId(*id)).collect();
        schedule.set_late(Late { beside_others, ..Late::default() });
        let step = schedule.next_step(now).expect("a sequence can run");
        schedule.charge(&step, Duration::from_millis(10));
        complete(schedule, &step, now);
        step.work.iter().map(|work| work.id.0).collect::<Vec<u64>>()
    };
    assert_eq!(ids(&mut schedule, &[]), [1, 2]);
    for _ in 0..20 {
        assert_eq!(ids(&mut schedule, &[1]), [2]);
    }
    assert_eq!(ids(&mut schedule, &[]), [1, 2], "nobody is behind");
}
