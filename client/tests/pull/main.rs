//! `rocmforge-client pull` before a server of HTTP in the test, which says what was asked.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // tests fail by panicking

mod hub;
mod server;
#[path = "../../../tests/common/mod.rs"]
mod skipping;
mod tls;

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Mutex};

use serde_json::Value;
use sha2::{Digest, Sha256};
use tempfile::TempDir;

use server::{Answered, Server};

/// A file that begins as a model.
fn model(bytes: usize) -> Vec<u8> {
    let noise = (0u32..).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8);
    b"GGUF".iter().copied().chain(noise).take(bytes).collect()
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Its exit code, and what it printed: the result, or the error.
struct Ran {
    code: i32,
    told: Value,
}

impl Ran {
    fn error(&self) -> &str {
        self.told["error"]["name"].as_str().unwrap_or_else(|| panic!("no error: {}", self.told))
    }

    fn file(&self) -> &Value {
        assert_eq!(self.code, 0, "{}", self.told);
        &self.told["files"][0]
    }
}

fn command(models: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rocmforge-client"));
    command.args(["--json", "pull", "--models"]).arg(models).args(arguments);
    for variable in [
        "http_proxy",
        "https_proxy",
        "all_proxy",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "ALL_PROXY",
        "ROCMFORGE_HUB",
        "ROCMFORGE_HUB_TOKEN",
    ] {
        command.env_remove(variable);
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn run(command: &mut Command) -> Ran {
    let output = command.output().unwrap();
    let text = if output.status.success() { output.stdout } else { output.stderr };
    let told = serde_json::from_slice(&text).unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&text)));
    Ran { code: output.status.code().unwrap(), told }
}

fn pull(models: &TempDir, arguments: &[&str]) -> Ran {
    run(&mut command(models.path(), arguments))
}

fn directory() -> TempDir {
    tempfile::tempdir().unwrap()
}

/// Names in the directory, sorted.
fn names(models: &TempDir) -> Vec<String> {
    let entries = std::fs::read_dir(models.path()).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_whole_file_is_there_with_its_digest_and_is_not_fetched_again() {
    let (models, body) = (directory(), model(3 << 20));
    let kept = body.clone();
    let server = Server::start(move |asked| Answered::of(&kept, asked, Some("\"1\"")));
    let (url, digest) = (server.url("/a/b%20c.gguf?x=1"), sha256(&body));
    let first = pull(&models, &[&url, "--sha256", &digest]);
    assert_eq!(first.told["name"], "b c");
    assert_eq!((&first.file()["sha256"], &first.file()["checked"]), (&digest.into(), &true.into()));
    assert_eq!((&first.file()["bytes"], &first.file()["resumed_bytes"]), (&(3 << 20).into(), &0.into()));
    assert_eq!(names(&models), ["b c.gguf"]);
    assert_eq!(std::fs::read(models.path().join("b c.gguf")).unwrap(), body);
    let again = pull(&models, &[&url, "--sha256", &sha256(&body)]);
    assert_eq!(again.file()["resumed_bytes"], 3 << 20);
    assert_eq!(server.asked().len(), 1);
    // Without a digest nothing tells that it is the same file.
    assert_eq!(pull(&models, &[&url]).error(), "Exists");
    let unchecked = pull(&models, &[&url, "--name", "other"]);
    assert_eq!((&unchecked.told["name"], &unchecked.file()["checked"]), (&"other".into(), &false.into()));
}

#[test]
fn a_transfer_that_breaks_off_goes_on_where_it_stopped() {
    let (models, body) = (directory(), model(2 << 20));
    let (kept, count) = (body.clone(), AtomicUsize::new(0));
    let server = Server::start(move |asked| {
        let answered = Answered::of(&kept, asked, Some("\"1\""));
        // Every answer but the fifth brings a quarter of a MiB.
        if count.fetch_add(1, Ordering::Relaxed) < 4 { answered.cut(1 << 18) } else { answered }
    });
    let ran = pull(&models, &[&server.url("/m.gguf")]);
    assert_eq!(ran.file()["sha256"], sha256(&body));
    assert_eq!(std::fs::read(models.path().join("m.gguf")).unwrap(), body);
    let asked = server.asked();
    let from: Vec<usize> = asked.iter().map(server::Asked::from).collect();
    assert_eq!(from, [0, 1 << 18, 2 << 18, 3 << 18, 4 << 18]);
    assert!(asked[1..].iter().all(|asked| asked.headers["if-range"] == "\"1\""), "{asked:?}");
}

#[test]
fn a_file_that_stays_truncated_gets_no_name_and_the_next_command_goes_on() {
    let (models, body) = (directory(), model(1 << 20));
    let (kept, whole) = (body.clone(), Arc::new(AtomicUsize::new(0)));
    let open = Arc::clone(&whole);
    let server = Server::start(move |asked| match (open.load(Ordering::Relaxed), asked.from()) {
        (0, 0) => Answered::of(&kept, asked, Some("\"1\"")).cut(300_000),
        (0, _) => Answered::status(503),
        _ => Answered::of(&kept, asked, Some("\"1\"")),
    });
    let broken = pull(&models, &[&server.url("/m.gguf")]);
    assert_eq!((broken.code, broken.error()), (1, "BrokenOff"));
    assert_eq!(names(&models), ["m.gguf.part", "m.gguf.part.json"]);
    whole.store(1, Ordering::Relaxed);
    let ran = pull(&models, &[&server.url("/m.gguf")]);
    assert_eq!(ran.file()["resumed_bytes"], 300_000);
    assert_eq!(server.asked().last().unwrap().from(), 300_000);
    assert_eq!((std::fs::read(models.path().join("m.gguf")).unwrap(), names(&models).len()), (body, 1));
}

#[test]
fn a_file_that_changed_meanwhile_is_fetched_from_its_beginning() {
    let (models, old, new) = (directory(), model(1 << 20), [b"GGUF".as_slice(), &[7; 500_000]].concat());
    let (kept, state) = ((old, new.clone()), Arc::new(AtomicUsize::new(0)));
    let state_of_server = Arc::clone(&state);
    let server = Server::start(move |asked| match state_of_server.load(Ordering::Relaxed) {
        0 if asked.from() == 0 => Answered::of(&kept.0, asked, Some("\"1\"")).cut(300_000),
        0 => Answered::status(503),
        _ => Answered::of(&kept.1, asked, Some("\"2\"")),
    });
    assert_eq!(pull(&models, &[&server.url("/m.gguf")]).error(), "BrokenOff");
    state.store(1, Ordering::Relaxed);
    let ran = pull(&models, &[&server.url("/m.gguf")]);
    assert_eq!(
        (ran.file()["sha256"].as_str(), ran.file()["bytes"].as_u64()),
        (Some(&*sha256(&new)), Some(500_004))
    );
    assert_eq!(std::fs::read(models.path().join("m.gguf")).unwrap(), new);
}

#[test]
fn a_server_that_knows_no_ranges_or_no_versions_sends_all_again() {
    let (models, body) = (directory(), model(1 << 20));
    let (kept, count) = (body.clone(), AtomicUsize::new(0));
    let server = Server::start(move |_| {
        let answered = Answered { body: kept.clone(), ..Answered::status(200) };
        if count.fetch_add(1, Ordering::Relaxed) == 0 { answered.cut(300_000) } else { answered }
    });
    let ran = pull(&models, &[&server.url("/m.gguf")]);
    assert_eq!(ran.file()["sha256"], sha256(&body));
    assert_eq!(names(&models), ["m.gguf"]);
}

#[test]
fn a_file_with_another_digest_is_deleted() {
    let (models, body) = (directory(), model(1 << 20));
    let server = Server::start(move |asked| Answered::of(&body, asked, Some("\"1\"")));
    let ran = pull(&models, &[&server.url("/m.gguf"), "--sha256", &sha256(b"other")]);
    assert_eq!((ran.code, ran.error()), (1, "Digest"));
    assert!(ran.told["error"]["message"].as_str().unwrap().contains(&sha256(b"other")));
    assert_eq!(names(&models), [""; 0]);
}

#[test]
fn a_file_that_is_no_model_is_refused() {
    let models = directory();
    let server = Server::start(|asked| match asked.path.as_str() {
        "/page.gguf" => Answered { body: b"<html>not here</html>".to_vec(), ..Answered::status(200) },
        "/short.gguf" => Answered { body: b"GG".to_vec(), ..Answered::status(200) },
        _ => Answered::status(404),
    });
    for (path, name) in [("/page.gguf", "NotAModel"), ("/short.gguf", "NotAModel"), ("/none.gguf", "Status")]
    {
        let ran = pull(&models, &[&server.url(path)]);
        assert_eq!((ran.code, ran.error()), (1, name), "{path}");
    }
    assert_eq!(names(&models), [""; 0]);
    for arguments in
        [&["story"][..], &["ftp://x/y.gguf"], &[&server.url("/m.bin")], &["http://192.0.2.1/m.gguf"]]
    {
        assert_eq!(pull(&models, arguments).code, 2, "{arguments:?}");
    }
    // Nothing listens there any more.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    assert_eq!(pull(&models, &[&format!("http://127.0.0.1:{port}/m.gguf")]).error(), "Web");
}

#[test]
fn a_redirect_is_followed_also_when_a_transfer_goes_on() {
    let (models, body) = (directory(), model(1 << 20));
    let kept = body.clone();
    let count = AtomicUsize::new(0);
    let server = Server::start(move |asked| match asked.path.as_str() {
        "/m.gguf" => {
            Answered { headers: vec![("Location", "/elsewhere?signed=1".into())], ..Answered::status(302) }
        }
        "/round.gguf" => {
            Answered { headers: vec![("Location", "/round.gguf".into())], ..Answered::status(302) }
        }
        _ => {
            let answered = Answered::of(&kept, asked, Some("\"1\""));
            if count.fetch_add(1, Ordering::Relaxed) == 0 { answered.cut(400_000) } else { answered }
        }
    });
    let ran = pull(&models, &[&server.url("/m.gguf")]);
    assert_eq!((ran.file()["sha256"].as_str(), &ran.told["name"]), (Some(&*sha256(&body)), &"m".into()));
    let paths: Vec<(String, usize)> =
        server.asked().iter().map(|asked| (asked.path.clone(), asked.from())).collect();
    assert_eq!(paths.last().unwrap(), &("/elsewhere?signed=1".to_owned(), 400_000));
    assert_eq!(pull(&models, &[&server.url("/round.gguf")]).error(), "Web");
}

#[test]
fn a_file_appears_when_it_is_whole_and_is_fetched_once() {
    let (models, body) = (directory(), model(1 << 20));
    let kept = body.clone();
    let (begin, begun) = mpsc::channel();
    let (go_on, going_on) = mpsc::channel::<()>();
    let going_on = Mutex::new(going_on);
    let server = Server::start(move |asked| {
        if asked.from() == 0 {
            return Answered::of(&kept, asked, Some("\"1\"")).cut(500_000);
        }
        begin.send(()).unwrap();
        going_on.lock().unwrap().recv().unwrap();
        Answered::of(&kept, asked, Some("\"1\""))
    });
    let mut child = command(models.path(), &[&server.url("/m.gguf")]).spawn().unwrap();
    begun.recv().unwrap();
    assert_eq!(names(&models), ["m.gguf.part", "m.gguf.part.json"]);
    assert_eq!(pull(&models, &[&server.url("/m.gguf")]).error(), "InProgress");
    go_on.send(()).unwrap();
    assert!(child.wait().unwrap().success());
    assert_eq!(
        (names(&models), std::fs::read(models.path().join("m.gguf")).unwrap()),
        (vec!["m.gguf".to_owned()], body)
    );
}
