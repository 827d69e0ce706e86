//! `embed`: embeddings of texts.

use std::io;

use clap::{Args, ValueEnum};
use rocmforge_client::wire::{EmbeddingOptions, GenerateRequest, Pooling, Prompt};
use rocmforge_client::{Client, random_request_id};
use serde::Serialize;

use super::report::Failure;
use super::{model_named, prompt};

/// Arguments of `embed`.
#[derive(Debug, Args)]
#[command(
    after_help = "Prints a line of numbers for each text. The numbers are the mean of the rows that the last layer leaves, or the row of\n\
        the first or the last token, after the model's last norm. Texts of similar meaning have a cosine near 1.\n\n\
        Examples:\n  rocmforge-client embed MODEL 'The sky is blue.' 'Grass is green.'\n  rocmforge-client embed MODEL - < file.txt --json | jq .texts[0].embedding"
)]
pub struct EmbedArguments {
    /// A name, or a file: with a `/`, or an existing `*.gguf`
    pub model: String,
    /// The texts; `-` or no text reads one from standard input
    pub texts: Vec<String>,
    /// How the rows of a text's tokens become one; by default as the file says. If it says nothing: the mean for an encoder,
    /// the last one for a decoder
    #[arg(long, value_enum)]
    pub pooling: Option<PoolingName>,
    /// Leave the length of the embedding as it is, instead of dividing by it
    #[arg(long)]
    pub raw: bool,
}

/// A pooling's name.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum PoolingName {
    /// The mean of all rows
    Mean,
    /// The row of the first token
    First,
    /// The row of the last token
    Last,
}

/// Embeddings of texts.
#[derive(Debug, Serialize)]
pub struct Embedded {
    /// In the order of the texts.
    texts: Vec<One>,
}

/// One text's embedding.
#[derive(Debug, Serialize)]
struct One {
    prompt_tokens: u32,
    embedding: Vec<f32>,
}

/// Asks for the embeddings, one text after the other.
///
/// # Errors
/// Errors of the daemon, and of standard input.
pub fn embed(client: &Client, arguments: &EmbedArguments) -> Result<Embedded, Failure> {
    let texts = match arguments.texts.as_slice() {
        [] => vec![prompt::text(None)?],
        [one] => vec![prompt::text(Some(one))?],
        texts => texts.to_vec(),
    };
    let model = model_named(client, &arguments.model)?;
    let pooling = arguments.pooling.map(|name| match name {
        PoolingName::Mean => Pooling::Mean,
        PoolingName::First => Pooling::First,
        PoolingName::Last => Pooling::Last,
    });
    let options = EmbeddingOptions { pooling, normalise: !arguments.raw };
    let one = |text: String| -> Result<One, Failure> {
        let request = GenerateRequest::new(&model, Prompt::Text(text));
        let request = GenerateRequest { request_id: random_request_id(), ..request }.with_embedding(options);
        let embedding = client.embed(&request)?;
        Ok(One { prompt_tokens: embedding.end.usage.prompt_tokens, embedding: embedding.values })
    };
    Ok(Embedded { texts: texts.into_iter().map(one).collect::<Result<_, _>>()? })
}

/// Writes one line of numbers for each text.
pub fn shown(out: &mut dyn io::Write, embedded: &Embedded) -> io::Result<()> {
    for One { embedding, .. } in &embedded.texts {
        let numbers: Vec<String> = embedding.iter().map(f32::to_string).collect();
        writeln!(out, "{}", numbers.join(" "))?;
    }
    Ok(())
}
