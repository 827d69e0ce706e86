//! The client processes of a benchmark, and the requests that they are given.

use std::io::{self, BufReader};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};

use signal_hook::consts::SIGINT;
use signal_hook::iterator::Signals;

use super::link::{Job, Problem, Sample, Setup, Told, now_us, read_line, write_line};
use crate::cli::report::{EXIT_CANCELLED, Failure};

/// The running program, also after its file was replaced.
const OWN_PROGRAM: &str = "/proc/self/exe";

/// Its name in lists of processes.
const SHOWN_NAME: &str = "rocmforge-client";

/// The client processes.
#[derive(Debug)]
pub struct Fleet {
    clients: Vec<Member>,
    events: Receiver<Event>,
    interrupted: bool,
}

/// One client process.
#[derive(Debug)]
struct Member {
    process: Child,
    /// Closed at the end.
    input: Option<ChildStdin>,
    /// The request that it has.
    asked: Option<Job>,
    ready: bool,
    gone: bool,
}

#[derive(Debug)]
enum Event {
    Told(usize, Told),
    /// The client closed its output.
    Gone(usize),
    Interrupt,
}

/// The results of a run.
#[derive(Debug)]
pub struct Measured {
    /// One for each request that began, in the order of their ends.
    pub samples: Vec<Sample>,
    /// When the first request could begin, by [`now_us`].
    pub start_us: u64,
    /// Ctrl-C ended it.
    pub interrupted: bool,
    /// Rates are of at least this time.
    pub window_min_us: u64,
}

impl Fleet {
    /// Starts client processes with these arguments, and waits until they are connected. From now on, Ctrl-C ends the
    /// benchmark early; a second one ends the program at once.
    ///
    /// # Errors
    /// [`Failure::Resources`] if the system gives too few processes, threads or descriptors, or a client ends at once.
    pub fn start(count: u32, arguments: &[std::ffi::OsString], setup: &Setup) -> Result<Self, Failure> {
        let (sender, events) = channel();
        watch_interrupt(sender.clone())?;
        let mut fleet = Self { clients: Vec::new(), events, interrupted: false };
        for number in 0..count as usize {
            let member = Member::start(number, arguments, setup, sender.clone()).map_err(|error| {
                Failure::Resources(format!(
                    "client {} of {count} could not be started: {error}; `ulimit -u` and `ulimit -n` show how many \
                     processes and open files you may have",
                    number + 1
                ))
            })?;
            fleet.clients.push(member);
        }
        while !fleet.interrupted && fleet.clients.iter().any(|client| !client.ready && !client.gone) {
            fleet.take_event();
        }
        match fleet.clients.iter().position(|client| client.gone) {
            Some(number) if !fleet.interrupted => Err(Failure::Resources(format!(
                "client {} of {count} ended before it could ask; standard error has its reason, if it had the time",
                number + 1
            ))),
            _ => Ok(fleet),
        }
    }

    /// Gives requests to clients that have none, until no more come and all ended. `next` gets the microseconds since
    /// the beginning, and so does each request's time count. `told` is called after each end.
    pub fn run(
        mut self,
        mut next: impl FnMut(u64) -> Option<Job>,
        mut told: impl FnMut(&[Sample], u64),
    ) -> Measured {
        let start_us = now_us();
        let mut samples = Vec::new();
        let mut give = |client: &mut Member, interrupted: bool| {
            if interrupted || client.gone {
                return;
            }
            let elapsed_us = now_us().saturating_sub(start_us);
            if let Some(mut job) = next(elapsed_us) {
                job.due_us = job.due_us.map(|due_us| start_us.saturating_add(due_us));
                client.give(job);
            }
        };
        self.clients.iter_mut().for_each(|client| give(client, self.interrupted));
        while self.clients.iter().any(|client| client.asked.is_some()) {
            let Some((number, ended)) = self.take_event() else { continue };
            let client = &mut self.clients[number];
            let job = client.asked.take();
            match (ended, job) {
                (Some(sample), _) => samples.push(sample),
                // One that waited for its time never began.
                (None, Some(job)) if !self.interrupted => samples.push(lost(&job)),
                (None, _) => {}
            }
            give(&mut self.clients[number], self.interrupted);
            told(&samples, start_us);
        }
        Measured { samples, start_us, interrupted: self.interrupted, window_min_us: 0 }
    }

    /// Waits for an event. Returns the client that ended its request or itself, with the request's sample.
    fn take_event(&mut self) -> Option<(usize, Option<Sample>)> {
        match self.events.recv() {
            Ok(Event::Told(number, Told::Ready)) => {
                self.clients[number].ready = true;
                None
            }
            Ok(Event::Told(number, Told::Ended(sample))) => Some((number, Some(sample))),
            Ok(Event::Gone(number)) => {
                self.clients[number].gone = true;
                Some((number, None))
            }
            // The thread of signals keeps a sender, so the channel never ends.
            Ok(Event::Interrupt) | Err(_) => {
                self.interrupted = true;
                self.clients.iter_mut().for_each(|client| client.input = None);
                None
            }
        }
    }
}

impl Drop for Fleet {
    /// Ends the clients and waits for them.
    fn drop(&mut self) {
        self.clients.iter_mut().for_each(|client| client.input = None);
        for client in &mut self.clients {
            // It ends by itself when its input ends; nothing is left to do if waiting fails.
            let _ = client.process.wait();
        }
    }
}

impl Member {
    fn start(
        number: usize,
        arguments: &[std::ffi::OsString],
        setup: &Setup,
        events: Sender<Event>,
    ) -> io::Result<Self> {
        let mut process = Command::new(OWN_PROGRAM)
            .arg0(SHOWN_NAME)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // A group of its own: Ctrl-C on the terminal must not end it before it reports.
            .process_group(0)
            .spawn()?;
        let (mut input, output) = (process.stdin.take(), process.stdout.take());
        let pass_on = move || {
            if let Some(output) = output {
                pass_on(number, output, &events);
            }
            let _ = events.send(Event::Gone(number));
        };
        if let Err(error) = std::thread::Builder::new().name("client".into()).spawn(pass_on) {
            drop(input);
            let _ = process.wait();
            return Err(error);
        }
        // A client that cannot be written to has ended: its output ends too, and that is noticed.
        let _ = input.as_mut().map(|input| write_line(input, setup));
        Ok(Self { process, input, asked: None, ready: false, gone: false })
    }

    fn give(&mut self, job: Job) {
        // As above; the request is then counted as lost.
        let _ = self.input.as_mut().map(|input| write_line(input, &job));
        self.asked = Some(job);
    }
}

/// Passes a client's lines on, until its output ends or is none of ours.
fn pass_on(number: usize, output: ChildStdout, events: &Sender<Event>) {
    let mut output = BufReader::new(output);
    while let Ok(Some(told)) = read_line(&mut output) {
        if events.send(Event::Told(number, told)).is_err() {
            return;
        }
    }
}

/// The sample of a request whose client ended.
fn lost(job: &Job) -> Sample {
    let problem = Problem {
        name: "ClientEnded".to_owned(),
        message: "the client process ended before its request".to_owned(),
        cancelled: false,
    };
    let now_us = now_us();
    let due_us = job.due_us.unwrap_or(now_us).min(now_us);
    Sample {
        number: job.number,
        due_us,
        sent_us: due_us,
        end_us: now_us,
        error: Some(problem),
        ..Sample::default()
    }
}

fn watch_interrupt(events: Sender<Event>) -> Result<(), Failure> {
    let mut signals = Signals::new([SIGINT])
        .map_err(|error| Failure::Resources(format!("Ctrl-C could not be watched: {error}")))?;
    let watch = move || {
        let mut pending = signals.forever();
        if pending.next().is_some() && events.send(Event::Interrupt).is_ok() {
            pending.next();
        }
        std::process::exit(EXIT_CANCELLED.into());
    };
    let begun = std::thread::Builder::new().name("signals".into()).spawn(watch);
    begun.map(drop).map_err(|error| Failure::Resources(format!("no thread could be started: {error}")))
}
