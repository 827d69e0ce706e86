//! `chat`, on a terminal and in a pipe, and suggestions for names that do not exist.

use std::fs::File;
use std::io::{Read, Write};
use std::process::{Output, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rocmforge_client::wire::*;
use rustix::process::{Pid, Signal, kill_process};

use crate::command_line::{client, generate, run, spawn};
use crate::server::{Peer, Server, accept, end, item, summary};
use crate::terminal::terminal;

/// Answers the question about the model.
fn show(peer: &mut Peer, chat_template: bool) {
    let request = peer.request().unwrap();
    assert!(matches!(request.message, ClientMessage::Show(_)), "{:?}", request.message);
    let reply = ShowReply { chat_template, ..crate::empty_show() };
    peer.send(request.header.stream, Op::Reply, &reply);
}

/// Takes a request for an answer to this chat.
fn asked(peer: &mut Peer, chat: &[(&str, &str)]) -> u32 {
    let (stream, request) = generate(peer);
    let message =
        |(role, content): &(&str, &str)| ChatMessage { role: (*role).into(), content: (*content).into() };
    assert_eq!(request.prompt, Prompt::Chat(chat.iter().map(message).collect()));
    assert!(request.marks());
    stream
}

fn answer(peer: &mut Peer, stream: u32, text: &str) {
    peer.send(stream, Op::Item, &item(text));
    peer.send(stream, Op::End, &end());
}

#[test]
fn a_chat_in_a_pipe_prints_the_answers_alone() {
    let dir = tempfile::tempdir().unwrap();
    let saved = dir.path().join("saved.json");
    let path = saved.to_str().unwrap().to_owned();
    let server = Server::greeting(|mut peer| {
        show(&mut peer, true);
        let stream = asked(&mut peer, &[("system", "Be kind."), ("user", "Hello")]);
        answer(&mut peer, stream, "<think>hm</think>Hi");
        let stream = asked(
            &mut peer,
            &[("system", "Be kind."), ("user", "Hello"), ("assistant", "Hi!"), ("user", "More")],
        );
        peer.fail(stream, ErrorCode::PromptTooLong);
        let stream = asked(&mut peer, &[("user", "Again")]);
        answer(&mut peer, stream, "Yes");
        let stream = asked(
            &mut peer,
            &[("system", "Be kind."), ("user", "Hello"), ("assistant", "Hi!"), ("user", "Back")],
        );
        answer(&mut peer, stream, "Here");
    });
    let mut child = spawn(&server, &["chat", "m", "--system", "Be kind."]);
    let lines = format!(
        "Hello\n\nMore\n/save {path}\n/save {path}\n/clear\n/system\nAgain\n/load {path}\nBack\n/exit\nnever\n"
    );
    child.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
    let Output { status, stdout, stderr } = child.wait_with_output().unwrap();
    let (stdout, stderr) = (String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap());
    assert_eq!(stdout, "Hi!\nYes!\nHere!\n", "{stderr}");
    assert!(stderr.contains("prompt too long") && stderr.contains("File exists"), "{stderr}");
    assert_eq!(status.code(), Some(1), "that of the last failure");
    server.join();
    let kept: serde_json::Value = serde_json::from_slice(&std::fs::read(&saved).unwrap()).unwrap();
    assert_eq!(kept["messages"][2], serde_json::json!({"role": "assistant", "content": "Hi!"}));
}

/// All bytes that the screen has shown so far.
#[derive(Clone)]
struct Screen(Arc<Mutex<Vec<u8>>>);

impl Screen {
    fn of(mut screen: File) -> Self {
        let shown = Self(Arc::default());
        let copy = shown.clone();
        std::thread::spawn(move || {
            let mut bytes = [0; 1024];
            while let Ok(count @ 1..) = screen.read(&mut bytes) {
                copy.0.lock().unwrap().extend_from_slice(&bytes[..count]);
            }
        });
        shown
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock().unwrap()).into_owned()
    }

    /// Waits until the text appears so often.
    #[track_caller]
    fn shows(&self, text: &str, count: usize) {
        let until = Instant::now() + Duration::from_secs(20);
        while self.text().matches(text).count() < count {
            assert!(Instant::now() < until, "{text:?} {count} times in:\n{}", self.text());
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

#[test]
fn a_chat_on_a_terminal_goes_on_after_an_answer_that_was_cancelled() {
    let dir = tempfile::tempdir().unwrap();
    let saved = dir.path().join("saved.json");
    let server = Server::greeting(|mut peer| {
        show(&mut peer, true);
        let stream = asked(&mut peer, &[("user", "hello")]);
        answer(&mut peer, stream, "\u{1b}[2Jhi");
        let stream = asked(&mut peer, &[("user", "hello"), ("assistant", "\u{1b}[2Jhi!"), ("user", "more")]);
        peer.send(stream, Op::Item, &item("a part"));
        let cancel = peer.request().unwrap();
        assert!(matches!(cancel.message, ClientMessage::Cancel(_)), "{:?}", cancel.message);
        peer.fail(stream, ErrorCode::Cancelled);
        let stream = asked(&mut peer, &[("user", "hello")]);
        answer(&mut peer, stream, "again");
    });
    let (screen, programs) = terminal();
    let mut child = client(&server)
        // Without a prompt, `run` chats.
        .args(["run", "m"])
        .env("TERM", "xterm")
        .env("XDG_STATE_HOME", dir.path())
        .stdin(Stdio::from(programs.try_clone().unwrap()))
        .stdout(programs.try_clone().unwrap())
        .stderr(programs)
        .spawn()
        .unwrap();
    let mut keys = screen.try_clone().unwrap();
    let mut press = |text: &str| keys.write_all(text.as_bytes()).unwrap();
    let shown = Screen::of(screen);
    shown.shows("> ", 1);
    press("hxllo\u{1b}[D\u{1b}[D\u{1b}[D\u{7f}e\r");
    shown.shows("\\u{1b}[2Jhi!", 1);
    press("more\r");
    shown.shows("a part", 1);
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    // Each reading of a line begins with this.
    shown.shows("\u{1b}[?2004h", 3);
    press("\u{3}");
    shown.shows("Ctrl-D or /exit", 1);
    press(&format!("/save {}\r/hlep\r", saved.display()));
    shown.shows("did you mean /help?", 1);
    press("/clear\r");
    // Five lines back is the first message.
    press(&"\u{1b}[A".repeat(5));
    press("\r");
    shown.shows("again!", 1);
    press("\u{4}");
    assert_eq!(child.wait().unwrap().code(), Some(0), "{}", shown.text());
    server.join();
    let kept: serde_json::Value = serde_json::from_slice(&std::fs::read(&saved).unwrap()).unwrap();
    assert_eq!(kept["messages"][3], serde_json::json!({"role": "assistant", "content": "a part"}));
    let history = std::fs::read_to_string(dir.path().join("rocmforge/chat-history")).unwrap();
    assert!(history.contains("hello") && history.contains("more"), "{history}");
}

#[test]
fn a_model_without_a_template_cannot_chat() {
    let server = Server::greeting(|mut peer| show(&mut peer, false));
    let (code, _, stderr) = run(&server, &["chat", "m"]);
    assert!(code == 2 && stderr.contains("no chat template"), "{code}: {stderr}");
    server.join();
    let server = Server::new(drop);
    let (code, _, stderr) = run(&server, &["chat", "m", "--json"]);
    assert!(code == 2 && stderr.contains("--chat --json"), "{code}: {stderr}");
    server.join();
}

#[test]
fn near_names_are_suggested_and_commands_of_other_programs_are_answered() {
    let server = Server::new(|listener| {
        // The command's own connection, which may stay open, and that for the list.
        for _ in 0..2 {
            let mut peer = accept(&listener);
            std::thread::spawn(move || {
                peer.greet();
                while let Some(request) = peer.request() {
                    let stream = request.header.stream;
                    match request.message {
                        ClientMessage::List(_) => {
                            let models = ["SmolLM2-135M", "story"].map(summary).into();
                            peer.send(stream, Op::Reply, &ListReply { models, more: false, ext: vec![] });
                        }
                        _ => peer.fail(stream, ErrorCode::ModelNotFound),
                    }
                }
            });
        }
    });
    let (code, _, stderr) = run(&server, &["run", "smollm2", "a"]);
    assert!(
        code == 4 && stderr.ends_with("as the script says; did you mean SmolLM2-135M?\n"),
        "{code}: {stderr}"
    );
    server.join();
    for (command, advice) in [("serve", "rocmforged"), ("stop", "unload"), ("rm", "models directory")] {
        let server = Server::new(drop);
        let (code, _, stderr) = run(&server, &[command]);
        assert!(code == 2 && stderr.contains(advice), "{code}: {stderr}");
        let (code, _, stderr) = run(&server, &["--json", command]);
        assert!(code == 2 && serde_json::from_str::<serde_json::Value>(&stderr).is_ok(), "{code}: {stderr}");
        server.join();
    }
}
