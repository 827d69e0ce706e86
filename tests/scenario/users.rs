//! Two users of one daemon. The second is a process under another uid, which only root can start.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;

use rocmforge_client::wire::{ErrorCode, GenerateRequest, Op};
use rocmforge_client::{Client, Options, ServerTrust};

use crate::child;
use crate::common;
use crate::raw::Raw;
use crate::rig::{Rig, TINY, answer, code, story};

const STRANGER: u32 = 54_321;

/// The second user's process of [`what_one_user_loads_is_not_anothers`].
#[test]
fn another_user() {
    let Some((socket, _)) = child::inside() else { return };
    // The daemon of the test is root's or our own before we changed: the test itself trusts it.
    let client = Client::new(Options { socket, trust: ServerTrust::Anyone, ..Options::default() });
    let names: Vec<String> = client.list().unwrap().models.into_iter().map(|model| model.name).collect();
    assert_eq!(names, [TINY], "a name that another uid passed is not shown");
    let private = GenerateRequest { model: "private".into(), ..story(4) };
    assert_eq!(code(answer(&client, &private)), ErrorCode::ModelNotFound as u16);
    let sequences = client.ps().unwrap().sequences;
    assert_eq!(sequences.len(), 1, "that someone runs something is no secret");
    assert_eq!((sequences[0].uid, sequences[0].model.as_str()), (0, ""), "what he runs is");
    answer(&client, &story(4)).unwrap();
    assert_eq!(code(client.unload(TINY)), ErrorCode::Forbidden as u16, "root loaded it");
    // An own name for the same file: one mapping.
    let before = client.status().unwrap().models_mapped;
    let kept = client.load_file(&common::tinystories(), Some("private")).unwrap();
    assert!(kept.mapped_now, "the repository's file is not the rig's copy");
    assert_eq!(client.status().unwrap().models_mapped, before + 1);
    assert!(client.unload("private").unwrap().was_mapped);
    println!("\nDONE well");
}

#[test]
fn what_one_user_loads_is_not_anothers() {
    if !rustix::process::geteuid().is_root() {
        common::skip("only root can be two users");
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
    rig.eventually("it runs", |status| status.devices[0].sequences_running == 1);

    let mut other = child::Process::start_as("users::another_user", &rig.socket(), "", |command| {
        command.uid(STRANGER).gid(STRANGER);
    });
    other.go();
    assert_eq!(other.line("DONE "), "well");
    drop(raw);
    rig.assert_idle();
    rig.assert_serves();
}
