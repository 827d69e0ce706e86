//! Documents in the order of their relevance to a query, in the form of Jina, Cohere and llama.cpp's server.

use std::sync::Arc;

use futures_util::{StreamExt, TryStreamExt, stream};
use hyper::Response;
use rocmforge_client::wire::limits::DOCUMENT_BYTES_MAX;
use rocmforge_client::wire::{GenerateRequest, Prompt};
use rocmforge_client::{Relevance, random_request_id};
use serde_json::{Value, json};

use crate::Gateway;
use crate::failure::Failure;
use crate::params::{Params, refused};
use crate::reply::{Body, json};

/// Most documents of a request.
const DOCUMENTS_MAX: usize = 2048;

/// Documents of one request that the daemon computes at once.
const AT_ONCE: usize = 8;

/// `POST /v1/rerank`
///
/// # Errors
/// Status 400 with the field at fault; errors of the daemon.
pub async fn rerank(gateway: &Arc<Gateway>, mut params: Params) -> Result<Response<Body>, Failure> {
    let model = params.required_text("model")?;
    let query = params.required_text("query")?;
    let documents = documents(&mut params)?;
    let most = params.whole("top_n", 1..=u32::MAX)?.map_or(usize::MAX, |most| most as usize);
    let returned = params.flag("return_documents")?.unwrap_or(false);
    params.drop_harmless(&["user"]);
    params.finish()?;
    let one = |document: &String| {
        let request = GenerateRequest::new(&model, Prompt::Text(query.clone())).with_document(document);
        let request = GenerateRequest { request_id: random_request_id(), ..request };
        async move { gateway.client.rank(&request).await }
    };
    let all: Vec<Relevance> = stream::iter(documents.iter().map(one)).buffered(AT_ONCE).try_collect().await?;
    let tokens: u64 = all.iter().map(|one| u64::from(one.end.usage.prompt_tokens)).sum();
    let mut ranked: Vec<(usize, f32)> = all.iter().map(|one| one.value).enumerate().collect();
    ranked.sort_by(|one, other| other.1.total_cmp(&one.1));
    let result = |(index, relevance): (usize, f32)| {
        let mut result = json!({"index": index, "relevance_score": relevance});
        if let (true, Some(document)) = (returned, documents.get(index)) {
            result["document"] = json!({"text": document});
        }
        result
    };
    let results: Vec<Value> = ranked.into_iter().take(most).map(result).collect();
    let usage = json!({"prompt_tokens": tokens, "total_tokens": tokens});
    Ok(json(&json!({"object": "list", "model": model, "results": results, "usage": usage})))
}

/// Takes the documents: texts, or objects with a `text`.
fn documents(params: &mut Params) -> Result<Vec<String>, Failure> {
    let list = params.required_list("documents")?;
    if list.is_empty() || list.len() > DOCUMENTS_MAX {
        let reason = format!("{} documents; from 1 to {DOCUMENTS_MAX} are ranked at once", list.len());
        return Err(refused("documents", reason));
    }
    let one = |(index, value): (usize, Value)| {
        let place = format!("documents[{index}]");
        let text = match value {
            Value::String(text) => text,
            Value::Object(_) => {
                let mut fields = Params::inside(&place, value)?;
                let text = fields.required_text("text")?;
                fields.finish()?;
                text
            }
            _ => return Err(refused(&place, "it is neither a text nor an object with a text")),
        };
        if text.len() > DOCUMENT_BYTES_MAX {
            return Err(refused(
                &place,
                format!("{} bytes, at most {DOCUMENT_BYTES_MAX} are ranked", text.len()),
            ));
        }
        Ok(text)
    };
    list.into_iter().enumerate().map(one).collect()
}
