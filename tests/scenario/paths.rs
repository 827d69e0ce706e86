//! The daemon opens no path of a client: models are passed as open files, and names are only names.

use std::fs::{self, File};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;

use rocmforge_client::wire::{ErrorCode, GenerateRequest, Prompt};
use rustix::fs::inotify;

use crate::common;
use crate::rig::{Rig, answer, code};

/// Names of files opened below the watched directories since the last call.
fn opens(watch: &impl AsFd) -> Vec<String> {
    let mut buffer = [MaybeUninit::uninit(); 4096];
    let mut reader = inotify::Reader::new(watch, &mut buffer);
    let mut found = Vec::new();
    while let Ok(event) = reader.next() {
        found.push(event.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default());
    }
    found
}

#[test]
fn a_name_that_is_a_path_is_never_opened() {
    let mut rig = Rig::start();
    // A good model beside the daemon's directories, under the names that clients try.
    let lure = rig.dir.path().join("lure");
    fs::create_dir(&lure).unwrap();
    let file = lure.join("secret.gguf");
    fs::copy(common::tinystories(), &file).unwrap();
    let watch = inotify::init(inotify::CreateFlags::NONBLOCK | inotify::CreateFlags::CLOEXEC).unwrap();
    inotify::add_watch(&watch, &lure, inotify::WatchFlags::OPEN).unwrap();
    let passed = File::open(&file).unwrap();
    assert_eq!(opens(&watch), ["secret.gguf"], "the watch missed the test's own open");

    let client = rig.client();
    let path = file.to_str().unwrap().to_owned();
    let stem = path.strip_suffix(".gguf").unwrap().to_owned();
    for name in [&path, &stem, "../lure/secret", "../lure/secret.gguf", "./../lure/secret"] {
        let request = GenerateRequest::new(name, Prompt::Text("a".into()));
        for refused in [
            code(client.load(name)),
            code(client.show(name, true)),
            code(client.unload(name)),
            code(answer(&client, &request)),
        ] {
            assert!(
                [ErrorCode::ModelNotFound as u16, ErrorCode::InvalidArgument as u16].contains(&refused),
                "{name}: {refused}"
            );
        }
        assert_eq!(opens(&watch), [""; 0], "{name} was opened");
        // The same text as the name of a passed file is just a name.
        if client.load_descriptor(passed.as_fd(), name).is_ok() {
            let request =
                GenerateRequest { max_tokens: 2, ..GenerateRequest::new(name, Prompt::Text("a".into())) };
            answer(&client, &request).unwrap();
            client.unload(name).unwrap();
        }
        assert_eq!(opens(&watch), [""; 0], "{name} was opened");
    }
    // A file without any name is a model like others: the descriptor is enough.
    fs::remove_file(&file).unwrap();
    client.load_descriptor(passed.as_fd(), "nameless").unwrap();
    let request =
        GenerateRequest { max_tokens: 2, ..GenerateRequest::new("nameless", Prompt::Text("a".into())) };
    answer(&client, &request).unwrap();
    rig.assert_serves();
}
