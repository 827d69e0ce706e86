//! Whole models of an independent writer, of every supported architecture, tensor type and tokenizer: all load and
//! answer.

use std::collections::BTreeSet;

use rocmforge_client::wire::{ChatMessage, GenerateRequest, Prompt, SamplingOptions};

use crate::good;
use crate::rig::{Rig, answer};

/// Names of the models in the directory; the parts of a model count once.
fn names(dir: &std::path::Path) -> BTreeSet<String> {
    let files = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let models = files.filter(|path| path.extension().is_some_and(|end| end == "gguf"));
    let stems = models.map(|path| path.file_stem().unwrap().to_string_lossy().into_owned());
    stems.map(|stem| stem.find("-0000").map_or(stem.clone(), |at| stem[..at].to_owned())).collect()
}

#[test]
fn every_model_of_an_independent_writer_loads_and_answers() {
    let Some(written) = good::written() else { return };
    let dir = written.join("models");
    let names = names(&dir);
    assert!(names.len() >= 60, "{names:?}");
    let mut rig = Rig::idle();
    for entry in std::fs::read_dir(&dir).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|end| end == "gguf") {
            std::os::unix::fs::symlink(&path, rig.dir.path().join("models").join(path.file_name().unwrap()))
                .unwrap();
        }
    }
    rig.configure("[device]\nbackend = 'cpu'\n");
    rig.run();
    let client = rig.client();
    let listed: BTreeSet<String> =
        client.list().unwrap().models.into_iter().map(|model| model.name).collect();
    assert!(names.is_subset(&listed), "{:?}", names.difference(&listed));
    let (mut faults, mut different) = (Vec::new(), BTreeSet::new());
    for name in &names {
        let text = "the a 12 ab\n";
        let prompt = match name.contains("chat") {
            true => Prompt::Chat(vec![ChatMessage { role: "user".into(), content: text.into() }]),
            false => Prompt::Text(text.into()),
        };
        let mut request = GenerateRequest::new(name.as_str(), prompt);
        (request.max_tokens, request.ignore_eog) = (4, true);
        request.sampling = SamplingOptions { temperature: 0.0, ..request.sampling };
        match answer(&client, &request) {
            Ok(answer) if answer.ids.len() == 4 => drop(different.insert(answer.ids)),
            other => faults.push(format!("{name}: {other:?}")),
        }
        client.unload(name).unwrap();
    }
    assert!(faults.is_empty(), "{} of {} models failed:\n{}", faults.len(), names.len(), faults.join("\n"));
    // Each model has different weights.
    assert!(different.len() * 2 > names.len(), "{different:?}");
    rig.assert_serves();
}
