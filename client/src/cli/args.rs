//! Arguments and help texts.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use rocmforge_client::wire::Preload;
use rocmforge_client::wire::limits::LAYERS_MAX;

use super::bench::{self, Arrivals, Lengths};
use super::chat_args::{CHAT_HELP, ChatArguments};
use super::run_args::RunArguments;

const EXIT_CODES: &str = "\
Exit codes:
  0    success; also when the reader of the output closed it
  1    the request failed, or the system gave this program no thread or file
  2    the arguments are invalid
  3    the daemon cannot be reached, is stopping, or is not trusted
  4    the model is missing, damaged or unsupported
  130  cancelled by Ctrl-C; the partial answer was printed

Errors go to standard error: a name, what happened, what to do; with --json as one object
{\"error\":{\"name\",\"code\",\"message\",\"retryable\",\"retry_after_ms\",\"detail\"}}.";

const COMMON: &str = "Options of all commands";

/// Asks the rocmforged inference daemon.
#[derive(Debug, Parser)]
#[command(name = "rocmforge-client", version, after_help = EXIT_CODES, max_term_width = 100)]
pub struct Arguments {
    /// The daemon's socket [default: your own daemon's, $XDG_RUNTIME_DIR/rocmforge/api.sock, if it exists, else
    /// /run/rocmforge/api.sock]
    #[arg(long, global = true, help_heading = COMMON, env = rocmforge_client::SOCKET_VARIABLE, value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// Print one JSON object instead of text
    #[arg(long, global = true, help_heading = COMMON)]
    pub json: bool,
    /// Trust only a daemon of this uid, instead of root, the user rocmforge and you
    #[arg(long, global = true, help_heading = COMMON, value_name = "UID", allow_negative_numbers = true)]
    pub server_uid: Vec<u32>,
    /// Stop trying to connect after this time
    #[arg(long = "connect-timeout", global = true, help_heading = COMMON, value_name = "MS", default_value_t = 2000, allow_negative_numbers = true, value_parser = number)]
    pub connect_timeout_ms: u64,
    /// The subcommand.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Generate text and print it as it is generated
    Run(RunArguments),
    #[command(after_help = CHAT_HELP)]
    Chat(ChatArguments),
    /// List the models that the daemon knows by name
    #[command(
        after_help = "Examples:\n  rocmforge-client list\n  rocmforge-client list --json | jq -r '.models[].name'\n  \
            sudo rocmforge-client list --uid 1000"
    )]
    List {
        /// As this user gets it, with the files that it passed; policy.see says who may
        #[arg(long)]
        uid: Option<u32>,
    },
    /// Show a model's sizes, tokenizer and memory
    #[command(after_help = "Examples:\n  rocmforge-client show smollm2-135m-instruct-q4_1\n  \
        rocmforge-client show ./model.gguf --full --json | jq '.tensors[0]'")]
    Show {
        /// A name, or a file: with a `/`, or an existing `*.gguf`
        model: String,
        /// Also show all metadata and tensors
        #[arg(long)]
        full: bool,
    },
    /// Map a model: by name, or a file that you may read, which is opened here and passed to the daemon
    #[command(after_help = "Examples:\n  rocmforge-client load smollm2-135m-instruct-q4_1\n  \
        rocmforge-client load ~/models/story.gguf --name story\n  rocmforge-client load story --preload all")]
    Load {
        /// A name, or a file: with a `/`, or an existing `*.gguf`
        model: String,
        /// Name to give a file [default: its file name without .gguf]
        #[arg(long)]
        name: Option<String>,
        /// Also load weights to the device now, instead of when requests need them; values as for `preload --layers`
        #[arg(long, value_name = "WHAT", value_parser = layers)]
        preload: Option<Preload>,
    },
    /// Load a model's weights to the device now, instead of when requests need them
    #[command(
        after_help = "Ends when the weights are resident. Ctrl-C ends it early; loaded weights stay. Resident weights are not loaded again.\n\n\
            Examples:\n  rocmforge-client preload llama-3-8b\n  rocmforge-client preload llama-3-8b --layers critical\n  \
            rocmforge-client preload llama-3-8b --layers 0-7,31 --json | jq .device_bytes"
    )]
    Preload {
        /// A name, or a file: with a `/`, or an existing `*.gguf`
        model: String,
        /// `all`, `critical` (the embedding, the head and the first layer), a number of first layers, or a list such as
        /// 0-3,7, counted from 0
        #[arg(long, value_name = "WHAT", default_value = "all", value_parser = layers)]
        layers: Preload,
    },
    /// Evict weights from the device; requests load what they need again
    #[command(
        after_help = "Examples:\n  rocmforge-client clear-cache llama-3-8b\n  rocmforge-client clear-cache --all --json | jq .device_bytes"
    )]
    ClearCache {
        /// A model that you passed as a file, or may manage; pinned or not
        #[arg(required_unless_present = "all", conflicts_with = "all")]
        model: Option<String>,
        /// All models that are not pinned; administrators only
        #[arg(long)]
        all: bool,
    },
    /// Keep a model's weights on the device, and its file in host memory
    #[command(
        after_help = "Allowed for a model that you passed as a file; policy.manage says who pins others. Only administrators also lock the file.\n\n\
            Example:\n  rocmforge-client pin llama-3-8b"
    )]
    Pin {
        /// A name, or a file: with a `/`, or an existing `*.gguf`
        model: String,
    },
    /// Let a pinned model's weights and file be evicted when memory is short
    #[command(after_help = "Example:\n  rocmforge-client unpin llama-3-8b")]
    Unpin {
        /// Its name
        model: String,
    },
    /// Change when a model's weights are evicted; without options, show its rules
    #[command(
        after_help = "Options that you leave out keep their values. Rules last until the model is unloaded.\n\n\
            Examples:\n  rocmforge-client rules llama-3-8b --priority 5 --keep-layers 8\n  \
            rocmforge-client rules llama-3-8b --idle 600"
    )]
    Rules {
        /// A name, or a file: with a `/`, or an existing `*.gguf`
        model: String,
        /// Priority, 0 to 255: weights of models with a lower priority are evicted first
        #[arg(long, value_name = "N", allow_negative_numbers = true)]
        priority: Option<u8>,
        /// Keep the embedding and this many first layers when other models need memory
        #[arg(long, value_name = "LAYERS", allow_negative_numbers = true)]
        keep_layers: Option<u32>,
        /// Evict the weights after this many seconds without a request; 0: never
        #[arg(long, value_name = "SECONDS", allow_negative_numbers = true)]
        idle: Option<u32>,
    },
    /// Print loads, evictions and other model events as they happen, until Ctrl-C
    #[command(
        after_help = "With --json, one object per line. Ends with exit code 3 when the daemon stops.\n\n\
            Examples:\n  rocmforge-client events\n  rocmforge-client events --json | jq -c 'select(.kind == \"evicted\")'"
    )]
    Events,
    /// Show how much device memory a model needs, and whether it fits; no weights are loaded
    #[command(after_help = "The exit code is 0 whether or not it fits.\n\n\
            Examples:\n  rocmforge-client plan llama-3-70b --context 8192\n  rocmforge-client plan llama-3-70b --json | jq .fit")]
    Plan {
        /// A name, or a file: with a `/`, or an existing `*.gguf`
        model: String,
        /// Tokens of one sequence, prompt and answer together; 0: the longest allowed
        #[arg(long, default_value_t = 0, value_name = "TOKENS", allow_negative_numbers = true)]
        context: u32,
    },
    /// Show how the devices' memory is used, and how much each model has
    #[command(after_help = "Examples:\n  rocmforge-client residency\n  \
            rocmforge-client residency --json | jq '.models[] | {model, weight_bytes}'")]
    Residency,
    /// Fetch a model from a URL or a hub into a directory of yours
    #[cfg(feature = "pull")]
    Pull(super::pull::PullArguments),
    /// Unmap a model once its requests end
    #[command(
        after_help = "Examples:\n  rocmforge-client unload story\n  sudo rocmforge-client unload draft --uid 1000"
    )]
    Unload {
        /// Its name
        model: String,
        /// Take the file that this user passed under that name; policy.manage says who may
        #[arg(long)]
        uid: Option<u32>,
    },
    /// List running and waiting requests
    #[command(
        after_help = "Each user with work gets an equal share of the device's time, unless `limit` sets another; DEVICE shows what each request took.\n\n\
            Examples:\n  rocmforge-client ps\n  rocmforge-client ps --json | jq '.sequences | length'",
        visible_alias = "requests"
    )]
    Ps,
    /// Cancel running and waiting requests
    #[command(after_help = "Everyone may cancel their own requests, an administrator anybody's.\n\n\
            Examples:\n  rocmforge-client cancel 17\n  rocmforge-client cancel --uid 1000")]
    Cancel {
        /// Number of the request, as `ps` shows it
        #[arg(required_unless_present = "uid", conflicts_with = "uid")]
        id: Option<u64>,
        /// All requests of this user
        #[arg(long)]
        uid: Option<u32>,
    },
    /// List your sessions, which `run --session` goes on with, or forget some
    #[command(
        disable_help_subcommand = true,
        after_help = "A session has one model. If it has messages, `run --chat` goes on with it, else `run`.\n\n\
            Examples:\n  rocmforge-client sessions\n  rocmforge-client sessions --json | jq -r '.sessions[].name'\n  \
            rocmforge-client sessions forget talk"
    )]
    Sessions {
        /// The subcommand
        #[command(subcommand)]
        what: Option<SessionsCommand>,
    },
    /// Limit what a user may take, or show the limits in force
    Limit(super::limits::LimitArguments),
    /// Show the state of the daemon and its devices, and what users hold
    #[command(
        after_help = "The last table has what your user holds of everything that users share; for an administrator, what each user holds.\n\n\
            Examples:\n  rocmforge-client status\n  rocmforge-client status --json | jq .rss_anon_bytes\n  \
            rocmforge-client status --json | jq '.users[] | {uid, device_us_per_s}'"
    )]
    Status,
    /// Print counters and gauges in Prometheus's format, or write them to a file
    #[command(
        after_help = "For the node exporter, name a file ending in .prom in the directory of its textfile collector. The file is replaced\n\
            atomically, by renaming. Models that you have no name for are left out. Prompts are not included.\n\n\
            Examples:\n  rocmforge-client metrics\n  \
            rocmforge-client metrics --out /var/lib/prometheus/node-exporter/rocmforge.prom --period 15"
    )]
    Metrics {
        /// Write to this file: a new one, or a regular file, which keeps its mode
        #[arg(long, value_name = "FILE")]
        out: Option<PathBuf>,
        /// Write again every so many seconds, until Ctrl-C or until the daemon stops
        #[arg(long, value_name = "SECONDS", requires = "out", value_parser = clap::value_parser!(u32).range(1..))]
        period: Option<u32>,
    },
    /// Find out why a GPU is used or not: what works, what is missing, how to fix it
    #[command(after_help = super::doctor::HELP)]
    Doctor,
    /// Print how likely a model finds a text
    Score(super::score::ScoreArguments),
    /// Print embeddings of texts
    Embed(super::embed::EmbedArguments),
    /// Print documents in the order of their relevance to a query
    Rank(super::rank::RankArguments),
    /// Print the token ids of a text
    Tokenize(TokenizeArguments),
    /// Print the text of token ids
    Detokenize(DetokenizeArguments),
    /// Put a load on the daemon, and measure speeds and latencies
    Bench(BenchArguments),
    /// One client of `bench`, which starts it: requests come from standard input
    #[command(name = bench::WORKER, hide = true)]
    BenchClient,
    /// Measure round trips to the daemon
    #[command(after_help = "Example:\n  rocmforge-client ping --count 10")]
    Ping {
        /// Number of round trips
        #[arg(long, default_value_t = 1, allow_negative_numbers = true)]
        count: u32,
    },
    /// Show the daemon's version, requests and limits
    #[command(after_help = "Example:\n  rocmforge-client info --json | jq .limits")]
    Info,
}

/// The subcommands of `sessions`.
#[derive(Debug, Subcommand)]
pub enum SessionsCommand {
    /// Forget a session, or all of yours
    #[command(
        after_help = "Examples:\n  rocmforge-client sessions forget talk\n  rocmforge-client sessions forget --all"
    )]
    Forget {
        /// Its name
        #[arg(required_unless_present = "all", conflicts_with = "all")]
        name: Option<String>,
        /// All of yours
        #[arg(long)]
        all: bool,
    },
}

const BENCH_HELP: &str = "\
Clients are separate processes, each with its own connection and one request at a time. Prompts are
random token ids without meaning. Answers are as long as was asked for, and always take the most
likely token. So the daemon has the work of real requests, but the texts mean nothing.

DIST is a number of tokens: N, A-B (each as likely), lognormal:MEDIAN,SIGMA, or
lognormal:MEDIAN,SIGMA,MAX, which cuts longer ones.

With --arrivals closed, each client asks again when it has its answer. With poisson:RATE (requests
a second) and bursts:N/SECONDS, requests arrive at their times, whether or not earlier ones are
answered. Their times to the first token and to the end count from the intended arrival, also if no
client was free then. So a slow daemon cannot hide its delays by slowing the load down. `sent late
by` shows that part. A timer alone is late by 0.1 ms; if it is more, --clients was too small.

Times are measured by the clients. Percentiles are exact: the nearest rank of all samples. The time
between tokens is that between each token and the one before in one answer; tokens that come
together have 0 between them. Rates are of the window from the beginning to the end of the last
request, or the whole --duration. Requests that failed have no part in times and tokens. Prompt tokens include reused ones.

The daemon reuses what it has of an earlier prompt. All prompts differ in their first token after
the shared prefix. But a second run with the same --seed repeats the prompts of the first: run
`clear-cache MODEL` between them, or leave --seed out. Weights that are not loaded yet are part of
the first requests: run `preload MODEL` before.

--single measures one request at a time, as llama-bench does: ppN is prompt tokens a second until
the one token of the answer came, tgN tokens a second after the first one of an answer. Each of the
two begins with a request that is not measured. Each repetition has a fresh random prompt, so that
the reuse of prompts does not help. Shown are mean and standard deviation.

--json prints one object: the arguments, window_s, requests, errors, tokens, and p50, p90, p99 and
max of ttft_ms, inter_token_ms, request_ms, queue_ms and sent_late_ms; null without samples. With
--single it has tests, each with tokens_per_s of all repetitions, their mean and deviation.

Ctrl-C ends it early, and prints what was measured so far; a second one ends the program at once.
The exit code is 1 if a request failed, after the figures were printed, and 130 after Ctrl-C.

Examples:
  rocmforge-client bench llama-3-8b --clients 16 --requests 200
  rocmforge-client bench llama-3-8b --clients 64 --arrivals poisson:4 --duration 60 \\
      --prompt-tokens lognormal:400,0.8,4000 --answer-tokens 50-300 --plot latency.svg
  rocmforge-client bench llama-3-8b --shared-prefix 1000 --prompt-tokens 20 --json | jq .ttft_ms
  rocmforge-client bench llama-3-8b --single";

/// Put a load on the daemon, and measure speeds and latencies.
#[derive(Debug, Args)]
#[command(after_help = BENCH_HELP)]
pub struct BenchArguments {
    /// A name, or a file: with a `/`, or an existing `*.gguf`
    pub model: String,
    /// Client processes, 1 to 4096; with open arrivals, the most requests at once
    #[arg(long, value_name = "N", default_value_t = 4, allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub clients: u32,
    /// End after this many requests [default: 32]
    #[arg(long, value_name = "N", allow_negative_numbers = true, conflicts_with = "duration", value_parser = clap::value_parser!(u64).range(1..))]
    pub requests: Option<u64>,
    /// Let requests arrive for this long, and wait for their answers
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true, value_parser = seconds)]
    pub duration: Option<f64>,
    /// closed, poisson:RATE or bursts:N/SECONDS
    #[arg(long, value_name = "ARRIVALS", default_value = "closed")]
    pub arrivals: Arrivals,
    /// Tokens of each prompt, after the shared prefix
    #[arg(long, value_name = "DIST", default_value = "512", allow_negative_numbers = true)]
    pub prompt_tokens: Lengths,
    /// Tokens of each answer
    #[arg(long, value_name = "DIST", default_value = "128", allow_negative_numbers = true)]
    pub answer_tokens: Lengths,
    /// Let all prompts begin with the same tokens, so many more than --prompt-tokens
    #[arg(long, value_name = "TOKENS", default_value_t = 0, allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(0..=i64::from(bench::TOKENS_MAX)))]
    pub shared_prefix: u32,
    /// Answers in JSON by the schema in this file, which shows what masks cost; one that is complete ends early
    #[arg(long, value_name = "FILE")]
    pub schema: Option<PathBuf>,
    /// Seed of lengths, arrivals and prompts [default: random; shown with the figures]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = number)]
    pub seed: Option<u64>,
    /// Also write a plot of the latencies, as SVG
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,
    /// Measure single requests instead, as llama-bench does
    #[arg(long, conflicts_with_all = ["clients", "requests", "duration", "arrivals", "shared_prefix", "plot"])]
    pub single: bool,
    /// Measured requests of each test of --single
    #[arg(long, value_name = "N", default_value_t = 5, requires = "single", allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub repetitions: u32,
}

/// Print the token ids of a text.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  rocmforge-client tokenize MODEL 'Hello, world'\n  rocmforge-client tokenize MODEL - < file.txt --json"
)]
pub struct TokenizeArguments {
    /// A name, or a file: with a `/`, or an existing `*.gguf`
    pub model: String,
    /// The text; `-` or no text reads standard input
    pub text: Option<String>,
    /// Do not add the beginning-of-sequence and end-of-sequence tokens that the model's file asks for
    #[arg(long)]
    pub no_special: bool,
    /// Read the spelling of a special token as that token
    #[arg(long)]
    pub parse_special: bool,
}

/// Print the text of token ids.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  rocmforge-client detokenize MODEL 9707 11 1879\n  rocmforge-client tokenize MODEL 'Hi' | rocmforge-client detokenize MODEL -"
)]
pub struct DetokenizeArguments {
    /// A name, or a file: with a `/`, or an existing `*.gguf`
    pub model: String,
    /// The ids, separated by commas or spaces; `-` or no ids read standard input
    #[arg(allow_negative_numbers = true)]
    pub ids: Vec<String>,
    /// Print special tokens by their spelling
    #[arg(long)]
    pub special: bool,
}

/// Parses a `u64`. For a number out of range, clap's own parser only reports an invalid digit.
pub fn number(text: &str) -> Result<u64, String> {
    let number: i128 = text.parse().map_err(|_| "not a whole number".to_owned())?;
    u64::try_from(number).map_err(|_| format!("{number} is not in 0..={}", u64::MAX))
}

/// Parses a duration in seconds, above 0 and at most a year.
fn seconds(text: &str) -> Result<f64, String> {
    const MAX: f64 = 365.0 * 86_400.0;
    let seconds: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    if seconds > 0.0 && seconds <= MAX {
        Ok(seconds)
    } else {
        Err(format!("{seconds} is not above 0 and at most {MAX}"))
    }
}

/// Parses which weights to load: `all`, `critical`, a count of first layers, or a list such as 0-3,7.
fn layers(text: &str) -> Result<Preload, String> {
    match text {
        "all" => return Ok(Preload::All),
        "critical" => return Ok(Preload::Critical),
        _ => {}
    }
    let number = |digits: &str| {
        let number: Option<u32> = digits.parse().ok();
        number.ok_or_else(|| {
            format!(
                "{digits:?} is not a number: give all, critical, a number of layers, or a list such as 0-3,7"
            )
        })
    };
    if !text.contains([',', '-']) {
        return Ok(Preload::First(number(text)?));
    }
    let mut layers = Vec::new();
    for range in text.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last) = (number(first)?, number(last)?);
        if first > last {
            return Err(format!("{range} ends before it begins"));
        }
        if layers.len() as u64 + u64::from(last - first) >= LAYERS_MAX as u64 {
            return Err(format!("more than {LAYERS_MAX} layers, the most in one request"));
        }
        layers.extend(first..=last);
    }
    Ok(Preload::Layers(layers))
}

/// Parses a temperature, 0 to 100, the daemon's range.
pub fn temperature(text: &str) -> Result<f32, String> {
    within(text, 100.0)
}

/// Parses a probability, 0 to 1.
pub fn share(text: &str) -> Result<f32, String> {
    within(text, 1.0)
}

/// Parses a number from 0 to `max`, so that a bad value fails here and not in the daemon.
fn within(text: &str, max: f32) -> Result<f32, String> {
    let number: f32 = text.parse().map_err(|_| "not a number".to_owned())?;
    // NaN is in no range, so this refuses it too.
    if (0.0..=max).contains(&number) { Ok(number) } else { Err(format!("{number} is not in 0..={max}")) }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn layers_are_a_word_a_count_or_a_list() {
        assert_eq!(layers("all"), Ok(Preload::All));
        assert_eq!(layers("critical"), Ok(Preload::Critical));
        assert_eq!(layers("8"), Ok(Preload::First(8)));
        assert_eq!(layers("0-2,7"), Ok(Preload::Layers(vec![0, 1, 2, 7])));
        assert_eq!(layers("5-5"), Ok(Preload::Layers(vec![5])));
        for wrong in ["", "some", "1-", "-3", "3-1", "1,,2", "0-4294967295", "0-1023,0", "4294967296"] {
            assert!(layers(wrong).is_err(), "{wrong}");
        }
        assert!(layers("0-1023").is_ok(), "as many as a request holds");
    }

    #[test]
    fn the_arguments_fit_together() {
        Arguments::command().debug_assert();
    }
}
