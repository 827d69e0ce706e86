use proptest::prelude::*;
use serde_json::json;

use super::*;

fn tools() -> Vec<Tool> {
    let parameters =
        json!({"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}});
    ["get_weather", "stop"]
        .map(|name| Tool { name: name.into(), description: None, parameters: parameters.clone() })
        .into()
}

/// The parts of a text that arrives in these pieces.
fn events<'a>(form: Form, in_reasoning: bool, pieces: impl IntoIterator<Item = &'a str>) -> Vec<Part> {
    let mut parser = Parser::new(form, tools());
    if in_reasoning {
        parser.begin_in_reasoning();
    }
    let mut events = Vec::new();
    for piece in pieces {
        parser.push(piece, &mut events);
    }
    parser.finish(&mut events);
    parts(&events)
}

fn text(text: &str) -> Part {
    Part::Text(text.to_owned())
}

fn reasoning(text: &str) -> Part {
    Part::Reasoning(text.to_owned())
}

fn call(name: &str, arguments: &str) -> Part {
    Part::Call(Call { name: name.to_owned(), arguments: arguments.to_owned(), id: None })
}

fn with_id(name: &str, arguments: &str, id: &str) -> Part {
    Part::Call(Call { name: name.to_owned(), arguments: arguments.to_owned(), id: Some(id.to_owned()) })
}

const WEATHER: &str = r#"{"city": "Oslo"}"#;

/// Answers in each form, with their events. The texts with calls are those of the models' own cards and templates.
fn cases() -> Vec<(Form, &'static str, Vec<Part>)> {
    let weather = || call("get_weather", WEATHER);
    vec![
        (Form::Hermes, "Hello there. ", vec![text("Hello there. ")]),
        (
            Form::Hermes,
            "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Oslo\"}}\n</tool_call>\n<tool_call>\n{\"name\": \"stop\"}\n</tool_call>",
            vec![weather(), call("stop", "{}")],
        ),
        (
            Form::Hermes,
            "<think>\nLet me see.\n</think>\n\nI look.\n\n<tool_call>{\"name\": \"get_weather\", \"arguments\": \"{\\\"city\\\": \\\"Oslo\\\"}\"}</tool_call> Done",
            vec![
                reasoning("Let me see."),
                text("I look."),
                call("get_weather", r#"{"city":"Oslo"}"#),
                text("Done"),
            ],
        ),
        // A closing mark inside of a text of the arguments, and none at the end.
        (
            Form::Hermes,
            "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"</tool_call>}\\\"\"}}",
            vec![call("f", r#"{"a": "</tool_call>}\""}"#)],
        ),
        (Form::Hermes, "a <tool_call> tag", vec![text("a <tool_call> tag")]),
        (
            Form::Hermes,
            "x <tool_call>{\"a\": 1}</tool_call>",
            vec![text("x <tool_call>{\"a\": 1}</tool_call>")],
        ),
        (Form::Hermes, "x\n<tool_call>{\"name\": \"f\", ", vec![text("x\n<tool_call>{\"name\": \"f\", ")]),
        (Form::Llama, "{\"name\": \"get_weather\", \"parameters\": {\"city\": \"Oslo\"}}", vec![weather()]),
        (
            Form::Llama,
            "<|python_tag|>{\"name\": \"other\", \"parameters\": {}}; {\"type\": \"function\", \"name\": \"get_weather\", \"parameters\": {\"city\": \"Oslo\"}}",
            vec![call("other", "{}"), weather()],
        ),
        (
            Form::Llama,
            "{\"name\": \"Oslo\", \"parameters\": {}}",
            vec![text("{\"name\": \"Oslo\", \"parameters\": {}}")],
        ),
        (
            Form::Mistral,
            "[TOOL_CALLS] [{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Oslo\"}, \"id\": \"abcdefghi\"}, {\"name\": \"stop\", \"arguments\": {}}]",
            // The name comes after what was told.
            vec![weather(), call("stop", "{}")],
        ),
        (
            Form::Mistral,
            "Wait.[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{\"city\": \"Oslo\"}[TOOL_CALLS]stop[ARGS]{}",
            vec![text("Wait."), with_id("get_weather", WEATHER, "abcdefghi"), call("stop", "{}")],
        ),
        (
            Form::Mistral,
            "[THINK]why[/THINK]so [TOOL_CALLS] what",
            vec![reasoning("why"), text("so [TOOL_CALLS] what")],
        ),
        (Form::Glm, "get_weather\n{\"city\": \"Oslo\"}", vec![weather()]),
        (Form::Glm, "get_weather is a tool", vec![text("get_weather is a tool")]),
        (
            Form::GlmTags,
            "<think>a</think>\nb<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>12</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
            vec![reasoning("a"), text("b"), call("get_weather", r#"{"city":"12","days":3}"#)],
        ),
        (Form::GlmTags, "<tool_call>two words</tool_call>", vec![text("<tool_call>two words</tool_call>")]),
        (
            Form::Harmony,
            "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{\"city\": \"Oslo\"}<|call|>",
            vec![reasoning("Think."), weather()],
        ),
        (
            Form::Harmony,
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>final<|message|>It < is <|fine",
            vec![text("I look.It < is <|fine")],
        ),
        (Form::Harmony, "plain", vec![text("plain")]),
        (
            Form::Harmony,
            " to=functions.stop<|message|>{\"a\": 1}\n<|call|>",
            vec![call("stop", "{\"a\": 1}")],
        ),
        (
            Form::Hermes,
            "<tool_call>{\"name\": \"stop\", \"arguments\": {}, \"x\": \"\\ \"}</tool_call> Done",
            vec![call("stop", "{}"), text("Done")],
        ),
        (
            Form::Described,
            "<|tool_call|>[{\"name\": \"stop\", \"arguments\": {}},]<|/tool_call|>",
            vec![call("stop", "{}")],
        ),
        (
            Form::Harmony,
            " to=functions.get_weather<|channel|>commentary json<|message|>{\"city\": \"Oslo\"}<|call|>",
            vec![weather()],
        ),
        (
            Form::Generic,
            " {\"name\": \"get_weather\", \"arguments\": {\"city\": \"Oslo\"}} ",
            vec![weather()],
        ),
        (
            Form::Described,
            "[{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Oslo\"}}, {\"function\": {\"name\": \"stop\", \"arguments\": {}}}]",
            vec![weather(), call("stop", "{}")],
        ),
        (
            Form::Described,
            "I look. <|tool_call|>[{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Oslo\"}}]<|/tool_call|>",
            vec![text("I look."), weather()],
        ),
        (Form::Generic, "[1] is a source, { no object", vec![text("[1] is a source, { no object")]),
        (Form::Generic, "{\"temperature\": 3}", vec![text("{\"temperature\": 3}")]),
        (Form::Generic, "{\"name\": \"get_weather\"}", vec![text("{\"name\": \"get_weather\"}")]),
    ]
}

#[test]
fn every_form_is_cut_into_text_reasoning_and_calls() {
    for (form, answer, expected) in cases() {
        assert_eq!(events(form, false, [answer]), expected, "{form:?} {answer}");
        let single: Vec<String> = answer.chars().map(String::from).collect();
        assert_eq!(events(form, false, single.iter().map(String::as_str)), expected, "{form:?} {answer}");
    }
    let begun = events(Form::Hermes, true, ["why</thi", "nk>\n\nso"]);
    assert_eq!(begun, [reasoning("why"), text("so")]);
    assert_eq!(events(Form::Hermes, true, ["why <tool_call>{"]), [reasoning("why <tool_call>{")]);
}

/// Calls that are cut, have faults, or lack a brace.
#[test]
fn a_call_that_was_begun_ends_where_its_arguments_do() {
    let cut = |name: &str, arguments: &str| {
        Part::Cut(Call { name: name.into(), arguments: arguments.into(), id: None })
    };
    let cases = [
        (Form::Hermes, r#"<tool_call>{"name": "f", "arguments": {"a": "b"#, vec![cut("f", r#"{"a": "b"#)]),
        (
            Form::Hermes,
            r#"<tool_call>{"name": "f", "arguments": {"a": no}}</tool_call> x"#,
            vec![cut("f", r#"{"a": no}"#), text("x")],
        ),
        (
            Form::Hermes,
            r#"<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call> x"#,
            vec![call("f", r#"{"a": 1}"#), text("x")],
        ),
        (
            Form::Generic,
            r#"[{"name": "stop", "arguments": {}, "id": "}"}, {"name": "other", "arguments": {}}]"#,
            vec![call("stop", "{}"), text(r#"{"name": "other", "arguments": {}}]"#)],
        ),
        (
            Form::Harmony,
            r#" to=functions.stop<|message|>{"a": <|call|><|channel|>final<|message|>x"#,
            vec![cut("stop", r#"{"a": "#), text("x")],
        ),
    ];
    for (form, answer, expected) in cases {
        assert_eq!(events(form, false, [answer]), expected, "{form:?} {answer}");
        let single: Vec<String> = answer.chars().map(String::from).collect();
        assert_eq!(events(form, false, single.iter().map(String::as_str)), expected, "{form:?} {answer}");
    }
}

#[test]
fn arguments_are_told_while_they_come() {
    for (form, head, rest) in [
        (Form::Hermes, "<tool_call>{\"name\": \"stop\", \"arguments\": {\"", "a\": 1"),
        (Form::Llama, "{\"name\": \"stop\", \"parameters\": {\"", "a\": 1"),
        (Form::Mistral, "[TOOL_CALLS]stop[ARGS]{\"", "a\": 1"),
        (Form::Mistral, "[TOOL_CALLS] [{\"name\": \"stop\", \"arguments\": {\"", "a\": 1"),
        (Form::Glm, "stop\n{\"", "a\": 1"),
        (Form::Described, "[{\"name\": \"stop\", \"arguments\": {\"", "a\": 1"),
        (Form::Harmony, " to=functions.stop<|message|>{\"", "a\": 1"),
    ] {
        let (mut parser, mut events) = (Parser::new(form, tools()), vec![]);
        parser.push(head, &mut events);
        let begun = Event::CallBegin { name: "stop".into(), id: None };
        assert_eq!(events, [begun, Event::Arguments("{\"".into())], "{form:?}");
        events.clear();
        parser.push(rest, &mut events);
        assert_eq!(events, [Event::Arguments(rest.into())], "{form:?}");
    }
}

#[test]
fn without_tools_nothing_is_a_call() {
    for (form, answer, _) in cases().into_iter().filter(|(form, ..)| *form != Form::Harmony) {
        let (mut parser, mut events) = (Parser::new(form, vec![]), vec![]);
        parser.push(answer, &mut events);
        parser.finish(&mut events);
        assert!(!events.iter().any(|event| matches!(event, Event::CallBegin { .. })), "{answer}");
    }
}

/// Pieces of all forms in any order: their halves, and other text.
fn pieces() -> impl Strategy<Value = Vec<String>> {
    let words = [
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "<|python_tag|>",
        "<|tool_call|>",
        "<|/tool_call|>",
        "<|tool_call|>",
        "<|/tool_call|>",
        "{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Oslo\"}}",
        "{\"name\": \"stop\", \"arguments\": {\"a",
        "{\"name\": \"stop\", \"arguments\": {}",
        "[{\"name\": \"stop\", \"arguments\": {}}",
        ", \"id\": \"x\"",
        "\"parameters\": ",
        ",",
        "{\"name\"",
        "get_weather",
        "\n",
        " ",
        "{",
        "}",
        "[",
        "]",
        "\"",
        "\\",
        "<|channel|>",
        "analysis",
        "<|message|>",
        "<|end|>",
        "<|start|>",
        " to=functions.stop ",
        "{}",
        "<arg_key>",
        "a",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "stop",
        ";",
        "é",
        "<",
        "[T",
        "<|",
    ];
    prop::collection::vec(prop::sample::select(words.map(String::from).to_vec()), 0..24)
}

proptest! {
    #[test]
    fn however_a_text_is_cut_its_events_are_the_same(
        pieces in pieces(),
        cuts in prop::collection::vec(0usize..400, 0..12),
        form in prop::sample::select(Form::ALL.to_vec()),
        in_reasoning: bool,
    ) {
        let whole = pieces.concat();
        let mut cuts: Vec<usize> = cuts.into_iter().filter(|cut| whole.is_char_boundary(*cut)).collect();
        cuts.extend([0, whole.len()]);
        cuts.sort_unstable();
        let cut = cuts.windows(2).map(|pair| &whole[pair[0]..pair[1]]);
        let expected = events(form, in_reasoning, [whole.as_str()]);
        prop_assert_eq!(&events(form, in_reasoning, cut), &expected);
        let single: Vec<String> = whole.chars().map(String::from).collect();
        prop_assert_eq!(&events(form, in_reasoning, single.iter().map(String::as_str)), &expected);
    }

    /// Without a call, the text is delivered but for marks of reasoning and the white space beside them.
    #[test]
    fn text_that_is_no_call_is_not_lost(pieces in pieces(), form in prop::sample::select(Form::ALL.to_vec())) {
        prop_assume!(form != Form::Harmony);
        let whole = pieces.concat();
        let events = events(form, false, [whole.as_str()]);
        prop_assume!(!events.iter().any(|event| matches!(event, Part::Call(_) | Part::Cut(_))));
        let told: String = events.iter().map(|event| match event {
            Part::Text(text) | Part::Reasoning(text) => text.as_str(),
            Part::Call(_) | Part::Cut(_) => "",
        }).collect();
        let bare = |text: &str| -> String {
            text.replace("<think>", "").replace("</think>", "").chars().filter(|c| !c.is_whitespace()).collect()
        };
        prop_assert_eq!(bare(&told), bare(&whole));
    }
}

#[test]
fn the_cost_of_a_long_call_is_linear() {
    // With the square of the length this would take minutes.
    let long = format!(
        "<tool_call>{{\"name\": \"f\", \"arguments\": {{\"a\": \"{}\"}}}}</tool_call>",
        "x".repeat(1 << 21)
    );
    let tags =
        format!("<tool_call>f<arg_key>a</arg_key><arg_value>{}</arg_value></tool_call>", "x".repeat(1 << 21));
    let channel = format!(
        "<|channel|>commentary to=functions.f <|message|>{{\"a\": \"{}\"}}<|call|>",
        "x".repeat(1 << 21)
    );
    for (form, answer) in [(Form::Hermes, long), (Form::GlmTags, tags), (Form::Harmony, channel)] {
        let pieces: Vec<&str> =
            answer.as_bytes().chunks(4).map(|piece| std::str::from_utf8(piece).unwrap()).collect();
        let found = events(form, false, pieces);
        assert!(matches!(found.as_slice(), [Part::Call(call)] if call.arguments.len() > 1 << 21));
    }
}

#[test]
fn a_template_tells_its_form() {
    for (template, form) in [
        ("{{ messages }}", Form::Generic),
        ("{% if tools %}<tools></tools><tool_call>", Form::Hermes),
        ("{% if tools %}<tool_call>{name}<arg_key>", Form::GlmTags),
        ("{{ tools }}[TOOL_CALLS]", Form::Mistral),
        ("{{ tools }}<|start_header_id|>ipython<|end_header_id|>", Form::Llama),
        ("{{ tools }}<|observation|>", Form::Glm),
        ("{{ tools }}<|channel|>", Form::Harmony),
        ("{{ tools|tojson }}", Form::Described),
    ] {
        assert_eq!(Form::of_template(template), form, "{template}");
        assert_eq!(Form::of_name(form.name()), form);
    }
    assert_eq!(Form::of_name("of a later version"), Form::Generic);
}

#[test]
fn a_chat_becomes_fields_or_texts() {
    let message = |role: &str, content: &str| Message {
        role: role.into(),
        content: Some(content.into()),
        ..Message::default()
    };
    let made =
        Call { name: "stop".into(), arguments: r#"{"z": 1, "a": 2}"#.into(), id: Some("call_1".into()) };
    let messages = || {
        vec![
            message("system", "Be kind."),
            message("user", "Stop."),
            Message { role: "assistant".into(), calls: vec![made.clone()], ..Message::default() },
            Message { call_id: Some("call_1".into()), ..message("tool", "done") },
            message("user", "And now?"),
        ]
    };
    let chat = conversation(Form::Hermes, &tools()[..1], messages(), serde_json::Map::new());
    let extras: Value = serde_json::from_str(&chat.extras.clone().unwrap()).unwrap();
    assert_eq!(extras["tools"][0]["function"]["name"], "get_weather");
    assert_eq!(extras["messages"][0], Value::Null);
    let fields = json!({"tool_calls": [{"type": "function", "id": "call_1",
        "function": {"name": "stop", "arguments": {"z": 1, "a": 2}}}]});
    assert_eq!(extras["messages"][2], fields);
    assert!(chat.extras.unwrap().contains(r#"{"z":1,"a":2}"#), "in the caller's order");
    assert_eq!(extras["messages"][3], json!({"tool_call_id": "call_1", "name": "stop"}));
    let mistral = conversation(Form::Mistral, &[], messages(), serde_json::Map::new()).extras.unwrap();
    let id = serde_json::from_str::<Value>(&mistral).unwrap()["messages"][3]["tool_call_id"].clone();
    assert_eq!(id.as_str().unwrap().len(), 9);
    assert_eq!(mistral.matches(id.as_str().unwrap()).count(), 2, "the same name in call and result");

    let chat = conversation(Form::Generic, &tools()[..1], messages(), serde_json::Map::new());
    assert_eq!(chat.extras, None);
    let roles: Vec<&str> = chat.messages.iter().map(|message| message.role.as_str()).collect();
    assert_eq!(roles, ["system", "user", "assistant", "user"]);
    assert!(
        chat.messages[0].content.contains("get_weather")
            && chat.messages[0].content.ends_with("\n\nBe kind.")
    );
    assert_eq!(chat.messages[2].content, r#"{"name":"stop","arguments":{"z":1,"a":2}}"#);
    assert_eq!(chat.messages[3].content, "Result of stop:\ndone\n\nAnd now?");
    let plain = conversation(Form::Hermes, &[], vec![message("user", "a")], serde_json::Map::new());
    assert_eq!((plain.messages.len(), plain.extras), (1, None), "an older daemon takes it too");
}
