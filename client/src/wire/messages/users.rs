//! Users' holdings of everything that they share.

use serde::{Deserialize, Serialize};

use super::{Ext, number};
use crate::wire::limits;
use crate::wire::validate::{any, extensions, list, validate};

/// Asks what users hold: the client's own user, or all of them if the policy lets it see others' requests.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsersRequest {
    /// Only users with a uid above this one; `None`: from the first.
    pub after: Option<u32>,
    /// Extensions.
    pub ext: Ext,
}

/// Holdings of users.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsersReply {
    /// Users that hold anything and the client's own, by rising uid, as many as fit.
    pub users: Vec<UserEntry>,
    /// There are more: ask again with the last uid.
    pub more: bool,
    /// Extensions.
    pub ext: Ext,
}

/// One user's holdings.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UserEntry {
    /// The user.
    pub uid: u32,
    /// Open connections.
    pub connections: u64,
    /// Open requests of any kind.
    pub requests: u64,
    /// Bytes of payloads of open requests.
    pub request_bytes: u64,
    /// Bytes of answers that its clients have not read.
    pub answer_bytes: u64,
    /// Descriptors in open requests.
    pub descriptors: u64,
    /// Model files passed by descriptor.
    pub passed_models: u64,
    /// Bytes that the headers of these files take.
    pub header_bytes: u64,
    /// Requests for tokens, running and waiting.
    pub sequences: u64,
    /// KV pages of these requests.
    pub kv_pages: u64,
    /// Microseconds of processor time for texts and headers that the user's allowance has yet to make up for.
    pub text_us: u64,
    /// Microseconds of processor time for frames that the user's allowance has yet to make up for.
    pub frame_us: u64,
    /// Microseconds of device time a second, over about the last ten seconds.
    pub device_us_per_s: u64,
    /// Extensions.
    pub ext: Ext,
}

/// Keys of [`UserEntry`]'s `ext`, each with a little-endian u64; absent for 0. The user's sessions.
pub const EXT_USER_SESSIONS: u16 = 1;
/// Bytes of these sessions.
pub const EXT_USER_SESSION_BYTES: u16 = 2;

impl UserEntry {
    /// Sessions of the user; 0 if the daemon does not say.
    pub fn sessions(&self) -> u64 {
        number(&self.ext, EXT_USER_SESSIONS).unwrap_or(0)
    }

    /// Bytes of the user's sessions; 0 if the daemon does not say.
    pub fn session_bytes(&self) -> u64 {
        number(&self.ext, EXT_USER_SESSION_BYTES).unwrap_or(0)
    }
}

validate!(UsersRequest { after: any, ext: extensions });
validate!(UsersReply { users: list(limits::USERS_MAX), more: any, ext: extensions });
validate!(UserEntry {
    uid: any,
    connections: any,
    requests: any,
    request_bytes: any,
    answer_bytes: any,
    descriptors: any,
    passed_models: any,
    header_bytes: any,
    sequences: any,
    kv_pages: any,
    text_us: any,
    frame_us: any,
    device_us_per_s: any,
    ext: extensions,
});
