//! The bytes of every message, kept in `tests/golden/frames`: `NAME-CASE.hex`, and its content as `NAME-CASE.json`.
//!
//! The files change only by `ROCMFORGE_WRITE_GOLDEN=1 cargo test -p rocmforge-client --test golden`, never by a plain run.
//! `tests/golden/decode.py`, written from `PROTOCOL.md` in another language, decodes them too and compares each field.

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)] // tests

#[path = "../common/mod.rs"]
mod common;
#[path = "../../../tests/common/mod.rs"]
mod skipping;

mod cases;
mod document;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use cases::Golden;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn frames() -> PathBuf {
    root().join("tests/golden/frames")
}

fn hex(bytes: &[u8]) -> String {
    let line =
        |line: &[u8]| line.iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().join(" ") + "\n";
    bytes.chunks(16).map(line).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    text.split_whitespace().map(|byte| u8::from_str_radix(byte, 16).unwrap()).collect()
}

fn check(golden: &Golden) {
    let file = |kind: &str| frames().join(format!("{}.{kind}", golden.name));
    if std::env::var_os("ROCMFORGE_WRITE_GOLDEN").is_some_and(|value| value == "1") {
        fs::write(file("hex"), hex(&golden.bytes)).unwrap();
        fs::write(file("json"), &golden.json).unwrap();
    }
    let kept = |kind| {
        fs::read_to_string(file(kind)).unwrap_or_else(|error| panic!("{}: {error}", file(kind).display()))
    };
    assert_eq!(kept("hex"), hex(&golden.bytes), "{}: other bytes than kept", golden.name);
    assert_eq!(kept("json"), golden.json, "{}: another value than kept", golden.name);
    (golden.decode)(&unhex(&kept("hex")), &kept("json"));
}

#[test]
fn every_message_has_the_kept_bytes_both_ways() {
    let cases = cases::all();
    cases.iter().for_each(check);
    let expected: BTreeSet<_> =
        cases.iter().flat_map(|case| ["hex", "json"].map(|kind| format!("{}.{kind}", case.name))).collect();
    let found: BTreeSet<_> = fs::read_dir(frames())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    assert_eq!(found, expected, "files without a case, or cases without a file");
}

#[test]
fn every_message_has_a_minimal_a_typical_and_a_large_case() {
    let cases = cases::all();
    let mut messages: BTreeSet<&str> = cases.iter().map(|case| case.message).collect();
    for message in &messages {
        for kind in ["min", "typical", "max"] {
            let found = cases.iter().any(|case| case.message == *message && case.name.ends_with(kind));
            assert!(found, "{message} has no {kind} case");
        }
    }
    // The two hellos; the wire module names all other messages.
    assert!(messages.remove("ClientHello") && messages.remove("ServerHello"));
    assert_eq!(messages.into_iter().collect::<Vec<_>>(), cases::message_names());
}

/// Runs Python; without it, prints that and returns `None`.
fn python(arguments: &[&str], folder: &str) -> Option<Output> {
    let output = Command::new("python3").arg("-B").args(arguments).current_dir(root().join(folder)).output();
    let Ok(output) = output else {
        skipping::skip("python3 is not there; the independent decoder and the Python package need it");
        return None;
    };
    let (text, complaint) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{text}{complaint}");
    Some(output)
}

/// Runs the independent decoder.
fn decoder(arguments: &[&str]) -> Option<String> {
    let output = python(&[&["tests/golden/decode.py"], arguments].concat(), "")?;
    Some(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[test]
fn a_decoder_written_from_the_document_reads_the_same_values() {
    let Some(text) = decoder(&["check", "tests/golden/frames"]) else { return };
    assert_eq!(text.trim(), format!("{} frames agree", cases::all().len()));
}

#[test]
fn a_changed_byte_anywhere_fails_the_independent_decoder() {
    let Some(text) = decoder(&["mutate", "tests/golden/frames"]) else { return };
    let bytes: usize = cases::all().iter().map(|case| case.bytes.len()).sum();
    assert_eq!(text.trim(), format!("{bytes} bytes, each change is seen"));
}

#[test]
fn the_decoder_has_the_documents_field_tables() {
    let Some(text) = decoder(&["document", "PROTOCOL.md"]) else { return };
    assert!(text.starts_with("the document agrees: "), "{text}");
}

#[test]
fn the_python_package_has_the_documents_messages() {
    if std::env::var_os("ROCMFORGE_WRITE_GOLDEN").is_some_and(|value| value == "1") {
        python(&["write_messages.py", "write"], "python");
    }
    python(&["write_messages.py", "check"], "python");
}

#[test]
fn the_python_package_reads_and_writes_every_kept_frame() {
    let Some(output) = python(&["-m", "unittest", "tests.test_wire"], "python") else { return };
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(complaint.contains("\nOK"), "{complaint}");
}

#[test]
fn the_python_package_reads_the_kept_answers_as_the_library_does() {
    let Some(output) = python(&["-m", "unittest", "tests.test_calls"], "python") else { return };
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(complaint.contains("\nOK"), "{complaint}");
}
