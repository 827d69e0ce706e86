//! A program whose user may act for users of its own: they share nothing with each other, and it wins nothing by them.

use std::os::unix::process::CommandExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rocmforge_client::wire::{
    ClientHello, ErrorCode, FEATURE_ACTS, GenerateEnd, GenerateRequest, LimitUserRequest, Op, Prompt,
    RequestScope, SequenceState, Subordinates, UserEntry,
};
use rocmforge_client::{Client, ClientError, Connection, Generation, Options, ServerTrust};

use crate::child;
use crate::common;
use crate::fairness::for_all_users;
use crate::raw::Raw;
use crate::rig::{Answer, PATIENCE, Rig, TINY, answer, code, collect, refusal, story};

/// The uid of the first of [`COUNT`] users that the test's own user may act for.
const FIRST: u32 = 3_000_000_000;
const COUNT: u32 = 3;

const FORBIDDEN: u16 = ErrorCode::Forbidden as u16;

/// Tokens of a prompt: no number of whole pages.
const PROMPT: u32 = 100;

fn own_uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// A configuration that lets a user act for users, with more of the table `limits`.
fn config(user: &str, count: u32, limits: &str) -> String {
    format!(
        "[device]\nbackend = 'cpu'\n[limits]\n{limits}\n[policy]\nsubordinates = {{ {user:?} = [{FIRST}, {count}] }}\n"
    )
}

fn rig(limits: &str) -> Rig {
    Rig::start_with(&config(&own_uid().to_string(), COUNT, limits))
}

fn options(rig: &Rig, user: u32) -> Options {
    Options { acts_as: Some(user), ..rig.options() }
}

fn acting(rig: &Rig, user: u32) -> Client {
    Client::new(options(rig, user))
}

/// The answer to a prompt of [`PROMPT`] tokens, and its end.
fn ask(client: &Client, session: Option<&str>) -> (Answer, GenerateEnd) {
    let ids = (0..PROMPT).map(|i| 260 + i * 7 % 200).collect();
    let request =
        GenerateRequest { max_tokens: 4, ignore_eog: true, ..GenerateRequest::new(TINY, Prompt::Ids(ids)) };
    let request = session.map_or(request.clone(), |name| request.with_session(name));
    let mut generation = client.generate(&request).unwrap();
    let answer = collect(&mut generation).unwrap();
    (answer, generation.end().cloned().unwrap())
}

/// A request that begins and then stays, because nobody reads it.
fn held(client: &Client) -> Result<Generation, ClientError> {
    let mut generation = client.generate(&story(400))?;
    generation.next_item()?;
    Ok(generation)
}

/// The holdings of a user, as an administrator sees them.
fn holdings(rig: &Rig, uid: u32) -> Option<UserEntry> {
    rig.client().users().unwrap().users.into_iter().find(|user| user.uid == uid)
}

#[test]
fn users_of_one_peer_know_no_prompts_of_each_other() {
    let mut rig = rig("");
    let reused = |client: &Client| ask(client, None).1.reused_tokens();
    let [first, second, third] = [0, 1, 2].map(|user| acting(&rig, user));
    assert_eq!((reused(&first), reused(&first)), (0, u64::from(PROMPT) - 1));
    assert_eq!((reused(&second), reused(&second)), (0, u64::from(PROMPT) - 1));
    assert_eq!((reused(&rig.client()), reused(&third)), (0, 0), "the peer itself is another user too");
    let again = Client::new(options(&rig, 0));
    assert_eq!(reused(&again), u64::from(PROMPT) - 1, "a user is the same on every connection");
    rig.assert_idle();
    rig.assert_serves();
}

#[test]
fn users_of_one_peer_have_sessions_and_requests_of_their_own() {
    let rig = rig("");
    let [first, second] = [0, 1].map(|user| acting(&rig, user));
    let (_, end) = ask(&first, Some("s"));
    let of_first = end.session_tokens().unwrap();
    assert_eq!(ask(&second, Some("s")).1.session_tokens(), Some(of_first), "it begins anew");
    assert!(ask(&first, Some("s")).1.session_tokens().unwrap() > of_first, "it goes on");
    assert_eq!(second.forget_session(None).unwrap().forgotten, 1);
    assert_eq!((first.sessions().unwrap().sessions.len(), second.sessions().unwrap().sessions.len()), (1, 0));
    assert_eq!(rig.client().sessions().unwrap().sessions, []);

    let running = held(&first).unwrap();
    assert_eq!(second.ps().unwrap().sequences, []);
    assert_eq!(first.ps().unwrap().sequences.len(), 1);
    let [shown] = rig.client().ps().unwrap().sequences.try_into().unwrap();
    assert_eq!(shown.uid, FIRST);
    assert_eq!(code(second.cancel_requests(RequestScope::Id(shown.id))), FORBIDDEN);
    assert_eq!(code(second.cancel_requests(RequestScope::Uid(FIRST))), FORBIDDEN);
    let own: Vec<u32> = second.users().unwrap().users.iter().map(|user| user.uid).collect();
    assert_eq!(own, [FIRST + 1], "it sees what others hold");
    let user = holdings(&rig, FIRST).unwrap();
    assert_eq!((user.sequences, user.sessions(), user.connections), (1, 1, 0), "{user:?}");
    assert_eq!(holdings(&rig, own_uid()).unwrap().sequences, 0, "connections alone count for the peer");
    assert!(holdings(&rig, own_uid()).unwrap().connections >= 2);
    assert_eq!(rig.client().cancel_requests(RequestScope::Uid(FIRST)).unwrap().cancelled, 1);
    drop(running);
    rig.assert_idle();
}

#[test]
fn a_limit_of_one_user_refuses_no_other() {
    let rig = rig(&format!("users = {{ \"{FIRST}\" = {{ requests = 1 }} }}"));
    let [first, second] = [0, 1].map(|user| acting(&rig, user));
    let one = held(&first).unwrap();
    let refused = refusal(held(&first).map(drop));
    assert_eq!(refused.code, ErrorCode::Quota as u16);
    assert!(refused.message.contains(&format!("limit of uid {FIRST} to 1")), "{refused}");
    let others = [held(&second).unwrap(), held(&second).unwrap(), held(&rig.client()).unwrap()];
    let none = LimitUserRequest { uid: Some(FIRST + 1), requests: Some(0), ..LimitUserRequest::default() };
    rig.client().limit_user(&none).unwrap();
    assert_eq!(refusal(held(&second).map(drop)).code, ErrorCode::Quota as u16);
    drop((one, others));
    // Later than the device is idle: the daemon counts a request until its last frame is sent.
    rig.eventually("the user's request is gone", |_| {
        holdings(&rig, FIRST).is_none_or(|user| (user.requests, user.sequences) == (0, 0))
    });
    answer(&first, &story(4)).unwrap();
}

#[test]
fn users_of_one_peer_have_equal_shares_of_the_places() {
    let rig = rig("running = 8");
    let [first, second] = [0, 1].map(|user| acting(&rig, user));
    let clients: Vec<&Client> = [&first, &second].into_iter().cycle().take(32).collect();
    let places = |uid: u32| {
        let sequences = rig.client().ps().unwrap().sequences;
        let waits = [SequenceState::Queued, SequenceState::Preparing];
        sequences.iter().filter(|one| one.uid == uid && !waits.contains(&one.state)).count()
    };
    let (stop, mut seen) = (&AtomicBool::new(false), (0, 0));
    std::thread::scope(|scope| {
        for client in clients {
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    let _ = answer(client, &story(400));
                }
            });
        }
        let until = Instant::now() + PATIENCE;
        while seen != (4, 4) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(10));
            seen = (places(FIRST), places(FIRST + 1));
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!(seen, (4, 4));
    rig.assert_idle();
}

#[test]
fn a_connection_that_acts_is_no_administrators_and_passes_no_files() {
    let rig = rig("");
    rig.client().load(TINY).unwrap();
    let first = acting(&rig, 0);
    let status = first.status().unwrap();
    let rights = status.notes().into_iter().find(|(name, _)| *name == "you may").unwrap().1;
    assert_eq!(
        rights,
        format!(
            "run, load, preload, unload, pin; not policy.manage, policy.lock, policy.see; acting for uid {FIRST}"
        )
    );
    assert_eq!(code(first.unload(TINY)), FORBIDDEN);
    assert_eq!(code(first.evict_weights(None)), FORBIDDEN);
    assert_eq!(code(first.pin(TINY)), FORBIDDEN);
    assert_eq!(code(first.limit_user(&LimitUserRequest::default())), FORBIDDEN);
    let passed = refusal(first.load_file(&common::tinystories(), Some("own")));
    assert_eq!(passed.code, FORBIDDEN);
    assert!(passed.message.contains("passes no files"), "{passed}");
    let all = Subordinates { first: FIRST, count: COUNT };
    assert_eq!(rig.client().info().unwrap().subordinates(), Some(all));
    assert_eq!(first.info().unwrap().subordinates(), None, "nobody acts for two at once");
}

#[test]
fn nobody_acts_for_a_user_who_may_not() {
    let mut plain = Rig::start();
    let refused = Connection::connect(&options(&plain, 0)).unwrap_err();
    assert_eq!(refused.code(), Some(FORBIDDEN));
    assert!(refused.to_string().contains("policy.subordinates"), "{refused}");
    assert!(plain.log_text().contains("gives this user no others to act for"), "{}", plain.log_text());
    assert_eq!(plain.client().info().unwrap().subordinates(), None);
    plain.assert_serves();

    let mut rig = rig("");
    for number in [COUNT, COUNT + 1, u32::MAX] {
        let mut raw = Raw::silent(&rig);
        raw.write(&ClientHello::new("raw").acting_as(number).to_bytes().unwrap());
        let hello = raw.hello();
        assert_eq!((hello.status, hello.features, hello.major), (FORBIDDEN, 0, 0));
        raw.assert_closed();
    }
    assert!(rig.log_text().contains("gives it 3, numbered from 0"), "{}", rig.log_text());
    // A number without the feature asks for nothing.
    let number = u64::from(COUNT) << 32;
    let mut raw = Raw::silent(&rig);
    raw.write(&ClientHello { features: number, ..ClientHello::new("raw") }.to_bytes().unwrap());
    let hello = raw.hello();
    assert_eq!((hello.status, hello.features, hello.features_unknown), (0, 0, number));
    // A second hello is no frame.
    let mut raw = Raw::silent(&rig);
    raw.write(&ClientHello::new("raw").acting_as(1).to_bytes().unwrap());
    let hello = raw.hello();
    assert_eq!((hello.status, hello.features, hello.acts_as()), (0, FEATURE_ACTS | 1 << 32, Some(1)));
    raw.write(&ClientHello::new("raw").acting_as(2).to_bytes().unwrap());
    assert_eq!(raw.error().0, 0);
    raw.assert_closed();
    rig.assert_serves();
}

#[test]
fn a_reload_gives_and_takes_users() {
    let user = own_uid().to_string();
    let rig = rig("");
    let connection = Connection::connect(&options(&rig, 2)).unwrap();
    let ask = || {
        let mut generation = connection.generate(&story(4)).unwrap();
        collect(&mut generation)
    };
    ask().unwrap();
    rig.reload(&config(&user, 2, ""));
    let refused = refusal(ask());
    assert_eq!((refused.code, refused.detail[0].value.as_str()), (FORBIDDEN, "policy.subordinates"));
    assert_eq!(Connection::connect(&options(&rig, 2)).unwrap_err().code(), Some(FORBIDDEN));
    rig.reload(&config(&user, 3, ""));
    ask().unwrap();
    // Uids that are not fit to be given change nothing.
    rig.configure(&config(&user, 3, "").replace(&FIRST.to_string(), "1000"));
    rig.signal(rustix::process::Signal::HUP);
    rig.eventually("the log reports the refused policy", |_| {
        rig.log_text().contains("the one in force stays")
    });
    assert!(rig.log_text().contains("policy.subordinates"), "{}", rig.log_text());
    ask().unwrap();
}

#[test]
fn a_restart_gives_each_user_its_own_sessions_and_prompts_back() {
    let kept = tempfile::tempdir().unwrap();
    let keep = format!("[kv]\nkeep_mib = 64\nkeep_dir = '{}'\n", kept.path().display());
    let mut rig = Rig::start_with(&(config(&own_uid().to_string(), COUNT, "") + &keep));
    let before = ask(&acting(&rig, 0), Some("s")).1.session_tokens();
    rig.signal(rustix::process::Signal::TERM);
    assert!(rig.ended().success());
    assert!(kept.path().join(FIRST.to_string()).is_dir(), "its folder has its number");
    rig.run();
    let [first, second] = [0, 1].map(|user| acting(&rig, user));
    let sessions = first.sessions().unwrap().sessions;
    assert_eq!(sessions.iter().map(|session| Some(session.tokens)).collect::<Vec<_>>(), [before]);
    assert_eq!(second.sessions().unwrap().sessions, []);
    assert_eq!(ask(&second, None).1.reused_tokens(), 0);
    assert!(ask(&first, None).1.reused_tokens() > 0, "its prompt is read back");
}

/// A process of [`a_user_is_named_and_no_other_acts`]: acts for its user of a number, or is itself without one.
#[test]
fn asks_for_its_first_user() {
    let Some((socket, number)) = child::inside() else { return };
    let options =
        Options { socket, trust: ServerTrust::Anyone, acts_as: number.parse().ok(), ..Options::default() };
    match Connection::connect(&options) {
        Err(error) => println!("\nDONE {}", error.code_name()),
        Ok(connection) => {
            let mut generation = connection.generate(&story(4)).unwrap();
            println!("\nDONE {}", collect(&mut generation).unwrap().text);
        }
    }
}

#[test]
fn a_user_is_named_and_no_other_acts() {
    let Some(rig) = for_all_users(&config("nobody", COUNT, "")) else { return };
    let passwd = std::fs::read_to_string("/etc/passwd").unwrap();
    let nobody = rocmforge_client::uid_of("nobody", &passwd).unwrap();
    let said_by = |uid: u32, number: &str| {
        let mut process =
            child::Process::start_as("acting::asks_for_its_first_user", &rig.socket(), number, |command| {
                command.uid(uid).gid(uid);
            });
        process.go();
        process.line("DONE ")
    };
    assert_eq!(said_by(nobody, "0"), ", there was a");
    assert_eq!((said_by(nobody - 1, "0"), said_by(0, "0")), ("Forbidden".to_owned(), "Forbidden".to_owned()));
    assert_eq!(
        (said_by(nobody, ""), said_by(nobody - 1, "")),
        (", there was a".to_owned(), ", there was a".to_owned())
    );
    // In a container with few uids, nobody can have this one.
    if std::fs::read_to_string("/proc/self/uid_map").unwrap().contains("4294967295") {
        assert_eq!(said_by(FIRST, ""), "Forbidden", "a real user with such a uid");
        assert_eq!(said_by(FIRST + COUNT, ""), ", there was a");
    }
    assert!(holdings(&rig, FIRST).is_some_and(|user| user.device_us_per_s > 0), "it counts for the user");
}

#[test]
fn an_answer_holds_for_every_message() {
    // The number of a user is part of the hello alone: all requests of the connection are its.
    let rig = rig("");
    let mut raw = Raw::connect_as(&rig, &ClientHello::new("raw").acting_as(1));
    for stream in [1, 3] {
        raw.send(stream, Op::Generate, &story(400));
    }
    rig.eventually("both run", |status| status.devices[0].sequences_running == 2);
    assert!(rig.client().ps().unwrap().sequences.iter().all(|one| one.uid == FIRST + 1));
    drop(raw);
    rig.assert_idle();
}
