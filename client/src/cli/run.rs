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

use super::report::{EXIT_CANCELLED, Failure, Output, snake_case};
use super::run_args::RunArguments;
use super::tools::Reader;
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
    /// Of a chat with tools: it finds the calls.
    reader: Option<Reader>,
    /// Size of the fields above.
    bytes: usize,
}

/// A request in the daemon: its connection and its stream.
type Stream = (Connection, u32);

/// An answer, and whether all of it came.
type Received = (Answer, Result<(), Failure>);

pub fn run(client: &Client, arguments: &RunArguments, output: Output) -> Result<ExitCode, Failure> {
    if arguments.logprobs > 0 && !output.json {
        return Err(Failure::usage("--logprobs prints nothing without --json: give both"));
    }
    let mut request = request(arguments)?;
    request.model = model_named(client, &arguments.model)?;
    let (request, reader) = arguments.tools.fill(client, request)?;
    let start = Instant::now();
    let generations = begin(client, &request, arguments.answers)?;
    let streams: Vec<Stream> =
        generations.iter().map(|generation| (generation.connection().clone(), generation.stream())).collect();
    cancel_on_interrupt(streams.clone())?;
    let (mut answers, mut cancelled, mut failed) = (Vec::new(), false, None);
    for (answer, outcome) in receive_all(generations, &streams, output, reader.as_ref())? {
        answers.push(answer);
        match outcome {
            Ok(()) => {}
            Err(Failure::Client(error)) if error.code() == Some(ErrorCode::Cancelled as u16) => {
                cancelled = true
            }
            Err(failure) => drop(failed.get_or_insert(failure)),
        }
    }
    let logprobs = arguments.logprobs > 0;
    match failed {
        Some(failure) if output.json => {
            return Ok(output.fail_with(&failure, all_of(&answers, |answer| so_far(answer, logprobs))));
        }
        Some(failure) => {
            end_line(answers.last())?;
            return Err(failure);
        }
        None if output.json => {
            writeln!(io::stdout(), "{}", all_of(&answers, |answer| to_json(answer, logprobs)))?;
        }
        None => end_line(answers.last())?,
    }
    answers.iter().try_for_each(cut_call)?;
    if arguments.stats {
        answers.iter().try_for_each(|answer| stats(answer, start))?;
    }
    Ok(if cancelled { ExitCode::from(EXIT_CANCELLED) } else { ExitCode::SUCCESS })
}

/// Starts so many answers to one prompt. The daemon computes the prompt for the first, and the others take its pages, and its state
/// if the model has one. For that it is told how many follow.
fn begin(client: &Client, request: &GenerateRequest, count: u32) -> Result<Vec<Generation>, Failure> {
    let begun = (0..u64::from(count)).map(|number| {
        let mut request = GenerateRequest { request_id: random_request_id(), ..request.clone() };
        if let Ok(more @ 1..) = u8::try_from(u64::from(count) - 1 - number) {
            request = request.with_alike(more);
        }
        request.sampling.seed = request.sampling.seed.map(|seed| seed.wrapping_add(number));
        Ok(client.generate(&request)?)
    });
    begun.collect()
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
    let request = match arguments.draft {
        Some(most) => request.with_drafts(most),
        None => request,
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

/// The first Ctrl-C cancels the answers, so that what there is of them is printed. The second ends the program at once.
/// Before this is set up, Ctrl-C ends the program as usual, and the daemon cancels the request when the connection
/// closes.
fn cancel_on_interrupt(streams: Vec<Stream>) -> Result<(), Failure> {
    let mut signals = Signals::new([SIGINT])
        .map_err(|error| Failure::Resources(format!("Ctrl-C could not be watched: {error}")))?;
    let watch = move || {
        let mut pending = signals.forever();
        if pending.next().is_none() || cancel(&streams) {
            pending.next();
        }
        std::process::exit(EXIT_CANCELLED.into());
    };
    let begun = std::thread::Builder::new().name("signals".into()).spawn(watch);
    begun.map(drop).map_err(|error| no_thread(&error))
}

/// Cancels answers; false if the daemon cannot be told.
fn cancel(streams: &[Stream]) -> bool {
    streams.iter().all(|(connection, stream)| connection.cancel(*stream).is_ok())
}

fn no_thread(error: &io::Error) -> Failure {
    Failure::Resources(format!(
        "no thread could be started: {error}; `ulimit -u` shows how many processes and threads you may have"
    ))
}

/// Receives the answers at once. Without `--json`, the text of the first is printed as it arrives. The others follow it, each
/// below a line with its number.
fn receive_all(
    generations: Vec<Generation>,
    streams: &[Stream],
    output: Output,
    reader: Option<&Reader>,
) -> Result<Vec<Received>, Failure> {
    let count = generations.len();
    let bytes_max = ANSWER_BYTES_MAX / count.max(1);
    let mut generations = generations.into_iter();
    let Some(first) = generations.next() else { return Ok(Vec::new()) };
    let mut printer = (!output.json).then(|| Printer { terminal: io::stdout().is_terminal() });
    std::thread::scope(|scope| {
        let others: io::Result<Vec<_>> = generations
            .map(|other| {
                let receive = move || receive(other, bytes_max, None, reader.cloned());
                std::thread::Builder::new().name("answer".into()).spawn_scoped(scope, receive)
            })
            .collect();
        let others = others.map_err(|error| {
            cancel(streams);
            no_thread(&error)
        })?;
        let mut all = Vec::with_capacity(count);
        if let Some(printer) = &mut printer {
            printer.begin(0, count, None)?;
        }
        all.push(receive(first, bytes_max, printer.as_mut(), reader.cloned()));
        if let Some((_, Err(Failure::Output(_)))) = all.last() {
            // Nobody reads the others.
            cancel(streams);
        }
        for other in others {
            let received = other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            if let Some(printer) = &mut printer {
                let before = all.last().map(|(answer, _)| answer);
                let printed = printer.begin(all.len(), count, before);
                printed.and_then(|()| printer.print(&received.0.text)).inspect_err(|_| {
                    cancel(streams);
                })?;
            }
            all.push(received);
        }
        Ok(all)
    })
}

/// Receives every item of an answer, and prints its text at once if there is a printer.
fn receive(
    mut generation: Generation,
    bytes_max: usize,
    mut printer: Option<&mut Printer>,
    reader: Option<Reader>,
) -> Received {
    let mut answer = Answer { reader, ..Answer::default() };
    let mut outcome = receive_items(&mut generation, &mut answer, bytes_max, printer.as_deref_mut());
    if let Some(reader) = answer.reader.as_mut().filter(|_| outcome.is_err()) {
        let shown = reader.finish();
        answer.text.push_str(&shown);
        if let Some(printer) = printer.filter(|_| !matches!(outcome, Err(Failure::Output(_))))
            && let Err(error) = printer.print(&shown)
        {
            outcome = Err(error.into());
        }
    }
    answer.end = generation.end().cloned();
    (answer, outcome)
}

fn receive_items(
    generation: &mut Generation,
    answer: &mut Answer,
    bytes_max: usize,
    mut printer: Option<&mut Printer>,
) -> Result<(), Failure> {
    while let Some(mut item) = generation.next_item()? {
        answer.bytes += bytes_of(&item);
        if let Some(reader) = answer.reader.as_mut().filter(|_| item.begins_in_reasoning()) {
            reader.begin_in_reasoning();
        }
        let shown = answer.shown(std::mem::take(&mut item.text));
        if let Some(printer) = &mut printer {
            printer.print(&shown)?;
        }
        if answer.bytes > bytes_max {
            return Err(ClientError::from(ProtocolError::AnswerTooLong { max: bytes_max }).into());
        }
        answer.text.push_str(&shown);
        answer.prompt_ids.append(&mut item.prompt_ids);
        answer.ids.append(&mut item.ids);
        answer.logprobs.append(&mut item.logprobs);
    }
    if let Some(end) = generation.end() {
        let mut shown = answer.shown(end.text.clone());
        if let Some(reader) = &mut answer.reader {
            shown += &reader.finish();
        }
        if let Some(printer) = &mut printer {
            printer.print(&shown)?;
        }
        answer.text.push_str(&shown);
    }
    Ok(())
}

impl Answer {
    /// The text to print, of more text of the answer.
    fn shown(&mut self, text: String) -> String {
        match &mut self.reader {
            Some(reader) => reader.push(&text),
            None => text,
        }
    }
}

/// Says that a call is not there because it did not end.
fn cut_call(answer: &Answer) -> io::Result<()> {
    match answer.reader.as_ref().and_then(Reader::cut) {
        Some(tool) => writeln!(
            io::stderr(),
            "a call of {} is not whole and was left out: the answer ended early, or its arguments are no JSON",
            printable_text(tool)
        ),
        None => Ok(()),
    }
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
    /// Begins an answer. One of several gets a line with its number, after the end of the one before.
    fn begin(&self, number: usize, count: usize, before: Option<&Answer>) -> io::Result<()> {
        if count == 1 {
            return Ok(());
        }
        let end = before.filter(|before| !before.text.ends_with('\n')).map_or("", |_| "\n");
        writeln!(io::stdout(), "{end}--- {} of {count} ---", number + 1)
    }

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
fn end_line(answer: Option<&Answer>) -> io::Result<()> {
    let open = answer.is_some_and(|answer| !answer.text.ends_with('\n'));
    if open && io::stdout().is_terminal() { writeln!(io::stdout()) } else { Ok(()) }
}

/// The object of one answer, or one object with those of several.
fn all_of(answers: &[Answer], of: impl Fn(&Answer) -> Value) -> Value {
    match answers {
        [answer] => of(answer),
        answers => json!({ "answers": answers.iter().map(of).collect::<Vec<_>>() }),
    }
}

/// The partial answer, printed with an error: it was computed, and a script may continue from it.
fn so_far(answer: &Answer, logprobs: bool) -> Value {
    let mut object = json!({ "text": answer.text, "prompt_ids": answer.prompt_ids, "ids": answer.ids });
    if let Some(reader) = &answer.reader {
        reader.describe(&mut object);
    }
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
    object["drafted_tokens"] = json!(end.map(GenerateEnd::drafted_tokens));
    object["accepted_tokens"] = json!(end.map(GenerateEnd::accepted_tokens));
    object["weights"] = json!(end.map(|end| json!({
        "tensors_found": end.tensors_found(),
        "tensors_loaded": end.tensors_loaded(),
        "loaded_bytes": end.loaded_bytes(),
    })));
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
    let drafts = match end.drafted_tokens() {
        0 => String::new(),
        drafted => format!(" ({} of {drafted} drafted)", end.accepted_tokens()),
    };
    let weights = match end.tensors_loaded() {
        0 => String::new(),
        loaded => format!(" of {loaded} tensors, {}", super::tables::bytes(end.loaded_bytes())),
    };
    // The first token comes from the prefill; decode is the time of the tokens after it.
    let decoded = usage.generated_tokens.saturating_sub(1);
    writeln!(
        stderr,
        "prompt {} tokens, {} reused, {:.1} tokens/s; generated {} tokens{drafts}, {:.1} tokens/s; queue {:.1} ms, load {:.1} ms{weights}, \
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
