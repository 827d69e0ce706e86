//! Embeddings, and the relevance of documents: what a request for one needs of its model.

use std::sync::Arc;

use rocmforge_client::wire::{self, EmbeddingOptions, ErrorCode, GenerateRequest, Prompt};

use super::Call;
use super::error::{Failure, failure};
use crate::model::Model;
use crate::model::embedding::{EmbeddingError, Pooler, Pooling};
use crate::model::store::Lease;

/// Bytes of the last frame beside the embedding.
const END_BYTES: usize = 4096;

/// The result that a request wants of a prompt's rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Wanted {
    /// Its embedding.
    Embedding(EmbeddingOptions),
    /// The relevance of this document, which follows it.
    Relevance(String),
}

impl Wanted {
    /// The request's result in place of an answer; `None` for an answer.
    pub fn of(request: &GenerateRequest) -> Result<Option<Self>, Failure> {
        let bad = |text: &str| failure(ErrorCode::InvalidArgument, text);
        let embedding = request.embedding().map_err(|error| bad(&error.to_string()))?;
        let document = request.document().map_err(|error| bad(&error.to_string()))?;
        match (embedding, document) {
            (None, None) => Ok(None),
            (Some(options), None) => Ok(Some(Self::Embedding(options))),
            (None, Some(document)) if matches!(request.prompt, Prompt::Text(_)) => {
                Ok(Some(Self::Relevance(document.to_owned())))
            }
            (None, Some(_)) => Err(bad("a document is ranked by a query: send the query as text")),
            (Some(_), Some(_)) => Err(bad("a document is ranked or embedded: leave one of them out")),
        }
    }
}

/// Refuses an answer of an encoder, which has embeddings alone, and of a reranker: its file may lack the output matrix.
pub(super) fn refuse_answers(model: &Model) -> Result<(), Failure> {
    let program = &model.plan.program;
    let (kind, advice) = match (program.encoder(), program.classifier()) {
        (None, None) => return Ok(()),
        (Some(_), _) => ("an encoder", "ask it for embeddings"),
        (None, Some(_)) => ("a reranker", "ask it to rank documents"),
    };
    let name = &model.plan.architecture;
    let text = format!("the model is {kind} ({name}): it gives no answers, {advice}");
    Err(failure(ErrorCode::ModelUnsupported, &text))
}

/// Reads what turns rows into an embedding or a score. Refuses one that the client's frames cannot hold.
pub(super) async fn pooler(call: &Call, lease: &Lease, wanted: &Wanted) -> Result<Arc<Pooler>, Failure> {
    let model = Arc::clone(lease.model());
    let unsupported = |error: EmbeddingError| failure(ErrorCode::ModelUnsupported, &error.to_string());
    let &Wanted::Embedding(options) = wanted else {
        return call.blocking(move |_| Pooler::scoring(&model).map(Arc::new).map_err(unsupported)).await;
    };
    let (width, frame) = (model.plan.shape.hidden, call.connection.limits.max_frame as usize);
    if width.saturating_mul(size_of::<f32>()).saturating_add(END_BYTES) > frame {
        let text = format!(
            "the embedding has {width} numbers of 4 bytes, and the connection's max_frame is {frame} bytes: connect with a \
             larger max_frame"
        );
        return Err(failure(ErrorCode::LimitExceeded, &text));
    }
    let pooling = options.pooling.map(|pooling| match pooling {
        wire::Pooling::Mean => Pooling::Mean,
        wire::Pooling::First => Pooling::First,
        wire::Pooling::Last => Pooling::Last,
    });
    let read = move |_: &Call| Pooler::new(&model, pooling, options.normalise).map(Arc::new);
    call.blocking(move |call| read(call).map_err(unsupported)).await
}
