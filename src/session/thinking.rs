//! The variable of a model's chat template that turns reasoning on and off.

use std::time::Instant;

use rocmforge_client::wire::THINKING_VARIABLES;

use super::Call;
use super::error::{Failure, of_template};
use super::prompt::RENDERING_BYTES;
use crate::model::store::Lease;
use crate::model::template::TemplateError;
use crate::model::{ChatTemplate, Model};

/// Asks the model's template for the variable, once for each mapping. Templates whose text has none of the names are not
/// asked. The others are compiled, which takes the bounds and the turn of a rendering, about 3 ms.
pub(super) async fn learn(call: &Call, lease: Lease) -> Result<Lease, Failure> {
    if suspect(lease.model()).is_none() {
        return Ok(lease);
    }
    let turn = call.service().rendering_turn(call.peer().uid, RENDERING_BYTES).await?;
    let work = move |call: &Call, ()| {
        let _turn = turn;
        // Another request may have asked while this one waited.
        let Some(source) = suspect(lease.model()) else { return Ok(lease) };
        let begun = Instant::now();
        let found = call.service().renderer.find(source, &THINKING_VARIABLES);
        call.service().text_time.charge(call.peer().uid, begun.elapsed());
        let found = match found {
            Err(error @ TemplateError::Process { .. }) => return Err(of_template(&error)),
            // A template that cannot be read renders no chat either, and a chat says why.
            Err(_) => None,
            Ok(found) => found,
        };
        let _ = lease.model().thinking.set(found);
        Ok(lease)
    };
    call.text_work(RENDERING_BYTES, |_| Ok(()), work).await
}

/// The template's text, if it may read such a variable and was not asked yet.
fn suspect(model: &Model) -> Option<&str> {
    let ChatTemplate::Source(source) = &model.chat_template else { return None };
    let named = || THINKING_VARIABLES.iter().any(|name| source.contains(name));
    (model.thinking.get().is_none() && named()).then_some(source)
}
