//! Several users of one daemon: processes under other uids, which only root can start.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::Command;

use rocmforge_client::wire::{ErrorCode, GenerateRequest, LoadRequest, Op, SetRulesRequest};
use rocmforge_client::{Client, ClientError, Options, ServerTrust};

use crate::child;
use crate::common;
use crate::raw::Raw;
use crate::rig::{PATIENCE, Rig, TINY, answer, code, story};

const STRANGER: u32 = 54_321;

/// The second user's process of [`models_of_one_user_are_not_anothers`].
#[test]
fn another_user() {
    let Some((socket, _)) = child::inside() else { return };
    // The test's daemon runs as root, or as the user before the change: the test trusts it without a check.
    let client = Client::new(Options { socket, trust: ServerTrust::Anyone, ..Options::default() });
    let names: Vec<String> = client.list().unwrap().models.into_iter().map(|model| model.name).collect();
    assert_eq!(names, [TINY], "a name that another uid passed is shown");
    let private = GenerateRequest { model: "private".into(), ..story(4) };
    assert_eq!(code(answer(&client, &private)), ErrorCode::ModelNotFound as u16);
    let sequences = client.ps().unwrap().sequences;
    assert_eq!(sequences, [], "another user's sequence is shown");
    let pages_max = || client.status().unwrap().devices[0].kv_pages_max;
    assert_eq!(pages_max(), 0, "the pages of another user's model are shown");
    answer(&client, &story(4)).unwrap();
    assert!(pages_max() > 0);
    assert_eq!(
        code(client.unload(TINY)),
        ErrorCode::Forbidden as u16,
        "a user could unload everybody's model"
    );
    // A private name for the same content: another file, so another mapping.
    let before = client.status().unwrap().models_mapped;
    let kept = client.load_file(&common::tinystories(), Some("private")).unwrap();
    assert!(kept.mapped_now, "the repository's file shares the mapping of the rig's copy");
    assert_eq!(client.status().unwrap().models_mapped, before + 1);
    assert!(client.unload("private").unwrap().was_mapped);
    for uid in [0, 54_322] {
        assert_eq!(code(client.list_of(Some(uid))), ErrorCode::Forbidden as u16);
        assert_eq!(code(client.unload_of(Some(uid), "private")), ErrorCode::Forbidden as u16);
    }
    assert_eq!(client.list_of(Some(STRANGER)).unwrap().models.len(), 1, "its own names are its own");
    client.load_file(&common::tinystories(), Some("left")).unwrap();
    println!("\nDONE well");
}

/// A process of [`each_user_may_what_the_policy_says`]: reports its rights by the daemon's words and by trying.
#[test]
fn a_user_of_a_policy() {
    let Some((socket, model)) = child::inside() else { return };
    let client = Client::new(Options { socket, trust: ServerTrust::Anyone, ..Options::default() });
    let rule = |result: Result<(), ClientError>| match result {
        Ok(()) => "ok".to_owned(),
        Err(ClientError::Server(error)) if error.code == ErrorCode::Forbidden as u16 => error
            .detail
            .iter()
            .find(|detail| detail.key == "rule")
            .map_or("owner".into(), |rule| rule.value.clone()),
        Err(error) => error.to_string(),
    };
    let rules = |pinned| SetRulesRequest {
        model: TINY.into(),
        pinned,
        priority: None,
        layers_min: None,
        idle_s: None,
        ext: vec![],
    };
    let own = std::path::Path::new(&model);
    let tried = [
        ("run", rule(answer(&client, &story(4)).map(drop))),
        ("load", rule(client.load(TINY).map(drop))),
        ("pass", rule(client.load_file(own, Some("own")).map(drop))),
        (
            "preload",
            rule(
                client
                    .preload_all(TINY)
                    .and_then(|loading| loading.map(|item| item.map(drop)).collect::<Result<Vec<()>, _>>())
                    .map(drop),
            ),
        ),
        ("unload", rule(client.unload(TINY).map(drop))),
        ("clear", rule(client.evict_weights(None).map(drop))),
        ("ask", rule(client.set_rules(&rules(None)).map(drop))),
        ("pin", rule(client.set_rules(&rules(Some(false))).map(drop))),
        ("ps", rule(client.ps().map(drop))),
    ];
    let tried: Vec<String> = tried.iter().map(|(what, came)| format!("{what}={came}")).collect();
    let status = client.status().unwrap();
    let may = status.notes().into_iter().find(|(name, _)| *name == "you may").unwrap().1.to_owned();
    println!("\nDONE {may} | {}", tried.join(" "));
}

#[test]
fn each_user_may_what_the_policy_says() {
    if !rustix::process::geteuid().is_root() {
        common::skip("only root can act as several users");
        return;
    }
    const GROUP: u32 = 54_400;
    let policy = |load: &str| {
        format!(
            "[policy]\nadministrators = [54330]\nload = [{load}]\npreload = ['@{GROUP}']\nunload = [54331]\npin = []\nsee = [54331]\n"
        )
    };
    let rig = Rig::start_with(&policy("'54331', '@54400'"));
    let open = |path: &std::path::Path, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    open(rig.dir.path(), 0o755);
    open(&rig.socket(), 0o666);
    rig.client().load(TINY).unwrap();
    let own = common::tinystories();
    let asked_by = |uid: u32, gid: u32| {
        let argument = own.to_str().unwrap();
        let mut process =
            child::Process::start_as("users::a_user_of_a_policy", &rig.socket(), argument, |command| {
                command.uid(uid).gid(gid);
            });
        process.go();
        process.line("DONE ")
    };
    assert_eq!(
        asked_by(STRANGER, STRANGER),
        "run; not policy.load, policy.preload, policy.unload, policy.pin, policy.manage, policy.lock, policy.see | run=ok load=policy.load \
         pass=policy.load preload=policy.preload unload=policy.unload clear=policy.unload ask=owner pin=policy.pin ps=ok"
    );
    assert_eq!(
        asked_by(54_331, STRANGER),
        "run, load, unload, see; not policy.preload, policy.pin, policy.manage, policy.lock | run=ok load=ok pass=ok preload=policy.preload \
         unload=owner clear=owner ask=owner pin=policy.pin ps=ok"
    );
    assert_eq!(
        asked_by(STRANGER, GROUP),
        "run, load, preload; not policy.unload, policy.pin, policy.manage, policy.lock, policy.see | run=ok load=ok pass=ok preload=ok \
         unload=policy.unload clear=policy.unload ask=owner pin=policy.pin ps=ok"
    );
    assert_eq!(
        asked_by(54_330, STRANGER),
        "everything (administrator) | run=ok load=ok pass=ok preload=ok unload=ok clear=ok ask=ok pin=ok ps=ok"
    );
    // An open connection follows a new policy too.
    let mut process =
        child::Process::start_as("users::refused_after_a_reload", &rig.socket(), "", |command| {
            command.uid(STRANGER).gid(GROUP);
        });
    process.go();
    assert_eq!(process.line("FIRST "), "ok");
    rig.configure(&policy("54331"));
    rig.signal(rustix::process::Signal::HUP);
    assert_eq!(process.line("THEN "), "policy.load");
    // A policy with an unknown name is refused, and the current one stays.
    rig.configure(&policy("'@no such group'"));
    rig.signal(rustix::process::Signal::HUP);
    rig.eventually("the log reports the refused policy", |_| {
        rig.log_text().contains("the one in force stays")
    });
    assert!(rig.log_text().contains("policy.load names"), "{}", rig.log_text());
}

/// A process of [`each_user_may_what_the_policy_says`], with one connection for all requests.
#[test]
fn refused_after_a_reload() {
    let Some((socket, _)) = child::inside() else { return };
    let client = Client::new(Options { socket, trust: ServerTrust::Anyone, ..Options::default() });
    let connection = client.connection().unwrap();
    let load = || {
        let request = LoadRequest { name: TINY.into(), by_descriptor: false, request_id: 0, ext: vec![] };
        match connection.call(&request) {
            Ok(_) => "ok".to_owned(),
            Err(ClientError::Server(error)) => {
                error.detail.first().map(|rule| rule.value.clone()).unwrap_or_default()
            }
            Err(error) => error.to_string(),
        }
    };
    println!("\nFIRST {}", load());
    let until = std::time::Instant::now() + PATIENCE;
    let mut then = load();
    while then == "ok" && std::time::Instant::now() < until {
        std::thread::sleep(std::time::Duration::from_millis(10));
        then = load();
    }
    println!("\nTHEN {then}");
}

#[test]
fn models_of_one_user_are_not_anothers() {
    if !rustix::process::geteuid().is_root() {
        common::skip("only root can act as two users");
        return;
    }
    let mut rig = Rig::start();
    let open = |path: &std::path::Path, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    open(rig.dir.path(), 0o755);
    open(&rig.socket(), 0o666);
    let client = rig.client();
    client.load(TINY).unwrap();
    let mine = rig.dir.path().join("mine.gguf");
    std::fs::copy(common::tinystories(), &mine).unwrap();
    client.load_file(&mine, Some("private")).unwrap();
    let mut raw = Raw::connect(&rig);
    raw.send(1, Op::Generate, &GenerateRequest { model: "private".into(), ..story(400) });
    rig.eventually("the sequence runs", |status| status.devices[0].sequences_running == 1);

    let mut other = child::Process::start_as("users::another_user", &rig.socket(), "", |command| {
        command.uid(STRANGER).gid(STRANGER);
    });
    other.go();
    assert_eq!(other.line("DONE "), "well");
    an_administrator_unloads_what_was_left(&client);
    drop(raw);
    rig.assert_idle();
    rig.assert_serves();
}

/// The file of [`another_user`]: `administrator` sees who passed it and its size, and unloads it, and nothing else of that name.
fn an_administrator_unloads_what_was_left(administrator: &Client) {
    let bytes = || {
        let users = administrator.users().unwrap().users;
        users.iter().find(|user| user.uid == STRANGER).map_or(0, |user| user.passed_bytes())
    };
    let size = std::fs::metadata(common::tinystories()).unwrap().len();
    assert_eq!(bytes(), size);
    let names = |uid| {
        let models = administrator.list_of(uid).unwrap().models;
        models.into_iter().map(|model| model.name).collect::<Vec<_>>()
    };
    assert_eq!(
        (names(None), names(Some(STRANGER))),
        (vec!["private".into(), TINY.into()], vec!["left".into(), TINY.into()])
    );
    for not_passed in [TINY, "private"] {
        assert_eq!(
            code(administrator.unload_of(Some(STRANGER), not_passed)),
            ErrorCode::ModelNotFound as u16
        );
    }
    assert!(administrator.unload_of(Some(STRANGER), "left").unwrap().was_mapped);
    assert_eq!((bytes(), names(Some(STRANGER))), (0, vec![TINY.into()]));
}

/// A user's process of [`users_that_the_daemon_cannot_tell_apart_are_refused`].
#[test]
fn a_user_that_says_hello() {
    let Some((socket, _)) = child::inside() else { return };
    let client = Client::new(Options { socket, trust: ServerTrust::Anyone, ..Options::default() });
    println!("\nDONE {}", client.ping(b"").unwrap_err());
}

/// The kernel reports one uid for all users that a user namespace does not map.
#[test]
fn users_that_the_daemon_cannot_tell_apart_are_refused() {
    if !rustix::process::geteuid().is_root() {
        return common::skip("only root can act as two users");
    }
    let namespace = ["--user", "--map-user=0", "--map-group=0"];
    if !Command::new("unshare").args(namespace).arg("true").status().is_ok_and(|status| status.success()) {
        return common::not_run("this machine allows no user namespaces");
    }
    let mut rig = Rig::idle();
    let daemon = rig.command();
    let mut command = Command::new("unshare");
    command.args(namespace).arg(daemon.get_program()).args(daemon.get_args());
    rig.spawn(command.env("MEMORY_PRESSURE_WATCH", "/dev/null"));
    rig.assert_serves(); // its own user has a uid
    for (path, mode) in [(rig.dir.path(), 0o755), (&rig.socket(), 0o666)] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }
    let mut other = child::Process::start_as("users::a_user_that_says_hello", &rig.socket(), "", |command| {
        command.uid(STRANGER).gid(STRANGER);
    });
    other.go();
    let refusal = other.line("DONE ");
    assert!(refusal.contains("PeerRefused"), "{refusal}");
    let log = rig.log_text();
    assert!(log.contains("user namespace has no uid for its user"), "{log}");
    rig.assert_serves();
}
