//! `rank`: documents in the order of their relevance to a query.

use std::io;

use clap::Args;
use rocmforge_client::wire::{GenerateRequest, Prompt};
use rocmforge_client::{Client, printable, random_request_id};
use serde::Serialize;

use super::model_named;
use super::report::Failure;

/// Arguments of `rank`.
#[derive(Debug, Args)]
#[command(
    after_help = "Prints a line for each document, the most relevant first: its relevance, its number from 0 on, and its text. Models\n\
        differ in the range of relevances. The model must be a reranker: one with a classifier.\n\n\
        Examples:\n  rocmforge-client rank MODEL 'What is a panda?' 'A bear of China.' 'Hi.'\n  rocmforge-client rank MODEL 'What is a panda?' \"$(cat a.txt)\" \"$(cat b.txt)\" --json | jq .documents[0].index"
)]
pub struct RankArguments {
    /// A name, or a file: with a `/`, or an existing `*.gguf`
    pub model: String,
    /// The query
    pub query: String,
    /// The documents
    #[arg(required = true)]
    pub documents: Vec<String>,
}

/// Documents in the order of their relevance.
#[derive(Debug, Serialize)]
pub struct Ranked {
    documents: Vec<One>,
}

/// A document.
#[derive(Debug, Serialize)]
struct One {
    /// Its place in the command, from 0 on.
    index: usize,
    relevance: f32,
    prompt_tokens: u32,
    text: String,
}

/// Asks for the relevances, one document after the other.
///
/// # Errors
/// Errors of the daemon.
pub fn rank(client: &Client, arguments: &RankArguments) -> Result<Ranked, Failure> {
    let model = model_named(client, &arguments.model)?;
    let one = |(index, text): (usize, &String)| -> Result<One, Failure> {
        let request = GenerateRequest::new(&model, Prompt::Text(arguments.query.clone())).with_document(text);
        let ranked = client.rank(&GenerateRequest { request_id: random_request_id(), ..request })?;
        let prompt_tokens = ranked.end.usage.prompt_tokens;
        Ok(One { index, relevance: ranked.value, prompt_tokens, text: text.clone() })
    };
    let mut documents =
        arguments.documents.iter().enumerate().map(one).collect::<Result<Vec<_>, Failure>>()?;
    documents.sort_by(|one, other| other.relevance.total_cmp(&one.relevance));
    Ok(Ranked { documents })
}

/// Writes one line for each document.
pub fn shown(out: &mut dyn io::Write, ranked: &Ranked) -> io::Result<()> {
    for One { index, relevance, text, .. } in &ranked.documents {
        writeln!(out, "{relevance:>9.4}  {index}  {}", printable(text))?;
    }
    Ok(())
}
