//! The draft model of a request: a smaller model that the configuration names for the request's model.
//!
//! It changes no answer, so one that cannot be used costs the request nothing: the request goes on without.

use std::collections::BTreeMap;
use std::sync::Arc;

use rocmforge_client::wire::ErrorCode;

use super::Call;
use super::error::{Failure, failure};
use crate::backend::BackendError;
use crate::model::Model;
use crate::model::store::Lease;
use crate::scheduler::EngineHandle;

/// Most tokens that a draft model drafts at once for a request that names no number.
pub(super) const DRAFTED: u32 = 8;

/// Names of draft models, by the name of the model that they draft for.
pub type DraftModels = BTreeMap<String, String>;

/// The draft model of a request for the model of that name; `None` if the configuration names none, or if it cannot draft.
pub(super) async fn model_for(call: &Call, name: &str, model: &Arc<Model>) -> Option<Lease> {
    let service = call.service();
    let drafting = service.draft_models().get(name)?.clone();
    let found = match service.store.acquire_now(call.peer().uid, &drafting) {
        Some(lease) if model.known_to_share_ids(lease.model()).is_some() => checked(model, lease, call),
        _ => {
            let (model, asked) = (Arc::clone(model), drafting.clone());
            call.blocking(move |call| checked(&model, call.acquire(&asked)?.0, call)).await
        }
    };
    found.inspect_err(|error| tracing::debug!(name, drafting, error = error.message, "no draft model")).ok()
}

fn checked(model: &Model, drafting: Lease, call: &Call) -> Result<Lease, Failure> {
    match check(model, drafting.model(), &call.service().engine) {
        Ok(()) => Ok(drafting),
        Err(error) => Err(failure(ErrorCode::ModelUnsupported, &error.to_string())),
    }
}

/// Why a model cannot draft for another one.
#[derive(Debug, thiserror::Error)]
pub enum DraftRefused {
    /// Their vocabularies differ.
    #[error("its tokens have other ids: a draft model needs the vocabulary of the model that it drafts for")]
    Ids,
    /// It gives no answers.
    #[error("it is an encoder, which gives no answers")]
    Encoder,
    /// It is the model itself.
    #[error("it is the model itself")]
    Itself,
    /// One of them has a state that refused tokens cannot be taken out of.
    #[error("recurrent layers cannot take a refused token back, and one of the two models has some")]
    Recurrent,
    /// The device does not compute it.
    #[error(transparent)]
    Unsupported(#[from] BackendError),
}

/// Checks that a model can draft for another one. May take some 3 ms.
///
/// # Errors
/// [`DraftRefused`].
pub fn check(model: &Model, drafting: &Model, engine: &EngineHandle) -> Result<(), DraftRefused> {
    match () {
        () if model.id == drafting.id => Err(DraftRefused::Itself),
        () if drafting.plan.program.encoder().is_some() => Err(DraftRefused::Encoder),
        () if [model, drafting].iter().any(|model| model.plan.program.is_recurrent()) => {
            Err(DraftRefused::Recurrent)
        }
        () if !model.shares_ids(drafting) => Err(DraftRefused::Ids),
        () => Ok(engine.check_model(drafting)?),
    }
}
