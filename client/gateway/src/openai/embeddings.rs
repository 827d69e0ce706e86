//! Embeddings.

use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hyper::Response;
use serde_json::{Value, json};

use super::HARMLESS;
use crate::Gateway;
use crate::embeddings::{Asked, inputs};
use crate::failure::Failure;
use crate::params::Params;
use crate::reply::{Body, json};

/// `POST /v1/embeddings`
///
/// # Errors
/// Status 400 with the field at fault; errors of the daemon.
pub async fn embeddings(gateway: &Arc<Gateway>, mut params: Params) -> Result<Response<Body>, Failure> {
    let model = params.required_text("model")?;
    let inputs = inputs(&mut params, "input")?;
    let packed = match params.text("encoding_format")?.as_deref() {
        None | Some("float") => false,
        Some("base64") => true,
        Some(_) => return Err(params.refuse("encoding_format", "it is neither \"float\" nor \"base64\"")),
    };
    let dimensions = params.whole("dimensions", 1..=u32::MAX)?;
    params.drop_harmless(&HARMLESS);
    params.finish()?;
    let asked = Asked { model: model.clone(), inputs, normalise: true, dimensions };
    let (all, tokens) = asked.answer(gateway).await?;
    let entry = |(index, values): (usize, Vec<f32>)| {
        let embedding: Value = if packed {
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            STANDARD.encode(bytes).into()
        } else {
            values.into()
        };
        json!({"object": "embedding", "index": index, "embedding": embedding})
    };
    let data: Vec<Value> = all.into_iter().enumerate().map(entry).collect();
    let usage = json!({"prompt_tokens": tokens, "total_tokens": tokens});
    Ok(json(&json!({"object": "list", "data": data, "model": model, "usage": usage})))
}
