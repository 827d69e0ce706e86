//! Ollama's lists of models.

use std::collections::HashMap;
use std::sync::Arc;

use hyper::Response;
use rocmforge_client::wire::{ModelState, ModelSummary, ResidencyRequest, ShowRequest};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::untagged;
use crate::Gateway;
use crate::failure::Failure;
use crate::models::servable;
use crate::params::Params;
use crate::reply::{Body, json};

/// `GET /api/version`: the gateway's.
pub fn version() -> Response<Body> {
    json(&json!({"version": env!("CARGO_PKG_VERSION")}))
}

/// The time that Ollama's programs show as none.
const UNKNOWN_TIME: &str = "0001-01-01T00:00:00Z";
/// A time that never comes: the daemon's own rules end a model's stay on a device.
const NO_END: &str = "9999-12-31T23:59:59Z";

/// A stand-in for the digest of a model's file, which nobody computes: Ollama's programs cut it to 12 digits.
fn digest(model: &ModelSummary) -> String {
    let of = Sha256::new().chain_update(&model.name).chain_update(model.file_bytes.to_le_bytes());
    of.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The part of a model's entry that the daemon knows without opening the file.
fn details(architecture: &str) -> Value {
    let families = (!architecture.is_empty()).then(|| vec![architecture]);
    json!({
        "format": "gguf", "family": architecture, "families": families, "parent_model": "",
        "parameter_size": "", "quantization_level": "",
    })
}

/// `GET /api/tags`: all models that can answer.
///
/// # Errors
/// Errors of the daemon.
pub async fn tags(gateway: &Arc<Gateway>) -> Result<Response<Body>, Failure> {
    let models = gateway.settings.aliases.listed(gateway).await?;
    let models = models.iter().map(|model| {
        let details = details(&model.architecture);
        json!({
            "name": model.name, "model": model.name, "size": model.file_bytes, "digest": digest(model), "details": details,
            "modified_at": UNKNOWN_TIME,
        })
    });
    Ok(json(&json!({"models": models.collect::<Vec<_>>()})))
}

/// `GET /api/ps`: the mapped models, with their weights' bytes on GPUs.
///
/// # Errors
/// Errors of the daemon.
pub async fn ps(gateway: &Arc<Gateway>) -> Result<Response<Body>, Failure> {
    let models = servable(&gateway.client).await?;
    let residency = gateway.client.call(&ResidencyRequest::default()).await?;
    let on_gpu =
        |device: u32| residency.devices.get(device as usize).is_some_and(|device| device.kind != "cpu");
    let resident = residency.models.iter().filter(|entry| on_gpu(entry.device));
    let resident: HashMap<&str, u64> =
        resident.map(|entry| (entry.model.as_str(), entry.weight_bytes)).collect();
    let mapped = models.iter().filter(|model| model.state == ModelState::Mapped).map(|model| {
        let bytes = resident.get(model.name.as_str()).copied().unwrap_or(0);
        let details = details(&model.architecture);
        json!({
            "name": model.name, "model": model.name, "size": model.file_bytes, "digest": digest(model), "details": details,
            "size_vram": bytes, "expires_at": NO_END,
        })
    });
    Ok(json(&json!({"models": mapped.collect::<Vec<_>>()})))
}

/// `POST /api/show`
///
/// # Errors
/// Status 400 with the field at fault; errors of the daemon.
pub async fn show(gateway: &Arc<Gateway>, mut params: Params) -> Result<Response<Body>, Failure> {
    // Ollama's own program sends all fields, also empty ones.
    let named = |name: Option<String>| name.filter(|name| !name.is_empty());
    let older = named(params.text("name")?);
    let model = match named(params.text("model")?).or(older) {
        Some(name) => untagged(&name).to_owned(),
        None => return Err(params.refuse("model", "it is required")),
    };
    for field in ["system", "template"] {
        params.only(field, |value| value.as_str() == Some(""))?;
    }
    params.only("options", |value| value.as_object().is_some_and(serde_json::Map::is_empty))?;
    params.drop_harmless(&["verbose"]);
    params.finish()?;
    let request = ShowRequest { model, full: false, skip_metadata: 0, skip_tensors: 0, ext: vec![] };
    let shown = gateway.client.call(&request).await?;
    let architecture = shown.summary.architecture.as_str();
    let mut details = details(architecture);
    details["parameter_size"] = json!(rounded(shown.parameters));
    let main = shown.types.iter().max_by_key(|of| of.bytes);
    details["quantization_level"] = json!(main.map_or("", |of| of.dtype.as_str()));
    let mut info = json!({
        "general.architecture": architecture,
        "general.parameter_count": shown.parameters,
        "tokenizer.ggml.model": shown.tokenizer,
    });
    for (key, value) in [
        ("context_length", shown.context_length),
        ("embedding_length", shown.hidden),
        ("block_count", shown.layers),
        ("attention.head_count", shown.heads),
        ("attention.head_count_kv", shown.kv_heads),
        ("feed_forward_length", shown.ffn),
        ("vocab_size", shown.vocab),
    ] {
        info[format!("{architecture}.{key}")] = json!(value);
    }
    // Models whose template knows no tools get them described.
    let tools = shown.chat_template.then_some("tools");
    let thinking = shown.thinking().map(|_| "thinking");
    let main = if shown.encoder().is_some() { "embedding" } else { "completion" };
    let capabilities: Vec<&str> = [main].into_iter().chain(tools).chain(thinking).collect();
    Ok(json(&json!({
        "modelfile": "", "parameters": "", "template": "", "details": details, "model_info": info,
        "capabilities": capabilities,
    })))
}

/// A number of parameters as people say it: `134.5M`, `8.0B`.
fn rounded(parameters: u64) -> String {
    let tenths = |unit: u64| format!("{}.{}", parameters / unit, parameters % unit * 10 / unit);
    match parameters {
        1_000_000_000.. => tenths(1_000_000_000) + "B",
        1_000_000.. => tenths(1_000_000) + "M",
        _ => tenths(1_000) + "K",
    }
}
