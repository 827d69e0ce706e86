//! `PROTOCOL.md` names every number of the code.

use std::fs;

use rocmforge_client::wire::{self, ErrorCode, Op, limits};

fn document() -> String {
    fs::read_to_string(super::root().join("PROTOCOL.md")).unwrap()
}

#[test]
fn the_document_lists_every_op_and_no_other() {
    let document = document();
    for op in Op::ALL {
        let number = *op as u16;
        let shown = if number < 0x8000 { number.to_string() } else { format!("{number:#06x}") };
        let row = format!("| {shown} | `{}` |", op.name());
        assert!(document.contains(&row), "no row {row:?}");
        assert_eq!(Op::from_u16(number), Some(*op));
    }
    let section = document.split("## 6. Ops").nth(1).unwrap().split("\n## ").next().unwrap();
    let rows = section.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| op")).count();
    assert_eq!(rows, Op::ALL.len());
}

#[test]
fn the_document_lists_every_error_and_no_other() {
    let document = document();
    for code in ErrorCode::ALL {
        let number = *code as u16;
        let retryable = if code.retryable() { "yes" } else { "" };
        let row = format!("| {number} | `{}` | {retryable} |", code.name());
        assert!(document.contains(&row), "no row {row:?}");
        assert_eq!(ErrorCode::from_u16(number), Some(*code));
    }
    let section = document.split("## 8. Errors").nth(1).unwrap().split("\n## ").next().unwrap();
    let rows = section.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| code")).count();
    assert_eq!(rows, ErrorCode::ALL.len());
}

#[test]
fn the_document_states_the_limits_of_the_code() {
    let document = document();
    for (name, value) in [
        ("payload", wire::PAYLOAD_BYTES_MAX as usize),
        ("smallest `max_frame`", wire::PAYLOAD_BYTES_MIN as usize),
        ("streams", wire::STREAMS_MAX as usize),
        ("initial credit", wire::INITIAL_CREDIT as usize),
        ("descriptors", wire::FDS_MAX.into()),
        ("NAME", limits::NAME_BYTES_MAX),
        ("LABEL", limits::LABEL_BYTES_MAX),
        ("KEY", limits::KEY_BYTES_MAX),
        ("VALUE", limits::VALUE_BYTES_MAX),
        ("TEXT", limits::TEXT_BYTES_MAX),
        ("IDS", limits::IDS_MAX),
        ("PING", limits::PING_BYTES_MAX),
        ("STOPS", limits::STOP_TEXTS_MAX),
        ("STOP", limits::STOP_TEXT_BYTES_MAX),
        ("TOP", limits::TOP_LOGPROBS_MAX),
        ("CHAT", limits::CHAT_MESSAGES_MAX),
        ("ROLE", limits::ROLE_BYTES_MAX),
        ("MODELS", limits::MODELS_MAX),
        ("SEQUENCES", limits::SEQUENCES_MAX),
        ("USERS", limits::USERS_MAX),
        ("DEVICES", limits::DEVICES_MAX),
        ("CHECKS", limits::CHECKS_MAX),
        ("OPS", limits::OPS_MAX),
        ("ENTRIES", limits::ENTRIES_MAX),
        ("DIMS", limits::DIMS_MAX),
        ("ENDS", limits::END_TOKENS_MAX),
        ("LAYERS", limits::LAYERS_MAX),
        ("PARTS", limits::PARTS_MAX),
        ("EVENTS", limits::EVENTS_MAX),
        ("ERROR", limits::ERROR_BYTES_MAX),
        ("DETAILS", limits::DETAILS_MAX),
        ("EXTS", limits::EXT_MAX),
        ("EXT", limits::EXT_BYTES_MAX),
        ("FORM", limits::FORM_BYTES_MAX),
        ("EXTRAS", limits::CHAT_EXTRAS_BYTES_MAX),
        ("EMBEDDING", limits::EMBEDDING_BYTES_MAX),
        ("TOOLS", limits::TOOLS_MAX),
        ("BIASES", limits::BIASES_MAX),
        ("DRAFTS", limits::DRAFTS_MAX.into()),
        ("LAST", limits::PENALTY_TOKENS_MAX as usize),
        ("BREAKERS", limits::BREAKERS_MAX),
        ("BREAKER", limits::BREAKER_BYTES_MAX),
    ] {
        let row = format!("| {name} | {value} |");
        assert!(document.contains(&row), "no row {row:?}");
    }
}

#[test]
fn the_documents_hexdump_is_the_kept_frame() {
    let kept = fs::read_to_string(super::frames().join("tokenize-request-typical.hex")).unwrap();
    let shown: String = document()
        .split("```hexdump\n")
        .nth(1)
        .and_then(|rest| rest.split("```").next())
        .unwrap()
        .lines()
        .filter_map(|line| line.split("  ").nth(1))
        .map(|bytes| format!("{} ", bytes.trim()))
        .collect();
    assert_eq!(super::unhex(&shown), super::unhex(&kept));
}
