//! `--check-config` and reloads look at the models: what would not be served is named before the configuration is taken.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use rocmforge::backend::cpu;
use rocmforge::config::Config;
use rocmforge::daemon::directories;
use rustix::process::Signal;

use crate::common;
use crate::forge::{Value, tiny_llama};
use crate::malformed;
use crate::rig::{PATIENCE, Rig, TINY};

/// Exit status, standard output and standard error of a check.
fn checked(rig: &Rig) -> (i32, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rocmforged"));
    let output = command.arg("--config").arg(rig.config()).arg("--check-config").output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

fn models_of(directories: &[&Path]) -> String {
    let list: Vec<String> = directories.iter().map(|dir| format!("{:?}", dir.to_str().unwrap())).collect();
    format!("models = [{}]\n", list.join(", "))
}

/// Bad files, each with what is said of it.
fn bad_files(dir: &Path) -> Vec<(PathBuf, &'static str)> {
    let tiny = fs::read(common::tinystories()).unwrap();
    let unknown = tiny_llama(7).set("general.architecture", Value::string("hal9000")).build().bytes;
    let of_type = |number| tiny_llama(7).filled().with_tensor("output_norm.weight", |t| t.ggml = number);
    let files: [(&str, Vec<u8>, &str); 7] = [
        ("text", b"a letter, not a model".to_vec(), "not a GGUF file"),
        ("empty", Vec::new(), "the file is empty"),
        (
            "cut",
            tiny[..tiny.len() / 2].to_vec(),
            "the file is incomplete or damaged; copy or download it again",
        ),
        ("cut-in-the-header", tiny[..1000].to_vec(), "at most 29 are possible here"),
        ("architecture", unknown, "hal9000"),
        ("no-such-type", of_type(255).build().bytes, "unknown tensor type 255"),
        ("part-00001-of-00002", tiny, "of-00002"),
    ];
    let written = files.map(|(name, bytes, says)| {
        let path = dir.join(name).with_extension("gguf");
        fs::write(&path, bytes).unwrap();
        (path, says)
    });
    let nowhere = dir.join("link.gguf");
    symlink("nowhere", &nowhere).unwrap();
    written.into_iter().chain([(nowhere, "No such file")]).collect()
}

#[test]
fn a_check_warns_of_bad_files_beside_good_ones_and_refuses_bad_ones_alone() {
    let rig = Rig::idle();
    let models = rig.dir.path().join("models");
    let bad = bad_files(&models);
    // Warnings are no matter of the log's level.
    rig.configure(&format!("{}[log]\nlevel = 'error'\n", models_of(&[&models])));
    let (status, out, told) = checked(&rig);
    assert_eq!(status, 0, "{told}");
    assert!(out.contains("config.toml; 1 of 9 models would be served"), "{out}");
    for (path, says) in &bad {
        let named = format!("warning: {} would not be served: ", path.display());
        let line =
            told.lines().find(|line| line.starts_with(&named)).unwrap_or_else(|| panic!("{path:?}: {told}"));
        assert!(line.contains(says) && line.ends_with("; replace or remove the file"), "{line}");
    }
    assert_eq!(told.lines().count(), bad.len(), "{told}");

    fs::remove_file(rig.model(TINY)).unwrap();
    let (status, out, told) = checked(&rig);
    assert_eq!((status, out.as_str()), (78, ""), "{told}");
    let says = [
        "config.toml: models: none of the 8 models",
        "architecture.gguf: ",
        "hal9000",
        "Replace or remove these files",
    ];
    assert!(says.iter().all(|says| told.contains(says)), "{told}");

    // A directory without models may get some, or clients pass theirs.
    let empty = rig.dir.path().join("empty");
    fs::create_dir(&empty).unwrap();
    rig.configure(&models_of(&[&empty]));
    let (status, _, told) = checked(&rig);
    assert!(status == 0 && told.contains("no directory has a model yet: put *.gguf files there"), "{told}");
    rig.configure("[device]\nindex = 0");
    let (status, _, told) = checked(&rig);
    assert!(status == 0 && told.contains("no directory of models is named"), "{told}");
}

#[test]
fn a_check_names_models_that_the_configuration_names_and_nobody_has() {
    let rig = Rig::idle();
    let named = "[weights.models]\ntiny = { pinned = true }\nTiny = { pinned = true }\n[host.models]\ngone = 'lock'\n";
    rig.configure(&format!("{}{named}", models_of(&[&rig.dir.path().join("models")])));
    let (status, _, told) = checked(&rig);
    let lines: Vec<&str> = told.lines().collect();
    let says =
        |key: &str, name: &str| format!("warning: {key} names {name:?}, and no directory has that model");
    assert_eq!((status, lines), (0, vec![&*says("host.models", "gone"), &*says("weights.models", "Tiny")]));
}

/// A daemon that systemd did not start has no cache directory, and would end at once.
#[test]
fn a_check_says_that_prefixes_have_no_folder() {
    let rig = Rig::idle();
    let models = models_of(&[&rig.dir.path().join("models")]);
    rig.configure(&format!("{models}[kv]\nkeep_mib = 64\n"));
    let (status, _, told) = checked(&rig);
    assert_eq!((status, told.lines().count()), (0, 1), "{told}");
    assert!(told.starts_with("warning: kv.keep_mib is set and kv.keep_dir is not: "), "{told}");
    let dir = rig.dir.path().join("kept");
    rig.configure(&format!("{models}[kv]\nkeep_mib = 64\nkeep_dir = {dir:?}\n"));
    assert_eq!((checked(&rig).0, checked(&rig).2), (0, String::new()));
}

/// Links to themselves are unreadable, even for root.
#[test]
fn a_check_names_what_cannot_be_read() {
    let rig = Rig::idle();
    let in_rig = |name: &str| rig.dir.path().join(name);
    let ways_out =
        ["create the directory, or correct its name", "make it readable for the daemon's user, or remove it"];
    let refused = |path: &Path, way_out: &str| {
        let (status, _, told) = checked(&rig);
        let names = told.contains(path.to_str().unwrap()) && told.contains(way_out);
        assert!(status == 78 && names && told.contains("symbolic links"), "{status}: {told}");
    };
    let models = in_rig("looped");
    symlink(&models, &models).unwrap();
    rig.configure(&models_of(&[&in_rig("models"), &models]));
    refused(&models, ways_out[0]);
    rig.configure(&models_of(&[&in_rig("models")]));
    assert_eq!(checked(&rig).0, 0);
    let drop_ins = in_rig("conf.d");
    symlink(&drop_ins, &drop_ins).unwrap();
    refused(&drop_ins, ways_out[1]);
    fs::remove_file(&drop_ins).unwrap();
    fs::create_dir(&drop_ins).unwrap();
    let drop_in = drop_ins.join("a.toml");
    symlink(&drop_in, &drop_in).unwrap();
    refused(&drop_in, ways_out[1]);
    fs::remove_file(&drop_in).unwrap();
    fs::write(&drop_in, b"models = ['/caf\xe9']").unwrap();
    let (status, _, told) = checked(&rig);
    assert!(status == 78 && told.contains(drop_in.to_str().unwrap()) && told.contains("UTF-8"), "{told}");
}

/// The look before a reload judges each model as a request for it would. It reads headers alone: one of these files has a TiB.
#[test]
fn a_look_at_the_directories_tells_every_malformed_model_from_the_good_ones() {
    let dir = tempfile::tempdir().unwrap();
    let all = malformed::cases();
    let name = |number: usize| format!("case{number}");
    all.iter().enumerate().for_each(|(number, case)| case.write(dir.path(), &name(number)));
    let directories = [dir.path().to_owned()];
    let survey = directories::survey(&directories, PATIENCE, Box::new(cpu::refuses)).unwrap();
    assert_eq!(survey.unseen.len(), 0, "{:?}", survey.unseen);
    let faults: Vec<&str> = (all.iter().enumerate())
        .filter(|(number, case)| {
            let unserved = survey.unserved.iter().any(|model| model.name == name(*number));
            (survey.served.contains(&name(*number)), unserved) != (case.code.is_none(), case.code.is_some())
        })
        .map(|(_, case)| case.what.as_str())
        .collect();
    assert!(faults.is_empty(), "{faults:?}");
    let config = Config { models: directories.to_vec(), ..Config::default() };
    let warnings = directories::judge(&config, Some(&survey)).unwrap();
    assert!(
        warnings.len() < 40 && warnings.iter().any(|text| text.contains("more models would not")),
        "{warnings:?}"
    );

    // Without time nothing is known, which is no fault of the configuration.
    let survey = directories::survey(&directories, Duration::ZERO, Box::new(cpu::refuses)).unwrap();
    assert!(survey.served.is_empty() && survey.unseen.len() + survey.unserved.len() >= all.len());
    let warnings = directories::judge(&config, Some(&survey)).unwrap();
    assert!(warnings.iter().any(|text| text.contains("were not looked at")), "{warnings:?}");
}

#[test]
fn a_reload_warns_of_bad_files_and_refuses_a_directory_that_serves_nothing() {
    let mut rig = Rig::idle();
    let own = rig.dir.path().join("models");
    let bad = rig.dir.path().join("bad");
    fs::create_dir(&bad).unwrap();
    let files = bad_files(&bad);
    rig.configure(&models_of(&[&own]));
    let mut command = Command::new(env!("CARGO_BIN_EXE_rocmforged"));
    command.arg("--socket").arg(rig.socket()).arg("--config").arg(rig.config());
    rig.spawn(&mut command);
    rig.client().load(TINY).unwrap();
    rig.configure(&models_of(&[&bad]));
    rig.signal(Signal::HUP);
    rig.eventually("the log refuses the directory", |_| {
        let log = rig.log_text();
        log.contains("none of the 8 models") && log.contains("the one in force stays")
    });
    let names =
        || rig.client().list().unwrap().models.into_iter().map(|model| model.name).collect::<Vec<_>>();
    assert_eq!(names(), [TINY]);
    rig.reload(&models_of(&[&own, &bad]));
    let log = rig.log_text();
    for (path, _) in &files {
        assert!(log.contains(&format!("{} would not be served: ", path.display())), "{path:?}: {log}");
    }
    assert_eq!(names().len(), 9);
    // Directories in force that became worthless are no reason to refuse other changes.
    fs::remove_file(rig.model(TINY)).unwrap();
    rig.reload(&format!("{}[limits]\nconnections = 77\n", models_of(&[&own, &bad])));
    assert!(rig.log_text().contains("none of the 8 models"));
}
