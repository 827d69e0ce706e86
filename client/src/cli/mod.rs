//! The command line: one module for the arguments, one for what each kind of command prints.

mod args;
mod bench;
mod chat;
mod chat_args;
mod doctor;
mod embed;
mod limits;
mod metrics;
mod near;
mod prompt;
#[cfg(feature = "pull")]
mod pull;
mod rank;
mod report;
mod residency;
mod run;
mod run_args;
mod samplers;
mod sampling;
mod score;
mod steering;
mod tables;
mod tools;

use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::error::{ContextKind, ContextValue};
use clap::{CommandFactory, Parser};
use rocmforge_client::{Client, ClientError, Options, wire};

use args::{Arguments, Command, DetokenizeArguments, SessionsCommand, TokenizeArguments};
use report::{Failure, Output};

/// The definition of the command line; xtask builds the manual pages and completions from it.
pub fn command() -> clap::Command {
    Arguments::command()
}

/// Parses the arguments, asks the daemon, prints the answer. `--help` documents the exit codes.
pub fn main() -> ExitCode {
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        // Help and version are not errors. Without --json, print clap's own message.
        Err(error) if !error.use_stderr() => error.exit(),
        Err(error) if elsewhere(&error).is_some() => {
            let output = Output { json: asks_for_json(std::env::args_os()) };
            return output.fail(&Failure::usage(elsewhere(&error).unwrap_or_default()));
        }
        Err(error) if !asks_for_json(std::env::args_os()) => error.exit(),
        Err(error) => return Output { json: true }.fail(&Failure::usage(&one_line(&error.to_string()))),
    };
    let output = Output { json: arguments.json };
    let outcome = dispatch(&arguments, output).map_err(|failure| {
        let client = Client::new(options(&arguments));
        near::with_near_model(&client, arguments.command.model(), failure)
    });
    outcome.unwrap_or_else(|failure| output.fail(&failure))
}

/// Whether `--json` is among arguments that failed to parse. Arguments after `--` are not options.
fn asks_for_json(arguments: impl Iterator<Item = OsString>) -> bool {
    arguments.take_while(|argument| argument != "--").any(|argument| argument == "--json")
}

/// Advice for a command that only other programs have.
fn elsewhere(error: &clap::Error) -> Option<&'static str> {
    match error.get(ContextKind::InvalidSubcommand) {
        Some(ContextValue::String(command)) => near::elsewhere(command),
        _ => None,
    }
}

/// clap's error message, without its "error:" prefix and the usage after it.
fn one_line(error: &str) -> String {
    let what = error.split("\n\nUsage:").next().unwrap_or(error);
    let words: Vec<_> = what.strip_prefix("error: ").unwrap_or(what).split_whitespace().collect();
    words.join(" ")
}

fn dispatch(arguments: &Arguments, output: Output) -> Result<ExitCode, Failure> {
    let options = options(arguments);
    options.check()?;
    let client = Client::new(options.clone());
    match &arguments.command {
        Command::Run(run) if run.chats(output) => return chat::run(&client, &run.into()),
        Command::Run(run) => return run::run(&client, run, output),
        Command::Chat(_) if output.json => {
            return Err(Failure::usage("a chat has no --json form: `run --chat --json` answers once"));
        }
        Command::Chat(chat) => return chat::run(&client, chat),
        Command::List { uid } => output.show(&client.list_of(*uid)?, tables::list)?,
        Command::Show { model, full } => {
            output.show(&client.show(&model_named(&client, model)?, *full)?, tables::show)?
        }
        Command::Load { model, name: Some(_), .. } if !is_path(model) => {
            return Err(Failure::usage(&format!(
                "--name is for a file, and {model:?} is a model's name: leave it out, or give a file with a `/`"
            )));
        }
        Command::Load { model, name, preload: None } => {
            output.show(&load(&client, model, name.as_deref())?, tables::load)?
        }
        Command::Load { model, name, preload: Some(what) } => {
            let load = load(&client, model, name.as_deref())?;
            let preload = residency::bring(&client, &load.summary.name, what, output)?;
            output.show(&residency::Loaded { load, preload }, residency::loaded)?
        }
        Command::Preload { model, layers } => {
            let model = model_named(&client, model)?;
            output.show(&residency::bring(&client, &model, layers, output)?, residency::preloaded)?
        }
        Command::ClearCache { model, .. } => {
            output.show(&client.evict_weights(model.as_deref())?, residency::cleared)?
        }
        Command::Pin { model } => {
            output.show(&client.pin(&model_named(&client, model)?)?, residency::ruled)?
        }
        Command::Unpin { model } => output.show(&client.unpin(model)?, residency::ruled)?,
        Command::Rules { model, priority, keep_layers, idle } => {
            let request = wire::SetRulesRequest {
                model: model_named(&client, model)?,
                pinned: None,
                priority: *priority,
                layers_min: *keep_layers,
                idle_s: *idle,
                ext: vec![],
            };
            output.show(&client.set_rules(&request)?, residency::ruled)?
        }
        Command::Events => residency::follow(&client, output)?,
        Command::Plan { model, context } => {
            let plan = client.plan(&model_named(&client, model)?, *context)?;
            output.show(&residency::Plan(plan), residency::plan)?
        }
        Command::Residency => output.show_as(&client.residency()?, residency::json, residency::residency)?,
        Command::Unload { model, uid } => output.show(&client.unload_of(*uid, model)?, tables::unload)?,
        Command::Ps => output.show(&client.ps()?, tables::ps)?,
        Command::Cancel { id, uid } => {
            let scope = match (id, uid) {
                (Some(id), _) => wire::RequestScope::Id(*id),
                (None, Some(uid)) => wire::RequestScope::Uid(*uid),
                (None, None) => {
                    return Err(Failure::usage("name a request by its number, or a user with --uid"));
                }
            };
            output.show(&client.cancel_requests(scope)?, tables::cancelled)?
        }
        Command::Sessions { what: None } => output.show(&client.sessions()?, tables::sessions)?,
        Command::Sessions { what: Some(SessionsCommand::Forget { name, .. }) } => {
            output.show(&client.forget_session(name.as_deref())?, tables::forgotten)?
        }
        Command::Limit(limit) => limits::run(&client, limit, output)?,
        Command::Status => {
            let status = Status { status: client.status()?, users: users(&client)? };
            output.show_as(&status, report::status, tables::status)?
        }
        Command::Metrics { out, period } => metrics::run(&client, out.as_deref(), *period, output)?,
        Command::Doctor => return doctor::run(&client, &options.socket, output),
        Command::Score(score) => output.show(&score::score(&client, score)?, score::shown)?,
        Command::Embed(embed) => output.show(&embed::embed(&client, embed)?, embed::shown)?,
        Command::Rank(rank) => output.show(&rank::rank(&client, rank)?, rank::shown)?,
        Command::Tokenize(tokenize) => output.show(&ids_of(&client, tokenize)?, tables::ids)?,
        Command::Detokenize(detokenize) => output.show(&text_of(&client, detokenize)?, tables::text)?,
        Command::Bench(bench) => return bench::run(&client, &options, bench, output),
        Command::BenchClient => bench::work(&client)?,
        #[cfg(feature = "pull")]
        Command::Pull(pull) => output.show(&pull::pull(pull, output)?, pull::shown)?,
        Command::Ping { count } => output.show(&ping(&client, *count)?, tables::ping)?,
        Command::Info => output.show(&client.info()?, tables::info)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn options(arguments: &Arguments) -> Options {
    let mut options = Options {
        connect_timeout: Duration::from_millis(arguments.connect_timeout_ms),
        ..Options::default()
    };
    options.set_server(arguments.socket.as_deref(), &arguments.server_uid);
    options
}

/// Whether `model` is a file that the client opens, rather than a name that the daemon knows.
fn is_path(model: &str) -> bool {
    model.contains('/') || (model.ends_with(".gguf") && Path::new(model).exists())
}

fn load(client: &Client, model: &str, name: Option<&str>) -> Result<wire::LoadReply, ClientError> {
    if is_path(model) { client.load_file(Path::new(model), name) } else { client.load(model) }
}

/// The model's name. A path is first opened and passed to the daemon.
fn model_named(client: &Client, model: &str) -> Result<String, ClientError> {
    if is_path(model) { Ok(load(client, model, None)?.summary.name) } else { Ok(model.to_owned()) }
}

fn ids_of(client: &Client, arguments: &TokenizeArguments) -> Result<wire::TokenizeReply, Failure> {
    let text = prompt::text(arguments.text.as_deref())?;
    let request = wire::TokenizeRequest {
        model: model_named(client, &arguments.model)?,
        text,
        add_special: !arguments.no_special,
        parse_special: arguments.parse_special,
        ext: vec![],
    };
    Ok(client.tokenize(&request)?)
}

fn text_of(client: &Client, arguments: &DetokenizeArguments) -> Result<wire::DetokenizeReply, Failure> {
    let given = arguments.ids.join(" ");
    let ids = if given.is_empty() || given == "-" { prompt::text(None)? } else { given };
    let request = wire::DetokenizeRequest {
        model: model_named(client, &arguments.model)?,
        ids: prompt::ids(&ids)?,
        show_special: arguments.special,
        ext: vec![],
    };
    Ok(client.detokenize(&request)?)
}

/// The parts that `status` shows.
#[derive(Debug)]
pub struct Status {
    status: wire::StatusReply,
    users: Vec<wire::UserEntry>,
}

/// Holdings of users; none if the daemon does not know the request.
fn users(client: &Client) -> Result<Vec<wire::UserEntry>, ClientError> {
    match client.users() {
        Err(error) if error.code() == Some(wire::ErrorCode::UnknownOp as u16) => Ok(Vec::new()),
        users => Ok(users?.users),
    }
}

/// Times of round trips on one connection, in microseconds.
#[derive(Debug, serde::Serialize)]
pub struct PingTimes {
    round_trips_us: Vec<f64>,
}

fn ping(client: &Client, count: u32) -> Result<PingTimes, ClientError> {
    let round_trips_us = (0..count).map(|number| {
        let start = Instant::now();
        client.ping(&number.to_le_bytes())?;
        Ok(start.elapsed().as_secs_f64() * 1e6)
    });
    Ok(PingTimes { round_trips_us: round_trips_us.collect::<Result<_, ClientError>>()? })
}
