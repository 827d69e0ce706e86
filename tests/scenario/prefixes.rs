//! A prompt that begins as an earlier one of the same user is computed from where they differ, on the CPU and on a GPU.

use std::os::unix::process::CommandExt;

use rocmforge_client::wire::{GenerateEnd, GenerateRequest, Prompt};
use rocmforge_client::{Client, Options, ServerTrust};

use crate::child;
use crate::device::on_gpu;
use crate::fairness::for_all_users;
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
