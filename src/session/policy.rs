//! Decides which requests a connected client may make.

use std::collections::BTreeSet;

use rocmforge_client::wire::{ClientMessage, ErrorCode};

use super::acting::ActsFor;
use super::error::{Failure, failure};

/// A right that the policy grants or denies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Right {
    /// Ask models for tokens, tokenise, and inspect models.
    Run,
    /// Map models and pass files.
    Load,
    /// Load weights to a device before they are needed.
    Preload,
    /// Unmap models that the user passed, and evict their weights.
    Unload,
    /// Change the rules of models that the user passed.
    Pin,
    /// Do with models of the directories what [`Self::Unload`] and [`Self::Pin`] allow with one's own, and limit users.
    Manage,
    /// Lock models' files in the machine's memory.
    Lock,
    /// See other users' requests, and the names of models that they passed.
    See,
}

impl Right {
    /// All rights, in the order of [`Policy::rules`].
    pub const ALL: [Self; 8] =
        [Self::Run, Self::Load, Self::Preload, Self::Unload, Self::Pin, Self::Manage, Self::Lock, Self::See];

    /// The right's key in the configuration's table `policy`.
    pub const fn key(self) -> &'static str {
        match self {
            Self::Run => "run",
            Self::Load => "load",
            Self::Preload => "preload",
            Self::Unload => "unload",
            Self::Pin => "pin",
            Self::Manage => "manage",
            Self::Lock => "lock",
            Self::See => "see",
        }
    }

    /// The right that a request needs; none for requests about the daemon's state.
    pub(super) fn of(message: &ClientMessage) -> Option<Self> {
        match message {
            ClientMessage::Generate(_)
            | ClientMessage::Tokenize(_)
            | ClientMessage::Detokenize(_)
            | ClientMessage::Show(_)
            | ClientMessage::Plan(_) => Some(Self::Run),
            ClientMessage::Load(_) => Some(Self::Load),
            ClientMessage::LoadToDevice(_) => Some(Self::Preload),
            ClientMessage::Unload(_) | ClientMessage::ClearCache(_) => Some(Self::Unload),
            ClientMessage::LimitUser(_) => Some(Self::Manage),
            ClientMessage::SetRules(rules) => {
                let changes = rules.pinned.is_some()
                    || rules.priority.is_some()
                    || rules.layers_min.is_some()
                    || rules.idle_s.is_some();
                Some(if changes { Self::Pin } else { Self::Run })
            }
            // Written out, so that a new request does not pass without a decision.
            ClientMessage::Ping(_)
            | ClientMessage::Info(_)
            | ClientMessage::List(_)
            | ClientMessage::Ps(_)
            | ClientMessage::CancelRequests(_) // decided by whose they are
            | ClientMessage::Users(_) // others' by [`Self::See`]
            | ClientMessage::Sessions(_) // one's own
            | ClientMessage::ForgetSession(_)
            | ClientMessage::Status(_)
            | ClientMessage::Doctor(_)
            | ClientMessage::Residency(_)
            | ClientMessage::Subscribe(_)
            | ClientMessage::Cancel(_)
            | ClientMessage::Credit(_)
            | ClientMessage::Fail(_) => None,
        }
    }
}

/// A set of users.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Who {
    /// All users that may connect.
    pub everyone: bool,
    /// Users by id.
    pub uids: BTreeSet<u32>,
    /// Members of these groups.
    pub gids: BTreeSet<u32>,
}

impl Who {
    /// All users that may connect.
    pub fn everyone() -> Self {
        Self { everyone: true, ..Self::default() }
    }

    fn has(&self, credentials: &Credentials) -> bool {
        self.everyone
            || self.uids.contains(&credentials.uid)
            || credentials.by.is_some_and(|by| self.uids.contains(&by))
            || credentials.gids.iter().any(|gid| self.gids.contains(gid))
    }
}

/// The client's ids, as the kernel reports them for the time of connecting, and the user that it acts for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Credentials {
    /// The user that everything counts for: the peer's effective user id, or the one that it acts for.
    pub uid: u32,
    /// The peer's effective group id and the supplementary ones.
    pub gids: Vec<u32>,
    /// The peer's effective user id, if it acts for another user.
    pub by: Option<u32>,
}

impl Credentials {
    /// The peer's own uid.
    pub fn real_uid(&self) -> u32 {
        self.by.unwrap_or(self.uid)
    }
}

/// Rights of users. Root, the daemon's own user and named administrators have all rights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Have every right, also on other users' models.
    pub administrators: Who,
    /// The users that have each of [`Right::ALL`].
    pub rules: [Who; Right::ALL.len()],
    /// The users that users may act for.
    pub acts_for: ActsFor,
    /// The daemon's own uid.
    own_uid: u32,
}

impl Default for Policy {
    /// Every user may run all models, and load and manage its own. Only administrators manage models of the directories,
    /// lock files and see other users' requests.
    fn default() -> Self {
        let rules = Right::ALL.map(|right| match right {
            Right::Manage | Right::Lock | Right::See => Who::default(),
            _ => Who::everyone(),
        });
        let own_uid = rustix::process::geteuid().as_raw();
        Self { administrators: Who::default(), rules, acts_for: ActsFor::default(), own_uid }
    }
}

impl Policy {
    /// True if the user has every right. A connection that acts for another user has not, whoever its peer is.
    pub fn is_administrator(&self, credentials: &Credentials) -> bool {
        credentials.by.is_none()
            && ([0, self.own_uid].contains(&credentials.uid) || self.administrators.has(credentials))
    }

    /// True if the policy names the user as an administrator, or it always is one. Its groups are not known.
    pub(super) fn names_administrator(&self, uid: u32) -> bool {
        self.is_administrator(&Credentials { uid, gids: Vec::new(), by: None })
    }

    /// True if the user has that right.
    pub fn allows(&self, credentials: &Credentials, right: Right) -> bool {
        self.rule(right).has(credentials) || self.is_administrator(credentials)
    }

    fn rule(&self, right: Right) -> &Who {
        &self.rules[right as usize]
    }

    /// Refuses a user without the right; the message names the rule, and not the users that have the right.
    pub(super) fn check(&self, credentials: &Credentials, right: Right) -> Result<(), Failure> {
        if self.allows(credentials, right) {
            return Ok(());
        }
        let (key, uid) = (right.key(), credentials.uid);
        let text = format!(
            "policy.{key} does not allow this for uid {uid}: an administrator may, or may change the rule in the daemon's \
             configuration"
        );
        let refusal = failure(ErrorCode::Forbidden, &text);
        Err(refusal.with_detail("rule", format!("policy.{key}")).with_detail("uid", uid))
    }

    /// The user's rights for display, and the rules that deny the rest.
    pub(super) fn rights(&self, credentials: &Credentials) -> String {
        if self.is_administrator(credentials) {
            return "everything (administrator)".to_owned();
        }
        let (may, may_not): (Vec<Right>, Vec<Right>) =
            Right::ALL.into_iter().partition(|right| self.allows(credentials, *right));
        let list = |rights: &[Right], prefix: &str| {
            rights.iter().map(|right| format!("{prefix}{}", right.key())).collect::<Vec<_>>().join(", ")
        };
        let acting = credentials.by.map(|_| format!("; acting for uid {}", credentials.uid));
        let rights = match (may.as_slice(), may_not.as_slice()) {
            (may, []) => list(may, ""),
            ([], may_not) => format!("nothing; see {}", list(may_not, "policy.")),
            (may, may_not) => format!("{}; not {}", list(may, ""), list(may_not, "policy.")),
        };
        rights + &acting.unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use rocmforge_client::wire::{
        GenerateRequest, LimitUserRequest, LoadRequest, PingRequest, Prompt, SetRulesRequest,
    };

    use super::*;

    fn who(uids: &[u32], gids: &[u32]) -> Who {
        Who { everyone: false, uids: uids.iter().copied().collect(), gids: gids.iter().copied().collect() }
    }

    fn user(uid: u32, gids: &[u32]) -> Credentials {
        Credentials { uid, gids: gids.to_vec(), by: None }
    }

    #[test]
    fn users_and_groups_are_allowed_and_administrators_always() {
        let mut policy = Policy { own_uid: 900, administrators: who(&[1], &[11]), ..Policy::default() };
        policy.rules[Right::Load as usize] = who(&[5], &[50]);
        let loads = |credentials: Credentials| policy.allows(&credentials, Right::Load);
        assert!(loads(user(5, &[1])) && loads(user(6, &[1, 50])));
        assert!(!loads(user(6, &[5])), "a gid is not a uid");
        assert!(!loads(user(50, &[6])), "a uid is not a gid");
        for administrator in [user(0, &[]), user(900, &[]), user(1, &[]), user(7, &[11])] {
            assert!(loads(administrator.clone()) && policy.is_administrator(&administrator));
            assert_eq!(policy.rights(&administrator), "everything (administrator)");
        }
        let error = policy.check(&user(6, &[6]), Right::Load).unwrap_err();
        assert_eq!(error.code, ErrorCode::Forbidden as u16);
        assert!(error.message.starts_with("policy.load does not allow this for uid 6: "), "{error}");
        assert!(!error.message.contains('5'), "{error} tells of the users that may");
        assert_eq!(error.detail[0].value, "policy.load");
        assert_eq!(
            policy.rights(&user(6, &[6])),
            "run, preload, unload, pin; not policy.load, policy.manage, policy.lock, policy.see"
        );
        policy.rules = Right::ALL.map(|_| Who::default());
        assert!(policy.rights(&user(6, &[6])).starts_with("nothing; see policy.run, policy.load"));
    }

    #[test]
    fn each_request_needs_its_right() {
        let prompt = Prompt::Text(String::new());
        let generate = ClientMessage::Generate(GenerateRequest::new("m", prompt));
        assert_eq!(Right::of(&generate), Some(Right::Run));
        let load = LoadRequest { name: "m".into(), by_descriptor: true, request_id: 0, ext: vec![] };
        assert_eq!(Right::of(&ClientMessage::Load(load)), Some(Right::Load));
        let mut rules = SetRulesRequest {
            model: "m".into(),
            pinned: None,
            priority: None,
            layers_min: None,
            idle_s: None,
            ext: vec![],
        };
        assert_eq!(Right::of(&ClientMessage::SetRules(rules.clone())), Some(Right::Run), "it only asks");
        rules.idle_s = Some(0);
        assert_eq!(Right::of(&ClientMessage::SetRules(rules)), Some(Right::Pin));
        assert_eq!(Right::of(&ClientMessage::Ping(PingRequest::default())), None);
        assert_eq!(Right::of(&ClientMessage::LimitUser(LimitUserRequest::default())), Some(Right::Manage));
    }
}
