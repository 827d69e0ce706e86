//! Arguments of `run`.

use std::io::IsTerminal;

use clap::Args;
use rocmforge_client::wire::limits;

use super::args::number;
use super::report::Output;

/// Most log-probabilities for each token.
const TOP_LOGPROBS_MAX: i64 = limits::TOP_LOGPROBS_MAX as i64;

/// Most answers to one prompt: each takes one of the user's requests.
const ANSWERS_MAX: i64 = 8;

/// Most drafted tokens in a step.
const DRAFTS_MAX: i64 = limits::DRAFTS_MAX as i64;

const RUN_HELP: &str = "\
Examples:
  rocmforge-client run smollm2-135m-instruct-q4_1 --chat 'Why is the sky blue?'
  rocmforge-client run ./tinystories-260k-f32.gguf 'Once upon a time' --max-tokens 64
  git diff | rocmforge-client run coder - --chat --system 'Write a commit message.'
  rocmforge-client run coder --session talk --chat 'And in Rust?'
  rocmforge-client run coder --chat --tools tools.json 'Weather in Oslo?'
  rocmforge-client run MODEL --ids '1, 403, 407' --temperature 0 --json | jq .ids

Sampling defaults are those of llama.cpp: temperature 0.8, top-k 40, top-p 0.95,
min-p 0.05. With --temperature 0, each token is the most likely one.

--json prints one object at the end: text, prompt_ids, ids, stop_reason (end_of_generation,
max_tokens, context_full, stop_text, cancelled), usage {prompt_tokens, generated_tokens}, reused_tokens,
dropped_tokens, drafted_tokens, accepted_tokens, seed, timings {queue, load, prefill, decode} in milliseconds,
weights {tensors_found, tensors_loaded, loaded_bytes}: what its steps asked the device for and loaded,
session_tokens (null without --session), and with --logprobs one {logprob, top: [{id, logprob}]} for each of ids.
After Ctrl-C seed, usage, timings and the counts of tokens are null. reused_tokens of the prompt were not
computed: an earlier prompt of yours began with them. dropped_tokens went because the context was full, with
--context-shift. drafted_tokens were computed before they were drawn, with --draft. The answer has the
accepted_tokens of them. With --tools the object also has calls [{name, arguments}] and reasoning, and text is without them.
Without --json each call is a line of JSON after the text.
If a request fails, the object on standard error (see --help of the program) holds \"error\" and the
partial answer: text, prompt_ids, ids, and with --logprobs logprobs. Without a request it holds \"error\" only.";

/// Generate text.
#[derive(Debug, Args)]
#[command(after_help = RUN_HELP)]
pub struct RunArguments {
    /// A name, or a file: with a `/`, or an existing `*.gguf`; a file is opened here and passed to the daemon
    pub model: String,
    /// The text to continue, unchanged; `-` or no text reads standard input
    pub prompt: Option<String>,
    /// Most tokens to generate; 0: until the model ends or the context is full
    #[arg(short = 'n', long, default_value_t = 0, value_name = "N", allow_negative_numbers = true)]
    pub max_tokens: u32,
    #[command(flatten)]
    pub sampling: super::sampling::Sampling,
    /// Seed for repeatable draws [default: random; shown with --json and --stats]
    #[arg(long, allow_negative_numbers = true, value_parser = number)]
    pub seed: Option<u64>,
    /// Print this many answers to the prompt, 1 to 8, each with a seed of its own: --seed, and the numbers after it
    #[arg(long = "n", default_value_t = 1, value_name = "N", allow_negative_numbers = true, conflicts_with = "session", value_parser = clap::value_parser!(u32).range(1..=ANSWERS_MAX))]
    pub answers: u32,
    /// Stop before this text; may be given several times
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
    #[command(flatten)]
    pub steering: super::steering::Steering,
    #[command(flatten)]
    pub tools: super::tools::Tools,
    /// Read the prompt as token ids, separated by commas or spaces; no special tokens are added
    #[arg(long, conflicts_with_all = ["chat", "system"])]
    pub ids: bool,
    /// Treat the prompt as a user's message and apply the model's chat template
    #[arg(long)]
    pub chat: bool,
    /// A system message before the user's message
    #[arg(long, requires = "chat", value_name = "TEXT")]
    pub system: Option<String>,
    /// Go on with the session of this name, or begin one: the daemon has its earlier prompts and answers
    #[arg(long, value_name = "NAME")]
    pub session: Option<String>,
    /// When the context is full, go on without the oldest half of the tokens after the first --keep ones
    #[arg(long, conflicts_with = "session")]
    pub context_shift: bool,
    /// First tokens that --context-shift never drops, at most half of the context
    #[arg(long, default_value_t = 1, value_name = "N", requires = "context_shift")]
    pub keep: u32,
    /// Compute up to so many tokens ahead where the text repeats, 1 to 32: the same answer, sooner
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = clap::value_parser!(u8).range(1..=DRAFTS_MAX))]
    pub draft: Option<u8>,
    /// Before your requests with a lower number, after those with a higher one, 0 to 255 [default: 128]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub priority: Option<u8>,
    /// Continue past end-of-generation tokens
    #[arg(long)]
    pub ignore_eog: bool,
    /// With each token, print the log-probabilities of this many most likely tokens, 0 to 20
    #[arg(long, default_value_t = 0, value_name = "N", allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(0..=TOP_LOGPROBS_MAX))]
    pub logprobs: u32,
    /// Fail after this time, including the time in the queue; 0: never
    #[arg(long, default_value_t = 0, value_name = "MS", allow_negative_numbers = true)]
    pub timeout: u32,
    /// Print tokens per second and times to standard error at the end
    #[arg(long, visible_alias = "verbose")]
    pub stats: bool,
}

impl RunArguments {
    /// Whether a person at a terminal gave no prompt, and so wants to chat. Options that a chat does not have say the opposite.
    pub fn chats(&self, output: Output) -> bool {
        let Self {
            prompt,
            answers,
            stop,
            ids,
            session,
            draft,
            context_shift,
            priority,
            ignore_eog,
            logprobs,
            timeout,
            stats,
            ..
        } = self;
        let plain =
            prompt.is_none() && stop.is_empty() && session.is_none() && priority.is_none() && draft.is_none();
        let plain =
            plain && !(*ids || *context_shift || *ignore_eog || *stats || *logprobs > 0 || *timeout > 0);
        plain
            && *answers == 1
            && !self.steering.is_any()
            && self.tools.tools.is_none()
            && !output.json
            && std::io::stdin().is_terminal()
            && std::io::stdout().is_terminal()
    }
}
