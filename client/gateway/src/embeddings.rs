//! Embeddings of several texts, for all APIs.

use futures_util::{StreamExt, TryStreamExt, stream};
use rocmforge_client::wire::{EmbeddingOptions, GenerateRequest, Prompt, Usage};
use rocmforge_client::{Embedding, random_request_id};
use serde_json::Value;

use crate::Gateway;
use crate::failure::Failure;
use crate::params::{Params, refused};

/// Most texts of a request, as OpenAI has it.
const INPUTS_MAX: usize = 2048;

/// Texts of one request that the daemon computes at once.
const AT_ONCE: usize = 8;

/// Most numbers of a response: as JSON they take up to ten times their 4 bytes.
const NUMBERS_MAX: usize = 4 << 20;

/// A request for embeddings.
pub struct Asked {
    /// The model's name.
    pub model: String,
    /// The texts.
    pub inputs: Vec<Prompt>,
    /// Whether each embedding has length 1.
    pub normalise: bool,
    /// Only so many first numbers are wanted.
    pub dimensions: Option<u32>,
}

impl Asked {
    /// Computes the embeddings, in the order of the texts, and counts the texts' tokens.
    ///
    /// # Errors
    /// Status 400 for texts that are too many, and for dimensions that the model does not have; errors of the daemon.
    pub async fn answer(self, gateway: &Gateway) -> Result<(Vec<Vec<f32>>, u64), Failure> {
        let Self { model, inputs, normalise, dimensions } = self;
        if inputs.len() > INPUTS_MAX {
            let reason = format!("{} texts in one request, at most {INPUTS_MAX} are taken", inputs.len());
            return Err(refused("input", reason));
        }
        let count = inputs.len();
        let one = |input: Prompt| {
            let options = EmbeddingOptions { pooling: None, normalise };
            let request = GenerateRequest::new(&model, input).with_embedding(options);
            let request = GenerateRequest { request_id: random_request_id(), ..request };
            async move {
                let Embedding { values, end, .. } = gateway.client.embed(&request).await?;
                if values.len().saturating_mul(count) > NUMBERS_MAX {
                    let width = values.len();
                    let reason = format!(
                        "{count} embeddings of {width} numbers exceed {NUMBERS_MAX}: send fewer texts"
                    );
                    return Err(refused("input", reason));
                }
                Ok::<_, Failure>((cut(values, dimensions)?, end.usage))
            }
        };
        let all: Vec<(Vec<f32>, Usage)> =
            stream::iter(inputs).map(one).buffered(AT_ONCE).try_collect().await?;
        let tokens = all.iter().map(|(_, usage)| u64::from(usage.prompt_tokens)).sum();
        Ok((all.into_iter().map(|(values, _)| values).collect(), tokens))
    }
}

/// The first `dimensions` numbers, with length 1 again, as OpenAI shortens embeddings.
fn cut(mut values: Vec<f32>, dimensions: Option<u32>) -> Result<Vec<f32>, Failure> {
    let Some(wanted) = dimensions else { return Ok(values) };
    let width = values.len();
    if wanted as usize > width {
        return Err(refused(
            "dimensions",
            format!("{wanted} numbers, but the model's embeddings have {width}"),
        ));
    }
    values.truncate(wanted as usize);
    let length = values.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
    if length > 0.0 {
        values.iter_mut().for_each(|x| *x = (f64::from(*x) / length) as f32);
    }
    Ok(values)
}

/// Takes texts: a string, token ids, or a list of these.
///
/// # Errors
/// Status 400 for anything else, and for a list of nothing.
pub fn inputs(params: &mut Params, place: &str) -> Result<Vec<Prompt>, Failure> {
    let list = match params.take(place) {
        Some(Value::String(text)) => return Ok(vec![Prompt::Text(text)]),
        Some(Value::Array(list)) if !list.is_empty() => list,
        Some(Value::Array(_)) => return Err(params.refuse(place, "it is empty")),
        Some(_) => return Err(params.refuse(place, "it is neither a string nor a list")),
        None => return Err(params.refuse(place, "it is required")),
    };
    if list.first().is_some_and(Value::is_number) {
        return Ok(vec![ids(&list, place)?]);
    }
    let one = |value: Value| match value {
        Value::String(text) => Ok(Prompt::Text(text)),
        Value::Array(list) => ids(&list, place),
        _ => Err(refused(place, "an element is neither a string nor a list of token ids")),
    };
    list.into_iter().map(one).collect()
}

fn ids(list: &[Value], place: &str) -> Result<Prompt, Failure> {
    let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    let ids: Option<Vec<u32>> = list.iter().map(id).collect();
    ids.map(Prompt::Ids).ok_or_else(|| refused(place, "a token id is no whole number of 32 bits"))
}
