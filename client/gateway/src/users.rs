//! The daemon's users behind the gateway's callers.
//!
//! The daemon's configuration may give the gateway's user a range of users to act for (`policy.subordinates`). Then each token,
//! or each peer of a Unix socket, is one of them: quotas, turns and known prompts are its own. Without a range all callers are
//! one user of the daemon, the gateway's.
//!
//! A peer's number is its uid. A token's is the one in the token file, or else a part of its digest. So it stays the same
//! whatever other tokens come and go. Digests of two tokens may have the same part; then the later one is refused until the file
//! gives it a number.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rocmforge_client::Options;
use rocmforge_client::asynchronous::Client;
use rocmforge_client::wire::{InfoRequest, Subordinates};

use crate::DAEMON_CONNECTIONS_MAX;
use crate::access::{Access, Identity, Token, Tokens};
use crate::failure::Failure;

/// The daemon is asked again after so long: a reload may have changed its configuration.
const ASK_AGAIN: Duration = Duration::from_secs(5);

/// Clients whose connections stay open between requests. More are there only while their requests run.
const IDLE_MAX: usize = 64;

/// Most lines of the log about tokens without a user.
const TOLD_MAX: usize = 16;

/// The daemon's users that callers are, each with connections of its own.
#[derive(Debug)]
pub struct Users {
    options: Options,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    /// The users that the gateway may act for, and when the daemon told that.
    told: Option<(Instant, Option<Subordinates>)>,
    /// By the number of the user.
    clients: HashMap<u32, Used>,
    /// Number of uses: the time of these.
    clock: u64,
}

#[derive(Debug)]
struct Used {
    client: Arc<Client>,
    at: u64,
}

impl Users {
    /// The users of a daemon at those options.
    pub fn new(options: Options) -> Self {
        Self { options, table: Mutex::default() }
    }

    /// The client that acts for the caller's user; `None` if all callers are one user. `gateway` is the gateway's own.
    ///
    /// # Errors
    /// Errors of the daemon and of the connection to it, and status 403 for a caller without a user.
    pub async fn client(
        &self,
        gateway: &Client,
        access: &Access,
        caller: Identity,
    ) -> Result<Option<Arc<Client>>, Failure> {
        if caller == Identity::Anyone {
            return Ok(None);
        }
        let Some(all) = self.range(gateway, access).await? else { return Ok(None) };
        let number = number(access, caller, all.count).map_err(|reason| {
            Failure::new(403, format!("the gateway has no user for this caller: {reason}"))
        })?;
        Ok(Some(self.table().client(number, &self.options)))
    }

    /// The users that the gateway may act for.
    async fn range(&self, gateway: &Client, access: &Access) -> Result<Option<Subordinates>, Failure> {
        if let Some((_, all)) = self.table().told.filter(|(at, _)| at.elapsed() < ASK_AGAIN) {
            return Ok(all);
        }
        let all = gateway.call(&InfoRequest::default()).await?.subordinates();
        let mut table = self.table();
        let before = table.told.replace((Instant::now(), all));
        if before.is_none_or(|(_, before)| before != all) {
            // Connections of before act for other users, or may act no longer.
            table.clients.clear();
            drop(table);
            tell(all, access);
        }
        Ok(all)
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    /// The client of the user of this number. Those that were not used for longest leave for a new one.
    fn client(&mut self, number: u32, options: &Options) -> Arc<Client> {
        self.clock += 1;
        let at = self.clock;
        if let Some(known) = self.clients.get_mut(&number) {
            known.at = at;
            return Arc::clone(&known.client);
        }
        while self.clients.len() >= IDLE_MAX {
            let idle = self.clients.iter().filter(|(_, used)| Arc::strong_count(&used.client) == 1);
            let Some(oldest) = idle.min_by_key(|(_, used)| used.at).map(|(number, _)| *number) else { break };
            self.clients.remove(&oldest);
        }
        let options = Options { acts_as: Some(number), ..options.clone() };
        let client = Arc::new(Client::new(options, DAEMON_CONNECTIONS_MAX));
        self.clients.insert(number, Used { client: Arc::clone(&client), at });
        client
    }
}

/// Tells the administrator which users callers are.
fn tell(all: Option<Subordinates>, access: &Access) {
    let Some(all) = all else {
        let uid = rustix::process::geteuid().as_raw();
        eprintln!(
            "rocmforge-gateway: all callers are one user of the daemon: its policy.subordinates names no users for uid {uid}"
        );
        return;
    };
    let last = all.first.saturating_add(all.count.saturating_sub(1));
    eprintln!(
        "rocmforge-gateway: each caller is a user of its own to the daemon, of uids {} to {last}",
        all.first
    );
    let Access::Token(tokens) = access else { return };
    let without = tokens.all().iter().filter_map(|token| of_token(tokens, token, all.count).err());
    without.take(TOLD_MAX).for_each(|reason| eprintln!("rocmforge-gateway: no user for a token: {reason}"));
}

/// The number of a caller's user, of so many.
fn number(access: &Access, caller: Identity, count: u32) -> Result<u32, String> {
    match (access, caller) {
        (_, Identity::Peer(uid)) if uid < count => Ok(uid),
        (_, Identity::Peer(uid)) => Err(format!(
            "uid {uid} is not below the number of users that the daemon's policy.subordinates gives the gateway, {count}"
        )),
        (Access::Token(tokens), Identity::Token(digest)) => {
            let token = tokens.all().iter().find(|token| token.digest == digest);
            of_token(tokens, token.ok_or("its token is not one of the gateway's")?, count)
        }
        _ => Err("nothing tells it from others".to_owned()),
    }
}

/// The number of a token's user, of so many.
fn of_token(tokens: &Tokens, token: &Token, count: u32) -> Result<u32, String> {
    let (line, number) = (token.line, wanted(token, count));
    if number >= count {
        return Err(format!(
            "line {line} of the token file has the number {number}, but policy.subordinates of the daemon's configuration gives \
             the gateway {count} users, numbered from 0"
        ));
    }
    let before = |other: &&Token| other.user.is_some() || other.line < line;
    let mut others = tokens.all().iter().filter(|other| other.line != line).filter(before);
    match others.find(|other| token.user.is_none() && wanted(other, count) == number) {
        None => Ok(number),
        Some(other) => Err(format!(
            "lines {line} and {} of the token file would be one user, number {number} of {count}: write another number behind the \
             token of line {line}",
            other.line
        )),
    }
}

/// The number that the file gives a token. Without one, it is the first 8 bytes of the digest, the highest byte first, modulo the
/// number of users.
fn wanted(token: &Token, count: u32) -> u32 {
    let first = token.digest.first_chunk::<8>().map_or(0, |bytes| u64::from_be_bytes(*bytes));
    // A remainder by a u32 is one.
    token.user.unwrap_or_else(|| u32::try_from(first % u64::from(count.max(1))).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: &str = "0123456789abcdef";
    const SECOND: &str = "fedcba9876543210";

    fn numbers(file: &str, count: u32) -> Vec<Result<u32, String>> {
        let tokens = Tokens::of(file).unwrap();
        tokens.all().iter().map(|token| of_token(&tokens, token, count)).collect()
    }

    /// From `printf 0123456789abcdef | sha256sum`, and so on, by a calculator.
    #[test]
    fn a_tokens_number_is_the_beginning_of_its_digest() {
        let file = format!("{FIRST}\n{SECOND}");
        assert_eq!(numbers(&file, 65_536), [Ok(31_352), Ok(43_654)]);
    }

    #[test]
    fn numbers_do_not_depend_on_other_tokens() {
        let of = |file: &str| numbers(file, 65_536).last().cloned().unwrap();
        let alone = of(SECOND);
        assert_eq!(of(&format!("{FIRST}\n{SECOND}")), alone);
        assert_eq!(of(&format!("{FIRST} 7\n\n{SECOND}")), alone);
        assert_eq!(of(&format!("{SECOND} 7")), Ok(7));
    }

    #[test]
    fn two_tokens_are_one_user_only_if_the_file_says_so() {
        // Of one user, both digests have the part 0.
        let both = numbers(&format!("{FIRST}\n{SECOND}"), 1);
        assert_eq!(both[0], Ok(0), "the earlier one keeps it");
        assert!(both[1].as_ref().unwrap_err().contains("lines 2 and 1"), "{both:?}");
        assert_eq!(numbers(&format!("{FIRST} 0\n{SECOND} 0"), 1), [Ok(0), Ok(0)]);
        let both = numbers(&format!("{FIRST}\n{SECOND} 0"), 1);
        assert!(both[0].is_err() && both[1] == Ok(0), "a number in the file goes first: {both:?}");
        let many = numbers(&format!("{FIRST} 1\n{SECOND}"), 1);
        assert!(many[0].as_ref().unwrap_err().contains("the number 1, but"), "{many:?}");
    }

    #[test]
    fn a_peers_number_is_its_uid() {
        let of = |uid| number(&Access::Peer(uid), Identity::Peer(uid), 1001);
        assert_eq!((of(0), of(1000)), (Ok(0), Ok(1000)));
        assert!(of(1001).unwrap_err().contains("1001"));
        let tokens = Access::Token(Tokens::of(FIRST).unwrap());
        assert!(number(&tokens, Identity::of_test(1), 9).is_err(), "a token that is not in the file");
    }

    #[test]
    fn idle_clients_leave_for_new_ones_and_busy_ones_stay() {
        let (mut table, options) = (Table::default(), Options::default());
        let busy: Vec<_> = (0..3).map(|number| table.client(number, &options)).collect();
        for number in 3..1000 {
            table.client(number, &options);
            assert!(table.clients.len() <= IDLE_MAX);
        }
        assert!(Arc::ptr_eq(&busy[2], &table.client(2, &options)), "a client in use was dropped");
        let latest = Arc::as_ptr(&table.client(999, &options));
        assert_eq!(latest, Arc::as_ptr(&table.client(999, &options)));
        let all: Vec<_> = (0..200).map(|number| table.client(number, &options)).collect();
        assert_eq!(table.clients.len(), 200, "as many as are in use");
        drop((all, busy));
        table.client(5000, &options);
        assert_eq!(table.clients.len(), IDLE_MAX);
    }
}
