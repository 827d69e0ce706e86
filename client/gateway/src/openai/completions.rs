//! Completions of a text, without a chat template.

use std::sync::Arc;
use std::time::Instant;

use hyper::Response;
use rocmforge_client::random_request_id;
use rocmforge_client::wire::{DetokenizeRequest, GenerateRequest, Prompt, limits};
use serde_json::{Value, json};

use super::{Common, DONE, event, finish_reason, logprobs, usage};
use crate::Gateway;
use crate::clock::unix_seconds;
use crate::events::{self, Events};
use crate::failure::Failure;
use crate::generation::{Echo, Ended, Piece, Running, Wanted};
use crate::params::{Params, is_empty, refused};
use crate::reply::{Body, json};

/// Most new tokens of a request that names no number, as the API has it.
const MAX_TOKENS: u32 = 16;

/// Most likely tokens that the daemon reports.
const TOP_MAX: u32 = limits::TOP_LOGPROBS_MAX as u32;

/// `POST /v1/completions`
///
/// # Errors
/// Status 400 with the field at fault; errors of the daemon.
pub async fn completions(
    gateway: &Arc<Gateway>,
    mut params: Params,
    since: Instant,
) -> Result<Response<Body>, Failure> {
    let common = Common::take(&mut params)?;
    let prompt = prompt(&mut params)?;
    let echoes = params.flag("echo")?.unwrap_or(false);
    // A prompt alone, with its log-probabilities, is an echo without an answer.
    let max_tokens = params.whole("max_tokens", u32::from(!echoes)..=u32::MAX)?.unwrap_or(MAX_TOKENS);
    let top = params.whole("logprobs", 0..=TOP_MAX)?;
    params.only("suffix", is_empty)?;
    // The best of as many as are wanted are all of them.
    params.only("best_of", |best_of| best_of == common.count)?;
    params.finish()?;
    let mut request = GenerateRequest::new(&common.model, prompt);
    let echo = if echoes {
        Some(Echo { text: text_of(gateway, &request).await?, alone: max_tokens == 0 })
    } else {
        None
    };
    request.max_tokens = max_tokens.max(1);
    request.sampling = common.sampling;
    request.sampling.top_logprobs = top.map_or(0, |top| top.max(1));
    request.stop = common.stop;
    let mut request = common.steering.fill(request);
    if let Some(top) = top.filter(|_| echoes) {
        request = request.with_scores(u8::try_from(top).unwrap_or(u8::MAX));
    }
    let wanted = Wanted { request, tokens: top.is_some(), stop_text: false, reader: None, echo };
    let mut running = Running::start_several(gateway, wanted, common.count, since).await?;
    let (id, created) = (format!("cmpl-{:032x}", random_request_id()), unix_seconds());
    let chunks = |index: usize| Chunks {
        index,
        id: id.clone(),
        created,
        model: common.model.clone(),
        top: top.map(|top| top as usize),
        include_usage: common.include_usage,
        offset: 0,
    };
    if common.stream {
        let answers = running.into_iter().enumerate().map(|(index, running)| (running, chunks(index)));
        return Ok(events::responses(answers.collect()));
    }
    let answers = Running::whole_of(&mut running).await?;
    let choice = |(index, (piece, ended)): (usize, &(Piece, Ended))| {
        chunks(index).choice(Some(piece), Some(finish_reason(ended.reason)))
    };
    let choices = answers.iter().enumerate().map(choice).collect();
    let mut whole = chunks(0).object(choices);
    whole["usage"] = usage(answers.iter().map(|(_, ended)| ended));
    Ok(json(&whole))
}

/// The text of a request's prompt.
async fn text_of(gateway: &Gateway, request: &GenerateRequest) -> Result<String, Failure> {
    match &request.prompt {
        Prompt::Text(text) => Ok(text.clone()),
        Prompt::Ids(ids) => {
            let (model, ids) = (request.model.clone(), ids.clone());
            let request = DetokenizeRequest { model, ids, show_special: false, ext: vec![] };
            Ok(gateway.client.call(&request).await?.text)
        }
        Prompt::Chat(_) => Ok(String::new()), // completions have none
    }
}

/// One prompt: a text, token ids, or a list of one of these.
fn prompt(params: &mut Params) -> Result<Prompt, Failure> {
    const PLACE: &str = "prompt";
    let value = params.take(PLACE).ok_or_else(|| params.refuse(PLACE, "it is required"))?;
    let list = match value {
        Value::String(text) => return Ok(Prompt::Text(text)),
        Value::Array(list) => list,
        _ => return Err(refused(PLACE, "it is neither a string nor a list")),
    };
    if list.first().is_some_and(Value::is_number) {
        return ids(list);
    }
    let count = list.len();
    match <[Value; 1]>::try_from(list) {
        Ok([Value::String(text)]) => Ok(Prompt::Text(text)),
        Ok([Value::Array(list)]) => ids(list),
        Ok(_) => Err(refused(PLACE, "its element is neither a string nor a list of token ids")),
        Err(_) => {
            Err(refused(PLACE, format!("{count} prompts in one request cannot be honoured here: send one")))
        }
    }
}

fn ids(list: Vec<Value>) -> Result<Prompt, Failure> {
    let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    let ids: Option<Vec<u32>> = list.iter().map(id).collect();
    ids.map(Prompt::Ids).ok_or_else(|| refused("prompt", "a token id is no whole number of 32 bits"))
}

/// The events of an answer, and its whole form.
struct Chunks {
    /// The answer's number.
    index: usize,
    id: String,
    created: u64,
    model: String,
    top: Option<usize>,
    include_usage: bool,
    /// Characters of the tokens so far.
    offset: usize,
}

impl Chunks {
    fn choice(&mut self, piece: Option<&Piece>, finish_reason: Option<&str>) -> Value {
        let logprobs = piece.and_then(|piece| {
            self.top.map(|top| logprobs::of_completion(&piece.tokens, top, &mut self.offset))
        });
        json!({
            "index": self.index,
            "text": piece.map_or("", |piece| &piece.text),
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        })
    }

    fn object(&self, choices: Vec<Value>) -> Value {
        json!({
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        })
    }

    fn chunk(&self, mut chunk: Value) -> String {
        if self.include_usage {
            chunk["usage"] = Value::Null;
        }
        event(&chunk)
    }
}

impl Events for Chunks {
    const CONTENT_TYPE: &'static str = "text/event-stream";

    fn begin(&mut self, _prompt_tokens: usize) -> String {
        String::new()
    }

    fn piece(&mut self, piece: &Piece) -> String {
        let choice = self.choice(Some(piece), None);
        self.chunk(self.object(vec![choice]))
    }

    fn end(&mut self, ended: &Ended) -> String {
        let choice = self.choice(None, Some(finish_reason(ended.reason)));
        self.chunk(self.object(vec![choice]))
    }

    fn after_all(&mut self, all: &[Ended]) -> String {
        let mut events = String::new();
        if self.include_usage {
            let mut last = self.object(Vec::new());
            last["usage"] = usage(all);
            events += &event(&last);
        }
        events + DONE
    }

    fn failed(&mut self, failure: &Failure) -> String {
        event(&failure.body(crate::api::Api::OpenAi))
    }
}
