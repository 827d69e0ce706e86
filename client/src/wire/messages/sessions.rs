//! Sessions: prompts and answers that later requests go on with.

use serde::{Deserialize, Serialize};

use super::Ext;
use crate::wire::limits;
use crate::wire::validate::{Validate, Violation, any, extensions, list, nested, text, validate};

/// Asks for the sessions of the client's own user.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionsRequest {
    /// Extensions.
    pub ext: Ext,
}

/// The sessions of the client's own user.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionsReply {
    /// All of them, by name.
    pub sessions: Vec<SessionEntry>,
    /// Extensions.
    pub ext: Ext,
}

/// One session.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionEntry {
    /// Its name.
    pub name: String,
    /// Name of the only model that it can be used with.
    pub model: String,
    /// Number of its chat messages; `None` for a session of token ids, whose prompts were texts or ids.
    pub messages: Option<u32>,
    /// Tokens after its last request: prompt and answer.
    pub tokens: u64,
    /// Milliseconds since its last request ended.
    pub age_ms: u64,
    /// Bytes that count against the user's quota.
    pub bytes: u64,
    /// A request uses it now.
    pub in_use: bool,
    /// Extensions.
    pub ext: Ext,
}

/// Forgets sessions of the client's own user.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForgetSessionRequest {
    /// The session or sessions to forget.
    pub scope: SessionScope,
    /// Extensions.
    pub ext: Ext,
}

/// The session or sessions to forget.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum SessionScope {
    /// All of the client's own user.
    #[default]
    All,
    /// The one of that name.
    Name(String),
}

/// The forgotten sessions.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForgetSessionReply {
    /// Number of forgotten sessions.
    pub forgotten: u32,
    /// Extensions.
    pub ext: Ext,
}

validate!(SessionsRequest { ext: extensions });
validate!(SessionsReply { sessions: list(limits::SESSIONS_MAX), ext: extensions });
validate!(SessionEntry {
    name: text(limits::LABEL_BYTES_MAX),
    model: text(limits::NAME_BYTES_MAX),
    messages: any,
    tokens: any,
    age_ms: any,
    bytes: any,
    in_use: any,
    ext: extensions,
});
validate!(ForgetSessionRequest { scope: nested, ext: extensions });
validate!(ForgetSessionReply { forgotten: any, ext: extensions });

impl Validate for SessionScope {
    fn validate(&self) -> Result<(), Violation> {
        match self {
            Self::All => Ok(()),
            Self::Name(name) => text(limits::LABEL_BYTES_MAX)(name, ("SessionScope", "Name")),
        }
    }
}
