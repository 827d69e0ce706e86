//! Arguments of `chat`, and what commands have in common.

use std::path::PathBuf;

use clap::Args;

use super::args::{Command, number};
use super::run_args::RunArguments;

pub const CHAT_HELP: &str = "\
Lines that begin with / are commands: /clear, /system TEXT, /save FILE, /load FILE, /exit, /help. Ctrl-C
ends an answer early, and the chat goes on. Without a terminal, each line of standard input is a
message, and only the answers are printed. Lines that you edited are kept in
$XDG_STATE_HOME/rocmforge/chat-history.

Examples:
  rocmforge-client chat smollm2-135m-instruct-q4_1
  rocmforge-client chat smollm2-135m-instruct-q4_1 --system 'Answer in one word.' --temperature 0
  printf 'Hello\\nWho are you?\\n' | rocmforge-client chat smollm2-135m-instruct-q4_1";

/// Chat with a model, line by line
#[derive(Debug, Args)]
pub struct ChatArguments {
    /// A name, or a file: with a `/`, or an existing `*.gguf`; a file is opened here and passed to the daemon
    pub model: String,
    /// A system message before the chat
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Go on with a chat that /save wrote
    #[arg(long, value_name = "FILE")]
    pub load: Option<PathBuf>,
    /// Most tokens of an answer; 0: until the model ends or the context is full
    #[arg(short = 'n', long, default_value_t = 0, value_name = "N", allow_negative_numbers = true)]
    pub max_tokens: u32,
    #[command(flatten)]
    pub sampling: super::sampling::Sampling,
    /// Seed for repeatable draws [default: random]
    #[arg(long, allow_negative_numbers = true, value_parser = number)]
    pub seed: Option<u64>,
}

impl From<&RunArguments> for ChatArguments {
    fn from(run: &RunArguments) -> Self {
        Self {
            model: run.model.clone(),
            system: run.system.clone(),
            load: None,
            max_tokens: run.max_tokens,
            sampling: run.sampling.clone(),
            seed: run.seed,
        }
    }
}

impl Command {
    /// The model that the command names.
    pub fn model(&self) -> Option<&str> {
        match self {
            Self::Run(RunArguments { model, .. })
            | Self::Chat(ChatArguments { model, .. })
            | Self::Show { model, .. }
            | Self::Load { model, .. }
            | Self::Preload { model, .. }
            | Self::Pin { model }
            | Self::Unpin { model }
            | Self::Rules { model, .. }
            | Self::Plan { model, .. }
            | Self::Unload { model, .. } => Some(model),
            Self::ClearCache { model, .. } => model.as_deref(),
            Self::Score(arguments) => Some(&arguments.model),
            Self::Tokenize(arguments) => Some(&arguments.model),
            Self::Detokenize(arguments) => Some(&arguments.model),
            Self::Bench(arguments) => Some(&arguments.model),
            _ => None,
        }
    }
}
