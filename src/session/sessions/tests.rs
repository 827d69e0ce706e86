use std::collections::BTreeMap;

use super::*;
use crate::prefixes::sessions::Said;
use crate::share::Whose;

const ALICE: u32 = 54_321;
const BOB: u32 = 54_322;

fn after(content: Content) -> After {
    After { fingerprint: [7; 32], content, tokens: 3, now: Instant::now(), aged: Duration::ZERO }
}

fn tokens(count: usize) -> Content {
    Content::Tokens(vec![9; count])
}

fn names(sessions: &Sessions, uid: u32) -> Vec<String> {
    sessions.list(uid, Instant::now()).into_iter().map(|listed| listed.name).collect()
}

/// A whole use.
fn say(sessions: &Arc<Sessions>, uid: u32, name: &str, content: Content) -> Result<u64, SessionError> {
    sessions.begin(uid, name, "m")?.commit(after(content))
}

fn random(state: &mut u64, below: usize) -> usize {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    (*state % below as u64) as usize
}

/// A session of the plain model: content, time of the last use.
type Plain = BTreeMap<(u32, String), (Content, u64)>;

/// Forgets the user's oldest sessions that are not in use until the new state fits, as a list would.
fn plain_commit(
    plain: &mut Plain,
    busy: &[(u32, String)],
    key: &(u32, String),
    content: Content,
    now: u64,
) -> bool {
    let bytes = |name: &str, content: &Content| match content {
        Content::Tokens(ids) => SESSION_BYTES + name.len() + 1 + 4 * ids.len(),
        Content::Chat(said) => {
            let texts: usize =
                said.iter().map(|said| said.role.len() + said.content.len() + MESSAGE_BYTES).sum();
            SESSION_BYTES + name.len() + 1 + texts
        }
    };
    if bytes(&key.1, &content) as u64 > BYTES_MAX_OF_UID {
        return false;
    }
    loop {
        let others: Vec<_> = plain.iter().filter(|(of, _)| of.0 == key.0 && *of != key).collect();
        let sum: usize = others.iter().map(|((_, name), (content, _))| bytes(name, content)).sum();
        if others.len() < SESSIONS_MAX && (sum + bytes(&key.1, &content)) as u64 <= BYTES_MAX_OF_UID {
            plain.insert(key.clone(), (content, now));
            return true;
        }
        let idle = others.into_iter().filter(|(of, _)| !busy.contains(of));
        let Some(oldest) = idle.min_by_key(|(_, (_, used))| *used).map(|(of, _)| of.clone()) else {
            return false;
        };
        plain.remove(&oldest);
    }
}

#[test]
fn random_uses_agree_with_a_plain_list() {
    let sessions = Sessions::new();
    let (mut plain, mut running) = (Plain::new(), Vec::<Use>::new());
    let (mut state, mut forgotten, mut refused) = (42, 0, 0);
    for now in 0..4000 {
        let uid = [ALICE, BOB][random(&mut state, 2)];
        let key = (uid, random(&mut state, 90).to_string());
        let busy: Vec<_> = running.iter().map(|used| used.key.clone()).collect();
        match random(&mut state, 10) {
            0..4 if running.len() < 8 => match sessions.begin(uid, &key.1, "m") {
                Ok(used) => {
                    assert!(!busy.contains(&key));
                    let before = used.before().map(|before| &*before.content);
                    assert_eq!(before, plain.get(&key).map(|(content, _)| content));
                    running.push(used);
                }
                Err(error) => {
                    assert_eq!(error, SessionError::InUse { name: key.1.clone() });
                    assert!(busy.contains(&key));
                }
            },
            0..8 if !running.is_empty() => {
                let used = running.swap_remove(random(&mut state, running.len()));
                let key = used.key.clone();
                let busy: Vec<_> = running.iter().map(|used| used.key.clone()).collect();
                let content = match random(&mut state, 20) {
                    0 => tokens(1 << 20),
                    1..12 => tokens(random(&mut state, 40_000)),
                    _ => {
                        let content = "x".repeat(random(&mut state, 300_000));
                        Content::Chat(vec![Said { role: "user".into(), content }])
                    }
                };
                let before = plain.len();
                let fits = plain_commit(&mut plain, &busy, &key, content.clone(), now);
                assert_eq!(used.commit(after(content)).is_ok(), fits, "step {now}");
                forgotten += usize::from(plain.len() < before);
                refused += usize::from(!fits);
            }
            8 if !running.is_empty() => drop(running.swap_remove(0)),
            9 => {
                let result = sessions.forget(uid, Some(&key.1));
                match busy.contains(&key) {
                    true => assert!(matches!(result, Err(SessionError::InUse { .. }))),
                    false => assert_eq!(result, Ok(usize::from(plain.remove(&key).is_some()))),
                }
            }
            _ => {}
        }
        for uid in [ALICE, BOB] {
            let expected: Vec<_> = plain.keys().filter(|key| key.0 == uid).map(|key| key.1.clone()).collect();
            assert_eq!(names(&sessions, uid), expected, "step {now}");
        }
    }
    assert!(forgotten > 20 && refused > 20, "{forgotten} {refused}");
    running.clear();
    let listed = [ALICE, BOB].map(|uid| sessions.list(uid, Instant::now())).concat();
    assert_eq!(
        sessions.shares.held(),
        listed.iter().map(|listed| listed.bytes).sum::<u64>(),
        "no charge is left over"
    );
    sessions.forget(ALICE, None).unwrap();
    sessions.forget(BOB, None).unwrap();
    assert_eq!(sessions.shares.held(), 0);
}

#[test]
fn the_least_recently_used_session_of_the_same_user_goes() {
    let sessions = Sessions::new();
    say(&sessions, BOB, "old", tokens(1)).unwrap();
    for number in 0..SESSIONS_MAX {
        say(&sessions, ALICE, &format!("{number:02}"), tokens(1)).unwrap();
    }
    let oldest = sessions.begin(ALICE, "00", "m").unwrap();
    say(&sessions, ALICE, "02", tokens(2)).unwrap();
    say(&sessions, ALICE, "new", tokens(1)).unwrap();
    let left = names(&sessions, ALICE);
    assert_eq!(left.len(), SESSIONS_MAX);
    assert!(left.contains(&"00".into()), "it is in use");
    assert!(!left.contains(&"01".into()) && left.contains(&"02".into()));
    drop(oldest);
    assert_eq!(names(&sessions, BOB), ["old"]);
}

#[test]
fn a_use_that_fails_leaves_the_session_and_the_bytes_as_they_were() {
    let sessions = Sessions::new();
    say(&sessions, ALICE, "s", tokens(5)).unwrap();
    let held = sessions.shares.held();
    let used = sessions.begin(ALICE, "s", "m").unwrap();
    used.reserve(&tokens(5000)).unwrap();
    assert_eq!(sessions.shares.held(), held + 4 * 4995);
    let busy = SessionError::InUse { name: "s".into() };
    assert_eq!(sessions.begin(ALICE, "s", "m").err(), Some(busy.clone()));
    assert_eq!(
        (sessions.forget(ALICE, Some("s")), sessions.forget(ALICE, None)),
        (Err(busy.clone()), Err(busy))
    );
    drop(used);
    assert_eq!(sessions.shares.held(), held);
    let used = sessions.begin(ALICE, "s", "m").unwrap();
    assert_eq!(*used.before().unwrap().content, tokens(5));
    let limit = BYTES_MAX_OF_UID;
    let refused = used.commit(after(tokens(1 << 20)));
    assert!(
        matches!(refused, Err(SessionError::TooLarge { limit: told, .. }) if told == limit),
        "{refused:?}"
    );
    assert_eq!((sessions.shares.held(), names(&sessions, ALICE)), (held, vec!["s".to_owned()]));
    drop(sessions.begin(ALICE, "new", "m").unwrap());
    assert_eq!(names(&sessions, ALICE), ["s"], "a new session whose first request fails is none");
    let other = sessions.begin(ALICE, "s", "n").unwrap_err();
    assert!(other.to_string().contains("has the model m, and the request names n"), "{other}");
}

#[test]
fn all_users_together_have_a_total_and_nobody_loses_to_another_user() {
    let sessions = Sessions::with_total(1 << 16);
    let size = tokens(1 << 11);
    // Of 64 KiB, ordinary users have 60 together, and the first one half of that.
    let told: Vec<_> =
        (0..5).map(|number| say(&sessions, ALICE, &number.to_string(), size.clone())).collect();
    assert!(told.iter().all(Result::is_ok));
    assert_eq!(names(&sessions, ALICE), ["2", "3", "4"], "its own older ones went");
    say(&sessions, BOB, "b", size.clone()).unwrap();
    let mut uid = BOB;
    let refused = loop {
        uid += 1;
        if let Err(error) = say(&sessions, uid, "c", size.clone()) {
            break error;
        }
    };
    let SessionError::Full { refusal } = refused else { panic!("{refused}") };
    assert_eq!(refusal.whose, Whose::Everybody);
    assert_eq!((names(&sessions, ALICE).len(), names(&sessions, BOB).len()), (3, 1));
}

#[test]
fn kept_sessions_come_back_with_their_order_and_age() {
    let sessions = Sessions::new();
    let begun = Instant::now();
    for (uid, name) in [(ALICE, "a"), (ALICE, "b"), (BOB, "z"), (ALICE, "a")] {
        let used = sessions.begin(uid, name, "m").unwrap();
        used.commit(After { now: begun, ..after(tokens(100)) }).unwrap();
    }
    let kept = sessions.keep(u64::MAX, begun + Duration::from_secs(3));
    let order: Vec<_> = kept.iter().map(|kept| (kept.name.as_str(), kept.age_ms)).collect();
    assert_eq!(order, [("b", 3000), ("z", 3000), ("a", 3000)]);
    let again = Sessions::new();
    assert_eq!(again.restore(kept.clone(), begun), 3);
    assert_eq!(again.keep(u64::MAX, begun), kept);
    assert_eq!(again.list(BOB, begun + Duration::from_secs(1))[0].age, Duration::from_secs(4));
    // With room for two: each user's last one.
    let two: Vec<_> = sessions.keep(1500, begun).into_iter().map(|kept| kept.name).collect();
    assert_eq!(two, ["z", "a"]);
    assert_eq!(again.restore(kept, begun), 0, "their names are taken");
}

#[test]
fn the_sessions_of_each_user_and_their_bytes_are_counted() {
    let sessions = Sessions::new();
    assert!(sessions.holdings().is_empty());
    say(&sessions, ALICE, "a", tokens(5)).unwrap();
    say(&sessions, ALICE, "b", tokens(7)).unwrap();
    say(&sessions, BOB, "c", tokens(1)).unwrap();
    let listed = |uid| sessions.list(uid, Instant::now()).iter().map(|listed| listed.bytes).sum::<u64>();
    assert_eq!(sessions.holdings(), [(ALICE, (2, listed(ALICE))), (BOB, (1, listed(BOB)))].into());
    sessions.forget(BOB, None).unwrap();
    assert!(!sessions.holdings().contains_key(&BOB));
}
