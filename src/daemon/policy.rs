//! The configuration's policy and limits of users, with names resolved to uids and gids.

use std::collections::BTreeMap;

use rocmforge_client::wire::Subordinates;

use crate::config::{ConfigError, Limits, Party, PolicyConfig, SubordinatesFault};
use crate::session::{ActsFor, Policy, Right, SubordinatesError, Who};
use crate::share::limits::{OfOneUser, UID_MAX};

/// Users and groups by name.
#[derive(Debug, Default)]
struct Names {
    users: BTreeMap<String, u32>,
    groups: BTreeMap<String, u32>,
}

/// Resolves user and group names by /etc/passwd and /etc/group.
///
/// # Errors
/// [`ConfigError::Who`] for an unknown name, [`ConfigError::Subordinates`].
pub fn resolve(config: &PolicyConfig) -> Result<Policy, ConfigError> {
    with(config, &names())
}

/// Resolves the users with limits of their own by /etc/passwd.
///
/// # Errors
/// [`ConfigError::User`] for an unknown name, and for a user that is named twice.
pub fn limited_users(config: &Limits) -> Result<BTreeMap<u32, OfOneUser>, ConfigError> {
    limited(config, &names())
}

fn names() -> Names {
    let text = |path| std::fs::read_to_string(path).unwrap_or_default();
    Names { users: ids(&text("/etc/passwd")), groups: ids(&text("/etc/group")) }
}

fn limited(config: &Limits, names: &Names) -> Result<BTreeMap<u32, OfOneUser>, ConfigError> {
    let mut limited = BTreeMap::new();
    for (name, user) in &config.users {
        let wrong = |why| ConfigError::User { name: name.clone(), why };
        let uid = name.parse().ok().or_else(|| names.users.get(name).copied());
        let uid = uid.filter(|uid| *uid <= UID_MAX).ok_or_else(|| wrong("is not a user"))?;
        if limited.insert(uid, user.limits()).is_some() {
            return Err(wrong("names a user that another entry names too"));
        }
    }
    Ok(limited)
}

fn with(config: &PolicyConfig, names: &Names) -> Result<Policy, ConfigError> {
    let mut policy = Policy::default();
    policy.administrators = who("policy.administrators", &config.administrators, names)?;
    for (right, rule) in Right::ALL.into_iter().zip(&mut policy.rules) {
        let (key, list) = match right {
            Right::Run => ("policy.run", &config.run),
            Right::Load => ("policy.load", &config.load),
            Right::Preload => ("policy.preload", &config.preload),
            Right::Unload => ("policy.unload", &config.unload),
            Right::Pin => ("policy.pin", &config.pin),
            Right::Manage => ("policy.manage", &config.manage),
            Right::Lock => ("policy.lock", &config.lock),
            Right::See => ("policy.see", &config.see),
        };
        *rule = who(key, list, names)?;
    }
    policy.acts_for = acts_for(config, names)?;
    Ok(policy)
}

/// The users that users may act for. No user of /etc/passwd and not the daemon's own is among them.
fn acts_for(config: &PolicyConfig, names: &Names) -> Result<ActsFor, ConfigError> {
    let mut all = ActsFor::default();
    let own_uid = rustix::process::geteuid().as_raw();
    for (name, (first, count)) in &config.subordinates {
        let wrong = |why: SubordinatesFault| ConfigError::Subordinates { name: name.clone(), why };
        let by = name.parse().ok().or_else(|| names.users.get(name).copied());
        let by = by.filter(|by| *by <= UID_MAX).ok_or_else(|| wrong(SubordinatesFault::Unknown))?;
        if all.of(by).is_some() {
            return Err(wrong(SubordinatesFault::Twice));
        }
        all.insert(by, Subordinates { first: *first, count: *count }).map_err(|error| wrong(error.into()))?;
        let users = names.users.iter().map(|(name, uid)| (*uid, format!("the user {name:?}")));
        let own = (own_uid, "the daemon itself".to_owned());
        if let Some((uid, whose)) = users.chain([own]).find(|(uid, _)| all.holds(*uid)) {
            return Err(wrong(SubordinatesError::Taken { uid, whose }.into()));
        }
    }
    Ok(all)
}

/// Name and id of each line: its first and third field.
fn ids(text: &str) -> BTreeMap<String, u32> {
    let line = |line: &str| {
        let mut fields = line.split(':');
        Some((fields.next()?.to_owned(), fields.nth(1)?.parse().ok()?))
    };
    text.lines().filter_map(line).collect()
}

fn who(key: &'static str, parties: &[Party], names: &Names) -> Result<Who, ConfigError> {
    let mut who = Who::default();
    for party in parties {
        let name = match party {
            Party::Uid(uid) => {
                who.uids.insert(*uid);
                continue;
            }
            Party::Name(name) => name,
        };
        let unknown = || ConfigError::Who { key, name: name.clone() };
        let number = |name: &str, ids: &BTreeMap<String, u32>| {
            name.parse().ok().or_else(|| ids.get(name).copied()).ok_or_else(unknown)
        };
        match name.strip_prefix('@') {
            Some(group) => drop(who.gids.insert(number(group, &names.groups)?)),
            None if name == "*" => who.everyone = true,
            None => drop(who.uids.insert(number(name, &names.users)?)),
        }
    }
    Ok(who)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::UserConfig;
    use crate::session::Credentials;

    #[test]
    fn names_and_numbers_of_users_and_groups_are_found() {
        let names = Names {
            users: ids("root:x:0:0::/:\nalice:x:1000:100:A:/home/alice:/bin/sh\nbroken\nworse:x:y:0\n"),
            groups: ids("ai:x:44:bob\nalice:x:1001:\n"),
        };
        let name = |name: &str| Party::Name(name.into());
        let config = PolicyConfig {
            load: vec![name("alice"), name("@ai"), Party::Uid(7), name("@9"), name("8")],
            ..PolicyConfig::default()
        };
        let policy = with(&config, &names).unwrap();
        let loads = &policy.rules[Right::Load as usize];
        assert_eq!(loads.uids, [7, 8, 1000].into());
        assert_eq!(loads.gids, [9, 44].into());
        let bob = Credentials { uid: 1002, gids: vec![100, 44], by: None };
        assert!(policy.allows(&bob, Right::Load) && policy.allows(&bob, Right::Run));
        assert_eq!(policy.rules[Right::Run as usize], Who::everyone());
        for unknown in ["bob", "@bob", "", "@", "@*", "-1"] {
            let config = PolicyConfig { see: vec![name(unknown)], ..PolicyConfig::default() };
            let error = with(&config, &names).unwrap_err();
            assert!(error.to_string().contains("policy.see"), "{error}");
        }
    }

    #[test]
    fn limited_users_are_found_by_name_and_number() {
        let names = Names { users: ids("alice:x:1000:100:A::\n"), groups: ids("ai:x:44:bob\n") };
        let config = |entries: &[&str]| {
            let user = UserConfig { requests: Some(3), ..UserConfig::default() };
            Limits {
                users: entries.iter().map(|name| ((*name).into(), user.clone())).collect(),
                ..Limits::default()
            }
        };
        let found = limited(&config(&["alice", "1001"]), &names).unwrap();
        assert_eq!(found.keys().copied().collect::<Vec<_>>(), [1000, 1001]);
        assert_eq!(found[&1000].requests, Some(3));
        for wrong in [&["bob"][..], &["@ai"], &["*"], &[""], &["4294967295"], &["alice", "1000"]] {
            let error = limited(&config(wrong), &names).unwrap_err().to_string();
            assert!(error.starts_with("limits.users names"), "{error}");
        }
    }

    #[test]
    fn subordinates_are_of_users_and_no_users_themselves() {
        let names = Names {
            users: ids("gate:x:990:990::/:\nodd:x:3000000500:1::/:\n"),
            groups: ids("ai:x:44:bob\n"),
        };
        let config = |entries: &[(&str, u32, u32)]| PolicyConfig {
            subordinates: entries
                .iter()
                .map(|(name, first, count)| ((*name).into(), (*first, *count)))
                .collect(),
            ..PolicyConfig::default()
        };
        let found =
            with(&config(&[("gate", 3_000_000_000, 500), ("1000", 3_000_000_501, 9)]), &names).unwrap();
        assert_eq!(found.acts_for.of(990), Some(Subordinates { first: 3_000_000_000, count: 500 }));
        assert_eq!(found.acts_for.of(1000), Some(Subordinates { first: 3_000_000_501, count: 9 }));
        assert!(found.acts_for.of(44).is_none() && found.acts_for.of(0).is_none());
        let refused = |entries: &[(&str, u32, u32)]| with(&config(entries), &names).unwrap_err().to_string();
        for (entries, why) in [
            (&[("nobody here", 3_000_000_000, 1)][..], "not a user"),
            (&[("@ai", 3_000_000_000, 1)], "not a user"),
            (&[("4294967295", 3_000_000_000, 1)], "not a user"),
            (&[("gate", 3_000_000_000, 1), ("990", 3_100_000_000, 1)], "same user"),
            (&[("gate", 100_000, 65_536)], "real users"),
            (&[("gate", 4_294_967_000, 296)], "real users"),
            (&[("gate", 3_000_000_000, 0)], "one at least"),
            (&[("gate", 3_000_000_000, 501)], "the user \"odd\""),
            (&[("gate", 3_000_000_000, 9), ("7", 3_000_000_008, 9)], "uid 3000000008 among them"),
        ] {
            let words = refused(entries);
            assert!(words.starts_with("policy.subordinates.") && words.contains(why), "{words}");
        }
    }

    #[test]
    fn the_default_is_the_sessions_default() {
        assert_eq!(with(&PolicyConfig::default(), &Names::default()).unwrap(), Policy::default());
    }
}
