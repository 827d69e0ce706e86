//! Requests that go on with a session, and requests about sessions.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rocmforge_client::wire::{
    ChatMessage, ErrorCode, Ext, ForgetSessionReply, ForgetSessionRequest, GenerateRequest, SessionEntry,
    SessionScope, SessionsReply, limits,
};

use super::Call;
use super::error::{Failure, failure, of_session};
use super::prompt::ValidRequest;
use super::sessions::{After, Before, Listed, SessionError, Use};
use crate::model::Model;
use crate::prefixes::fingerprint;
use crate::prefixes::sessions::{Content, Said};
use crate::scheduler::{Outcome, TokenBatch};

/// The role of answers in a chat.
const ASSISTANT: &str = "assistant";

/// The session that a request goes on with, as the preparation of its prompt sees it.
#[derive(Clone, Debug)]
pub(super) struct Earlier {
    name: String,
    model: String,
    before: Option<Before>,
}

impl Earlier {
    /// Refuses a model whose file is not the one that the session began with.
    pub fn check(&self, model: &Model) -> Result<(), SessionError> {
        match &self.before {
            Some(before) if before.fingerprint != fingerprint(model) => {
                let (name, model) = (self.name.clone(), self.model.clone());
                Err(SessionError::OtherFile { name, model })
            }
            _ => Ok(()),
        }
    }

    /// A copy of the session's tokens.
    pub fn tokens(&self) -> Result<Vec<u32>, SessionError> {
        match self.before.as_ref().map(|before| &*before.content) {
            None => Ok(Vec::new()),
            Some(Content::Tokens(ids)) => Ok(ids.clone()),
            Some(Content::Chat(_)) => Err(self.other_kind("chat messages", "text or token ids")),
        }
    }

    /// A copy of the session's messages.
    pub fn messages(&self) -> Result<Vec<Said>, SessionError> {
        match self.before.as_ref().map(|before| &*before.content) {
            None => Ok(Vec::new()),
            Some(Content::Chat(messages)) => Ok(messages.clone()),
            Some(Content::Tokens(_)) => Err(self.other_kind("tokens of texts or ids", "a chat")),
        }
    }

    fn other_kind(&self, has: &'static str, wanted: &'static str) -> SessionError {
        SessionError::OtherKind { name: self.name.clone(), has, wanted }
    }
}

/// A request's use of a session, with what is to become of it.
#[derive(Debug)]
pub(super) struct Continued {
    used: Use,
    /// The session with the request's prompt, and with the answer's tokens so far.
    content: Content,
    /// Text of the answer so far.
    text: String,
}

impl Continued {
    /// Begins the use of the session that the request names, if it names one.
    pub fn begin(call: &Call, request: &GenerateRequest) -> Result<Option<Self>, Failure> {
        let name =
            request.session().map_err(|error| failure(ErrorCode::InvalidArgument, &error.to_string()))?;
        let Some(name) = name else { return Ok(None) };
        let used = call.service().sessions.begin(call.peer().uid, name, &request.model);
        let used = used.map_err(|error| of_session(&error))?;
        Ok(Some(Self { used, content: Content::Tokens(Vec::new()), text: String::new() }))
    }

    /// The session before the request.
    pub fn earlier(&self, model: &str) -> Earlier {
        let name = self.used.name().to_owned();
        Earlier { name, model: model.to_owned(), before: self.used.before().cloned() }
    }

    /// Makes room for the session with the request's prompt.
    pub fn asked(&mut self, valid: &mut ValidRequest) -> Result<(), Failure> {
        self.content = match valid.conversation.take() {
            Some(messages) => Content::Chat(messages),
            None => Content::Tokens(valid.prompt.clone()),
        };
        self.used.reserve(&self.content).map_err(|error| of_session(&error))
    }

    /// Takes a part of the answer.
    pub fn answered(&mut self, batch: &TokenBatch) {
        match &mut self.content {
            Content::Tokens(ids) => ids.extend_from_slice(&batch.ids),
            Content::Chat(_) => self.text.push_str(&batch.text),
        }
    }

    /// Changes the session: its request has ended well. Returns the tokens that it now has.
    pub fn commit(self, model: &Model, outcome: &Outcome) -> Result<u64, Failure> {
        let Self { used, mut content, mut text } = self;
        if let Content::Chat(messages) = &mut content {
            text.push_str(&outcome.text);
            messages.push(Said { role: ASSISTANT.to_owned(), content: text });
        }
        let tokens = u64::from(outcome.prompt_tokens) + u64::from(outcome.generated_tokens);
        let after = After {
            fingerprint: fingerprint(model),
            content,
            tokens,
            now: Instant::now(),
            aged: Duration::ZERO,
        };
        used.commit(after).map_err(|error| {
            let failed = of_session(&error);
            let message = format!("the answer is whole, but its session stays as it was: {}", failed.message);
            Failure { message, ..failed }
        })
    }
}

/// A message of a request, for the table.
pub(super) fn said(message: ChatMessage) -> Said {
    Said { role: message.role, content: message.content }
}

/// The sessions of the client's own user.
pub(super) async fn sessions(call: Call) -> Result<SessionsReply, Failure> {
    let sessions = call.service().sessions.list(call.peer().uid, Instant::now());
    let entries = sessions.into_iter().take(limits::SESSIONS_MAX).map(entry);
    Ok(SessionsReply { sessions: entries.collect(), ext: Ext::new() })
}

fn entry(session: Listed) -> SessionEntry {
    let Listed { name, model, messages, tokens, age, bytes, in_use } = session;
    let messages = messages.map(|messages| u32::try_from(messages).unwrap_or(u32::MAX));
    let age_ms = u64::try_from(age.as_millis()).unwrap_or(u64::MAX);
    SessionEntry { name, model, messages, tokens, age_ms, bytes, in_use, ext: Ext::new() }
}

/// Forgets a session of the client's own user, or all.
pub(super) async fn forget(call: Call, request: ForgetSessionRequest) -> Result<ForgetSessionReply, Failure> {
    let name = match &request.scope {
        SessionScope::All => None,
        SessionScope::Name(name) => Some(name.as_str()),
    };
    let forgotten = Arc::clone(&call.service().sessions).forget(call.peer().uid, name);
    let forgotten = forgotten.map_err(|error| of_session(&error))?;
    Ok(ForgetSessionReply { forgotten: u32::try_from(forgotten).unwrap_or(u32::MAX), ext: Ext::new() })
}

#[cfg(test)]
mod tests {
    use rocmforge_client::wire;

    use super::*;

    #[test]
    fn a_users_sessions_with_the_longest_names_fit_the_smallest_payload() {
        let longest = Listed {
            name: "n".repeat(limits::LABEL_BYTES_MAX),
            model: "m".repeat(limits::NAME_BYTES_MAX),
            messages: Some(usize::MAX),
            tokens: u64::MAX,
            age: Duration::MAX,
            bytes: u64::MAX,
            in_use: true,
        };
        let sessions = vec![entry(longest); limits::SESSIONS_MAX];
        let encoded = wire::encode(&SessionsReply { sessions, ext: Ext::new() }).unwrap();
        assert!(encoded.len() <= wire::PAYLOAD_BYTES_MIN as usize, "{}", encoded.len());
    }
}
