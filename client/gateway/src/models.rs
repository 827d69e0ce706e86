//! Models of the daemon.

use rocmforge_client::ClientError;
use rocmforge_client::asynchronous::Client;
use rocmforge_client::wire::{ListRequest, ModelState, ModelSummary, ShowReply, ShowRequest};

use crate::Gateway;
use crate::failure::Failure;

/// Most parts of the list: each fills a frame.
const PARTS_MAX: usize = 64;

/// The models that can answer, by name.
///
/// # Errors
/// Errors of the daemon and of the connection to it.
pub async fn servable(client: &Client) -> Result<Vec<ModelSummary>, ClientError> {
    let mut all: Vec<ModelSummary> = Vec::new();
    for _ in 0..PARTS_MAX {
        let after = all.last().map(|last| last.name.clone()).unwrap_or_default();
        let reply = client.call(&ListRequest { after, ext: vec![] }).await?;
        let more = reply.more && !reply.models.is_empty();
        all.extend(reply.models);
        if !more {
            break;
        }
    }
    all.retain(|model| matches!(model.state, ModelState::Registered | ModelState::Mapped));
    Ok(all)
}

/// The daemon's account of a model.
///
/// # Errors
/// Errors of the daemon and of the connection to it.
pub async fn shown(gateway: &Gateway, model: &str) -> Result<ShowReply, Failure> {
    let model = model.to_owned();
    let request = ShowRequest { model, full: false, skip_metadata: 0, skip_tensors: 0, ext: vec![] };
    Ok(gateway.client.call(&request).await?)
}
