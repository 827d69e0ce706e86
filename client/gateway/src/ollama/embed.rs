//! `/api/embed` and the older `/api/embeddings`.

use std::sync::Arc;
use std::time::Instant;

use hyper::Response;
use rocmforge_client::wire::Prompt;
use serde_json::json;

use super::options::Chosen;
use super::untagged;
use crate::Gateway;
use crate::embeddings::{Asked, inputs};
use crate::failure::Failure;
use crate::params::Params;
use crate::reply::{Body, json};

/// `POST /api/embed`
///
/// # Errors
/// Status 400 with the field at fault, and for a text that is longer than the context; errors of the daemon.
pub async fn embed(
    gateway: &Arc<Gateway>,
    mut params: Params,
    since: Instant,
) -> Result<Response<Body>, Failure> {
    let model = common(&mut params)?;
    let inputs = inputs(&mut params, "input")?;
    // A text that is too long is refused either way, because half a text has another meaning.
    params.flag("truncate")?;
    let dimensions = params.whole("dimensions", 1..=u32::MAX)?;
    params.finish()?;
    let asked = Asked { model: model.clone(), inputs, normalise: true, dimensions };
    let (embeddings, tokens) = asked.answer(gateway).await?;
    let total = u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX);
    Ok(json(&json!({
        "model": model,
        "embeddings": embeddings,
        "total_duration": total,
        "load_duration": 0,
        "prompt_eval_count": tokens,
    })))
}

/// `POST /api/embeddings`: one text, whose embedding keeps its length.
///
/// # Errors
/// As [`embed`].
pub async fn embeddings(gateway: &Arc<Gateway>, mut params: Params) -> Result<Response<Body>, Failure> {
    let model = common(&mut params)?;
    let prompt = params.required_text("prompt")?;
    params.finish()?;
    let asked = Asked { model, inputs: vec![Prompt::Text(prompt)], normalise: false, dimensions: None };
    let (embeddings, _) = asked.answer(gateway).await?;
    Ok(json(&json!({"embedding": embeddings.into_iter().next().unwrap_or_default()})))
}

/// The model's name. Options are checked, and none of them changes an embedding.
fn common(params: &mut Params) -> Result<String, Failure> {
    let model = untagged(&params.required_text("model")?).to_owned();
    params.drop_harmless(&["keep_alive"]);
    Chosen::take(params)?;
    Ok(model)
}
