//! The list of models.

use std::sync::Arc;

use hyper::Response;
use serde_json::{Value, json};

use crate::Gateway;
use crate::failure::Failure;
use crate::reply::{Body, json};

/// `GET /v1/models`
///
/// # Errors
/// Errors of the daemon.
pub async fn models(gateway: &Arc<Gateway>) -> Result<Response<Body>, Failure> {
    let models = gateway.settings.aliases.listed(gateway).await?;
    let data: Vec<Value> = models.iter().map(|model| entry(&model.name)).collect();
    Ok(json(&json!({"object": "list", "data": data})))
}

/// `GET /v1/models/NAME`
///
/// # Errors
/// Errors of the daemon; status 404 for an unknown name.
pub async fn model(gateway: &Arc<Gateway>, name: &str) -> Result<Response<Body>, Failure> {
    let models = gateway.settings.aliases.listed(gateway).await?;
    match models.iter().find(|model| model.name == name) {
        Some(model) => Ok(json(&entry(&model.name))),
        None => Err(Failure::new(404, "no model has that name; GET /v1/models lists them")
            .about("model")
            .coded("model_not_found")),
    }
}

/// The daemon does not know when a model was made; clients demand a number.
fn entry(name: &str) -> Value {
    json!({"id": name, "object": "model", "created": 0, "owned_by": "rocmforge"})
}
