//! Turns a client's prompt into checked token ids.

use std::time::Instant;

use rocmforge_client::wire::{ErrorCode, GenerateRequest, Prompt};

use super::Call;
use super::continued::{Earlier, said};
use super::error::{Failure, failure, of_extras, of_session, of_template};
use super::extras::Extras;
use super::text::check_ids;
use crate::model::pair;
use crate::model::store::Lease;
use crate::model::template::{Message, SOURCE_BYTES_MAX, TemplateError, TemplateRequest};
use crate::model::tokenizer::{EncodeOptions, Tokenizer};
use crate::model::{ChatTemplate, Model};
use crate::prefixes::sessions::Said;

/// Bytes of the first item reserved for everything but the prompt's ids. With the largest frames, `IDS_MAX` ids still
/// fit.
const FIRST_ITEM_BYTES: usize = 4096;

/// Rendering a template takes about as long as tokenising this many bytes: 10 ms.
pub(super) const RENDERING_BYTES: usize = 50_000;

/// Most ids and bytes of text of a prompt that a runtime thread checks and encodes itself. The longest take 10 and 100 us;
/// hops to other threads and back take 130 us.
const IDS_AT_ONCE: usize = 4096;
const TEXT_AT_ONCE: usize = 512;

/// Some templates begin the answer with this mark.
const REASONING: &str = "<think>";

/// A request that was checked against the model and the limits.
pub(super) struct ValidRequest {
    pub lease: Lease,
    pub prompt: Vec<u32>,
    pub max_tokens: u32,
    pub context_tokens: u32,
    /// Whether the prompt ends with the begin mark of a reasoning.
    pub in_reasoning: bool,
    /// All messages of a chat that goes on with a session.
    pub conversation: Option<Vec<Said>>,
}

/// The request's further values for the chat template.
pub(super) fn extras(request: &GenerateRequest) -> Result<Option<String>, Failure> {
    let bad = |text: &str| failure(ErrorCode::InvalidArgument, text);
    let Some(extras) = request.chat_extras().map_err(|error| bad(&error.to_string()))? else {
        return Ok(None);
    };
    if !matches!(request.prompt, Prompt::Chat(_)) {
        return Err(bad(
            "tools, fields and variables are for the template of a chat: send messages, or leave them out",
        ));
    }
    if !matches!(request.session(), Ok(None)) {
        return Err(bad(
            "a session keeps roles and texts alone: send all messages, and leave the session out",
        ));
    }
    Ok(Some(extras.to_owned()))
}

/// Maps the model if necessary, turns the prompt into ids, and checks everything against the model. With a session, the
/// prompt follows on its content.
pub(super) async fn prepare(
    call: &Call,
    name: String,
    prompt: Prompt,
    extras: Option<String>,
    max_tokens: u32,
    earlier: Option<Earlier>,
) -> Result<ValidRequest, Failure> {
    let uid = call.peer().uid;
    let messages = match prompt {
        Prompt::Chat(messages) => messages,
        Prompt::Ids(ids) => {
            let at_once = earlier.is_none() && ids.len() <= IDS_AT_ONCE;
            if let Some(lease) = at_once.then(|| call.service().store.acquire_now(uid, &name)).flatten() {
                return valid_request(call, lease, ids, max_tokens, false);
            }
            let work = move |call: &Call| {
                let lease = acquire(call, &name, earlier.as_ref())?;
                let ids = following(earlier.as_ref(), |_| ids)?;
                valid_request(call, lease, ids, max_tokens, earlier.is_some())
            };
            return call.blocking(work).await;
        }
        Prompt::Text(text) => {
            let bytes = text.len();
            if let Some((lease, ids)) = text_at_once(call, &name, &text, earlier.as_ref()) {
                return valid_request(call, lease, ids, max_tokens, false);
            }
            let open = earlier.clone();
            let work = move |call: &Call, lease: Lease| {
                // Special tokens belong to the start of a session alone.
                let ids =
                    following(earlier.as_ref(), |add_special| encoded(lease.model(), &text, add_special))?;
                valid_request(call, lease, ids, max_tokens, earlier.is_some())
            };
            return call.text_work(bytes, move |call| acquire(call, &name, open.as_ref()), work).await;
        }
    };
    let (lease, mut request, extras, conversation, messages_bytes) = call
        .blocking(move |call| {
            let lease = acquire(call, &name, earlier.as_ref())?;
            let mut all: Vec<Said> = match &earlier {
                Some(earlier) => earlier.messages().map_err(|error| of_session(&error))?,
                None => Vec::new(),
            };
            all.extend(messages.into_iter().map(said));
            let bytes = all.iter().map(|message| message.content.len()).sum::<usize>();
            let bytes = bytes.saturating_add(extras.as_ref().map_or(0, String::len));
            let conversation = earlier.map(|_| all.clone());
            let request = template_request(lease.model(), all)?;
            Ok((lease, request, extras, conversation, bytes))
        })
        .await?;
    // The model is open and has a template: only requests that will be rendered wait for a turn.
    let bytes = messages_bytes.saturating_add(RENDERING_BYTES);
    let turn = call.service().rendering_turn(call.peer().uid, bytes).await?;
    let work = move |call: &Call, ()| {
        let begun = Instant::now();
        // The values take much more memory than their text, and only requests with a turn have them.
        let read = extras.map(|json| Extras::read(&json, request.messages.len())).transpose();
        let text = match read {
            Ok(extras) => {
                extras.unwrap_or_default().fill(&mut request);
                call.service().renderer.render(&request).map_err(|error| of_template(&error))
            }
            Err(error) => Err(of_extras(&error)),
        };
        call.service().text_time.charge(call.peer().uid, begun.elapsed());
        drop((turn, request));
        let text = text?;
        let ids = rendered_ids(&lease.model().tokenizer, &text);
        let in_reasoning = text.trim_end().ends_with(REASONING);
        let valid = valid_request(call, lease, ids, max_tokens, conversation.is_some())?;
        Ok(ValidRequest { conversation, in_reasoning, ..valid })
    };
    call.text_work(bytes, |_| Ok(()), work).await
}

/// As [`prepare`], for a query, which is a text, and a document that the model reads after it.
pub(super) async fn pair(
    call: &Call,
    name: String,
    query: Prompt,
    document: String,
) -> Result<ValidRequest, Failure> {
    let Prompt::Text(query) = query else {
        return Err(failure(ErrorCode::InvalidArgument, "a query is text"));
    };
    let bytes = query.len().saturating_add(document.len()).saturating_add(pair::SOURCE_BYTES_MAX);
    let work = move |call: &Call, lease: Lease| {
        let ids = lease.model().encode_pair(&query, &document);
        let ids = ids.map_err(|error| failure(ErrorCode::TemplateFailed, &error.to_string()))?;
        valid_request(call, lease, ids, 1, false)
    };
    call.text_work(bytes, move |call| acquire(call, &name, None), work).await
}

/// The model of that name and the text's ids, if that takes about as long as one thread hop would. The user pays as for other
/// texts.
fn text_at_once(call: &Call, name: &str, text: &str, earlier: Option<&Earlier>) -> Option<(Lease, Vec<u32>)> {
    if earlier.is_some() || text.len() > TEXT_AT_ONCE {
        return None;
    }
    let (service, uid) = (call.service(), call.peer().uid);
    let _claim = service.text_time.claim(uid, text.len())?;
    let lease = service.store.acquire_now(uid, name)?;
    let ids = encoded(lease.model(), text, true);
    Some((lease, ids))
}

fn encoded(model: &Model, text: &str, add_special: bool) -> Vec<u32> {
    model.tokenizer.encode(text, EncodeOptions { add_special, parse_special: false })
}

/// The model of that name, which must be the session's.
fn acquire(call: &Call, name: &str, earlier: Option<&Earlier>) -> Result<Lease, Failure> {
    let (lease, _) = call.acquire(name)?;
    let checked = earlier.map_or(Ok(()), |earlier| earlier.check(lease.model()));
    checked.map(|()| lease).map_err(|error| of_session(&error))
}

/// The session's tokens and then those of the prompt, which is told whether it is at the start.
fn following(earlier: Option<&Earlier>, prompt: impl FnOnce(bool) -> Vec<u32>) -> Result<Vec<u32>, Failure> {
    let tokens = earlier.map_or_else(|| Ok(Vec::new()), Earlier::tokens);
    let mut ids = tokens.map_err(|error| of_session(&error))?;
    if ids.is_empty() {
        return Ok(prompt(true));
    }
    ids.extend(prompt(false));
    Ok(ids)
}

fn valid_request(
    call: &Call,
    lease: Lease,
    prompt: Vec<u32>,
    max_tokens: u32,
    of_session: bool,
) -> Result<ValidRequest, Failure> {
    let service = call.service();
    let model = lease.model();
    check_ids(&prompt, model.plan.program.vocab())?;
    check_frame(&prompt, call.connection.limits.max_frame)?;
    if prompt.is_empty() {
        return Err(failure(ErrorCode::EmptyPrompt, "the prompt has no tokens: a model needs at least one"));
    }
    let context_tokens = model.plan.context_length.min(service.settings.context_tokens);
    let prompt_tokens = u32::try_from(prompt.len()).unwrap_or(u32::MAX);
    // An encoder has no answer that needs room.
    let encodes = model.plan.program.encoder().is_some();
    if prompt_tokens >= context_tokens.saturating_add(encodes.into()) {
        let (own, limit) = (model.plan.context_length, service.settings.context_tokens);
        let lacks =
            if encodes { "an encoder reads a text whole" } else { "which leaves no room for an answer" };
        let (what, advice) = if of_session {
            ("the session with this prompt", "forget the session, start another,")
        } else {
            ("the prompt", "shorten the prompt")
        };
        let text = format!(
            "{what} has {prompt_tokens} tokens and the context has {context_tokens} (model {own}, limits.context_tokens \
             {limit}), {lacks}: {advice} or raise the limit"
        );
        let error = failure(ErrorCode::PromptTooLong, &text);
        return Err(error
            .with_detail("prompt_tokens", prompt_tokens)
            .with_detail("context_tokens", context_tokens));
    }
    let max_tokens = if max_tokens == 0 { u32::MAX } else { max_tokens };
    Ok(ValidRequest { lease, prompt, max_tokens, context_tokens, in_reasoning: false, conversation: None })
}

/// The first item carries all ids of the prompt: refuses a prompt whose ids do not fit the client's frames before any
/// work.
fn check_frame(prompt: &[u32], payload_bytes_max: u32) -> Result<(), Failure> {
    let fit = (payload_bytes_max as usize).saturating_sub(FIRST_ITEM_BYTES) / size_of::<u32>();
    if prompt.len() <= fit {
        return Ok(());
    }
    let text = format!(
        "the prompt has {} tokens, but the connection's max_frame of {payload_bytes_max} bytes holds only {fit} ids: \
         connect with a larger max_frame",
        prompt.len()
    );
    Err(failure(ErrorCode::LimitExceeded, &text))
}

/// The template and its input for a chat.
fn template_request(model: &Model, messages: Vec<Said>) -> Result<TemplateRequest, Failure> {
    let template = match &model.chat_template {
        ChatTemplate::Source(source) => source,
        ChatTemplate::Absent => {
            let text = "the model's file has no chat template: send the prompt as text, in the format that the model was trained on";
            return Err(failure(ErrorCode::NoChatTemplate, text));
        }
        ChatTemplate::TooLong { bytes } => {
            let limit = SOURCE_BYTES_MAX;
            return Err(of_template(&TemplateError::SourceTooLong { bytes: *bytes, limit }));
        }
    };
    let messages = messages.into_iter().map(|message| Message::new(message.role, message.content)).collect();
    Ok(TemplateRequest::new(template.as_str(), messages).with_tokens_of(&model.tokenizer))
}

/// Ids of a rendered conversation; special tokens in the text are parsed. If the vocabulary wants a beginning of
/// sequence, the result has exactly one, whether or not the template wrote it.
fn rendered_ids(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    let mut ids = tokenizer.encode(text, EncodeOptions { add_special: false, parse_special: true });
    let added = tokenizer.encode("", EncodeOptions { add_special: true, parse_special: false });
    if let Some(bos) = tokenizer.bos().filter(|bos| added.first() == Some(bos) && ids.first() != Some(bos)) {
        ids.insert(0, bos);
    }
    ids
}

#[cfg(test)]
mod tests {
    use rocmforge_client::wire;

    use super::*;

    #[test]
    fn a_prompt_whose_ids_do_not_fit_the_first_item_is_refused() {
        let fit = (65536 - FIRST_ITEM_BYTES) / 4;
        assert_eq!(check_frame(&vec![0; fit], 65536), Ok(()));
        let error = check_frame(&vec![0; fit + 1], 65536).unwrap_err();
        assert_eq!(error.code, ErrorCode::LimitExceeded as u16);
        let max = wire::limits::IDS_MAX;
        assert_eq!(
            check_frame(&vec![0; max], wire::PAYLOAD_BYTES_MAX),
            Ok(()),
            "never with the largest frames"
        );
    }
}
