//! Files that are not models, by name and by descriptor: each gets a typed error with the reason, and the daemon serves
//! on.

use std::os::fd::AsFd;
use std::path::Path;

use rocmforge_client::Connection;
use rocmforge_client::wire::{ErrorCode, GenerateRequest, ListRequest, ModelState, Prompt, WireError};

use crate::common;
use crate::forge::{Value, tiny_llama};
use crate::rig::{Rig, TINY, answer, refusal};

/// The errors of loading by name, loading by descriptor and requesting an answer.
fn refusals(rig: &Rig, name: &str) -> [WireError; 3] {
    let client = rig.client();
    let file = std::fs::File::open(rig.model(name)).unwrap();
    let prompt = Prompt::Text("a".into());
    [
        refusal(client.load(name)),
        refusal(client.load_descriptor(file.as_fd(), "passed")),
        refusal(answer(&client, &GenerateRequest::new(name, prompt))),
    ]
}

#[track_caller]
fn assert_refused(content: impl FnOnce(&Path), code: ErrorCode, says: &str) {
    let mut rig = Rig::start();
    content(&rig.model("bad"));
    for error in refusals(&rig, "bad") {
        assert_eq!(error.code, code as u16, "{error:?}");
        assert!(error.message.contains(says), "{:?} does not say {says:?}", error.message);
        assert!(
            !error.message.contains(rig.dir.path().to_str().unwrap()),
            "the message contains a path: {}",
            error.message
        );
    }
    rig.assert_serves();
}

fn write(bytes: impl AsRef<[u8]>) -> impl FnOnce(&Path) {
    move |path| std::fs::write(path, bytes).unwrap()
}

fn tiny() -> Vec<u8> {
    std::fs::read(common::tinystories()).unwrap()
}

#[test]
fn a_directory_is_no_model() {
    assert_refused(|path| std::fs::create_dir(path).unwrap(), ErrorCode::NotAModelFile, "a directory");
}

#[test]
fn an_empty_file_is_no_model() {
    assert_refused(write(""), ErrorCode::NotAModelFile, "the file is empty");
}

#[test]
fn a_file_of_another_kind_is_no_model() {
    assert_refused(
        write("PK\x03\x04 a zip archive, say, with enough bytes in it"),
        ErrorCode::NotAModelFile,
        "not a GGUF file",
    );
}

#[test]
fn a_truncated_file_is_damaged() {
    assert_refused(write(&tiny()[..100_000]), ErrorCode::ModelCorrupt, "incomplete or damaged");
    assert_refused(write(&tiny()[..10]), ErrorCode::ModelCorrupt, "incomplete or damaged");
}

#[test]
fn an_unsupported_architecture_is_named() {
    let forge = tiny_llama(1).set("general.architecture", Value::string("mamba"));
    assert_refused(write(forge.build().bytes), ErrorCode::ModelUnsupported, "\"mamba\"");
}

#[test]
fn an_unsupported_tensor_type_is_named() {
    let forge = tiny_llama(1).with_tensor("output.weight", |tensor| {
        tensor.data = Some(vec![0; 4 * tensor.dims.iter().product::<u64>() as usize]);
        tensor.ggml = 26; // I32
    });
    assert_refused(write(forge.build().bytes), ErrorCode::ModelUnsupported, "I32");
}

#[test]
fn a_missing_tensor_is_named() {
    let forge = tiny_llama(1).without("blk.1.attn_k.weight");
    assert_refused(write(forge.build().bytes), ErrorCode::ModelCorrupt, "blk.1.attn_k.weight");
}

#[test]
fn a_file_that_went_away_is_a_model_that_is_not_found() {
    let mut rig = Rig::start();
    std::fs::copy(rig.model(TINY), rig.model("other")).unwrap();
    let client = rig.client();
    assert!(client.load("other").unwrap().mapped_now);
    std::fs::remove_file(rig.model("other")).unwrap();
    assert_eq!(refusal(client.load("other")).code, ErrorCode::ModelNotFound as u16);
    let missing = refusal(client.show("never-was", false));
    assert_eq!(missing.code, ErrorCode::ModelNotFound as u16);
    assert!(missing.message.contains("never-was"));
    rig.assert_serves();
}

#[test]
fn a_directory_that_is_missing_is_logged_when_that_begins_and_ends() {
    let mut rig = Rig::idle();
    let missing = rig.dir.path().join("missing");
    let mut command = rig.command();
    rig.spawn(command.arg("--models").arg(&missing));
    let client = rig.client();
    let look = || (0..5).for_each(|_| assert_eq!(client.list().unwrap().models.len(), 1));
    let lines = |text: &str| rig.log_text().lines().filter(|line| line.contains(text)).count();
    look();
    assert_eq!(lines("cannot be read"), 1, "the log has more than one line for repeated requests");
    std::fs::create_dir(&missing).unwrap();
    look();
    std::fs::remove_dir(&missing).unwrap();
    look();
    assert_eq!((lines("cannot be read"), lines("can be read again")), (2, 1));
}

#[test]
fn a_list_that_fits_no_frame_comes_in_parts() {
    let rig = Rig::start();
    let names: Vec<String> = (0..3500).map(|n| format!("{}{n:04}", "n".repeat(246))).collect();
    names.iter().for_each(|name| std::fs::write(rig.model(name), "").unwrap());
    let first = Connection::connect(&rig.options()).unwrap().call(&ListRequest::default()).unwrap();
    assert!(first.more && first.models.len() < names.len(), "{}", first.models.len());
    let models = rig.client().list().unwrap().models;
    let mut listed: Vec<String> = models.into_iter().map(|model| model.name).collect();
    assert_eq!(listed.pop().as_deref(), Some(TINY));
    assert_eq!(listed, names);
}

#[test]
fn the_list_says_what_cannot_be_used_and_why() {
    let rig = Rig::start();
    std::fs::write(rig.model("empty"), "").unwrap();
    std::fs::create_dir(rig.model("folder")).unwrap();
    let models = rig.client().list().unwrap().models;
    let states: Vec<(&str, ModelState, &str)> =
        models.iter().map(|m| (m.name.as_str(), m.state, m.reason.as_str())).collect();
    assert_eq!(
        states,
        [
            ("empty", ModelState::Unusable, "the file is empty"),
            ("folder", ModelState::Unusable, "not a regular file"),
            (TINY, ModelState::Registered, ""),
        ]
    );
}
