//! `score`: how likely a model finds a text.

use std::io;

use clap::Args;
use rocmforge_client::wire::limits::TOP_LOGPROBS_MAX;
use rocmforge_client::wire::{GenerateRequest, Prompt, TokenLogprob};
use rocmforge_client::{Client, random_request_id};
use serde::Serialize;

use super::report::Failure;
use super::{model_named, prompt};

/// Arguments of `score`.
#[derive(Debug, Args)]
#[command(
    after_help = "Each token's log-probability is that of the model after all tokens before it; the first has none before it, and\n\
        counts for nothing. The perplexity is e to the power of their mean, negated: lower is likelier.\n\n\
        Examples:\n  rocmforge-client score MODEL 'The sky is blue.'\n  rocmforge-client score MODEL - < file.txt --json | jq .perplexity"
)]
pub struct ScoreArguments {
    /// A name, or a file: with a `/`, or an existing `*.gguf`
    pub model: String,
    /// The text; `-` or no text reads standard input
    pub text: Option<String>,
    /// Read the text as token ids, separated by commas or spaces; no special tokens are added
    #[arg(long)]
    pub ids: bool,
    /// With each token, print the log-probabilities of this many most likely tokens, 0 to 20
    #[arg(long, default_value_t = 0, value_name = "N", allow_negative_numbers = true, value_parser = clap::value_parser!(u8).range(0..=TOP_LOGPROBS_MAX as i64))]
    pub logprobs: u8,
}

/// A text's log-probabilities.
#[derive(Debug, Serialize)]
pub struct Scored {
    /// The text's tokens.
    ids: Vec<u32>,
    /// Of each token but the first its log-probability, and the most likely ones.
    logprobs: Vec<TokenLogprob>,
    /// Sum of the log-probabilities, natural logarithms.
    logprob: f64,
    /// e to the power of the negated mean; none for a text of one token.
    perplexity: Option<f64>,
}

/// Asks for a text's log-probabilities.
///
/// # Errors
/// Errors of the daemon, and of standard input.
pub fn score(client: &Client, arguments: &ScoreArguments) -> Result<Scored, Failure> {
    let text = prompt::text(arguments.text.as_deref())?;
    let prompt = if arguments.ids { Prompt::Ids(prompt::ids(&text)?) } else { Prompt::Text(text) };
    let request = GenerateRequest::new(&model_named(client, &arguments.model)?, prompt);
    // The request asks for one token of an answer, which says nothing of the text.
    let request = GenerateRequest { max_tokens: 1, request_id: random_request_id(), ..request };
    let mut generation = client.generate(&request.with_scores(arguments.logprobs))?;
    let (mut ids, mut logprobs) = (Vec::new(), Vec::new());
    while let Some(mut item) = generation.next_item()? {
        ids.append(&mut item.prompt_ids);
        if item.ids.is_empty() {
            logprobs.append(&mut item.logprobs);
        }
    }
    let logprob: f64 = logprobs.iter().map(|token| f64::from(token.logprob)).sum();
    let perplexity = (!logprobs.is_empty()).then(|| (-logprob / logprobs.len() as f64).exp());
    Ok(Scored { ids, logprobs, logprob, perplexity })
}

/// Writes the result in words.
pub fn shown(out: &mut dyn io::Write, scored: &Scored) -> io::Result<()> {
    write!(out, "{} tokens, log-probability {:.4}", scored.ids.len(), scored.logprob)?;
    match scored.perplexity {
        Some(perplexity) => writeln!(out, ", perplexity {perplexity:.4}"),
        None => writeln!(out, ": the first token has nothing before it"),
    }
}
