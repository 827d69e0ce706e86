//! `run`: prints text as it arrives, or one object at the end.

use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;
use std::time::Instant;

use rocmforge_client::{
    Client, ClientError, Connection, Generation, ProtocolError, printable_text, random_request_id, wire,
};
use serde_json::{Value, json};
use signal_hook::consts::SIGINT;
use signal_hook::iterator::Signals;
use wire::{ChatMessage, ErrorCode, GenerateEnd, GenerateRequest, Prompt, TokenLogprob};

use super::args::RunArguments;
use super::report::{EXIT_CANCELLED, Failure, Output, snake_case};
use super::{model_named, prompt};

/// Most bytes of an answer, which is kept whole: a million tokens with twenty log-probabilities each have fewer.
const ANSWER_BYTES_MAX: usize = 256 << 20;

/// The answer received so far.
#[derive(Debug, Default)]
struct Answer {
    text: String,
    prompt_ids: Vec<u32>,
    ids: Vec<u32>,
    logprobs: Vec<TokenLogprob>,
    end: Option<GenerateEnd>,
    /// Size of the fields above.
    bytes: usize,
}

pub fn run(client: &Client, arguments: &RunArguments, output: Output) -> Result<ExitCode, Failure> {
    if arguments.logprobs > 0 && !output.json {
        return Err(Failure::usage("--logprobs prints nothing without --json: give both"));
    }
    let mut request = request(arguments)?;
    request.model = model_named(client, &arguments.model)?;
    let start = Instant::now();
    let mut generation = client.generate(&request)?;
    cancel_on_interrupt(generation.connection().clone(), generation.stream())?;
    let mut answer = Answer::default();
    let outcome = receive(&mut generation, &mut answer, output);
    answer.end = generation.end().cloned();
    let cancelled = match outcome {
        Ok(()) => false,
        Err(Failure::Client(error)) if error.code() == Some(ErrorCode::Cancelled as u16) => true,
        Err(failure) if output.json => {
            return Ok(output.fail_with(&failure, so_far(&answer, arguments.logprobs > 0)));
        }
        Err(failure) => {
            end_line(&answer.text)?;
            return Err(failure);
        }
    };
    if output.json {
        writeln!(io::stdout(), "{}", to_json(&answer, arguments.logprobs > 0))?;
    } else {
        end_line(&answer.text)?;
    }
    if arguments.stats {
        stats(&answer, start)?;
    }
    Ok(if cancelled { ExitCode::from(EXIT_CANCELLED) } else { ExitCode::SUCCESS })
}

fn request(arguments: &RunArguments) -> Result<GenerateRequest, Failure> {
    let text = prompt::text(arguments.prompt.as_deref())?;
    let prompt = if arguments.ids {
        Prompt::Ids(prompt::ids(&text)?)
    } else if arguments.chat {
        let message = |role: &str, content: &str| ChatMessage { role: role.into(), content: content.into() };
        let system = arguments.system.iter().map(|system| message("system", system));
        Prompt::Chat(system.chain([message("user", &text)]).collect())
    } else {
        Prompt::Text(text)
    };
    let request = GenerateRequest {
        model: String::new(),
        prompt,
        max_tokens: arguments.max_tokens,
        sampling: arguments.sampling.options(arguments.seed, arguments.logprobs),
        stop: arguments.stop.clone(),
        ignore_eog: arguments.ignore_eog,
        timeout_ms: arguments.timeout,
        request_id: random_request_id(),
        ext: vec![],
    };
    let request = match arguments.context_shift {
        true => request.with_context_shift(arguments.keep),
        false => request,
    };
    let request = match arguments.priority {
        Some(priority) => request.with_priority(priority),
        None => request,
    };
    let request = arguments.steering.fill(request)?;
    let Some(name) = &arguments.session else { return Ok(request) };
    let request = request.with_session(name);
    request.session().map_err(|error| Failure::usage(&format!("--session {name:?}: {error}")))?;
    Ok(request)
}

/// The first Ctrl-C cancels the request, so that the partial answer is printed. The second ends the program at once.
/// Before this is set up, Ctrl-C ends the program as usual, and the daemon cancels the request when the connection
/// closes.
fn cancel_on_interrupt(connection: Connection, stream: u32) -> Result<(), Failure> {
    let mut signals = Signals::new([SIGINT])
        .map_err(|error| Failure::Resources(format!("Ctrl-C could not be watched: {error}")))?;
    let watch = move || {
        let mut pending = signals.forever();
        if pending.next().is_none() || connection.cancel(stream).is_ok() {
            pending.next();
        }
        std::process::exit(EXIT_CANCELLED.into());
    };
    let begun = std::thread::Builder::new().name("signals".into()).spawn(watch);
    begun.map(drop).map_err(|error| {
        Failure::Resources(format!(
            "no thread could be started: {error}; `ulimit -u` shows how many processes and threads you may have"
        ))
    })
}

/// Receives every item; without `--json` prints its text at once.
fn receive(generation: &mut Generation, answer: &mut Answer, output: Output) -> Result<(), Failure> {
    let mut printer = Printer { terminal: io::stdout().is_terminal() };
    while let Some(mut item) = generation.next_item()? {
        if !output.json {
            printer.print(&item.text)?;
        }
        answer.bytes += bytes_of(&item);
        if answer.bytes > ANSWER_BYTES_MAX {
            return Err(ClientError::from(ProtocolError::AnswerTooLong { max: ANSWER_BYTES_MAX }).into());
        }
        answer.text.push_str(&item.text);
        answer.prompt_ids.append(&mut item.prompt_ids);
        answer.ids.append(&mut item.ids);
        answer.logprobs.append(&mut item.logprobs);
    }
    if let Some(end) = generation.end() {
        if !output.json {
            printer.print(&end.text)?;
        }
        answer.text.push_str(&end.text);
    }
    Ok(())
}

fn bytes_of(item: &wire::GenerateItem) -> usize {
    let tops = item.logprobs.iter().map(|token| size_of_val(token) + size_of_val(&*token.top));
    item.text.len() + size_of_val(&*item.ids) + size_of_val(&*item.prompt_ids) + tops.sum::<usize>()
}

/// Prints a model's text. A terminal gets its control characters escaped, because a model could use them to control it.
struct Printer {
    terminal: bool,
}

impl Printer {
    fn print(&mut self, text: &str) -> io::Result<()> {
        if text.is_empty() {
            return Ok(());
        }
        let mut stdout = io::stdout().lock();
        if self.terminal {
            stdout.write_all(printable_text(text).as_bytes())?;
        } else {
            stdout.write_all(text.as_bytes())?;
        }
        stdout.flush()
    }
}

/// On a terminal, ends the text with a newline so that the prompt starts on its own line. A file or pipe gets the
/// text unchanged.
fn end_line(text: &str) -> io::Result<()> {
    if io::stdout().is_terminal() && !text.ends_with('\n') { writeln!(io::stdout()) } else { Ok(()) }
}

/// The partial answer, printed with an error: it was computed, and a script may continue from it.
fn so_far(answer: &Answer, logprobs: bool) -> Value {
    let mut object = json!({ "text": answer.text, "prompt_ids": answer.prompt_ids, "ids": answer.ids });
    if logprobs {
        object["logprobs"] = json!(answer.logprobs);
    }
    object
}

fn to_json(answer: &Answer, logprobs: bool) -> Value {
    let end = answer.end.as_ref();
    let reason = end.map_or("cancelled".to_owned(), |end| snake_case(&format!("{:?}", end.stop_reason)));
    let ms = |us: u64| us as f64 / 1e3;
    let mut object = so_far(answer, logprobs);
    object["stop_reason"] = json!(reason);
    object["usage"] = json!(end.map(|end| end.usage));
    object["reused_tokens"] = json!(end.map(GenerateEnd::reused_tokens));
    object["dropped_tokens"] = json!(end.map(GenerateEnd::dropped_tokens));
    object["session_tokens"] = json!(end.and_then(GenerateEnd::session_tokens));
    object["seed"] = json!(end.map(|end| end.seed));
    object["timings"] = json!(end.map(|end| json!({
        "queue": ms(end.timings.queue_us),
        "load": ms(end.timings.load_us),
        "prefill": ms(end.timings.prefill_us),
        "decode": ms(end.timings.decode_us),
    })));
    object
}

/// One line: rates as the daemon measured them, and the total time at the client.
fn stats(answer: &Answer, start: Instant) -> io::Result<()> {
    let total_ms = start.elapsed().as_secs_f64() * 1e3;
    let mut stderr = io::stderr().lock();
    let Some(end) = &answer.end else {
        return writeln!(stderr, "cancelled after {} tokens, {total_ms:.1} ms", answer.ids.len());
    };
    let ms = |us: u64| us as f64 / 1e3;
    let rate = |tokens: u32, us: u64| if us == 0 { 0.0 } else { f64::from(tokens) * 1e6 / us as f64 };
    let (usage, timings) = (end.usage, end.timings);
    let computed = u64::from(usage.prompt_tokens).saturating_sub(end.reused_tokens());
    let computed = u32::try_from(computed).unwrap_or(0);
    // The first token comes from the prefill; decode is the time of the tokens after it.
    let decoded = usage.generated_tokens.saturating_sub(1);
    writeln!(
        stderr,
        "prompt {} tokens, {} reused, {:.1} tokens/s; generated {} tokens, {:.1} tokens/s; queue {:.1} ms, load {:.1} ms, \
         prefill {:.1} ms, decode {:.1} ms, total {total_ms:.1} ms; seed {}",
        usage.prompt_tokens,
        end.reused_tokens(),
        rate(computed, timings.prefill_us),
        usage.generated_tokens,
        rate(decoded, timings.decode_us),
        ms(timings.queue_us),
        ms(timings.load_us),
        ms(timings.prefill_us),
        ms(timings.decode_us),
        end.seed,
    )
}
