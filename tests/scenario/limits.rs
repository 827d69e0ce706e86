//! Limits of single users: by configuration, by request, and lifted again, under uids of their own, which only root can
//! give.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;

use rocmforge_client::wire::{ErrorCode, LimitOrigin, LimitUserRequest};
use rocmforge_client::{Client, ClientError, Connection, Options, ServerTrust};

use crate::child;
use crate::common;
use crate::rig::{Rig, answer, refusal, story};

const LIMITED: u32 = 54_321;
const OTHER: u32 = 54_322;

/// The most of each thing that [`takes_all_it_gets`] takes.
const MOST: usize = 4;

/// Limits of a user; what is left out stays as it is.
fn of(uid: u32) -> LimitUserRequest {
    LimitUserRequest { uid: Some(uid), ..LimitUserRequest::default() }
}

/// Takes connections, requests and names of passed files until it is refused, at most [`MOST`] of each. Prints their
/// numbers, the last refusal, and what it may do to limits.
#[test]
fn takes_all_it_gets() {
    let Some((socket, model)) = child::inside() else { return };
    let options = Options { socket, trust: ServerTrust::Anyone, ..Options::default() };
    let client = Client::new(options.clone());
    let connection = client.connection().unwrap();
    let mut connections = vec![connection.clone()];
    while connections.len() < MOST
        && let Ok(further) = Connection::connect(&options)
    {
        connections.push(further);
    }
    let (mut held, mut words) = (Vec::new(), String::new());
    while held.len() < MOST {
        let mut generation = connection.generate(&story(400)).unwrap();
        match generation.next_item() {
            Ok(_) => held.push(generation), // unread from now on, so it stays
            refused => {
                let refused = refusal(refused);
                assert_eq!(refused.code, ErrorCode::Quota as u16, "{refused}");
                words = refused.message;
                break;
            }
        }
    }
    let path = std::path::Path::new(&model);
    let pass = |number: usize| client.load_file(path, Some(&format!("p{number}")));
    let passed = (0..MOST).take_while(|number| pass(*number).is_ok()).count();
    for number in 0..passed {
        client.unload(&format!("p{number}")).unwrap();
    }
    let limits = |request: &LimitUserRequest| match client.limit_user(request) {
        Ok(_) => "ok".to_owned(),
        Err(ClientError::Server(error)) => {
            assert_eq!(error.code, ErrorCode::Forbidden as u16);
            error.detail.first().map_or("administrators".into(), |rule| rule.value.clone())
        }
        Err(error) => error.to_string(),
    };
    let rights = [LimitUserRequest::default(), LimitUserRequest { share: Some(1000), ..of(LIMITED) }, of(0)]
        .map(|r| limits(&r));
    let root = limits(&LimitUserRequest { requests: Some(0), ..of(0) });
    println!(
        "\nDONE {} connections, {} requests, {passed} files; {}, root {root}; {words}",
        connections.len(),
        held.len(),
        rights.join(" ")
    );
}

fn taken(rig: &Rig, uid: u32) -> String {
    let model = common::tinystories();
    let argument = model.to_str().unwrap();
    let mut process =
        child::Process::start_as("limits::takes_all_it_gets", &rig.socket(), argument, |command| {
            command.uid(uid).gid(uid);
        });
    process.go();
    let taken = process.line("DONE ");
    drop(process);
    rig.eventually("the user's connections are gone", |status| status.connections <= 2);
    taken
}

#[test]
fn a_configured_limit_holds_from_the_start() {
    let uid = rustix::process::geteuid().as_raw();
    let mut rig = Rig::start_with(&format!("[limits.users.{uid}]\nrequests = 1\n"));
    let connection = Connection::connect(&rig.options()).unwrap();
    let mut held = connection.generate(&story(400)).unwrap();
    held.next_item().unwrap();
    let refused = refusal(answer(&rig.client(), &story(4)));
    assert_eq!(refused.code, ErrorCode::Quota as u16);
    let words = format!("an administrator set the limit of uid {uid} to 1");
    assert!(refused.message.contains(&words), "{}", refused.message);
    drop((held, connection));
    rig.assert_idle();
    rig.assert_serves();
}

#[test]
fn a_user_is_limited_by_request_and_by_configuration_and_others_are_not() {
    if !rustix::process::geteuid().is_root() {
        common::skip("only root can act as several users");
        return;
    }
    let mut rig = Rig::start_with("[device]\nbackend = 'cpu'\n");
    for (path, mode) in [(rig.dir.path(), 0o755), (&rig.socket(), 0o666)] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }
    let manage = "policy.manage policy.manage policy.manage, root policy.manage";
    let all = format!("4 connections, 4 requests, 4 files; {manage};");
    assert_eq!(taken(&rig, LIMITED), all);

    let client = rig.client();
    let request =
        LimitUserRequest { requests: Some(1), connections: Some(3), passed_models: Some(2), ..of(LIMITED) };
    let limited = client.limit_user(&request).unwrap().users.remove(0);
    assert_eq!((limited.uid, limited.requests.value, limited.share.value), (LIMITED, 1, 100));
    assert_eq!(
        (limited.requests.origin, limited.share.origin),
        (LimitOrigin::Request, LimitOrigin::EveryUser)
    );
    assert_eq!(client.limit_user(&LimitUserRequest::default()).unwrap().users, [limited]);
    let words = "uid 54321 has 1 requests, queued and running; an administrator set the limit of uid 54321 to 1: wait for \
                 some to end";
    assert_eq!(taken(&rig, LIMITED), format!("3 connections, 1 requests, 2 files; {manage}; {words}"));
    assert_eq!(taken(&rig, OTHER), all, "another user is not limited");
    let logged = rig.log_text();
    assert!(logged.contains("an administrator set the limit of uid 54321 to 3"), "{logged}");

    client.limit_user(&LimitUserRequest { requests: Some(0), ..of(LIMITED) }).unwrap();
    let words =
        "uid 54321 has 0 requests, queued and running; an administrator set the limit of uid 54321 to 0";
    assert_eq!(taken(&rig, LIMITED), format!("3 connections, 0 requests, 2 files; {manage}; {words}"));
    client.limit_user(&LimitUserRequest { clear: true, ..of(LIMITED) }).unwrap();
    assert_eq!(taken(&rig, LIMITED), all);
    assert_eq!(client.limit_user(&LimitUserRequest::default()).unwrap().users, []);

    // A reload sets what the configuration says, and drops what requests set.
    client.limit_user(&LimitUserRequest { passed_models: Some(1), ..of(LIMITED) }).unwrap();
    rig.reload(
        "[device]\nbackend = 'cpu'\n[policy]\nmanage = [54321]\n[limits]\nrequests_per_uid = 3\n[limits.users.54321]\nrequests = 2\nshare = 50\n",
    );
    let found = client.limit_user(&of(LIMITED)).unwrap().users.remove(0);
    assert_eq!((found.requests.value, found.requests.origin), (2, LimitOrigin::Configuration));
    assert_eq!((found.share.value, found.passed_models.origin), (50, LimitOrigin::EveryUser));
    let taken_now = taken(&rig, LIMITED);
    assert!(
        taken_now.starts_with("4 connections, 2 requests, 4 files; ok ok ok, root administrators; "),
        "{taken_now}"
    );
    assert!(taken(&rig, OTHER).starts_with("4 connections, 3 requests, 4 files; policy.manage"));
    assert!(!rig.log_text().contains("take effect at the next start"), "{}", rig.log_text());

    // A configuration that names no user, or a value out of range, changes nothing.
    for wrong in ["[limits.users.'no such user']\nrequests = 1", "[limits.users.7]\nshare = 0"] {
        let before = rig.log_text().matches("the one in force stays").count();
        rig.configure(wrong);
        rig.signal(rustix::process::Signal::HUP);
        rig.eventually("the wrong configuration is refused", |_| {
            rig.log_text().matches("the one in force stays").count() > before
        });
    }
    let users = client.limit_user(&LimitUserRequest::default()).unwrap().users;
    assert_eq!(users.iter().map(|user| (user.uid, user.share.value)).collect::<Vec<_>>(), [(LIMITED, 1000)]);

    let wrong = [
        LimitUserRequest { uid: None, requests: Some(1), ..of(0) },
        LimitUserRequest { share: Some(0), ..of(LIMITED) },
        LimitUserRequest { connections: Some(0), ..of(LIMITED) },
        LimitUserRequest { requests: Some(u32::MAX), ..of(LIMITED) },
        LimitUserRequest { passed_models: Some(4097), ..of(LIMITED) },
        LimitUserRequest { requests: Some(1), ..of(u32::MAX) },
        of(u32::MAX),
    ];
    for request in wrong {
        let refusal = refusal(client.limit_user(&request));
        assert_eq!(refusal.code, ErrorCode::InvalidArgument as u16, "{request:?}");
        assert!(request.uid.is_none() || refusal.message.contains("..="), "the range is named: {refusal:?}");
    }
    rig.assert_serves();
}
