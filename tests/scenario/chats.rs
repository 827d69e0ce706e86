//! Chats whose template computes until its limit: a user who sends many of them delays only that user.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::sync::atomic::{AtomicBool, Ordering};

use rocmforge_client::wire::{
    ChatMessage, ErrorCode, GenerateRequest, Op, Prompt, RequestScope, SequenceState,
};
use rocmforge_client::{Client, Options, ServerTrust};

use crate::child;
use crate::common;
use crate::forge::{Value, tiny_llama};
use crate::raw::Raw;
use crate::rig::{PATIENCE, Rig, answer, code};

/// Computes for the allowed 2 s of processor time, then fails.
const SLOW: &str =
    "{% set x = 'a' * 20000000 %}{% for i in range(99999) %}{% set y = x|upper|lower %}{% endfor %}";

const QUICK: &str = "{{ messages[0].content }}";

/// Concurrent requests of a connection.
const MANY: u32 = 60;

fn models(rig: &Rig) {
    for (name, template) in [("slow", SLOW), ("quick", QUICK)] {
        let model = tiny_llama(3).set("tokenizer.chat_template", Value::string(template));
        std::fs::write(rig.model(name), model.build().bytes).unwrap();
    }
}

fn chat(model: &str) -> GenerateRequest {
    let messages = vec![ChatMessage { role: "user".into(), content: "ab".into() }];
    GenerateRequest { max_tokens: 1, ..GenerateRequest::new(model, Prompt::Chat(messages)) }
}

fn send_many(raw: &mut Raw) {
    for n in 0..MANY {
        raw.send(1 + 2 * n, Op::Generate, &chat("slow"));
    }
}

/// The second user's process of [`slow_chats_of_one_user_are_not_waited_for_by_another`].
#[test]
fn another_chatter() {
    let Some((socket, _)) = child::inside() else { return };
    let client = Client::new(Options { socket, trust: ServerTrust::Anyone, ..Options::default() });
    let outcome = answer(&client, &chat("quick")).map(|answer| answer.ids.len());
    println!("\nDONE {outcome:?}");
}

#[test]
fn slow_chats_of_one_user_are_not_waited_for_by_another() {
    if !rustix::process::geteuid().is_root() {
        common::skip("only root can act as two users");
        return;
    }
    let mut rig = Rig::start();
    models(&rig);
    for (path, mode) in [(rig.dir.path(), 0o755), (&rig.socket(), 0o666)] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }
    let mut other = child::Process::start_as("chats::another_chatter", &rig.socket(), "", |command| {
        command.uid(54_321).gid(54_321);
    });
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let again_and_again = || {
            let mut raw = Raw::connect(&rig);
            send_many(&mut raw);
            for stream in (1 + 2 * MANY..).step_by(2) {
                let (_, error) = raw.error();
                let slow = [ErrorCode::TemplateFailed as u16, ErrorCode::Busy as u16];
                assert!(slow.contains(&error.code), "{error:?}");
                if stop.load(Ordering::Relaxed) {
                    return;
                }
                raw.send(stream, Op::Generate, &chat("slow"));
            }
        };
        scope.spawn(again_and_again);
        scope.spawn(again_and_again);
        // When the first one has ended, the queue has been full for a while.
        let (mut raw, request) = (Raw::connect(&rig), chat("slow"));
        raw.send(1, Op::Generate, &request);
        raw.error();
        other.go();
        let line = other.line("DONE ");
        stop.store(true, Ordering::Relaxed);
        assert_eq!(line, "Ok(1)");
    });
    rig.assert_serves();
}

#[test]
fn chats_that_are_being_rendered_are_listed_and_cancelled() {
    let mut rig = Rig::start();
    models(&rig);
    const COUNT: usize = 8;
    let (mut raw, client) = (Raw::connect(&rig), rig.client());
    for n in 0..COUNT as u32 {
        raw.send(1 + 2 * n, Op::Generate, &chat("slow"));
    }
    let until = std::time::Instant::now() + PATIENCE;
    // Two are rendered at once, for 2 s: the last ones wait for their turn.
    let listed = loop {
        let listed = client.ps().unwrap().sequences;
        if listed.len() == COUNT {
            break listed;
        }
        assert!(std::time::Instant::now() < until, "{listed:?}");
    };
    for request in &listed {
        assert_eq!((request.state, request.model.as_str()), (SequenceState::Preparing, "slow"));
        assert_eq!((request.uid, request.prompt_tokens), (rustix::process::geteuid().as_raw(), 0));
    }
    let last = listed.last().unwrap();
    assert_eq!(client.cancel_requests(RequestScope::Id(last.id)).unwrap().cancelled, 1);
    let all = client.cancel_requests(RequestScope::Uid(last.uid)).unwrap().cancelled as usize;
    let ended: Vec<u16> = (0..COUNT).map(|_| raw.error().1.code).collect();
    let cancelled = ended.iter().filter(|code| **code == ErrorCode::Cancelled as u16).count();
    assert!(cancelled >= 2 && cancelled <= 1 + all, "{cancelled} of {all}: {ended:?}");
    assert_eq!(client.ps().unwrap().sequences, []);
    let nothing = client.cancel_requests(RequestScope::Uid(last.uid));
    assert_eq!(code(nothing), ErrorCode::InvalidArgument as u16);
    rig.assert_serves();
}
