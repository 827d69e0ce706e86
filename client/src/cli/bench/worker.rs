//! One client of a benchmark: a process of its own, with its own connection. It reads requests from standard input and
//! writes how they went to standard output.

use std::io::{self, BufReader};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rocmforge_client::wire::{AnswerForm, ErrorCode, FormKind, GenerateRequest, Prompt};
use rocmforge_client::{Client, ClientError, Connection, Generation, random_request_id};

use super::link::{Job, Problem, Sample, Setup, Told, now_us, read_line, write_line};
use super::prompts::Prompts;
use crate::cli::report::Failure;

/// Shortest pause of a closed loop after a failure, so that a daemon that refuses is not flooded.
const PAUSE_MIN_MS: u32 = 20;
/// Longest pause, whatever the daemon asks for.
const PAUSE_MAX_MS: u32 = 5000;

/// Requests that the benchmark may send ahead. It sends the next one only after an answer.
const JOBS_AHEAD: usize = 1;

/// Shown in lists of processes; the kernel keeps 15 bytes.
const PROCESS_NAME: &std::ffi::CStr = c"rocmforge-bench";

/// Whether the benchmark is over, and the request to cancel if it is.
#[derive(Debug, Default)]
struct Stop(Mutex<Stopping>);

#[derive(Debug, Default)]
struct Stopping {
    stopped: bool,
    running: Option<(Connection, u32)>,
}

impl Stop {
    fn lock(&self) -> MutexGuard<'_, Stopping> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes the running request. One that begins after the end is cancelled at once.
    fn begin(&self, generation: &Generation) {
        let mut state = self.lock();
        let (connection, stream) = (generation.connection().clone(), generation.stream());
        if state.stopped {
            cancel(&connection, stream);
        }
        state.running = Some((connection, stream));
    }

    fn end(&self) {
        self.lock().running = None;
    }

    /// Ends the benchmark, and cancels the running request.
    fn stop(&self) {
        let mut state = self.lock();
        state.stopped = true;
        if let Some((connection, stream)) = state.running.take() {
            cancel(&connection, stream);
        }
    }

    fn is_stopped(&self) -> bool {
        self.lock().stopped
    }
}

/// A connection that is gone has no request to cancel.
fn cancel(connection: &Connection, stream: u32) {
    let _ = connection.cancel(stream);
}

/// Answers the benchmark until it closes standard input.
pub fn run(client: &Client) -> Result<(), Failure> {
    // Lists of processes would show the name of the link that it was started by. Without a name it works as well.
    let _ = rustix::thread::set_name(PROCESS_NAME);
    let mut input = BufReader::new(io::stdin());
    let line = read_line::<Setup>(&mut input);
    let line =
        line.map_err(|error| Failure::usage(&format!("standard input is not that of `bench`: {error}")));
    let Some(setup) = line? else { return Ok(()) };
    let prompts = Prompts::new(&setup);
    let form = setup.schema.as_ref().map(|schema| AnswerForm::new(FormKind::JsonSchema, schema));
    let stop = Arc::new(Stop::default());
    let (sender, jobs) = sync_channel(JOBS_AHEAD);
    let reader = Arc::clone(&stop);
    std::thread::Builder::new()
        .name("jobs".into())
        .spawn(move || pass_on(&mut input, &sender, &reader))
        .map_err(|error| Failure::Resources(format!("no thread could be started: {error}")))?;
    // Connects before the first request, whose time would include it. A request finds an error again.
    let _ = client.connection();
    let mut output = io::stdout();
    write_line(&mut output, &Told::Ready)?;
    while let Ok(job) = jobs.recv() {
        let ids = prompts.ids(job.number, job.prompt_tokens);
        if job
            .due_us
            .is_some_and(|due_us| !wait(&jobs, Duration::from_micros(due_us.saturating_sub(now_us()))))
        {
            break;
        }
        let mut sample = Sample { number: job.number, prompt_tokens: ids.len() as u64, ..Sample::default() };
        let request = GenerateRequest {
            max_tokens: job.answer_tokens,
            ignore_eog: true,
            request_id: random_request_id(),
            ..GenerateRequest::new(&setup.model, Prompt::Ids(ids))
        };
        let request = form.iter().fold(request, |request, form| request.with_form(form));
        ask(client, &job, &request, &mut sample, &stop, &jobs);
        write_line(&mut output, &Told::Ended(sample))?;
    }
    Ok(())
}

/// Passes requests on. At the end of standard input, also if the benchmark was killed, it stops the running one.
fn pass_on(input: &mut BufReader<io::Stdin>, jobs: &SyncSender<Job>, stop: &Stop) {
    while let Ok(Some(job)) = read_line(input) {
        if jobs.send(job).is_err() {
            break;
        }
    }
    stop.stop();
}

/// Waits; false if the benchmark ended meanwhile. No request comes while another one waits.
fn wait(jobs: &Receiver<Job>, time: Duration) -> bool {
    !matches!(jobs.recv_timeout(time), Err(RecvTimeoutError::Disconnected))
}

/// Asks one request. After a failure in a closed loop, it pauses before it returns.
fn ask(
    client: &Client,
    job: &Job,
    request: &GenerateRequest,
    sample: &mut Sample,
    stop: &Stop,
    jobs: &Receiver<Job>,
) {
    sample.sent_us = now_us();
    sample.due_us = job.due_us.unwrap_or(sample.sent_us);
    let outcome = client.generate(request).and_then(|mut generation| {
        stop.begin(&generation);
        let outcome = receive(&mut generation, sample);
        stop.end();
        outcome
    });
    sample.end_us = now_us();
    if let Err(error) = outcome {
        let cancelled = stop.is_stopped() && error.code() == Some(ErrorCode::Cancelled as u16);
        let (name, pause_ms) = (error.code_name().to_owned(), error.retry_after_ms());
        sample.error = Some(Problem { name, message: Failure::from(error).to_string(), cancelled });
        if job.due_us.is_none() {
            let pause_ms = pause_ms.clamp(PAUSE_MIN_MS, PAUSE_MAX_MS);
            wait(jobs, Duration::from_millis(pause_ms.into()));
        }
    }
}

/// Receives the whole answer.
fn receive(generation: &mut Generation, sample: &mut Sample) -> Result<(), ClientError> {
    let mut last_us = None;
    while let Some(item) = generation.next_item()? {
        let now_us = now_us();
        for _ in &item.ids {
            match last_us {
                None => sample.first_us = Some(now_us),
                Some(last_us) => sample.gaps_us.push(now_us.saturating_sub(last_us)),
            }
            last_us = Some(now_us);
        }
        sample.answer_tokens += item.ids.len() as u64;
    }
    let broken =
        || ClientError::Disconnected { reason: "the answer ended without its last message".to_owned() };
    let end = generation.end().ok_or_else(broken)?;
    sample.reused_tokens = end.reused_tokens();
    sample.queue_us = end.timings.queue_us;
    Ok(())
}
