//! The configuration's policy and limits of users, with names resolved to uids and gids.

use std::collections::BTreeMap;

use crate::config::{ConfigError, Limits, Party, PolicyConfig};
use crate::session::{Policy, Right, Who};
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
/// [`ConfigError::Who`] for an unknown name.
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
    Ok(policy)
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
    let mut texts = Vec::new();
    for party in parties {
        let name = match party {
            Party::Uid(uid) => {
                who.uids.insert(*uid);
                texts.push(uid.to_string());
                continue;
            }
            Party::Name(name) => name,
        };
        texts.push(format!("{name:?}"));
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
    who.text = texts.join(", ");
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
        assert_eq!(loads.text, r#""alice", "@ai", 7, "@9", "8""#);
        let bob = Credentials { uid: 1002, gids: vec![100, 44] };
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
    fn the_default_is_the_sessions_default() {
        assert_eq!(with(&PolicyConfig::default(), &Names::default()).unwrap(), Policy::default());
    }
}
