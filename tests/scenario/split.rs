//! Models split into parts: one name and one model; a fault of one part is a fault of the model.

use std::fs::{self, File, OpenOptions};
use std::os::fd::AsFd;

use rocmforge_client::wire::{ErrorCode, GenerateRequest, ModelState, ModelSummary, Prompt};

use crate::forge::{self, Forge, Value, tiny_llama};
use crate::rig::{Answer, Rig, answer, maps, refusal};

const PARTS: usize = 3;

fn part(number: usize) -> String {
    format!("cut-{number:05}-of-{PARTS:05}")
}

/// A rig with the model in parts as `cut`, and whole as `whole`. Also returns the whole.
fn rig() -> (Rig, Forge) {
    let rig = Rig::start();
    let whole = tiny_llama(11).filled();
    fs::write(rig.model("whole"), whole.build().bytes).unwrap();
    write_parts(&rig, &whole);
    (rig, whole)
}

fn write_parts(rig: &Rig, whole: &Forge) {
    for (number, forge) in (1..).zip(forge::split(whole, PARTS as u16)) {
        fs::write(rig.model(&part(number)), forge.build().bytes).unwrap();
    }
}

fn request(model: &str) -> GenerateRequest {
    let request = GenerateRequest::new(model, Prompt::Text("ab ba".into()));
    GenerateRequest { max_tokens: 12, ignore_eog: true, ..request }
}

fn ask(rig: &Rig, model: &str) -> Answer {
    answer(&rig.client(), &request(model)).unwrap()
}

fn summary(rig: &Rig, name: &str) -> ModelSummary {
    let mut models = rig.client().list().unwrap().models;
    models.retain(|model| model.name == name);
    assert_eq!(models.len(), 1, "{name}");
    models.remove(0)
}

#[test]
fn parts_are_one_model_that_answers_as_the_whole_does() {
    let (mut rig, whole) = rig();
    let names: Vec<String> = rig.client().list().unwrap().models.into_iter().map(|m| m.name).collect();
    assert_eq!(names, ["cut", "tiny", "whole"]);
    let bytes: u64 = (1..=PARTS).map(|n| fs::metadata(rig.model(&part(n))).unwrap().len()).sum();
    assert_eq!(summary(&rig, "cut").file_bytes, bytes);
    assert_eq!(ask(&rig, "cut"), ask(&rig, "whole"));
    let (cut, joined) = (rig.client().show("cut", true).unwrap(), rig.client().show("whole", true).unwrap());
    assert_eq!((cut.tensors_total as usize, cut.parameters), (whole.tensors.len(), joined.parameters));
    let names = |reply: &rocmforge_client::wire::ShowReply| -> Vec<String> {
        reply.tensors.iter().map(|t| t.name.clone()).collect()
    };
    assert_eq!(names(&cut), names(&joined));
    // Mapped once for all clients, and unmapped as a whole.
    assert!(!rig.client().load("cut").unwrap().mapped_now);
    assert!((1..=PARTS).all(|n| !maps(rig.pid(), &rig.model(&part(n))).is_empty()));
    assert!(rig.client().unload("cut").unwrap().was_mapped);
    rig.eventually("only the whole model is mapped", |status| status.models_mapped == 1);
    rig.assert_serves();
}

#[test]
fn a_missing_part_is_named_and_serves_once_it_is_there() {
    let (mut rig, _) = rig();
    let away = rig.dir.path().join("away");
    fs::rename(rig.model(&part(2)), &away).unwrap();
    let error = refusal(answer(&rig.client(), &request("cut")));
    assert_eq!(error.code, ErrorCode::NotAModelFile as u16);
    assert_eq!(error.message, format!("cut: 1 of {PARTS} parts are missing: {}.gguf", part(2)));
    let listed = summary(&rig, "cut");
    assert!(listed.state == ModelState::Unusable && listed.reason.contains(&part(2)), "{listed:?}");
    fs::rename(&away, rig.model(&part(2))).unwrap();
    assert_eq!(ask(&rig, "cut"), ask(&rig, "whole"));
    fs::remove_file(rig.model(&part(3))).unwrap();
    let error = refusal(rig.client().load("cut"));
    assert!(error.message.contains(&part(3)), "{}", error.message);
    rig.assert_serves();
}

#[test]
fn parts_that_do_not_belong_together_are_refused() {
    let (mut rig, whole) = rig();
    let good = forge::split(&whole, PARTS as u16);
    let refused = |part_number: usize, forge: &Forge, says: &str| {
        fs::write(rig.model(&part(part_number)), forge.build().bytes).unwrap();
        let error = refusal(rig.client().load("cut"));
        assert_eq!(error.code, ErrorCode::ModelCorrupt as u16, "{error:?}");
        assert!(error.message.contains(says), "{:?} does not say {says:?}", error.message);
        fs::write(rig.model(&part(part_number)), good[part_number - 1].build().bytes).unwrap();
    };
    refused(2, &good[2], "part 2 of 3: its split.no is 2, not 1");
    refused(3, &good[2].clone().set("split.count", Value::u16(4)), "part 3 of 3: its split.count is 4");
    refused(2, &good[1].clone().without("split.no"), "part 2 of 3: its split.no is missing");
    let mut less = good[1].clone();
    less.tensors.pop();
    refused(2, &less, "tensors, but split.tensors.count is");
    let mut twice = good[2].clone();
    twice.tensors[0] = good[0].tensors[0].clone();
    refused(3, &twice, "part 3 of 3 repeats tensor");
    let mut other = good[1].clone();
    other.magic = *b"GGML";
    fs::write(rig.model(&part(2)), other.build().bytes).unwrap();
    let error = refusal(rig.client().load("cut"));
    assert!(error.message.contains("part 2 of 3: not a GGUF file"), "{}", error.message);
    write_parts(&rig, &whole);
    assert_eq!(ask(&rig, "cut"), ask(&rig, "whole"));
    rig.assert_serves();
}

#[test]
fn a_part_by_itself_is_refused_and_told_what_to_do() {
    let (mut rig, _) = rig();
    let file = File::open(rig.model(&part(2))).unwrap();
    let error = refusal(rig.client().load_descriptor(file.as_fd(), "mine"));
    assert_eq!(error.code, ErrorCode::NotAModelFile as u16);
    assert!(error.message.contains("part 2 of 3 of a split model"), "{}", error.message);
    assert!(error.message.contains("NAME-00001-of-00003.gguf"), "{}", error.message);
    // The same under a name without a part number.
    fs::copy(rig.model(&part(1)), rig.model("renamed")).unwrap();
    let error = refusal(rig.client().load("renamed"));
    assert!(error.message.contains("part 1 of 3 of a split model"), "{}", error.message);
    rig.assert_serves();
}

#[test]
fn a_part_that_changes_or_shrinks_is_the_end_of_the_mapping() {
    let (mut rig, whole) = rig();
    let before = ask(&rig, "cut");
    // Another model's last part, put there by rename: a new model of the same name.
    let other = forge::split(&tiny_llama(12).filled(), PARTS as u16);
    let new = rig.dir.path().join("new");
    fs::write(&new, other[2].build().bytes).unwrap();
    fs::rename(&new, rig.model(&part(3))).unwrap();
    assert_ne!(ask(&rig, "cut"), before);
    rig.eventually("the old files are unmapped", |status| status.models_mapped == 1);
    write_parts(&rig, &whole);
    assert_eq!(ask(&rig, "cut"), before);
    // Truncated in place: the mapping loses bytes.
    let file = OpenOptions::new().write(true).open(rig.model(&part(3))).unwrap();
    file.set_len(file.metadata().unwrap().len() / 2).unwrap();
    let error = refusal(answer(&rig.client(), &request("cut")));
    assert_eq!(error.code, ErrorCode::ModelCorrupt as u16, "{error:?}");
    assert!(error.message.contains("part 3 of 3"), "{}", error.message);
    write_parts(&rig, &whole);
    assert_eq!(ask(&rig, "cut"), before);
    rig.assert_serves();
}
