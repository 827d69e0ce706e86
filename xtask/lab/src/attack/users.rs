//! The users of an attack, each in a process of its own.

use std::collections::VecDeque;
use std::fs::File;
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use rocmforge_client::wire::{
    AnswerForm, ClientHello, FDS_MAX, Flags, FormKind, GenerateRequest, LoadRequest, Op, Prompt,
    TokenizeRequest, encode_frame,
};
use rocmforge_client::{Client, Connection, Options, ServerTrust};

use crate::synthetic;

/// The model's name.
pub const MODEL: &str = "story";
/// The name of the one on the file system that hangs.
pub const FAR: &str = "far";
/// Connections and threads of an attacker that uses many.
const MANY: usize = 16;
/// Threads of an attacker that only wants to be fast.
const STORM: usize = 64;
/// Tokens of a prompt that leaves room for an answer in the smallest context of 512.
const PROMPT_IDS: u32 = 480;
const MIB: usize = 1 << 20;

/// The behaviour of a user.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Attack {
    /// One long answer after another.
    Fair,
    /// Long answers in all places, without credit.
    Hold,
    /// Long answers in all places, without an end.
    Endless,
    /// A thousand short answers at a time.
    Short,
    /// Long prompts without an end.
    Prompts,
    /// The 20 likeliest tokens at each place of random prompts, sixty at a time on each of a few connections, without an end.
    Scores,
    /// Sixty long prompts on each of a few connections, all cancelled after 50 ms, without an end.
    Cancels,
    /// Answers of a large model that the attacker passed, from a file with holes for weights: 8 billion, or 9 million on the
    /// look-alike.
    Slow,
    /// Files with 1.5 million tokens, passed and unloaded again and again.
    Headers,
    /// Loads with as many open files as a frame carries, on all streams of many connections.
    Descriptors,
    /// Answers and loads of a model in a directory whose server has stopped answering.
    Hanging,
    /// Texts of 1 MB to tokenize, without an end.
    Tokenize,
    /// Answers by schemas of 600 ranges of integers, each another one, without an end.
    Schemas,
    /// Answers by costly regular expressions, each another one, without an end.
    Expressions,
    /// Frames of 1 MiB that never end.
    Frames,
    /// As many connections as the daemon takes.
    Connections,
    /// Connections that are made and closed as fast as 64 threads can.
    Storm,
    /// No attack on the daemon, and not judged: 64 threads as busy as those of `storm`, with sockets of their own.
    Busy,
    /// No attack: long answers or prompts without an end, on 1 to 8 connections by the user's number.
    Demand,
    /// No attack: unloads what earlier processes of the user passed, because a passed model outlasts its connection.
    Leave,
    /// No attack: short answers one after another, timed.
    Ask,
}

impl Attack {
    pub const ALL: [Self; 17] = [
        Self::Hold,
        Self::Endless,
        Self::Short,
        Self::Prompts,
        Self::Scores,
        Self::Cancels,
        Self::Slow,
        Self::Headers,
        Self::Descriptors,
        Self::Hanging,
        Self::Tokenize,
        Self::Schemas,
        Self::Expressions,
        Self::Frames,
        Self::Connections,
        Self::Busy,
        Self::Storm,
    ];
}

impl std::fmt::Display for Attack {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(&format!("{self:?}").to_lowercase())
    }
}

#[derive(clap::Args)]
pub struct UserArgs {
    attack: Attack,
    #[arg(long)]
    socket: PathBuf,
    #[arg(long)]
    requests: u32,
    /// A model on the file system that hangs.
    #[arg(long)]
    far: PathBuf,
    /// The daemon's GPU is the look-alike.
    #[arg(long)]
    emulated: bool,
}

/// Times of a user's answers.
#[derive(Clone, Copy, Debug)]
pub struct Times {
    pub median: Duration,
    /// The 99th percentile: of a hundred times, the slowest but one.
    pub worst: Duration,
    /// Requests that were refused or failed.
    pub failed: u32,
}

impl Times {
    fn of(mut times: Vec<Duration>, failed: u32) -> Self {
        times.sort();
        let at = |part: usize| times.get((times.len() * part).div_ceil(100).saturating_sub(1));
        let or_worst = |time: Option<&Duration>| time.copied().unwrap_or(Duration::MAX);
        Self { median: or_worst(at(50)), worst: or_worst(at(99)), failed }
    }

    fn write(&self) -> String {
        format!("{} {} {}", self.median.as_micros(), self.worst.as_micros(), self.failed)
    }

    /// Reads what a user's process printed.
    pub fn read(text: &str) -> Option<Self> {
        let mut numbers = text.split_whitespace().map(str::parse::<u64>);
        let mut next = || numbers.next()?.ok();
        let (median, worst) = (Duration::from_micros(next()?), Duration::from_micros(next()?));
        Some(Self { median, worst, failed: u32::try_from(next()?).ok()? })
    }
}

/// Runs a user until it is killed, or has its answers.
pub fn as_user(args: &UserArgs) -> ExitCode {
    // SAFETY is not needed: the limit only lets the attacker open more.
    let _ = rustix::process::setrlimit(
        rustix::process::Resource::Nofile,
        rustix::process::Rlimit { current: Some(16_384), maximum: Some(16_384) },
    );
    let options = Options { socket: args.socket.clone(), trust: ServerTrust::Anyone, ..Options::default() };
    match args.attack {
        Attack::Ask => println!("{}", ask(&options, args.requests).write()),
        Attack::Demand => demand(&options, args.requests),
        Attack::Leave => leave(&Client::new(options)),
        Attack::Fair => repeat(&options, 1, &answer_of(200)),
        Attack::Endless => repeat(&options, 2 * MANY, &answer_of(400)),
        Attack::Short => short(&options),
        Attack::Prompts => repeat(&options, 2 * MANY, &long_prompt()),
        Attack::Scores => scores(&options, args.emulated),
        Attack::Cancels => cancels(&options),
        Attack::Slow => slow(&options, args.emulated),
        Attack::Headers => headers(&options),
        Attack::Descriptors => descriptors(&options),
        Attack::Hanging => hanging(&options, &args.far),
        Attack::Hold => hold(&options),
        Attack::Tokenize => tokenize(&options),
        Attack::Schemas => forms(&options, FormKind::JsonSchema, schema),
        Attack::Expressions => forms(&options, FormKind::Regex, expression),
        Attack::Storm => threads(STORM, || drop(UnixStream::connect(&options.socket))),
        Attack::Busy => threads(STORM, || drop(UnixStream::pair())),
        Attack::Frames => keep(unfinished(&options, 500)),
        Attack::Connections => {
            keep((0..10_000).filter_map(|_| Connection::connect(&options).ok()).collect::<Vec<_>>())
        }
    }
    ExitCode::SUCCESS
}

fn answer_of(tokens: u32) -> GenerateRequest {
    let request = GenerateRequest::new(MODEL, Prompt::Text("Once upon a time".into()));
    GenerateRequest { max_tokens: tokens, ignore_eog: true, ..request }
}

/// Leaves room for a few tokens in the smallest context of 512.
fn long_prompt() -> GenerateRequest {
    GenerateRequest { prompt: Prompt::Text("once upon a time ".repeat(90)), ..answer_of(4) }
}

fn ask(options: &Options, requests: u32) -> Times {
    let (mut times, mut failed) = (Vec::new(), 0);
    for n in 0..requests {
        // A connection of its own for each answer, as the command line has.
        match super::timed(|| collect(Client::new(options.clone()).generate(&answer_of(8)))) {
            Ok(time) => times.push(time),
            Err(error) => {
                eprintln!("a request of {MODEL} failed: {error}");
                failed += 1;
            }
        }
        thread::sleep(Duration::from_millis(u64::from(37 * n % 101)));
    }
    Times::of(times, failed)
}

fn collect(
    generation: Result<rocmforge_client::Generation, rocmforge_client::ClientError>,
) -> Result<(), rocmforge_client::ClientError> {
    generation?.try_for_each(|item| item.map(drop))
}

/// The same request again and again, on as many connections.
fn repeat(options: &Options, connections: usize, request: &GenerateRequest) {
    thread::scope(|scope| {
        for _ in 0..connections {
            scope.spawn(|| {
                let client = Client::new(options.clone());
                loop {
                    if collect(client.generate(request)).is_err() {
                        thread::sleep(Duration::from_millis(10));
                    }
                }
            });
        }
    });
}

/// Users with even numbers want long answers, the others long prompts.
fn demand(options: &Options, number: u32) {
    let request = if number.is_multiple_of(2) { answer_of(400) } else { long_prompt() };
    repeat(options, 8 >> (number / 2 % 4), &request);
}

/// Keeps about a thousand short requests waiting.
fn short(options: &Options) {
    thread::scope(|scope| {
        for _ in 0..MANY {
            scope.spawn(|| {
                loop {
                    let Ok(connection) = Connection::connect(options) else { continue };
                    let open: Vec<_> =
                        (0..60).filter_map(|_| connection.generate(&answer_of(8)).ok()).collect();
                    open.into_iter().for_each(|generation| drop(collect(Ok(generation))));
                }
            });
        }
    });
}

/// Most connections keep sixty requests waiting, which is as many as the user may have. The others' frames of 24 KB are refused.
fn scores(options: &Options, emulated: bool) {
    let length = if emulated { PROMPT_IDS } else { 6_000 };
    let (turn, connections) = (
        AtomicU32::new(rustix::process::getpid().as_raw_nonzero().get().unsigned_abs()),
        AtomicUsize::new(0),
    );
    let request = || {
        let mut state = turn.fetch_add(1, Ordering::Relaxed);
        let ids = (0..length).map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            3 + (state >> 16) % 500
        });
        GenerateRequest { prompt: Prompt::Ids(ids.collect()), ..answer_of(1) }.with_scores(20)
    };
    threads(20, || {
        let Ok(connection) = Connection::connect(options) else { return };
        let most = if connections.fetch_add(1, Ordering::Relaxed) < 18 { 60 } else { 1 };
        let mut open = VecDeque::new();
        while let Ok(generation) = connection.generate(&request()) {
            open.push_back(generation);
            if open.len() == most && open.pop_front().is_some_and(|first| collect(Ok(first)).is_err()) {
                thread::sleep(Duration::from_millis(5));
            }
        }
    });
}

/// Cancels are sent for all, and the connection is closed. Its own work is only to send.
fn cancels(options: &Options) {
    let ids = (0..PROMPT_IDS).map(|n| 3 + n * 7 % 500).collect::<Vec<_>>();
    let turn = AtomicU32::new(rustix::process::getpid().as_raw_nonzero().get().unsigned_abs());
    threads(4, || {
        let Ok(connection) = Connection::connect(options) else { return };
        let open: Vec<_> = (0..60)
            .filter_map(|_| {
                let mut ids = ids.clone();
                // Another first token, so that no prompt begins as one before it.
                ids[0] = 3 + turn.fetch_add(1, Ordering::Relaxed) % 500;
                let request = GenerateRequest { prompt: Prompt::Ids(ids), ..answer_of(4) };
                connection.generate(&request).ok()
            })
            .collect();
        thread::sleep(Duration::from_millis(50));
        drop(open);
    });
}

fn hold(options: &Options) {
    let Ok(connection) = Connection::connect(options) else { return };
    keep((0..64).filter_map(|_| connection.generate(&answer_of(400)).ok()).collect::<Vec<_>>());
}

/// The look-alike takes longer for a step of 8 billion weights than the daemon waits for a GPU.
fn slow(options: &Options, emulated: bool) {
    let shape = if emulated { synthetic::MODEST } else { synthetic::LARGE };
    let Ok(dir) = tempfile::tempdir() else { return };
    let file = dir.path().join("slow.gguf");
    let files = std::slice::from_ref(&file);
    if let Err(error) = synthetic::write_sparse(files, &shape, synthetic::Mixture::Q4KM) {
        eprintln!("{}: {error}", file.display());
        return;
    }
    match Client::new(options.clone()).load_file(&file, Some("slow")) {
        Ok(_) => repeat(options, MANY, &GenerateRequest { model: "slow".into(), ..long_prompt() }),
        Err(error) => eprintln!("{}: {error}", file.display()),
    }
}

fn headers(options: &Options) {
    let Ok(dir) = tempfile::tempdir() else { return };
    // A mapping of its own for each: mapped files are not read again.
    let files: Vec<PathBuf> = (0..MANY).map(|n| dir.path().join(format!("{n}.gguf"))).collect();
    if let Err(error) = synthetic::write_sparse(&files, &synthetic::WORDY, synthetic::Mixture::Q8) {
        eprintln!("{error}");
        return;
    }
    thread::scope(|scope| {
        for (n, file) in files.iter().enumerate() {
            let name = n.to_string();
            scope.spawn(move || {
                let client = Client::new(options.clone());
                loop {
                    let loaded = client.load_file(file, Some(&name)).map(drop);
                    if loaded.and_then(|()| client.unload(&name).map(drop)).is_err() {
                        thread::sleep(Duration::from_millis(10));
                    }
                }
            });
        }
    });
}

/// Passes open files that are no models: each is looked at, and refused.
fn descriptors(options: &Options) {
    let Ok(file) = tempfile::tempfile() else { return };
    let files = [file.as_fd(); FDS_MAX as usize];
    threads(4 * MANY, || {
        let Ok(connection) = Connection::connect(options) else { return };
        let load =
            |n: usize| LoadRequest { name: n.to_string(), by_descriptor: true, request_id: 0, ext: vec![] };
        let sent: Vec<_> =
            (0..60).filter_map(|n| connection.send_with_descriptors(&load(n), &files).ok()).collect();
        sent.into_iter().for_each(|pending| drop(pending.wait()));
    });
}

fn hanging(options: &Options, far: &Path) {
    // Opened while the server still answers.
    let Ok(file) = File::open(far) else { return };
    let client = Client::new(options.clone());
    let turn = AtomicUsize::new(0);
    threads(4 * MANY, || match turn.fetch_add(1, Ordering::Relaxed) {
        n if n % 2 == 0 => drop(client.load_descriptor(file.as_fd(), &n.to_string())),
        _ => drop(collect(client.generate(&GenerateRequest { model: FAR.into(), ..answer_of(8) }))),
    });
}

/// Again and again for some seconds: loads that have begun go on after their client.
fn leave(client: &Client) {
    for _ in 0..4 {
        let models = client.list().into_iter().flat_map(|list| list.models);
        for model in models.filter(|model| ![MODEL, FAR].contains(&model.name.as_str())) {
            if let Err(error) = client.unload(&model.name) {
                eprintln!("unloading {}: {error}", model.name);
            }
        }
        thread::sleep(Duration::from_secs(1));
    }
}

fn tokenize(options: &Options) {
    let request = TokenizeRequest {
        model: MODEL.into(),
        text: "a b".repeat(MIB / 4),
        add_special: false,
        parse_special: false,
        ext: vec![],
    };
    thread::scope(|scope| {
        for _ in 0..8 * MANY {
            scope.spawn(|| {
                let client = Client::new(options.clone());
                loop {
                    if client.tokenize(&request).is_err() {
                        thread::sleep(Duration::from_millis(10));
                    }
                }
            });
        }
    });
}

/// Answers by forms that the daemon has not seen, as many at a time as it computes.
fn forms(options: &Options, kind: FormKind, text: impl Fn(u32) -> String + Sync) {
    let turn = AtomicU32::new(rustix::process::getuid().as_raw() % 1000 * 1_000_000);
    threads(2 * MANY, || {
        let Ok(connection) = Connection::connect(options) else { return };
        let form = AnswerForm::new(kind, &text(turn.fetch_add(1, Ordering::Relaxed)));
        let request = GenerateRequest { ignore_eog: false, ..answer_of(100) }.with_form(&form);
        if collect(connection.generate(&request)).is_err() {
            thread::sleep(Duration::from_millis(10));
        }
    });
}

/// A schema of 60 KB that takes a second to compile: ranges of integers are automata.
fn schema(number: u32) -> String {
    let property = |n: u32| {
        let of = u64::from(n + number % 1000);
        let (least, most) = (of * 7_919_317 % 1_000_003, 1_000_003 + of * 104_729_771 % 999_999_937);
        format!(r#""p{number}_{n}":{{"type":"integer","minimum":{least},"maximum":{most}}}"#)
    };
    let properties: Vec<String> = (0..600).map(property).collect();
    let required: Vec<String> = (0..600).map(|n| format!(r#""p{number}_{n}""#)).collect();
    let (properties, required) = (properties.join(","), required.join(","));
    format!(
        r#"{{"type":"object","properties":{{{properties}}},"required":[{required}],"additionalProperties":false}}"#
    )
}

/// By turns 6,000 words, which take 600 ms to compile, and an automaton with a state for each set of places where a vowel was.
fn expression(number: u32) -> String {
    if number.is_multiple_of(2) {
        let words: Vec<String> =
            (0..6000_u32).map(|n| format!("{:09x}", n.wrapping_mul(number | 1) ^ n << 12)).collect();
        return format!("({})+", words.join("|"));
    }
    let (places, end) = (12 + number % 7, 1 + number / 7 % 1000);
    format!(r"(.|\n)*[aeiou](.|\n){{{places}}}x{{{end}}}.{{300}}")
}

/// Connections that each sent all but the last byte of a large frame.
fn unfinished(options: &Options, count: usize) -> Vec<UnixStream> {
    let text = TokenizeRequest {
        model: MODEL.into(),
        text: "x".repeat(MIB - 8192),
        add_special: false,
        parse_special: false,
        ext: vec![],
    };
    let Ok(frame) = encode_frame(1, Op::Tokenize, Flags::NONE, u32::MAX, &text) else { return Vec::new() };
    let one = || {
        let mut stream = UnixStream::connect(&options.socket).ok()?;
        stream.set_write_timeout(Some(Duration::from_millis(50))).ok()?;
        stream.write_all(&ClientHello::new("attack").to_bytes().ok()?).ok()?;
        let _ = stream.write_all(&frame[..frame.len() - 1]); // the daemon may not read all of it
        Some(stream)
    };
    (0..count).filter_map(|_| one()).collect()
}

/// Does this again and again on so many threads.
fn threads(count: usize, work: impl Fn() + Sync) {
    thread::scope(|scope| {
        for _ in 0..count {
            scope.spawn(|| {
                loop {
                    work();
                }
            });
        }
    });
}

/// Holds it until this process is killed.
fn keep<T>(held: T) {
    thread::sleep(Duration::from_secs(3600));
    drop(held);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_as_they_were_written() {
        let ms = |n| Duration::from_millis(n);
        let times = Times::of((1..=200).rev().map(ms).collect(), 3);
        assert_eq!((times.median, times.worst, times.failed), (ms(100), ms(198), 3));
        assert_eq!(Times::of((1..=100).map(ms).collect(), 0).worst, ms(99), "the slowest but one");
        let read = Times::read(&times.write()).unwrap();
        assert_eq!((read.median, read.worst, read.failed), (times.median, times.worst, times.failed));
        assert!(Times::read("1 2").is_none() && Times::read("").is_none());
        assert_eq!(Times::of(vec![], 1).median, Duration::MAX, "no answer is the slowest");
    }
}
