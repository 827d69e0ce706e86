//! `run --tools`: the request's tools and constraint, and the calls of the answer.

use rocmforge_client::wire::*;
use serde_json::{Value, json};

use crate::command_line::{generate, run};
use crate::server::{Peer, Server, end, item};

const TOOLS: &str =
    r#"[{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]"#;

/// A daemon whose model writes calls as Hermes does. It answers in these pieces; `see` looks at the request.
fn answering(pieces: &'static [&'static str], see: fn(&GenerateRequest)) -> Server {
    Server::greeting(move |mut peer: Peer| {
        let request = peer.request().unwrap();
        assert!(matches!(request.message, ClientMessage::Show(_)), "{:?}", request.message);
        let mut reply = ShowReply { chat_template: true, ..crate::empty_show() };
        reply.ext.push((EXT_SHOW_CALLS, b"hermes".to_vec()));
        peer.send(request.header.stream, Op::Reply, &reply);
        let (stream, request) = generate(&mut peer);
        see(&request);
        assert!(request.marks());
        let extras: Value = serde_json::from_str(request.chat_extras().unwrap().unwrap()).unwrap();
        assert_eq!(extras["tools"][0]["function"]["name"], "weather");
        for piece in pieces {
            peer.send(stream, Op::Item, &item(piece));
        }
        peer.send(stream, Op::End, &GenerateEnd { text: String::new(), ..end() });
    })
}

fn file(text: &str) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(&file, text).unwrap();
    file
}

const PIECES: &[&str] = &[
    "<think>hm</think>I look. <tool_",
    "call>{\"name\": \"weather\", \"arguments\": {\"city\": ",
    "\"Oslo\"}}</tool_call>",
];

#[test]
fn calls_are_lines_of_json_after_the_text() {
    let tools = file(TOOLS);
    let server = answering(PIECES, |request| assert_eq!(request.form(), Ok(None)));
    let path = tools.path().to_str().unwrap();
    let (code, out, error) = run(&server, &["run", "m", "--chat", "--tools", path, "Oslo?"]);
    let call = r#"{"name":"weather","arguments":{"city":"Oslo"}}"#;
    assert_eq!((code, out.as_str(), error.as_str()), (0, format!("I look.\n{call}\n").as_str(), ""));
    server.join();
}

#[test]
fn an_object_has_text_reasoning_and_calls_apart() {
    let tools = file(TOOLS);
    let schema = file(r#"{"type": "boolean"}"#);
    let server = answering(PIECES, |request| {
        let form = request.form().unwrap().unwrap();
        assert!(form.kind == FormKind::Lark && form.text.contains("| answer\nanswer: %json"), "{form:?}");
    });
    let (path, schema) = (tools.path().to_str().unwrap(), schema.path().to_str().unwrap());
    let (code, out, error) =
        run(&server, &["run", "m", "--json", "--chat", "--tools", path, "--schema", schema, "Oslo?"]);
    let object: Value = serde_json::from_str(&out).unwrap();
    let calls = json!([{"name": "weather", "arguments": {"city": "Oslo"}}]);
    assert_eq!((code, error.as_str(), &object["calls"]), (0, "", &calls));
    assert_eq!((&object["text"], &object["reasoning"]), (&json!("I look."), &json!("hm")));
    server.join();
}

#[test]
fn a_call_may_be_demanded_and_one_that_is_cut_is_told() {
    let tools = file(TOOLS);
    let server = answering(&["<tool_call>{\"name\": \"weather\", \"arguments\": {\"ci"], |request| {
        let form = request.form().unwrap().unwrap();
        assert!(form.kind == FormKind::Lark && !form.text.contains("answer"), "{form:?}");
    });
    let path = tools.path().to_str().unwrap();
    let words = ["run", "m", "--chat", "--tools", path, "--tool-choice", "weather", "Oslo?"];
    let (code, out, error) = run(&server, &words);
    assert_eq!((code, out.as_str()), (0, ""), "{error}");
    assert!(error.starts_with("a call of weather is not whole and was left out"), "{error}");
    server.join();
}

#[test]
fn wrong_tools_and_choices_are_refused_before_anything_is_asked() {
    let (tools, wrong) = (file(TOOLS), file("{}"));
    let (path, wrong) = (tools.path().to_str().unwrap(), wrong.path().to_str().unwrap());
    let server = Server::new(|_| {});
    for (words, why) in [
        (&["--chat", "--tools", wrong] as &[&str], "it is no list of tools"),
        (&["--chat", "--tools", path, "--tool-choice", "x"], "neither auto, required nor a tool: weather"),
        (&["--chat", "--tools", path, "--regex", "a"], "the answer's form can only be a --schema"),
        (&["--tools", path], "--chat"),
        (&["--chat", "--tool-choice", "auto"], "--tools"),
        (&["--chat", "--tools", path, "--session", "s"], "--session"),
    ] {
        let (code, out, error) = run(&server, &[&["run", "m", "Oslo?"], words].concat());
        assert_eq!((code, out.as_str()), (2, ""), "{words:?}: {error}");
        assert!(error.contains(why), "{words:?}: {error}");
    }
    server.join();
}
