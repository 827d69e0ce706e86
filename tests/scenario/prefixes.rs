//! A prompt that begins as an earlier one of the same user is computed from where they differ, on the CPU and on a GPU.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};

use rocmforge_client::wire::{GenerateEnd, GenerateRequest, Prompt};
use rocmforge_client::{Client, Options, ServerTrust};
use rustix::process::Signal;

use crate::child;
use crate::device::{on_gpu, on_gpu_with, run_on_gpu};
use crate::fairness::for_all_users;
use crate::forge;
use crate::rig::{Rig, TINY, collect};

const ALICE: u32 = 54_323;
const BOB: u32 = 54_324;

/// Tokens of the shared prompt: no number of whole pages.
const SHARED: u64 = 460;
/// The same on a GPU, which may be the look-alike: it computes a row in about 0.1 s.
const SHARED_ON_GPU: u64 = 76;

/// A prompt that has `own` after the shared tokens.
fn request(shared: u64, own: &[u32]) -> GenerateRequest {
    let shared = (0..shared as u32).map(|i| 260 + i * 7 % 200);
    let ids = shared.chain(own.iter().copied()).collect();
    GenerateRequest { max_tokens: 12, ignore_eog: true, ..GenerateRequest::new(TINY, Prompt::Ids(ids)) }
}

/// The ids of the answer, and its end.
fn ask(client: &Client, shared: u64, own: &[u32]) -> (Vec<u32>, GenerateEnd) {
    let mut generation = client.generate(&request(shared, own)).unwrap();
    let answer = collect(&mut generation).unwrap();
    (answer.ids, generation.end().cloned().unwrap())
}

/// Prompt tokens that the device has computed so far, and those that it did not need to.
fn counts(rig: &Rig) -> (u64, u64) {
    let device = rig.client().status().unwrap().devices.remove(0);
    (device.prefill_rows, device.reused_tokens())
}

fn a_second_client_computes_one_token(rig: &Rig, shared: u64) {
    let (first, end) = ask(&rig.client(), shared, &[]);
    assert_eq!((end.reused_tokens(), counts(rig)), (0, (shared, 0)));
    let (second, end) = ask(&rig.client(), shared, &[]);
    assert_eq!(u64::from(end.usage.prompt_tokens), shared);
    assert_eq!((end.reused_tokens(), counts(rig)), (shared - 1, (shared + 1, shared - 1)));
    assert_eq!(first, second);
    // With other tokens after the shared ones.
    let (_, end) = ask(&rig.client(), shared, &[300, 301, 302]);
    assert_eq!((end.reused_tokens(), counts(rig).0), (shared, shared + 4));
    let device = rig.client().status().unwrap().devices.remove(0);
    assert!(device.kv_cached_bytes() > 0 && device.kv_cached_bytes() == device.kv_bytes, "{device:?}");
    let residency = rig.client().residency().unwrap();
    assert_eq!(residency.models[0].kv_cached_bytes(), device.kv_cached_bytes());
    rig.client().evict_weights(Some(TINY)).unwrap();
    let device = rig.client().status().unwrap().devices.remove(0);
    assert_eq!((device.kv_cached_bytes(), device.kv_bytes), (0, 0));
    let (again, end) = ask(&rig.client(), shared, &[]);
    assert_eq!((again, end.reused_tokens()), (first, 0));
    rig.assert_idle();
}

#[test]
fn a_second_client_computes_one_token_on_the_cpu() {
    a_second_client_computes_one_token(&Rig::start_with("[device]\nbackend = 'cpu'"), SHARED);
}

#[test]
fn a_second_client_computes_one_token_on_a_gpu() {
    let Some(rig) = on_gpu() else { return };
    a_second_client_computes_one_token(&rig, SHARED_ON_GPU);
}

/// Asks as another user, and tells how many prompt tokens were reused.
#[test]
fn asks_twice() {
    let Some((socket, _)) = child::inside() else { return };
    let client = Client::new(Options { socket, trust: ServerTrust::Anyone, ..Options::default() });
    let reused = [(); 2].map(|()| ask(&client, SHARED, &[]).1.reused_tokens());
    println!("\nDONE {reused:?}");
}

#[test]
fn another_users_prompt_is_computed_unless_the_configuration_shares() {
    for (reuse, first) in [("user", 0), ("all", SHARED - 1), ("off", 0)] {
        let config = format!("[device]\nbackend = 'cpu'\n[kv]\nreuse = '{reuse}'\n");
        let Some(rig) = for_all_users(&config) else { return };
        ask(&rig.client(), SHARED, &[]);
        rig.client().load(TINY).unwrap();
        let again = if reuse == "off" { 0 } else { SHARED - 1 };
        for (uid, n) in [(ALICE, 1), (BOB, 2)] {
            let mut child = child::Process::start_as("prefixes::asks_twice", &rig.socket(), "", |command| {
                command.uid(uid).gid(uid);
            });
            child.go();
            assert_eq!(child.line("DONE "), format!("[{first}, {again}]"), "{reuse}, user {n}");
            let computed = SHARED * (1 + 2 * n) - n * (first + again);
            assert_eq!(counts(&rig).0, computed, "{reuse}, user {n}");
        }
    }
}

/// Asks once, in a process that a user runs.
#[test]
fn asks_once() {
    let Some((socket, _)) = child::inside() else { return };
    let client = Client::new(Options { socket, trust: ServerTrust::Anyone, ..Options::default() });
    let (ids, end) = ask(&client, SHARED, &[]);
    println!("\nDONE {} {ids:?}", end.reused_tokens());
}

/// Stops the daemon, and starts it again for all users.
fn restart(rig: &mut Rig) {
    rig.signal(Signal::TERM);
    assert!(rig.ended().success());
    rig.run();
    std::fs::set_permissions(rig.socket(), std::fs::Permissions::from_mode(0o666)).unwrap();
}

#[test]
fn a_conversation_goes_on_after_a_restart() {
    let kept = tempfile::tempdir().unwrap();
    let dir = kept.path().join("prefixes");
    let config = format!("[device]\nbackend = 'cpu'\n[kv]\nkeep_mib = 64\nkeep_dir = '{}'\n", dir.display());
    let Some(mut rig) = for_all_users(&config) else { return };
    let as_alice = |rig: &Rig| {
        rig.client().load(TINY).unwrap();
        let mut child = child::Process::start_as("prefixes::asks_once", &rig.socket(), "", |command| {
            command.uid(ALICE).gid(ALICE);
        });
        child.go();
        child.line("DONE ")
    };
    let (first, end) = ask(&rig.client(), SHARED, &[]);
    assert_eq!((end.reused_tokens(), as_alice(&rig)), (0, format!("0 {first:?}")));
    restart(&mut rig);
    assert_eq!(files_below(&dir).len(), 2, "one for each user");

    // The next process computes one token of the prompt, and gives the same answer.
    let (again, end) = ask(&rig.client(), SHARED, &[]);
    assert_eq!((again, end.reused_tokens(), counts(&rig)), (first.clone(), SHARED - 1, (1, SHARED - 1)));
    assert_eq!(files_below(&dir).len(), 1, "its file went");
    restart(&mut rig);
    assert_eq!(files_below(&dir).len(), 2);

    // With one byte changed in each, nothing of either is used.
    for file in files_below(&dir) {
        let mut bytes = std::fs::read(&file).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        std::fs::write(&file, bytes).unwrap();
    }
    let (again, end) = ask(&rig.client(), SHARED, &[]);
    assert_eq!((again, end.reused_tokens(), as_alice(&rig)), (first.clone(), 0, format!("0 {first:?}")));
    assert!(rig.log_text().contains("a file of kept prefixes is removed"));
    // Dropped prefixes are not kept either.
    rig.client().evict_weights(Some(TINY)).unwrap();
    restart(&mut rig);
    assert_eq!(files_below(&dir), Vec::<PathBuf>::new());
}

#[test]
fn a_session_of_a_recurrent_model_goes_on_after_a_restart() {
    let kept = tempfile::tempdir().unwrap();
    let dir = kept.path().display();
    let mut rig =
        Rig::start_with(&format!("[device]\nbackend = 'cpu'\n[kv]\nkeep_mib = 64\nkeep_dir = '{dir}'\n"));
    let (_, forge) = forge::newer_decoders().into_iter().find(|(name, _)| *name == "qwen35").unwrap();
    std::fs::write(rig.model("recurrent"), forge.build().bytes).unwrap();
    let request = |ids: &[u32]| {
        let request = GenerateRequest::new("recurrent", Prompt::Ids(ids.to_vec()));
        GenerateRequest { max_tokens: 12, ignore_eog: true, ..request }
    };
    let ask = |rig: &Rig, request: &GenerateRequest| {
        let client = rig.client();
        let mut generation = client.generate(request).unwrap();
        let answer = collect(&mut generation).unwrap();
        (answer.ids, generation.end().unwrap().reused_tokens())
    };
    let prompt: Vec<u32> = (0..200).map(|i| i * 37 % 250 + 3).collect();
    let (first, reused) = ask(&rig, &request(&prompt).with_session("s"));
    assert_eq!((first.len(), reused), (12, 0));
    let device = rig.client().status().unwrap().devices.remove(0);
    assert_eq!((device.states_used(), device.states_cached()), (0, 1));
    let (states, cached) = (device.states_cached_bytes(), device.kv_cached_bytes());
    assert!(0 < states && states < cached, "{states} of {cached} bytes are states");
    let models = rig.client().residency().unwrap().models;
    let model = models.iter().find(|model| model.model == "recurrent").unwrap();
    assert_eq!((model.states_cached(), model.states_cached_bytes()), (1, states));

    rig.signal(Signal::TERM);
    assert!(rig.ended().success());
    rig.run();
    let (second, reused) = ask(&rig, &request(&[7, 8, 9]).with_session("s"));
    assert_eq!(reused, 200 + 11, "all but the answer's last token, which was not computed");
    // The same tokens computed anew give the same answer.
    rig.client().evict_weights(Some("recurrent")).unwrap();
    let whole = [&prompt[..], &first, &[7, 8, 9]].concat();
    assert_eq!(ask(&rig, &request(&whole)), (second, 0));
}

#[test]
fn a_conversation_goes_on_after_a_restart_on_a_gpu() {
    let kept = tempfile::tempdir().unwrap();
    let config = format!("[kv]\nkeep_mib = 64\nkeep_dir = '{}'", kept.path().display());
    let Some(mut rig) = on_gpu_with(&config) else { return };
    let (first, end) = ask(&rig.client(), SHARED_ON_GPU, &[]);
    assert_eq!(end.reused_tokens(), 0);
    rig.signal(Signal::TERM);
    assert!(rig.ended().success());
    run_on_gpu(&mut rig);
    let (again, end) = ask(&rig.client(), SHARED_ON_GPU, &[]);
    assert_eq!((again, end.reused_tokens()), (first, SHARED_ON_GPU - 1));
    assert_eq!(counts(&rig), (1, SHARED_ON_GPU - 1));
}

fn files_below(dir: &Path) -> Vec<PathBuf> {
    let folders = std::fs::read_dir(dir).into_iter().flatten();
    let files = folders.flat_map(|folder| std::fs::read_dir(folder.unwrap().path()).unwrap());
    files.map(|file| file.unwrap().path()).collect()
}
