//! The facts that the daemon shows of a model and of itself, with exact types, levels and bytes.

use rocmforge_client::wire::{DetokenizeRequest, ErrorCode, TokenizeRequest, limits};

use crate::forge::{Value, every_type, tiny_llama};
use crate::rig::{Rig, TINY, refusal};

#[test]
fn metadata_of_every_type_is_shown() {
    let rig = Rig::start();
    let mut model = tiny_llama(1)
        .set("llama.rope.scaling.type", Value::string("linear"))
        .set("llama.rope.scaling.factor", Value::f32(4.0));
    for (key, value) in every_type(1).entries {
        let key = String::from_utf8(key).unwrap();
        if !key.starts_with("general.") {
            model = model.set(&key, value);
        }
    }
    std::fs::write(rig.model("typed"), model.build().bytes).unwrap();
    let shown = rig.client().show("typed", true).unwrap();
    assert!(shown.positions().unwrap().contains("divided by 4"), "{:?}", shown.positions());
    let found: Vec<(&str, &str, &str)> = shown
        .metadata
        .iter()
        .filter(|entry| entry.key.starts_with("t.") || entry.key.starts_with("a."))
        .map(|entry| (entry.key.as_str(), entry.kind.as_str(), entry.value.as_str()))
        .collect();
    let wanted = [
        ("t.u8", "u8", "200"),
        ("t.i8", "i8", "-128"),
        ("t.u16", "u16", "513"),
        ("t.i16", "i16", "-32768"),
        ("t.i32", "i32", "-5"),
        ("t.u64", "u64", "1099511627776"),
        ("t.i64", "i64", "-7"),
        ("t.f32", "f32", "0.5"),
        ("t.f64", "f64", "2.5"),
        ("t.bool", "bool", "true"),
        ("t.empty", "string", ""),
        ("a.u8", "[u8]", "[1, 2, 3]"),
        ("a.i8", "[i8]", "[1, -1]"),
        ("a.u16", "[u16]", "[1, 2]"),
        ("a.i16", "[i16]", "[-1]"),
        ("a.u32", "[u32]", "[1]"),
        ("a.i32", "[i32]", "[-1, 2]"),
        ("a.u64", "[u64]", "[1]"),
        ("a.i64", "[i64]", "[-1]"),
        ("a.f32", "[f32]", "[1, -2]"),
        ("a.f64", "[f64]", "[1]"),
        ("a.bool", "[bool]", "[true, false, true]"),
        ("a.string", "[string]", "[\"one\", \"\", \"zwölf\", \"\u{1f600}\"]"),
        ("a.none", "[string]", "[]"),
    ];
    assert_eq!(found, wanted);
}

#[test]
fn texts_that_no_reply_could_hold_are_refused_with_numbers() {
    let mut rig = Rig::start();
    let client = rig.client();
    let request = TokenizeRequest {
        model: TINY.into(),
        // No character is a token of the story model: each has three bytes and gives three tokens.
        text: "\u{4e00}".repeat(limits::IDS_MAX / 3 + 1),
        add_special: false,
        parse_special: false,
        ext: vec![],
    };
    let error = refusal(client.tokenize(&request));
    assert_eq!(error.code, ErrorCode::LimitExceeded as u16, "{error}");
    assert!(error.message.contains("a reply holds at most 261120: send it in parts"), "{error}");

    let once = TokenizeRequest { text: " there".into(), ..request };
    let longest = *client.tokenize(&once).unwrap().ids.last().unwrap();
    let ids = vec![longest; limits::IDS_MAX];
    let request = DetokenizeRequest { model: TINY.into(), ids, show_special: false, ext: vec![] };
    let error = refusal(client.detokenize(&request));
    assert_eq!(error.code, ErrorCode::LimitExceeded as u16, "{error}");
    assert!(error.message.contains("the text of 261120 tokens may not fit into one reply"), "{error}");
    rig.assert_serves();
}

#[test]
fn the_log_has_what_its_level_says() {
    for (level, tells) in
        [("error", false), ("warn", false), ("info", true), ("debug", true), ("trace", true)]
    {
        let mut rig = Rig::start_with(&format!("[log]\nlevel = \"{level}\"\n"));
        rig.assert_serves();
        let log = rig.log_text();
        assert_eq!(log.contains(" INFO "), tells, "{level}: {log}");
        assert!(level != "error" || !log.contains(" WARN "), "{log}");
    }
}
