//! Many processes of several users on one GPU or the look-alike share one copy of the weights.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;

use rocmforge_client::wire::{DeviceStatus, GenerateRequest, Prompt};
use rocmforge_client::{Client, Options, ServerTrust};

use crate::child::{self, Process, ids_text};
use crate::common;
use crate::gpu;
use crate::rig::{Rig, TINY, answer};

/// Number of client processes.
const CLIENTS: usize = 16;

/// Users of the client processes, in turn.
const UIDS: [u32; 3] = [0, 54_321, 54_322];

/// `Once upon a time`, and another engine's continuation.
const PROMPT: [u32; 5] = [1, 403, 407, 261, 378];
const STORY: [u32; 12] = [432, 383, 286, 261, 376, 298, 315, 421, 395, 317, 426, 338];

/// A request specific to this client; client 0's has a known answer.
fn request(client: usize) -> GenerateRequest {
    let more = (0..client as u32 * 3).map(|i| 3 + (i * 37 + client as u32 * 11) % 500);
    GenerateRequest {
        max_tokens: STORY.len() as u32 + client as u32 % 5,
        ignore_eog: true,
        ..GenerateRequest::new(TINY, Prompt::Ids(PROMPT.into_iter().chain(more).collect()))
    }
}

/// The client process of [`sixteen_processes_of_three_users_share_one_copy`]; does nothing as a test.
#[test]
fn process_of_a_user() {
    let Some((socket, argument)) = child::inside() else { return };
    let number: usize = argument.parse().unwrap();
    assert_eq!(rustix::process::geteuid().as_raw(), UIDS[number % UIDS.len()]);
    let client = Client::new(Options { socket, trust: ServerTrust::Anyone, ..Options::default() });
    println!("\nTOOK {}", ids_text(&answer(&client, &request(number)).unwrap().ids));
}

/// The status note on uploads.
fn uploads(device: &DeviceStatus) -> String {
    let note = device.notes().into_iter().find(|(name, _)| *name == "uploads");
    note.map(|(_, text)| text.to_owned()).unwrap_or_default()
}

#[test]
fn sixteen_processes_of_three_users_share_one_copy() {
    if !rustix::process::geteuid().is_root() {
        common::skip("only root can act as three users");
        return;
    }
    let Some(library) = gpu::library() else { return };
    let mut rig = Rig::idle();
    rig.configure("[device]\nbackend = 'hip'\n");
    let mut command = rig.command();
    command.env("ROCMFORGE_HIP_LIB", library);
    rig.spawn(&mut command);
    let client = rig.client();
    client.load(TINY).unwrap();
    let mode = |path: &std::path::Path, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    mode(rig.dir.path(), 0o755);
    mode(&rig.socket(), 0o666);
    let device = || client.status().unwrap().devices.remove(0);
    assert_eq!(device().kind, "hip", "the device is not a GPU");
    assert_eq!(
        (device().device_bytes, uploads(&device())),
        (0, String::new()),
        "registering a model loaded weights"
    );

    let first = answer(&client, &request(0)).unwrap().ids;
    assert_eq!(first, STORY);
    let one = device();
    let file = std::fs::metadata(rig.model(TINY)).unwrap().len();
    assert!(one.device_bytes > file / 2 && one.device_bytes < file * 5 / 4, "{} of {file}", one.device_bytes);
    assert!(uploads(&one).ends_with(", 0 failed"), "{}", uploads(&one));

    let start = |n: usize| {
        Process::start_as("shared_gpu::process_of_a_user", &rig.socket(), &n.to_string(), |command| {
            command.uid(UIDS[n % UIDS.len()]).gid(UIDS[n % UIDS.len()]);
        })
    };
    let mut processes: Vec<Process> = (0..CLIENTS).map(start).collect();
    processes.iter_mut().for_each(Process::go);
    let together: Vec<String> = processes.iter_mut().map(|process| process.line("TOOK ")).collect();
    rig.assert_idle();
    let all = device();
    assert_eq!(all.kind, "hip");
    assert_eq!(all.device_bytes, one.device_bytes, "there is more than one copy of the weights");
    assert_eq!(uploads(&all), uploads(&one), "a tensor was uploaded again");
    assert_eq!(all.sequences_done - one.sequences_done, CLIENTS as u64);
    for (n, together) in together.iter().enumerate() {
        assert_eq!(*together, ids_text(&answer(&client, &request(n)).unwrap().ids), "client {n}");
    }
    rig.assert_serves();
}
