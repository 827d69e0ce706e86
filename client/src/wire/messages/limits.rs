//! Limits of single users, which an administrator changes at run time.

use serde::{Deserialize, Serialize};

use super::Ext;
use crate::wire::limits;
use crate::wire::validate::{any, extensions, list, nested, validate};

/// Changes the limits of one user until the daemon stops or a reload, or asks for limits. A field that is `None` stays
/// as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LimitUserRequest {
    /// The user; `None` asks for all users that have limits of their own.
    pub uid: Option<u32>,
    /// First drop what earlier requests set for the user: the configuration's limits hold again.
    pub clear: bool,
    /// Most token requests, loads to a device and subscriptions at once.
    pub requests: Option<u32>,
    /// Most open connections.
    pub connections: Option<u32>,
    /// Most model files passed by descriptor at a time.
    pub passed_models: Option<u32>,
    /// Share of the device's time while other users want it too; most have 100.
    pub share: Option<u32>,
    /// Extensions.
    pub ext: Ext,
}

/// The limits in force now.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LimitUserReply {
    /// The user of the request, or in order of uid all users that have limits of their own.
    pub users: Vec<UserLimitsEntry>,
    /// Extensions.
    pub ext: Ext,
}

/// Limits of one user.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UserLimitsEntry {
    /// The user.
    pub uid: u32,
    /// Most token requests, loads to a device and subscriptions at once.
    pub requests: LimitInForce,
    /// Most open connections.
    pub connections: LimitInForce,
    /// Most model files passed by descriptor at a time.
    pub passed_models: LimitInForce,
    /// Share of the device's time.
    pub share: LimitInForce,
    /// Extensions.
    pub ext: Ext,
}

/// A limit and its origin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LimitInForce {
    /// The value.
    pub value: u32,
    /// Its origin.
    pub origin: LimitOrigin,
}

/// The origin of a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LimitOrigin {
    /// It holds for every user.
    EveryUser,
    /// The configuration sets it for this user.
    Configuration,
    /// A request set it for this user.
    Request,
}

validate!(LimitUserRequest {
    uid: any,
    clear: any,
    requests: any,
    connections: any,
    passed_models: any,
    share: any,
    ext: extensions,
});
validate!(LimitUserReply { users: list(limits::USERS_MAX), ext: extensions });
validate!(UserLimitsEntry {
    uid: any,
    requests: nested,
    connections: nested,
    passed_models: nested,
    share: nested,
    ext: extensions,
});
validate!(LimitInForce { value: any, origin: any });
