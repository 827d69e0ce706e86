//! The command about users' limits.

use std::io;

use clap::Args;
use rocmforge_client::Client;
use rocmforge_client::wire::{LimitInForce, LimitOrigin, LimitUserReply, LimitUserRequest, UserLimitsEntry};

use super::report::{Failure, Output};
use super::tables::{Out, table};

const LIMIT_HELP: &str = "\
Needs the right policy.manage, which administrators have. Limits that you set here last until the
daemon stops or reads its configuration again; limits.users of the configuration sets lasting ones.
What a user holds already stays its own: a lower limit refuses only what comes next.
Without a user, shows all users with limits of their own; without options, the user's limits.

Examples:
  rocmforge-client limit alice --requests 2 --share 50
  rocmforge-client limit 1000 --clear
  rocmforge-client limit --json | jq '.users[] | {uid, requests: .requests.value}'";

/// Limit what a user may take.
#[derive(Debug, Args)]
#[command(after_help = LIMIT_HELP)]
pub struct LimitArguments {
    /// The user, by name or uid
    #[arg(value_name = "UID|NAME")]
    pub user: Option<String>,
    /// Most requests for tokens, loads to a device and subscriptions at once, 0 to 1048576; 0: none
    #[arg(long, value_name = "N", allow_negative_numbers = true, requires = "user")]
    pub requests: Option<u32>,
    /// Most open connections, 1 to 60000
    #[arg(long, value_name = "N", allow_negative_numbers = true, requires = "user")]
    pub connections: Option<u32>,
    /// Most model files passed to the daemon at a time, 0 to 4096; 0: none
    #[arg(long, value_name = "N", allow_negative_numbers = true, requires = "user")]
    pub passed_models: Option<u32>,
    /// Share of the device's time while other users want it too, 1 to 1000; users without one have 100
    #[arg(long, value_name = "N", allow_negative_numbers = true, requires = "user")]
    pub share: Option<u32>,
    /// First drop what was set here before: the configuration's limits hold again
    #[arg(long, requires = "user")]
    pub clear: bool,
}

/// Changes or shows limits.
pub fn run(client: &Client, arguments: &LimitArguments, output: Output) -> Result<(), Failure> {
    let request = LimitUserRequest {
        uid: arguments.user.as_deref().map(uid_of).transpose()?,
        clear: arguments.clear,
        requests: arguments.requests,
        connections: arguments.connections,
        passed_models: arguments.passed_models,
        share: arguments.share,
        ext: vec![],
    };
    output.show(&client.limit_user(&request)?, limits)
}

/// The uid of a user, given by uid or by its name in /etc/passwd.
fn uid_of(user: &str) -> Result<u32, Failure> {
    let passwd = || std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    match user.parse() {
        // The kernel keeps the greatest number for no user.
        Ok(u32::MAX) => {
            Err(Failure::usage(&format!("uid {user} is nobody's: give one of 0 to {}", u32::MAX - 1)))
        }
        Ok(uid) => Ok(uid),
        Err(_) => rocmforge_client::uid_of(user, &passwd()).ok_or_else(|| {
            Failure::usage(&format!(
                "{user:?} is no user in /etc/passwd: give a name that is there, or a uid"
            ))
        }),
    }
}

fn limits(out: Out<'_>, reply: &LimitUserReply) -> io::Result<()> {
    if reply.users.is_empty() {
        return writeln!(out, "no user has limits of its own");
    }
    let row = |user: &UserLimitsEntry| {
        let [requests, connections, passed_models, share] =
            [user.requests, user.connections, user.passed_models, user.share].map(limit);
        [user.uid.to_string(), requests, connections, passed_models, share]
    };
    table(out, ["UID", "REQUESTS", "CONNECTIONS", "PASSED MODELS", "SHARE"], reply.users.iter().map(row))
}

/// A limit, with its origin if it is this user's own.
fn limit(limit: LimitInForce) -> String {
    match limit.origin {
        LimitOrigin::EveryUser => limit.value.to_string(),
        LimitOrigin::Configuration => format!("{} (configured)", limit.value),
        LimitOrigin::Request => format!("{} (set)", limit.value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_a_table_with_their_origins() {
        let limit = |value, origin| LimitInForce { value, origin };
        let user = UserLimitsEntry {
            uid: 1000,
            requests: limit(4, LimitOrigin::Request),
            connections: limit(4096, LimitOrigin::EveryUser),
            passed_models: limit(8, LimitOrigin::Configuration),
            share: limit(100, LimitOrigin::EveryUser),
            ext: vec![],
        };
        let text = |users| {
            let mut out = Vec::new();
            limits(&mut out, &LimitUserReply { users, ext: vec![] }).unwrap();
            String::from_utf8(out).unwrap()
        };
        assert_eq!(
            text(vec![user]),
            "UID   REQUESTS  CONNECTIONS  PASSED MODELS   SHARE\n\
             1000  4 (set)   4096         8 (configured)  100\n"
        );
        assert_eq!(text(vec![]), "no user has limits of its own\n");
    }

    #[test]
    fn users_are_given_by_name_or_uid() {
        assert_eq!(uid_of("4711").unwrap(), 4711);
        assert_eq!(uid_of("root").unwrap(), 0);
        assert!(uid_of("no such user").is_err());
        let nobody = uid_of("4294967295").unwrap_err().to_string();
        assert_eq!(nobody, "uid 4294967295 is nobody's: give one of 0 to 4294967294");
        assert!(uid_of("4294967296").is_err());
    }
}
