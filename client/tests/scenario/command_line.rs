//! The program against a scripted server: its output and its exit codes.

use std::io::{Read, Write};
use std::process::{Child, Command, Output, Stdio};

use rocmforge_client::wire::*;
use rustix::process::{Pid, Signal, kill_process};

use crate::server::{Peer, Server, end, item, summary};

pub fn client(server: &Server) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rocmforge-client"));
    command.env("ROCMFORGE_SOCKET", server.socket()).stdin(Stdio::null());
    command
}

pub fn spawn(server: &Server, arguments: &[&str]) -> Child {
    client(server)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

pub fn run(server: &Server, arguments: &[&str]) -> (i32, String, String) {
    let Output { status, stdout, stderr } = client(server).args(arguments).output().unwrap();
    (status.code().unwrap(), String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap())
}

pub fn generate(peer: &mut Peer) -> (u32, GenerateRequest) {
    let request = peer.request().unwrap();
    let ClientMessage::Generate(generate) = request.message else { panic!("{:?}", request.message) };
    (request.header.stream, generate)
}

#[test]
fn run_prints_the_text_as_it_comes() {
    let (told, heard) = std::sync::mpsc::channel::<()>();
    let server = Server::greeting(move |mut peer| {
        let (stream, request) = generate(&mut peer);
        assert_eq!(request.prompt, Prompt::Text("from a pipe\n".into()));
        let SamplingOptions { temperature, top_k, top_p, min_p, seed, top_logprobs } = request.sampling;
        assert_eq!((temperature, top_k, top_p, min_p, seed, top_logprobs), (0.8, 40, 0.95, 0.05, None, 0));
        peer.send(stream, Op::Item, &item("first "));
        heard.recv().unwrap();
        peer.send(stream, Op::Item, &item("second"));
        peer.send(stream, Op::End, &end());
    });
    let mut child = spawn(&server, &["run", "m", "-", "--stats"]);
    child.stdin.take().unwrap().write_all(b"from a pipe\n").unwrap();
    let mut first = [0; 6];
    child.stdout.as_mut().unwrap().read_exact(&mut first).unwrap();
    assert_eq!(&first, b"first ");
    told.send(()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(0), b"second!".as_slice()));
    let stats = String::from_utf8(output.stderr).unwrap();
    assert!(
        stats.contains("generated 3 tokens, 500.0 tokens/s"),
        "two tokens after the first in 4 ms: {stats}"
    );
    server.join();
}

#[test]
fn run_with_json_prints_one_object() {
    let server = Server::greeting(|mut peer| {
        let (stream, request) = generate(&mut peer);
        assert_eq!(request.prompt, Prompt::Ids(vec![5, 6]));
        assert_eq!((request.max_tokens, request.timeout_ms, request.ignore_eog), (3, 900, true));
        assert_eq!(request.stop, ["a", "b"]);
        assert_eq!((request.sampling.seed, request.sampling.top_logprobs), (Some(4), 1));
        let logprob = TokenLogprob { logprob: -0.5, top: vec![TopToken { id: 1, logprob: -0.5 }] };
        let item = GenerateItem { prompt_ids: vec![5, 6], logprobs: vec![logprob], ..item("x") };
        peer.send(stream, Op::Item, &item);
        let weights =
            [(EXT_END_TENSORS_FOUND, 290), (EXT_END_TENSORS_LOADED, 2), (EXT_END_LOADED_BYTES, 512)];
        peer.send(stream, Op::End, &GenerateEnd { ext: number_ext(weights), ..end() });
    });
    let arguments = [
        "--json",
        "run",
        "m",
        "5, 6",
        "--ids",
        "-n",
        "3",
        "--timeout",
        "900",
        "--ignore-eog",
        "--stop",
        "a",
        "--stop",
        "b",
        "--seed",
        "4",
        "--logprobs",
        "1",
    ];
    let (code, stdout, stderr) = run(&server, &arguments);
    assert_eq!((code, stderr.as_str()), (0, ""));
    let object: serde_json::Value = serde_json::from_str(&stdout).unwrap();
    let expected = serde_json::json!({
        "text": "x!", "prompt_ids": [5, 6], "ids": [1], "stop_reason": "max_tokens",
        "usage": { "prompt_tokens": 2, "generated_tokens": 3 }, "reused_tokens": 0, "dropped_tokens": 0,
        "drafted_tokens": 0, "accepted_tokens": 0, "session_tokens": null, "seed": 9,
        "timings": { "queue": 1.5, "load": 0.0, "prefill": 2.0, "decode": 4.0 },
        "weights": { "tensors_found": 290, "tensors_loaded": 2, "loaded_bytes": 512 },
        "logprobs": [{ "logprob": -0.5, "top": [{ "id": 1, "logprob": -0.5 }] }],
    });
    assert_eq!(object, expected);
    server.join();
}

#[test]
fn run_with_chat_sends_messages() {
    let server = Server::greeting(|mut peer| {
        let (stream, request) = generate(&mut peer);
        let message = |role: &str, content: &str| ChatMessage { role: role.into(), content: content.into() };
        assert_eq!(request.prompt, Prompt::Chat(vec![message("system", "Be brief."), message("user", "Hi")]));
        peer.send(stream, Op::End, &end());
    });
    let (code, stdout, _) = run(&server, &["run", "m", "Hi", "--chat", "--system", "Be brief."]);
    assert_eq!((code, stdout.as_str()), (0, "!"));
    server.join();
}

#[test]
fn ctrl_c_cancels_prints_what_came_and_exits_130() {
    let server = Server::greeting(|mut peer| {
        let (stream, _) = generate(&mut peer);
        peer.send(stream, Op::Item, &item("begun"));
        assert!(matches!(peer.request().unwrap().message, ClientMessage::Cancel(_)));
        peer.fail(stream, ErrorCode::Cancelled);
    });
    let mut child = spawn(&server, &["run", "m", "p"]);
    let mut begun = [0; 5];
    child.stdout.as_mut().unwrap().read_exact(&mut begun).unwrap();
    assert_eq!(&begun, b"begun");
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), output.stderr.as_slice()), (Some(130), b"".as_slice()));
    server.join();
}

#[test]
fn a_second_ctrl_c_ends_a_program_whose_daemon_does_not_answer() {
    let (told, heard) = std::sync::mpsc::channel();
    let server = Server::greeting(move |mut peer| {
        let (stream, _) = generate(&mut peer);
        peer.send(stream, Op::Item, &item("begun"));
        assert!(matches!(peer.request().unwrap().message, ClientMessage::Cancel(_)));
        told.send(()).unwrap();
        assert_eq!(peer.drain(), []);
    });
    let mut child = spawn(&server, &["run", "m", "p"]);
    child.stdout.as_mut().unwrap().read_exact(&mut [0; 5]).unwrap();
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    heard.recv().unwrap();
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    server.join();
}

#[test]
fn a_reader_that_goes_away_cancels_quietly() {
    let server = Server::greeting(|mut peer| {
        let (stream, _) = generate(&mut peer);
        peer.send(stream, Op::Item, &item("begun"));
        // The pipe breaks at the first write after its reader closed. The server sends items until the client has
        // noticed.
        for _ in 1..INITIAL_CREDIT {
            peer.try_send(stream, Op::Item, &item("more"));
        }
        let messages = peer.drain();
        assert!(messages.iter().any(|message| matches!(message, ClientMessage::Cancel(_))), "{messages:?}");
    });
    let mut child = spawn(&server, &["run", "m", "p"]);
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), output.stderr.as_slice()), (Some(0), b"".as_slice()));
    server.join();
}

#[test]
fn errors_have_their_exit_codes_and_say_what_to_do() {
    let cases = [
        (ErrorCode::ModelNotFound, 4),
        (ErrorCode::ModelCorrupt, 4),
        (ErrorCode::PromptTooLong, 1),
        (ErrorCode::Internal, 1),
    ];
    for (code, exit) in cases {
        let server = Server::greeting(move |mut peer| {
            let (stream, _) = generate(&mut peer);
            let error = WireError::new(code, "no such thing: try another").with_detail("model", "m");
            peer.send(stream, Op::Error, &error);
        });
        let (found, stdout, stderr) = run(&server, &["run", "m", "p", "--json"]);
        assert_eq!((found, stdout.as_str()), (exit, ""), "{stderr}");
        let error: serde_json::Value = serde_json::from_str(&stderr).unwrap();
        assert_eq!(error["error"]["name"], code.name());
        assert_eq!(error["error"]["code"], code as u16);
        assert_eq!(error["error"]["message"], "no such thing: try another");
        assert_eq!(error["error"]["detail"]["model"], "m");
        server.join();
    }
}

#[test]
fn usage_and_reachability_have_their_exit_codes() {
    let server = Server::new(drop);
    let socket = server.socket();
    for arguments in
        [&["run"][..], &["run", "m", "p", "--ids"], &["nonsense"], &["run", "m", "p", "--logprobs", "3"]]
    {
        assert_eq!(run(&server, arguments).0, 2, "{arguments:?}");
    }
    server.join();
    let mut command = Command::new(env!("CARGO_BIN_EXE_rocmforge-client"));
    let output = command.arg("--socket").arg(socket).arg("list").output().unwrap();
    assert_eq!(output.status.code(), Some(3));
    let output = Command::new(env!("CARGO_BIN_EXE_rocmforge-client"))
        .args(["load", "/does/not/exist.gguf"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(4));
}

#[test]
fn a_path_is_loaded_and_then_used_by_its_name() {
    let server = Server::greeting(|mut peer| {
        let request = peer.request().unwrap();
        let ClientMessage::Load(load) = request.message else { panic!("{:?}", request.message) };
        assert_eq!((load.name.as_str(), request.fds.len()), ("tale", 1));
        let reply = LoadReply { summary: summary("tale-2"), mapped_now: true, elapsed_us: 1, ext: vec![] };
        peer.send(request.header.stream, Op::Reply, &reply);
        let (stream, request) = generate(&mut peer);
        assert_eq!(request.model, "tale-2", "the name the daemon gave");
        peer.send(stream, Op::End, &end());
    });
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tale.gguf");
    std::fs::write(&path, "GGUF").unwrap();
    let (code, stdout, stderr) = run(&server, &["run", path.to_str().unwrap(), "p"]);
    assert_eq!((code, stdout.as_str(), stderr.as_str()), (0, "!", ""));
    server.join();
}

#[test]
fn tokens_go_from_text_to_ids_and_back() {
    let server = Server::greeting(|mut peer| {
        let request = peer.request().unwrap();
        let ClientMessage::Tokenize(tokenize) = request.message else { panic!("{:?}", request.message) };
        assert_eq!(
            (tokenize.text.as_str(), tokenize.add_special, tokenize.parse_special),
            ("Hi", false, true)
        );
        peer.send(request.header.stream, Op::Reply, &TokenizeReply { ids: vec![1, 22], ext: vec![] });
    });
    let (_, stdout, _) = run(&server, &["tokenize", "m", "Hi", "--no-special", "--parse-special"]);
    assert_eq!(stdout, "1 22\n");
    server.join();
    let server = Server::greeting(|mut peer| {
        let request = peer.request().unwrap();
        let ClientMessage::Detokenize(detokenize) = request.message else { panic!("{:?}", request.message) };
        assert_eq!((detokenize.ids, detokenize.show_special), (vec![1, 22], false));
        peer.send(request.header.stream, Op::Reply, &DetokenizeReply { text: "Hi".into(), ext: vec![] });
    });
    let (_, stdout, _) = run(&server, &["detokenize", "m", "1,", "22", "--json"]);
    assert_eq!(stdout, "{\"text\":\"Hi\"}\n");
    server.join();
}

#[test]
fn list_and_ping_print_for_people_and_scripts() {
    // A list that arrives in parts is shown whole.
    let server = Server::greeting(|mut peer| {
        for (name, after, more) in [("a", "", true), ("m", "a", false)] {
            let request = peer.request().unwrap();
            let ClientMessage::List(list) = request.message else { panic!("{:?}", request.message) };
            assert_eq!(list.after, after);
            let reply = ListReply { models: vec![summary(name)], more, ext: vec![] };
            peer.send(request.header.stream, Op::Reply, &reply);
        }
    });
    let (_, stdout, _) = run(&server, &["list", "--json"]);
    let model = |name: &str| {
        serde_json::json!({
            "name": name, "state": "mapped", "file_bytes": 1, "architecture": "llama", "sequences": 0, "reason": ""
        })
    };
    assert_eq!(
        serde_json::from_str::<serde_json::Value>(&stdout).unwrap(),
        serde_json::json!({ "models": [model("a"), model("m")] })
    );
    server.join();
    let server = Server::greeting(|mut peer| {
        while let Some(request) = peer.request() {
            peer.echo(&request);
        }
    });
    let (code, stdout, _) = run(&server, &["ping", "--count", "3"]);
    assert_eq!((code, stdout.lines().count()), (0, 3));
    server.join();
}

/// Answers a load to the device; `what` is the expected request.
#[test]
fn limit_changes_a_user_and_shows_its_limits() {
    let limit = |value, origin| LimitInForce { value, origin };
    let (set, every) = (LimitOrigin::Request, LimitOrigin::EveryUser);
    let reply = LimitUserReply {
        users: vec![UserLimitsEntry {
            uid: 0,
            requests: limit(2, set),
            connections: limit(9, every),
            passed_models: limit(8, every),
            share: limit(50, set),
            ext: vec![],
        }],
        ext: vec![],
    };
    let wanted = [
        LimitUserRequest { uid: Some(0), requests: Some(2), share: Some(50), ..LimitUserRequest::default() },
        LimitUserRequest { uid: Some(1000), clear: true, ..LimitUserRequest::default() },
        LimitUserRequest::default(),
    ];
    let ask = |wanted: LimitUserRequest, arguments: &[&str]| {
        let reply = reply.clone();
        let server = Server::greeting(move |mut peer| {
            let request = peer.request().unwrap();
            assert_eq!(request.message, ClientMessage::LimitUser(wanted));
            peer.send(request.header.stream, Op::Reply, &reply);
        });
        let ran = run(&server, arguments);
        server.join();
        ran
    };
    let [change, clear, all] = wanted;
    let (code, text, _) = ask(change, &["limit", "root", "--requests", "2", "--share", "50"]);
    assert_eq!((code, text.lines().nth(1)), (0, Some("0    2 (set)   9            8              50 (set)")));
    assert_eq!(ask(clear, &["limit", "1000", "--clear"]).0, 0);
    let json: serde_json::Value = serde_json::from_str(&ask(all, &["limit", "--json"]).1).unwrap();
    assert_eq!(json["users"][0]["share"], serde_json::json!({ "value": 50, "origin": "request" }));
    let server = Server::greeting(|_| ());
    for usage in
        [&["limit", "no such user"][..], &["limit", "--requests", "1"], &["limit", "0", "--share", "x"]]
    {
        assert_eq!(run(&server, usage).0, 2, "{usage:?}");
    }
}

#[test]
fn run_states_a_priority_and_a_context_shift_where_it_is_told_to() {
    type Wanted = (u8, Option<u32>);
    let cases: [(&[&str], Wanted); 4] = [
        (&[], (PRIORITY, None)),
        (&["--priority", "7"], (7, None)),
        (&["--context-shift"], (PRIORITY, Some(1))),
        (&["--priority", "255", "--context-shift", "--keep", "300"], (255, Some(300))),
    ];
    for (arguments, wanted) in cases {
        let server = Server::greeting(move |mut peer| {
            let (stream, request) = generate(&mut peer);
            assert_eq!((request.priority(), request.context_shift()), wanted);
            let ext = number_ext([(EXT_END_DROPPED, 95)]);
            peer.send(stream, Op::End, &GenerateEnd { ext, ..end() });
        });
        let (code, text, _) = run(&server, &[&["run", "m", "more", "--json"], arguments].concat());
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!((code, json["dropped_tokens"].as_u64()), (0, Some(95)), "{arguments:?}");
        server.join();
    }
    let server = Server::greeting(|_| ());
    let shift_and_session = ["--context-shift", "--session", "s"];
    for usage in [&["--priority", "256"][..], &["--priority", "-1"], &["--keep", "3"], &shift_and_session] {
        assert_eq!(run(&server, &[&["run", "m", "p"], usage].concat()).0, 2, "{usage:?}");
    }
}

#[test]
fn run_states_the_form_of_the_answer_penalties_and_biases() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("form");
    std::fs::write(&file, "text").unwrap();
    let file = file.to_str().unwrap();
    let form = |kind, text| Some(AnswerForm::new(kind, text));
    let penalties =
        Penalties { repeat: 1.5, frequency: 0.25, presence: -1.0, last: 9, ..Penalties::default() };
    let biased = Penalties { bias: vec![(7, -100.0), (8, 0.5)], ..Penalties::default() };
    let numbers = [
        "--repeat-penalty",
        "1.5",
        "--frequency-penalty",
        "0.25",
        "--presence-penalty",
        "-1",
        "--repeat-last",
        "9",
    ];
    let cases: [(&[&str], Option<AnswerForm>, Option<Penalties>); 6] = [
        (&[], None, None),
        (&["--schema", file], form(FormKind::JsonSchema, "text"), None),
        (&["--regex", "a+"], form(FormKind::Regex, "a+"), None),
        (&["--grammar", file], form(FormKind::Lark, "text"), None),
        (&numbers, None, Some(penalties)),
        (&["--logit-bias", "7=-100", "--logit-bias", "8=0.5"], None, Some(biased)),
    ];
    for (arguments, form, penalties) in cases {
        let server = Server::greeting(move |mut peer| {
            let (stream, request) = generate(&mut peer);
            assert_eq!((request.form(), request.penalties()), (Ok(form), Ok(penalties)));
            peer.send(stream, Op::End, &end());
        });
        let (code, _, errors) = run(&server, &[&["run", "m", "more"], arguments].concat());
        assert_eq!(code, 0, "{arguments:?}: {errors}");
        server.join();
    }
    let server = Server::greeting(|_| ());
    for usage in [&["--regex", "a", "--schema", file][..], &["--schema", "/absent"], &["--logit-bias", "x"]] {
        assert_eq!(run(&server, &[&["run", "m", "p"], usage].concat()).0, 2, "{usage:?}");
    }
}

#[test]
fn run_goes_on_with_a_session_and_sessions_shows_and_forgets_them() {
    let server = Server::greeting(|mut peer| {
        let (stream, request) = generate(&mut peer);
        assert_eq!(request.session(), Ok(Some("talk")));
        let ext = number_ext([(EXT_END_SESSION, 412)]);
        peer.send(stream, Op::End, &GenerateEnd { ext, ..end() });
    });
    let (code, text, _) = run(&server, &["run", "m", "more", "--session", "talk", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!((code, json["session_tokens"].as_u64()), (0, Some(412)));
    server.join();

    let answers = |message: ClientMessage, arguments: &[&str]| {
        let server = Server::greeting(move |mut peer| {
            let request = peer.request().unwrap();
            assert_eq!(request.message, message);
            let session = SessionEntry {
                name: "talk".into(),
                model: "m".into(),
                messages: Some(6),
                tokens: 412,
                age_ms: 90_500,
                bytes: 2048,
                ..SessionEntry::default()
            };
            let stream = request.header.stream;
            match message {
                ClientMessage::Sessions(_) => {
                    peer.send(stream, Op::Reply, &SessionsReply { sessions: vec![session], ext: vec![] });
                }
                _ => peer.send(stream, Op::Reply, &ForgetSessionReply { forgotten: 1, ext: vec![] }),
            }
        });
        let (code, text, _) = run(&server, arguments);
        server.join();
        assert_eq!(code, 0);
        text
    };
    let list = || ClientMessage::Sessions(SessionsRequest::default());
    let forget = |scope| ClientMessage::ForgetSession(ForgetSessionRequest { scope, ext: vec![] });
    let text = answers(list(), &["sessions"]);
    let row: Vec<&str> = text.lines().nth(1).unwrap().split("  ").filter(|cell| !cell.is_empty()).collect();
    assert_eq!(
        row.iter().map(|cell| cell.trim()).collect::<Vec<_>>(),
        ["talk", "m", "6", "412", "2.0 KiB", "90.5 s"]
    );
    let json: serde_json::Value = serde_json::from_str(&answers(list(), &["sessions", "--json"])).unwrap();
    assert_eq!(json["sessions"][0]["messages"].as_u64(), Some(6));
    let forgot = answers(forget(SessionScope::Name("talk".into())), &["sessions", "forget", "talk"]);
    assert_eq!(forgot, "forgot 1 session\n");
    answers(forget(SessionScope::All), &["sessions", "forget", "--all"]);
    let server = Server::greeting(|_| ());
    for usage in [
        &["sessions", "forget"][..],
        &["sessions", "forget", "a", "--all"],
        &["run", "m", "t", "--session", ""],
    ] {
        assert_eq!(run(&server, usage).0, 2, "{usage:?}");
    }
}

#[test]
fn status_shows_what_users_hold_where_the_daemon_says_it() {
    let show = |knows: bool, arguments: &[&str]| {
        let server = Server::greeting(move |mut peer| {
            let request = peer.request().unwrap();
            assert!(matches!(request.message, ClientMessage::Status(_)));
            peer.send(request.header.stream, Op::Reply, &StatusReply::default());
            let pages = [(None, 7, true), (Some(7), 1000, false)];
            for (after, uid, more) in pages.into_iter().take(if knows { 2 } else { 1 }) {
                let request = peer.request().unwrap();
                assert_eq!(request.message, ClientMessage::Users(UsersRequest { after, ext: vec![] }));
                if knows {
                    let users = vec![UserEntry { uid, kv_pages: 3, ..UserEntry::default() }];
                    peer.send(request.header.stream, Op::Reply, &UsersReply { users, more, ext: vec![] });
                } else {
                    let error = WireError::new(ErrorCode::UnknownOp, "unknown");
                    peer.send(request.header.stream, Op::Error, &error);
                }
            }
        });
        let ran = run(&server, arguments);
        server.join();
        ran
    };
    let (code, text, _) = show(true, &["status"]);
    let table: Vec<&str> = text.lines().skip_while(|line| !line.starts_with("UID")).collect();
    assert!(code == 0 && table.len() == 3 && table[2].starts_with("1000  0 "), "{text}");
    let json: serde_json::Value = serde_json::from_str(&show(true, &["status", "--json"]).1).unwrap();
    assert_eq!(
        (json["users"][1]["uid"].as_u64(), json["users"][1]["kv_pages"].as_u64()),
        (Some(1000), Some(3))
    );
    let (code, text, _) = show(false, &["status"]);
    assert!(code == 0 && !text.contains("UID"), "{text}");
}

fn bring(peer: &mut Peer, what: &Preload) {
    let request = peer.request().unwrap();
    let ClientMessage::LoadToDevice(load) = &request.message else { panic!("{:?}", request.message) };
    assert_eq!((load.model.as_str(), &load.what), ("m", what));
    let stream = request.header.stream;
    for tensors in 0..9 {
        let item = LoadToDeviceItem {
            tensors,
            tensors_total: 9,
            device_bytes: 1 << 20,
            device_bytes_total: 5 << 20,
            bytes_per_second: 1 << 30,
            ext: vec![],
        };
        peer.send(stream, Op::Item, &item);
    }
    let end = LoadToDeviceEnd { tensors: 9, device_bytes: 5 << 20, elapsed_us: 1500, ext: vec![] };
    peer.send(stream, Op::End, &end);
}

#[test]
fn load_with_preload_tells_how_it_ended() {
    let server = Server::greeting(|mut peer| {
        let request = peer.request().unwrap();
        assert!(matches!(&request.message, ClientMessage::Load(load) if load.name == "m"));
        let reply = LoadReply { summary: summary("m"), mapped_now: true, elapsed_us: 900, ext: vec![] };
        peer.send(request.header.stream, Op::Reply, &reply);
        bring(&mut peer, &Preload::Critical);
    });
    let (code, stdout, stderr) = run(&server, &["load", "m", "--preload", "critical", "--json"]);
    assert_eq!((code, stderr.as_str()), (0, ""));
    let answer: serde_json::Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(answer["mapped_now"], true);
    assert_eq!(answer["preload"]["tensors"], 9);
    assert_eq!(answer["preload"]["device_bytes"], 5 << 20);
    server.join();
}

#[test]
fn preload_asks_for_layers_and_ends_with_what_came() {
    let server = Server::greeting(|mut peer| bring(&mut peer, &Preload::Layers(vec![0, 1, 7])));
    let (code, stdout, stderr) = run(&server, &["preload", "m", "--layers", "0-1,7"]);
    assert_eq!((code, stderr.as_str()), (0, ""), "no progress without a terminal");
    assert_eq!(stdout, "9 tensors on the device, 5.0 MiB, in 1.5 ms\n");
    server.join();
    let server = Server::greeting(|_| {});
    let (code, _, stderr) = run(&server, &["preload", "m", "--layers", "9-1"]);
    assert_eq!(code, 2);
    assert!(stderr.contains("9-1 ends before it begins"), "{stderr}");
}

#[test]
fn clear_cache_says_whose_weights_leave() {
    let server = Server::greeting(|mut peer| {
        let request = peer.request().unwrap();
        let ClientMessage::ClearCache(clear) = &request.message else { panic!("{:?}", request.message) };
        assert_eq!(clear.scope, CacheScope::Model("m".into()));
        let reply = ClearCacheReply { parts: 7, device_bytes: 3 << 20, ext: vec![] };
        peer.send(request.header.stream, Op::Reply, &reply);
    });
    let (code, stdout, _) = run(&server, &["clear-cache", "m"]);
    assert_eq!((code, stdout.as_str()), (0, "7 parts evicted, 3.0 MiB\n"));
    server.join();
    let nobody = Server::greeting(|_| {});
    let (code, _, _) = run(&nobody, &["clear-cache"]);
    assert_eq!(code, 2, "clearing all models needs --all");
}
