//! The table `limits`: bounds on client requests, for all users and for single ones.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::ConfigError;
use crate::share::limits::{OfEveryUser, OfOneUser, USERS_MAX};

/// Bounds on client requests.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Most positions of one sequence, unless the model's own context length is less. 16 to 131072.
    pub context_tokens: u32,
    /// Most open connections in all.
    pub connections: u32,
    /// Most open connections of one uid.
    pub connections_per_uid: u32,
    /// Most queued token requests in all.
    pub queued: u32,
    /// Most token requests, loads to a device and subscriptions of one uid at once, queued and running.
    pub requests_per_uid: u32,
    /// Most sequences that run at once. 0: suited to the device.
    pub running: u32,
    /// Most token rows of one step; longer prompts are split into such chunks. 0: suited to the device.
    pub step_rows: u32,
    /// Most memory for payloads of unanswered requests, in MiB, and as much for unread answers. Users share it.
    pub request_mib: u64,
    /// Most memory for headers of mapped models, in MiB. Users share it.
    pub header_mib: u64,
    /// Most model files that one uid may have passed by descriptor at a time. 0: the kernel drops descriptors on arrival.
    pub passed_models_per_uid: u32,
    /// Whether clients may pass files of network and user file systems, whose servers may hang. They are copied into memory.
    /// With them, files in memory without a name or with holes are allowed.
    pub passed_remote_files: bool,
    /// Limits of single users, by name or uid. They take the place of those for each uid above.
    pub users: BTreeMap<String, UserConfig>,
    /// Seconds that running answers get to finish when the daemon stops; it ends within two more.
    pub drain_s: u32,
}

/// Limits of one user; a key that is left out is as for every user.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct UserConfig {
    /// Most token requests, loads to a device and subscriptions at once; 0: none. In place of `requests_per_uid`.
    pub requests: Option<u32>,
    /// Most open connections, at least 1. In place of `connections_per_uid`.
    pub connections: Option<u32>,
    /// Most model files passed by descriptor at a time; 0: none. In place of `passed_models_per_uid`.
    pub passed_models: Option<u32>,
    /// Share of the device's time while other users want it too, 1 to 1000; that of others is 100.
    pub share: Option<u32>,
}

impl UserConfig {
    /// The limits as the daemon keeps them.
    pub fn limits(&self) -> OfOneUser {
        let Self { requests, connections, passed_models, share } = *self;
        OfOneUser { requests, connections, passed_models, share }
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            context_tokens: 8192,
            // Each takes one descriptor and, when idle, about 10 KiB; LimitNOFILE of the unit is 65536.
            connections: 8192,
            connections_per_uid: 4096,
            queued: 4096,
            requests_per_uid: 1024,
            running: 0,
            step_rows: 0,
            request_mib: 256,
            header_mib: 1024,
            passed_models_per_uid: 64,
            passed_remote_files: false,
            users: BTreeMap::new(),
            drain_s: 8,
        }
    }
}

impl Limits {
    /// The limits of every user without one of its own.
    pub fn of_every_user(&self) -> OfEveryUser {
        OfEveryUser {
            requests: self.requests_per_uid,
            connections: self.connections_per_uid,
            passed_models: self.passed_models_per_uid,
        }
    }

    /// Checks the limits of single users.
    pub(super) fn check_users(&self) -> Result<(), ConfigError> {
        if self.users.len() > USERS_MAX {
            let (value, max) = (self.users.len() as u64, USERS_MAX as u64);
            return Err(ConfigError::Range { key: "limits.users: number of users", value, min: 0, max });
        }
        for (name, user) in &self.users {
            let of_user = |source| ConfigError::UserLimit { name: name.clone(), source };
            user.limits().check().map_err(of_user)?;
        }
        Ok(())
    }
}
