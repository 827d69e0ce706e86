//! Sessions: requests that name one go on with its tokens or messages, of the same user alone, also after a restart.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;

use rocmforge_client::wire::{ChatMessage, ErrorCode, GenerateEnd, GenerateRequest, Prompt, SessionEntry};
use rocmforge_client::{Client, Options, ServerTrust};
use rustix::process::Signal;

use crate::child;
use crate::fairness::for_all_users;
use crate::forge::{Value, tiny_llama};
use crate::rig::{Answer, Rig, TINY, code, collect, refusal};

const ALICE: u32 = 54_325;

/// Tokens of each answer, except the cancelled ones.
const ANSWER: u32 = 12;

const CPU: &str = "[device]\nbackend = 'cpu'\n";

/// The prompts of three turns.
fn turns() -> [Vec<u32>; 3] {
    let ids = |from: u32, count: u32| (from..from + count).map(|i| 260 + i * 7 % 200).collect();
    [ids(0, 40), ids(40, 10), ids(50, 5)]
}

fn of(prompt: Prompt) -> GenerateRequest {
    GenerateRequest { max_tokens: ANSWER, ignore_eog: true, ..GenerateRequest::new(TINY, prompt) }
}

fn ids(ids: &[u32]) -> GenerateRequest {
    of(Prompt::Ids(ids.to_vec()))
}

fn ask(client: &Client, request: &GenerateRequest) -> (Answer, GenerateEnd) {
    let mut generation = client.generate(request).unwrap();
    let answer = collect(&mut generation).unwrap();
    (answer, generation.end().cloned().unwrap())
}

/// The sessions without their ages.
fn listed(client: &Client) -> Vec<SessionEntry> {
    let sessions = client.sessions().unwrap().sessions;
    sessions.into_iter().map(|session| SessionEntry { age_ms: 0, ..session }).collect()
}

#[test]
fn turns_give_the_tokens_of_whole_prompts_and_compute_only_new_ones() {
    let rig = Rig::start_with(CPU);
    let plain = Rig::start_with(&format!("{CPU}[kv]\nreuse = 'off'\n"));
    let mut whole = Vec::new();
    for turn in turns() {
        let known = whole.len() as u64;
        let (answer, end) = ask(&rig.client(), &ids(&turn).with_session("s"));
        whole.extend(turn);
        // The last token of the answer before was never an input.
        assert_eq!((&answer.prompt_ids, end.reused_tokens()), (&whole, known.saturating_sub(1)));
        let (expected, alone) = ask(&plain.client(), &ids(&whole));
        assert_eq!((&answer, alone.session_tokens()), (&expected, None));
        whole.extend(answer.ids);
        assert_eq!(end.session_tokens(), Some(whole.len() as u64));
    }
    let computed: usize = turns().iter().map(Vec::len).sum();
    assert_eq!(rig.client().status().unwrap().devices[0].prefill_rows, computed as u64 + 2);
    let [session] = listed(&rig.client()).try_into().unwrap();
    assert_eq!((session.name.as_str(), session.model.as_str(), session.in_use), ("s", TINY, false));
    assert_eq!((session.messages, session.tokens), (None, whole.len() as u64));
    assert_eq!(rig.client().forget_session(Some("other")).unwrap().forgotten, 0);
    assert_eq!(rig.client().forget_session(Some("s")).unwrap().forgotten, 1);
    assert_eq!(listed(&rig.client()), []);
    rig.assert_idle();
}

#[test]
fn texts_follow_on_one_another_with_one_beginning_of_sequence() {
    let rig = Rig::start_with(CPU);
    let text = |text: &str| of(Prompt::Text(text.to_owned()));
    let (first, _) = ask(&rig.client(), &text("Once upon a time").with_session("s"));
    let (second, _) = ask(&rig.client(), &text("The end").with_session("s"));
    let begins = |ids: &[u32]| ids.iter().filter(|id| **id == 1).count();
    assert_eq!(first.prompt_ids[0], 1);
    assert_eq!(begins(&second.prompt_ids), 1 + begins(&first.ids));
    assert!(second.prompt_ids.starts_with(&[first.prompt_ids, first.ids].concat()));
    // Nothing in addition: the answer goes on.
    let (third, _) = ask(&rig.client(), &text("").with_session("s"));
    assert_eq!(third.prompt_ids, [second.prompt_ids, second.ids].concat());
}

fn message(role: &str, content: &str) -> ChatMessage {
    ChatMessage { role: role.into(), content: content.into() }
}

fn chat(messages: &[ChatMessage]) -> GenerateRequest {
    GenerateRequest { model: "chatty".into(), max_tokens: 6, ..of(Prompt::Chat(messages.to_vec())) }
}

#[test]
fn turns_of_a_chat_equal_sending_all_messages() {
    const TEMPLATE: &str = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}";
    let rig = Rig::start_with(CPU);
    let model = tiny_llama(3)
        .set("llama.context_length", Value::u32(512))
        .set("tokenizer.chat_template", Value::string(TEMPLATE));
    std::fs::write(rig.model("chatty"), model.build().bytes).unwrap();
    let turns = [vec![message("system", "ab"), message("user", "ba")], vec![message("user", "")], vec![]];
    let mut all = Vec::new();
    for (turn, new) in turns.into_iter().enumerate() {
        all.extend_from_slice(&new);
        let (expected, _) = ask(&rig.client(), &chat(&all));
        // The last character may begin a stop text: it comes with the end.
        let last = expected.text.chars().last().expect("the answer has a text");
        let request = GenerateRequest { stop: vec![format!("{last}\u{1}")], ..chat(&new) };
        let (answer, end) = ask(&rig.client(), &request.with_session("talk"));
        assert!(!end.text.is_empty());
        assert_eq!(answer, expected, "turn {turn}");
        all.push(message("assistant", &answer.text));
        assert_eq!(end.session_tokens(), Some((answer.prompt_ids.len() + answer.ids.len()) as u64));
    }
    assert_eq!(listed(&rig.client())[0].messages, Some(all.len() as u32));
    // Each session has one kind of content and one model.
    let client = rig.client();
    ask(&client, &ids(&[300]).with_session("s"));
    let text = GenerateRequest { model: "chatty".into(), ..ids(&[300]) };
    for (request, told) in [
        (text.with_session("talk"), "has chat messages"),
        (GenerateRequest { model: TINY.into(), ..chat(&all) }.with_session("s"), "has tokens"),
        (chat(&all).with_session("s"), TINY),
    ] {
        let error = refusal(client.generate(&request).and_then(|mut generation| collect(&mut generation)));
        assert_eq!(error.code, ErrorCode::InvalidArgument as u16);
        assert!(error.message.contains(told), "{error}");
    }
}

#[test]
fn a_session_without_room_in_the_context_says_what_to_do() {
    let rig = Rig::start_with(CPU);
    ask(&rig.client(), &ids(&turns()[0]).with_session("s"));
    let before = listed(&rig.client());
    let too_long = rig.client().generate(&ids(&[300; 470]).with_session("s"));
    let error = refusal(too_long.and_then(|mut generation| collect(&mut generation)));
    assert_eq!(error.code, ErrorCode::PromptTooLong as u16);
    assert!(error.message.contains("forget the session, start another"), "{error}");
    assert_eq!(listed(&rig.client()), before);
    for name in ["", "a\nb", &"n".repeat(256)] {
        let bad = rig.client().generate(&ids(&[300]).with_session(name));
        let bad = bad.and_then(|mut generation| collect(&mut generation));
        assert_eq!(code(bad), ErrorCode::InvalidArgument as u16, "{name:?}");
    }
}

#[test]
fn a_session_has_one_request_at_a_time_and_a_cancelled_one_changes_nothing() {
    let rig = Rig::start_with(CPU);
    let client = rig.client();
    let (first, _) = ask(&client, &ids(&turns()[0]).with_session("s"));
    let before = listed(&client);
    for name in ["s", "new"] {
        // It stalls when its credit is used up.
        let endless = GenerateRequest { max_tokens: 300, ..ids(&turns()[1]) }.with_session(name);
        let mut running = client.generate(&endless).unwrap();
        running.next_item().unwrap();
        let second = client.generate(&ids(&turns()[1]).with_session(name));
        let error = refusal(second.and_then(|mut generation| collect(&mut generation)));
        assert_eq!(error.code, ErrorCode::Busy as u16);
        assert!(error.message.contains("another request uses session"), "{error}");
        for name in [Some(name), None] {
            assert_eq!(code(client.forget_session(name)), ErrorCode::Busy as u16);
        }
        drop(running);
        rig.assert_idle();
        rig.eventually("the session is free", |_| listed(&client) == before);
    }
    let (second, end) = ask(&client, &ids(&turns()[1]).with_session("s"));
    assert_eq!(second.prompt_ids, [&turns()[0][..], &first.ids, &turns()[1]].concat());
    assert_eq!(end.session_tokens(), Some(second.prompt_ids.len() as u64 + u64::from(ANSWER)));
}

/// Uses the session `s` in a process that a user runs, and tells how long the prompt was and which sessions there are.
#[test]
fn another_uses_the_name() {
    let Some((socket, _)) = child::inside() else { return };
    let client = Client::new(Options { socket, trust: ServerTrust::Anyone, ..Options::default() });
    let before = listed(&client).len() as u32 + client.forget_session(None).unwrap().forgotten;
    let (answer, _) = ask(&client, &ids(&turns()[1]).with_session("s"));
    println!("\nDONE {before} {} {}", answer.prompt_ids.len(), listed(&client).len());
}

#[test]
fn sessions_of_a_user_are_nobody_elses() {
    let Some(rig) = for_all_users(CPU) else { return };
    for name in ["s", "t"] {
        ask(&rig.client(), &ids(&turns()[0]).with_session(name));
    }
    let own = listed(&rig.client());
    let mut child =
        child::Process::start_as("sessions::another_uses_the_name", &rig.socket(), "", |command| {
            command.uid(ALICE).gid(ALICE);
        });
    child.go();
    assert_eq!(child.line("DONE "), "0 10 1");
    assert_eq!((listed(&rig.client()), own.len()), (own.clone(), 2), "also for an administrator");
}

/// Stops the daemon, and starts it again.
fn restart(rig: &mut Rig) {
    rig.signal(Signal::TERM);
    assert!(rig.ended().success());
    rig.run();
}

#[test]
fn sessions_go_on_after_a_restart_and_a_damaged_file_is_refused() {
    let kept = tempfile::tempdir().unwrap();
    let file = kept.path().join("sessions");
    let mut rig =
        Rig::start_with(&format!("{CPU}[kv]\nkeep_mib = 64\nkeep_dir = '{}'\n", kept.path().display()));
    let [first, second, third] = turns();
    let (answer, _) = ask(&rig.client(), &ids(&first).with_session("s"));
    let before = listed(&rig.client());
    restart(&mut rig);
    assert!(!file.exists(), "the daemon took it back");
    assert_eq!(listed(&rig.client()), before);
    let (going_on, end) = ask(&rig.client(), &ids(&second).with_session("s"));
    let whole = [&first[..], &answer.ids, &second].concat();
    assert_eq!((&going_on.prompt_ids, end.reused_tokens()), (&whole, whole.len() as u64 - 11));
    assert_eq!(rig.client().status().unwrap().devices[0].prefill_rows, 1 + second.len() as u64);

    rig.signal(Signal::TERM);
    assert!(rig.ended().success());
    let metadata = std::fs::metadata(&file).unwrap();
    assert_eq!(metadata.permissions().mode() & 0o777, 0o600);
    let mut bytes = std::fs::read(&file).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&file, bytes).unwrap();
    rig.run();
    assert!(rig.log_text().contains("the file of sessions is removed"));
    assert_eq!((listed(&rig.client()), file.exists()), (vec![], false));
    let (fresh, _) = ask(&rig.client(), &ids(&third).with_session("s"));
    assert_eq!(fresh.prompt_ids, third);
    // A forgotten session does not come back.
    rig.client().forget_session(None).unwrap();
    restart(&mut rig);
    assert_eq!(listed(&rig.client()), []);
}

#[test]
fn a_session_does_not_go_on_with_another_file_of_its_model() {
    let rig = Rig::start_with(CPU);
    let model = |seed| std::fs::write(rig.model("changing"), tiny_llama(seed).build().bytes).unwrap();
    let request = GenerateRequest { model: "changing".into(), ..ids(&[3]) }.with_session("s");
    model(3);
    ask(&rig.client(), &request);
    rig.client().unload("changing").unwrap();
    std::fs::remove_file(rig.model("changing")).unwrap();
    model(4);
    let changed = rig.client().generate(&request).and_then(|mut generation| collect(&mut generation));
    let error = refusal(changed);
    assert_eq!(error.code, ErrorCode::ModelChanged as u16);
    assert!(error.message.contains("forget the session"), "{error}");
}
