//! Work aside: on threads that may be lost.
//!
//! A thread that opens, examines, reads or closes a file of a dead NFS or FUSE server stands still, and nothing ends it.
//! So the caller hands such work to a thread of its own, an [`Errand`], and waits [`Limits::patience`] for an answer.
//! Without one the caller goes on, and the thread is lost until its system call returns. Bounds keep one dead server
//! from taking everything. There are a few threads for one name, none for a device on which a thread is lost, and a
//! total.
//!
//! A local file costs one change of threads for that, about 30 us.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

use crate::lock::{Condvar, Guard, Mutex, Rank};

mod dropping;
pub mod processes;
mod received;

use dropping::Dropped;
pub use dropping::STUCK;
pub use received::ReceivedFd;

/// Most bytes of a panic's message.
const PANIC_TEXT_MAX: usize = 256;

/// The message of work that panicked, at most 256 bytes.
pub fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    let mut text = text.unwrap_or("a panic without a message").to_owned();
    while text.len() > PANIC_TEXT_MAX {
        text.pop();
    }
    text
}

/// Most threads that wait for new work, and how long each waits.
const IDLE_MAX: usize = 8;
const IDLE: Duration = Duration::from_secs(10);

/// Shortest time between two warnings about lost threads.
const WARNING_PAUSE: Duration = Duration::from_secs(10);

/// Bounds on work aside.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Longest time between two signs of life of one piece of work. A disk that spins up needs less than 10 s.
    pub patience: Duration,
    /// Longest wait for a place among the callers of one name.
    pub wait: Duration,
    /// Most threads at once for one name.
    pub of_name: usize,
    /// Most lost threads; past that, callers wait on instead of giving up, so that memory is bounded.
    pub lost: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { patience: Duration::from_secs(10), wait: Duration::from_secs(2), of_name: 4, lost: 64 }
    }
}

/// The subject of a piece of work.
#[derive(Clone, Debug)]
pub struct Subject {
    /// The operation, for messages: `opening the file`.
    pub what: &'static str,
    /// Work of one name shares [`Limits::of_name`] threads; an empty name has no such bound.
    pub name: String,
    /// Device number of the file's mount, once known.
    pub device: Option<u64>,
}

/// Why work has no result.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Unanswered {
    /// No sign of life within the patience; the thread is lost until its system call returns.
    #[error("{what} had no answer for {waited_s} s")]
    Silent {
        /// The operation.
        what: &'static str,
        /// Seconds without a sign of life.
        waited_s: u64,
    },
    /// A thread is lost on the same device already.
    #[error("{what} was not tried, because another thread has had no answer for {waited_s} s")]
    Known {
        /// The operation.
        what: &'static str,
        /// Seconds that the other thread has waited.
        waited_s: u64,
    },
    /// Too many threads work for the same name, and none ended in time.
    #[error(
        "{what} was not tried, because {others} threads work on the same name and none ended within {waited_s} s"
    )]
    Crowded {
        /// The operation.
        what: &'static str,
        /// Threads at work.
        others: usize,
        /// Seconds waited for a place.
        waited_s: u64,
    },
    /// The operating system has no thread.
    #[error("{what} needs a thread, and the system has none: {error}")]
    NoThread {
        /// The operation.
        what: &'static str,
        /// The operating system's message.
        error: String,
    },
    /// The work panicked: a bug.
    #[error("{what} ended by a bug in the daemon; see its log")]
    Panicked {
        /// The operation.
        what: &'static str,
    },
}

type Work = Box<dyn FnOnce() + Send>;

/// The threads for work aside, and what they do.
#[derive(Debug)]
pub struct Aside {
    table: Mutex<Table>,
    /// Notified at the end of each piece of work.
    ended: Condvar,
    limits: Limits,
}

#[derive(Debug, Default)]
struct Table {
    running: BTreeMap<u64, Running>,
    /// Threads without work, by the number of their last work.
    idle: BTreeMap<u64, SyncSender<(u64, Work)>>,
    /// Values to drop, while all threads for that are busy or lost.
    to_drop: Vec<(String, Dropped)>,
    next: u64,
    warned: Option<Instant>,
}

/// A piece of work on its thread.
#[derive(Debug)]
struct Running {
    subject: Subject,
    /// Last sign of life.
    since: Instant,
    /// False once its caller gave up.
    wanted: bool,
}

/// A piece of work, as its own thread sees it.
#[derive(Debug)]
pub struct Errand<T> {
    aside: Arc<Aside>,
    number: u64,
    tell: SyncSender<T>,
}

impl<T> Errand<T> {
    /// Hands the result to the caller. The thread may go on: what it closes then, the caller does not wait for. A result
    /// that no caller wants is dropped here.
    pub fn answer(&self, result: T) {
        drop(self.tell.send(result));
    }

    /// A sign of life: the patience starts anew. False if the caller has given up.
    pub fn goes_on(&self) -> bool {
        let mut table = self.aside.table.lock();
        table.running.get_mut(&self.number).is_some_and(|running| {
            running.since = Instant::now();
            running.wanted
        })
    }

    /// A sign of life; the work is on that device from now on.
    pub fn goes_on_at(&self, device: Option<u64>) {
        if let Some(running) = self.aside.table.lock().running.get_mut(&self.number) {
            (running.since, running.subject.device) = (Instant::now(), device);
        }
    }
}

impl Aside {
    /// Threads with these bounds; none runs yet.
    pub fn new(limits: Limits) -> Arc<Self> {
        let table = Mutex::new(Rank::Aside, Table::default());
        Arc::new(Self { table, ended: Condvar::new(), limits })
    }

    /// The bounds.
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// Number of lost threads.
    pub fn lost(&self) -> usize {
        let patience = self.limits.patience;
        self.table.lock().running.values().filter(|running| running.since.elapsed() >= patience).count()
    }

    /// How long a thread has been lost on that name or device; `None` if none is.
    pub fn silent(&self, name: &str, device: Option<u64>) -> Option<Duration> {
        self.table.lock().silent(self.limits.patience, |subject| {
            subject.name == name || (device.is_some() && subject.device == device)
        })
    }

    /// Runs `work` on a thread of its own and waits for its answer.
    ///
    /// # Errors
    /// [`Unanswered`].
    pub fn run<T: Send + 'static>(
        self: &Arc<Self>,
        subject: Subject,
        work: impl FnOnce(&Errand<T>) + Send + 'static,
    ) -> Result<T, Unanswered> {
        let what = subject.what;
        let (tell, answer) = sync_channel(0);
        let number = self.place(subject)?;
        let errand = Errand { aside: Arc::clone(self), number, tell };
        self.start(number, what, Box::new(move || work(&errand)))?;
        self.wait(number, what, &answer)
    }

    /// Runs `work` on a thread of its own; nobody waits for it.
    ///
    /// # Errors
    /// [`Unanswered::NoThread`].
    pub fn send(
        self: &Arc<Self>,
        subject: Subject,
        work: impl FnOnce(&Errand<()>) + Send + 'static,
    ) -> Result<(), Unanswered> {
        let what = subject.what;
        let number = self.table.lock().enter(subject);
        let errand = Errand { aside: Arc::clone(self), number, tell: sync_channel(0).0 };
        self.start(number, what, Box::new(move || work(&errand)))
    }

    /// Waits for a place among the work of one name.
    fn place(&self, subject: Subject) -> Result<u64, Unanswered> {
        let Limits { patience, wait, of_name, .. } = self.limits;
        let (what, until) = (subject.what, Instant::now() + wait);
        let mut table = self.table.lock();
        loop {
            let device = |other: &Subject| subject.device.is_some() && other.device == subject.device;
            if let Some(waited) = table.silent(patience, device) {
                return Err(Unanswered::Known { what, waited_s: waited.as_secs() });
            }
            let named = |running: &&Running| !subject.name.is_empty() && running.subject.name == subject.name;
            let others = table.running.values().filter(named).count();
            if others < of_name {
                return Ok(table.enter(subject));
            }
            if self.ended.wait_until(&mut table, until) {
                return Err(Unanswered::Crowded { what, others, waited_s: wait.as_secs() });
            }
        }
    }

    fn start(self: &Arc<Self>, number: u64, what: &'static str, work: Work) -> Result<(), Unanswered> {
        let idle = self.table.lock().idle.pop_last();
        let work = match idle {
            // An idle thread takes it; one that ended at this moment gives it back.
            Some((_, idle)) => match idle.send((number, work)) {
                Ok(()) => return Ok(()),
                Err(unsent) => unsent.0.1,
            },
            None => work,
        };
        let aside = Arc::clone(self);
        let thread = std::thread::Builder::new().name("aside".into());
        thread.spawn(move || aside.serve(number, work)).map(drop).map_err(|error| {
            self.end(number);
            Unanswered::NoThread { what, error: error.to_string() }
        })
    }

    /// A thread's life: this work, then more as long as some comes in time.
    fn serve(&self, mut number: u64, mut work: Work) {
        loop {
            // A panic was logged by its hook, and the caller sees that no answer comes.
            let _ = catch_unwind(AssertUnwindSafe(work));
            let (give, more) = sync_channel(1);
            let mut table = self.end(number);
            if table.idle.len() >= IDLE_MAX {
                return;
            }
            table.idle.insert(number, give);
            drop(table);
            let next = more.recv_timeout(IDLE).or_else(|_| {
                // Whoever took this thread off the list sends work at once.
                let listed = self.table.lock().idle.remove(&number).is_some();
                if listed { Err(()) } else { more.recv().map_err(drop) }
            });
            match next {
                Ok(next) => (number, work) = next,
                Err(()) => return,
            }
        }
    }

    fn end(&self, number: u64) -> Guard<'_, Table> {
        let mut table = self.table.lock();
        if let Some(ended) = table.running.remove(&number)
            && !ended.wanted
        {
            let Subject { what, name, .. } = ended.subject;
            tracing::info!(name, what, "a lost thread has returned");
        }
        self.ended.notify_all();
        table
    }

    fn wait<T>(&self, number: u64, what: &'static str, answer: &Receiver<T>) -> Result<T, Unanswered> {
        let Limits { patience, lost, .. } = self.limits;
        let mut left = patience;
        loop {
            match answer.recv_timeout(left) {
                Ok(result) => return Ok(result),
                Err(RecvTimeoutError::Disconnected) => return Err(Unanswered::Panicked { what }),
                Err(RecvTimeoutError::Timeout) => {}
            }
            let lost_now = self.lost();
            let mut table = self.table.lock();
            let Some(running) = table.running.get_mut(&number) else {
                left = Duration::ZERO; // it has ended: its answer is there, or none comes
                continue;
            };
            let waited = running.since.elapsed();
            left = patience.saturating_sub(waited);
            if !left.is_zero() {
                continue;
            }
            if lost_now > lost {
                left = patience;
                continue;
            }
            running.wanted = false;
            let name = running.subject.name.clone();
            if table.warned.is_none_or(|warned| warned.elapsed() >= WARNING_PAUSE) {
                table.warned = Some(Instant::now());
                drop(table);
                tracing::warn!(
                    name,
                    what,
                    waited_s = waited.as_secs(),
                    lost_threads = lost_now,
                    "a file's server does not answer: the thread is lost until it does; requests for other files go on"
                );
            }
            return Err(Unanswered::Silent { what, waited_s: waited.as_secs() });
        }
    }
}

impl Table {
    fn enter(&mut self, subject: Subject) -> u64 {
        self.next += 1;
        self.running.insert(self.next, Running { subject, since: Instant::now(), wanted: true });
        self.next
    }

    /// The longest silence past the patience among work that `is` selects.
    fn silent(&self, patience: Duration, is: impl Fn(&Subject) -> bool) -> Option<Duration> {
        let of = self.running.values().filter(|running| is(&running.subject));
        of.map(|running| running.since.elapsed()).filter(|silence| *silence >= patience).max()
    }
}

/// Processor time that this thread has taken.
pub(crate) fn thread_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    let whole = u64::try_from(time.tv_sec).unwrap_or(0);
    Duration::new(whole, u32::try_from(time.tv_nsec).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    fn aside(lost: usize) -> Arc<Aside> {
        let ms = Duration::from_millis;
        Aside::new(Limits { patience: ms(400), wait: ms(40), of_name: 2, lost })
    }

    fn about(name: &str, device: Option<u64>) -> Subject {
        Subject { what: "opening", name: name.into(), device }
    }

    /// Work that stands still until the returned sender drops.
    fn hang(aside: &Arc<Aside>, subject: Subject) -> (std::sync::mpsc::Sender<()>, Result<u32, Unanswered>) {
        let (end, ends) = channel::<()>();
        let result = aside.run(subject, move |errand| {
            let _ = ends.recv();
            errand.answer(1);
        });
        (end, result)
    }

    #[test]
    fn an_answer_comes_back_and_threads_are_used_again() {
        let aside = Aside::new(Limits::default());
        let begun = Instant::now();
        for number in 0..1000 {
            assert_eq!(aside.run(about("a", None), move |errand| errand.answer(number)).unwrap(), number);
        }
        println!("{:.1} us for each answer", begun.elapsed().as_secs_f64() * 1e3);
        assert!(aside.table.lock().idle.len() <= IDLE_MAX);
        let panicked = aside.run::<()>(about("a", None), |_| panic!("a fault in the work"));
        assert!(matches!(panicked, Err(Unanswered::Panicked { .. })));
        assert_eq!(aside.lost(), 0);
    }

    #[test]
    fn hanging_work_is_given_up_and_counted_until_it_returns() {
        let aside = aside(64);
        let (end, result) = hang(&aside, about("a", Some(7)));
        assert!(matches!(result, Err(Unanswered::Silent { .. })), "{result:?}");
        assert_eq!(aside.lost(), 1);
        assert!(aside.silent("a", None).is_some() && aside.silent("b", Some(7)).is_some());
        assert!(aside.silent("b", Some(8)).is_none() && aside.silent("b", None).is_none());
        // The device is known to hang; other devices are not waited for.
        let known = aside.run(about("b", Some(7)), |errand| errand.answer(2));
        assert!(matches!(known, Err(Unanswered::Known { .. })), "{known:?}");
        assert_eq!(aside.run(about("b", Some(8)), |errand| errand.answer(3)).unwrap(), 3);
        drop(end);
        while aside.lost() > 0 {
            std::thread::yield_now();
        }
        assert_eq!(aside.run(about("b", Some(7)), |errand| errand.answer(4)).unwrap(), 4);
    }

    #[test]
    fn one_name_takes_few_threads_and_others_pass() {
        let aside = aside(64);
        let held = [hang(&aside, about("a", None)), hang(&aside, about("a", None))];
        let third = aside.run(about("a", None), |errand| errand.answer(1));
        assert!(matches!(third, Err(Unanswered::Crowded { others: 2, .. })), "{third:?}");
        assert_eq!(aside.run(about("b", None), |errand| errand.answer(2)).unwrap(), 2);
        drop(held);
    }

    #[test]
    fn signs_of_life_renew_the_patience_and_work_learns_that_nobody_waits() {
        let aside = aside(64);
        let slow = aside.run(about("a", None), |errand| {
            for _ in 0..8 {
                std::thread::sleep(Duration::from_millis(100));
                assert!(errand.goes_on());
            }
            errand.answer(5);
        });
        assert_eq!(slow.unwrap(), 5);
        let (tell, told) = channel();
        let given_up = aside.run::<()>(about("a", None), move |errand| {
            std::thread::sleep(Duration::from_millis(1200));
            let _ = tell.send(errand.goes_on());
        });
        assert!(matches!(given_up, Err(Unanswered::Silent { .. })));
        assert_eq!(told.recv(), Ok(false));
    }

    #[test]
    fn past_the_bound_of_lost_threads_callers_wait_on() {
        let aside = aside(0);
        let late = aside.run(about("a", None), |errand| {
            std::thread::sleep(Duration::from_millis(1200));
            errand.answer(6);
        });
        assert_eq!(late.unwrap(), 6);
    }
}
