//! Users' holdings of everything that they share.

use serde::{Deserialize, Serialize};

use super::{EXT_CRITICAL, Ext, ListRequest, UnloadRequest, number};
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
/// Bytes of the model files that the user passed.
pub const EXT_USER_PASSED_BYTES: u16 = 3;

/// Key of [`ListRequest`]'s and [`UnloadRequest`]'s `ext`, with a little-endian u64: the uid whose names are meant,
/// instead of the client's own.
pub const EXT_OF_USER: u16 = EXT_CRITICAL | 1;

/// Bytes of [`EXT_OF_USER`] that are no uid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("extension 0x8001 is a uid as u64, at most {max}", max = u32::MAX - 1)]
pub struct NoUid;

/// The user whose names a request means, if it is not the client's own.
fn of_user(ext: &Ext) -> Result<Option<u32>, NoUid> {
    if ext.iter().all(|(key, _)| *key != EXT_OF_USER) {
        return Ok(None);
    }
    let uid = number(ext, EXT_OF_USER).and_then(|uid| u32::try_from(uid).ok());
    uid.filter(|uid| *uid != u32::MAX).map(Some).ok_or(NoUid)
}

fn meant(uid: Option<u32>) -> Ext {
    uid.map(|uid| (EXT_OF_USER, u64::from(uid).to_le_bytes().to_vec())).into_iter().collect()
}

impl ListRequest {
    /// Asks for the names that a user has, after one of them; `None`: the client's own user.
    pub fn of(uid: Option<u32>, after: &str) -> Self {
        Self { after: after.to_owned(), ext: meant(uid) }
    }

    /// The user whose names are wanted, if it is not the client's own.
    ///
    /// # Errors
    /// [`NoUid`].
    pub fn of_user(&self) -> Result<Option<u32>, NoUid> {
        of_user(&self.ext)
    }
}

impl UnloadRequest {
    /// Unloads what a user calls `name`; `None`: the client's own user.
    pub fn of(uid: Option<u32>, name: &str, request_id: u128) -> Self {
        Self { name: name.to_owned(), request_id, ext: meant(uid) }
    }

    /// The user whose name is meant, if it is not the client's own.
    ///
    /// # Errors
    /// [`NoUid`].
    pub fn of_user(&self) -> Result<Option<u32>, NoUid> {
        of_user(&self.ext)
    }
}

impl UserEntry {
    /// Sessions of the user; 0 if the daemon does not say.
    pub fn sessions(&self) -> u64 {
        number(&self.ext, EXT_USER_SESSIONS).unwrap_or(0)
    }

    /// Bytes of the user's sessions; 0 if the daemon does not say.
    pub fn session_bytes(&self) -> u64 {
        number(&self.ext, EXT_USER_SESSION_BYTES).unwrap_or(0)
    }

    /// Bytes of the model files that the user passed; 0 if the daemon does not say.
    pub fn passed_bytes(&self) -> u64 {
        number(&self.ext, EXT_USER_PASSED_BYTES).unwrap_or(0)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Validate;

    #[test]
    fn a_request_means_the_clients_own_names_or_those_of_a_uid() {
        assert_eq!(ListRequest::default().of_user(), Ok(None));
        let list = ListRequest::of(Some(1001), "a");
        assert_eq!((list.of_user(), list.validate()), (Ok(Some(1001)), Ok(())));
        let unload = UnloadRequest::of(Some(0), "a", 7);
        assert_eq!((unload.of_user(), unload.validate()), (Ok(Some(0)), Ok(())));
        for bytes in
            [vec![], vec![1; 4], u64::MAX.to_le_bytes().to_vec(), u64::from(u32::MAX).to_le_bytes().to_vec()]
        {
            let list = ListRequest { after: String::new(), ext: vec![(EXT_OF_USER, bytes)] };
            assert_eq!((list.of_user(), list.validate()), (Err(NoUid), Ok(())));
        }
    }
}
