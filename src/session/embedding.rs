//! Embeddings: what a request for one needs of its model.

use std::sync::Arc;

use rocmforge_client::wire::{self, EmbeddingOptions, ErrorCode};

use super::Call;
use super::error::{Failure, failure};
use crate::model::embedding::{Pooler, Pooling};
use crate::model::store::Lease;

/// Bytes of the last frame beside the embedding.
const END_BYTES: usize = 4096;

/// Reads what turns rows into an embedding. Refuses one that the client's frames cannot hold.
pub(super) async fn pooler(
    call: &Call,
    lease: &Lease,
    options: EmbeddingOptions,
) -> Result<Arc<Pooler>, Failure> {
    let model = Arc::clone(lease.model());
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
        wire::Pooling::Last => Pooling::Last,
    });
    let read = move |_: &Call| Pooler::new(&model, pooling, options.normalise).map(Arc::new);
    call.blocking(move |call| {
        read(call).map_err(|error| failure(ErrorCode::ModelUnsupported, &error.to_string()))
    })
    .await
}
