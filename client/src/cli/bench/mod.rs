//! `bench`: puts a load on the daemon and measures its answers, as separate processes see them.
//!
//! The command starts itself again, once for each client ([`worker`]), and gives each client one request at a time
//! ([`fleet`]). Times come from the clients; the figures are made here.

mod arrivals;
mod fleet;
mod lengths;
mod link;
mod percentiles;
mod plot;
mod prompts;
mod random;
mod single;
mod summary;
mod text;
mod worker;
mod workload;

use std::ffi::OsString;
use std::io::{self, IsTerminal};
use std::process::ExitCode;

use rocmforge_client::{Client, Options, ServerTrust, random_request_id};

use super::args::BenchArguments;
use super::model_named;
use super::report::{EXIT_CANCELLED, Failure, Output, show_progress};
use super::steering::read;
pub use arrivals::Arrivals;
use fleet::{Fleet, Measured};
pub use lengths::{Lengths, TOKENS_MAX};
use link::{Sample, Setup, now_us};
use single::{Plan, Single};
use summary::{Shape, Summary, errors};
pub use worker::run as work;
use workload::{Until, Workload};

/// Name of the hidden command that is one client.
pub const WORKER: &str = "bench-client";

/// Requests of a load without a number or a duration.
const REQUESTS: u64 = 32;

/// Runs the benchmark and prints its figures.
pub fn run(
    client: &Client,
    options: &Options,
    arguments: &BenchArguments,
    output: Output,
) -> Result<ExitCode, Failure> {
    let model = model_named(client, &arguments.model)?;
    let shown = client.show(&model, false)?;
    // Short enough to type, and for programs that read JSON's numbers as f64.
    let seed = arguments.seed.unwrap_or_else(|| u64::from(random_request_id() as u32));
    let setup = Setup {
        model: shown.summary.name,
        seed,
        shared_tokens: if arguments.single { 0 } else { arguments.shared_prefix },
        vocabulary: shown.vocab,
        left_out: shown.end_of_generation,
        schema: arguments.schema.as_ref().map(|path| read("--schema", path)).transpose()?,
    };
    if arguments.single {
        one_by_one(options, arguments, setup, output)
    } else {
        load(options, arguments, setup, output)
    }
}

fn load(
    options: &Options,
    arguments: &BenchArguments,
    setup: Setup,
    output: Output,
) -> Result<ExitCode, Failure> {
    let until = match (arguments.duration, arguments.requests) {
        (Some(seconds), _) => Until::Elapsed { us: (seconds * 1e6) as u64 },
        (None, requests) => Until::Requests(requests.unwrap_or(REQUESTS)),
    };
    let (prompts, answers) = (arguments.prompt_tokens, arguments.answer_tokens);
    let mut workload = Workload::new(setup.seed, arguments.arrivals, prompts, answers, until);
    let total = workload.total();
    // A client beyond the number of requests would have none.
    let clients = total
        .map_or(arguments.clients, |total| u32::try_from(total).unwrap_or(u32::MAX).min(arguments.clients));
    let fleet = Fleet::start(clients, &worker_arguments(options), &setup)?;
    let mut measured = fleet.run(|elapsed_us| workload.next(elapsed_us), progress(total, output));
    end_progress(output);
    if let (Until::Elapsed { us }, false) = (until, measured.interrupted) {
        measured.window_min_us = us;
    }
    let shape = Shape {
        model: setup.model,
        clients,
        arrivals: arguments.arrivals.to_string(),
        prompt_tokens: prompts.to_string(),
        answer_tokens: answers.to_string(),
        shared_prefix: setup.shared_tokens,
        seed: setup.seed,
        schema: arguments.schema.as_ref().map(|path| path.display().to_string()),
    };
    let summary = Summary::of(shape, &measured);
    output.show(&summary, text::summary)?;
    if let Some(file) = &arguments.plot {
        std::fs::write(file, plot::svg(&summary))
            .map_err(|error| Failure::File(format!("{}: {error}", file.display())))?;
    }
    outcome(&measured)
}

fn one_by_one(
    options: &Options,
    arguments: &BenchArguments,
    setup: Setup,
    output: Output,
) -> Result<ExitCode, Failure> {
    let (Lengths::Fixed(prompt_tokens), Lengths::Fixed(answer_tokens)) =
        (arguments.prompt_tokens, arguments.answer_tokens)
    else {
        return Err(Failure::usage(
            "--single needs one length: give --prompt-tokens and --answer-tokens as numbers",
        ));
    };
    let plan = Plan { prompt_tokens, answer_tokens, repetitions: arguments.repetitions };
    let fleet = Fleet::start(1, &worker_arguments(options), &setup)?;
    let mut numbers = 0..;
    let measured = fleet.run(|_| plan.job(numbers.next()?), progress(Some(plan.total()), output));
    end_progress(output);
    let single = Single { model: setup.model, seed: setup.seed, tests: plan.tests(&measured.samples) };
    output.show(&single, text::single)?;
    outcome(&measured)
}

/// The exit code after the figures were printed.
fn outcome(measured: &Measured) -> Result<ExitCode, Failure> {
    if measured.interrupted {
        return Ok(ExitCode::from(EXIT_CANCELLED));
    }
    let errors = errors(&measured.samples);
    let Some(most) = errors.first() else { return Ok(ExitCode::SUCCESS) };
    let failed: u64 = errors.iter().map(|error| error.count).sum();
    let all = measured.samples.len();
    Err(Failure::Requests(format!(
        "{failed} of {all} requests failed, {} of them with {}: {}",
        most.count, most.name, most.message
    )))
}

/// Arguments with which a client process reaches the same daemon.
fn worker_arguments(options: &Options) -> Vec<OsString> {
    let mut arguments: Vec<OsString> = vec!["--socket".into(), options.socket.clone().into()];
    arguments.push("--connect-timeout".into());
    arguments.push(options.connect_timeout.as_millis().to_string().into());
    if let ServerTrust::Uids(uids) = &options.trust {
        for uid in uids {
            arguments.extend(["--server-uid".into(), uid.to_string().into()]);
        }
    }
    arguments.push(WORKER.into());
    arguments
}

/// Shows the progress, if standard error is a terminal and the output is text.
fn progress(total: Option<u64>, output: Output) -> impl FnMut(&[Sample], u64) {
    let told = is_told(output);
    let (mut failed, mut answer_tokens, mut counted) = (0u64, 0, 0);
    move |samples, start_us| {
        for sample in &samples[counted..] {
            failed += u64::from(sample.error.as_ref().is_some_and(|error| !error.cancelled));
            answer_tokens += sample.answer_tokens;
        }
        counted = samples.len();
        if told {
            let of = total.map_or(String::new(), |total| format!(" of {total}"));
            let seconds = now_us().saturating_sub(start_us) as f64 / 1e6;
            let rate = answer_tokens as f64 / seconds.max(1e-6);
            show_progress(&format!("{counted}{of} requests, {failed} failed, {rate:.1} answer tokens/s"));
        }
    }
}

/// Clears the line of progress.
fn end_progress(output: Output) {
    if is_told(output) {
        show_progress("");
    }
}

fn is_told(output: Output) -> bool {
    !output.json && io::stderr().is_terminal()
}
