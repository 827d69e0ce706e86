//! Processes of several users whose requests do not fit together. Prompts are reused, sequences are parked, requests are cancelled and
//! clients killed, and each answer is the one that its request gets alone.

use std::collections::BTreeMap;
use std::os::unix::process::CommandExt;

use rocmforge_client::wire::{GenerateRequest, INITIAL_CREDIT, Prompt};
use rocmforge_client::{Client, Options, ServerTrust};

use crate::child::{self, Process, ids_text};
use crate::fairness::for_all_users;
use crate::rig::{Rig, TINY, collect};

/// The users of the processes, in turn.
const USERS: [u32; 3] = [54_330, 54_331, 54_332];

/// Keys and values of some 1,600 tokens of the kept model.
const LITTLE_ROOM: &str = "[device]\nbackend = 'cpu'\n[kv]\nbudget_mib = 1\n";
const NO_REUSE: &str = "[device]\nbackend = 'cpu'\n[kv]\nreuse = 'off'\n";

/// Requests of a process, one after another.
const ROUNDS: usize = 3;
/// Different requests: several processes of a user and of others ask the same.
const KINDS: usize = 24;
/// A request that a client gives up has so many items.
const GIVEN_UP_AFTER: usize = 2;

/// How a request ends. Of each eight processes, one cancels a request and one is killed.
#[derive(Clone, Copy, PartialEq)]
enum Fate {
    Whole,
    Cancelled,
    Killed,
}

fn fate(process: usize, round: usize) -> Fate {
    match (process % 8, round) {
        (5, 1) => Fate::Cancelled,
        (6, 2) => Fate::Killed,
        _ => Fate::Whole,
    }
}

fn kind(process: usize, round: usize) -> usize {
    (process * 5 + round * 7) % KINDS
}

/// A third of the kinds begin with the same tokens. Lengths are no whole pages. Each answer is longer than a client's first credit, so
/// that it waits for a client that gives it up, however late.
fn request(kind: usize) -> GenerateRequest {
    let (shared, own) = (100 * (kind % 3).min(1), 20 + kind * 9 % 70);
    let shared = (0..shared as u32).map(|i| 260 + i * 7 % 200);
    let own = (0..own as u32).map(|i| 260 + (i * 11 + 13 * kind as u32) % 220);
    GenerateRequest {
        max_tokens: INITIAL_CREDIT + 20 + 60 * (kind as u32 % 7),
        ignore_eog: true,
        ..GenerateRequest::new(TINY, Prompt::Ids(shared.chain(own).collect()))
    }
}

/// Prompt tokens of a request.
fn prompt_tokens(kind: usize) -> u64 {
    match request(kind).prompt {
        Prompt::Ids(ids) => ids.len() as u64,
        _ => 0,
    }
}

/// A process of [`whatever_the_company_each_answer_is_that_of_the_request_alone`]; does nothing as a test.
#[test]
fn a_process_in_company() {
    let Some((socket, number)) = child::inside() else { return };
    let process: usize = number.parse().unwrap();
    let client = Client::new(Options { socket, trust: ServerTrust::Anyone, ..Options::default() });
    for round in 0..ROUNDS {
        let mut generation = client.generate(&request(kind(process, round))).unwrap();
        if fate(process, round) == Fate::Whole {
            let ids = collect(&mut generation).unwrap().ids;
            let reused = generation.end().unwrap().reused_tokens();
            println!("\nTOOK {reused} {}", ids_text(&ids));
            continue;
        }
        let items = std::iter::from_fn(|| generation.next_item().unwrap()).take(GIVEN_UP_AFTER);
        let ids: Vec<u32> = items.flat_map(|item| item.ids).collect();
        println!("\nTOOK 0 {}", ids_text(&ids));
        if fate(process, round) == Fate::Killed {
            std::thread::sleep(crate::rig::PATIENCE); // with its connection open
        }
    }
}

/// The ids of each kind of request, asked one at a time of a daemon that has room and reuses nothing.
fn alone() -> Vec<String> {
    let rig = Rig::start_with(NO_REUSE);
    let ids = |kind| {
        let mut generation = rig.client().generate(&request(kind)).unwrap();
        ids_text(&collect(&mut generation).unwrap().ids)
    };
    (0..KINDS).map(ids).collect()
}

/// Runs so many processes at once; returns rows that were computed again because a sequence had to give its pages up.
fn run(rig: &Rig, processes: usize, alone: &[String]) -> u64 {
    let before = rig.client().status().unwrap().devices.remove(0);
    let start = |process: usize| {
        let (test, number) = ("company::a_process_in_company", process.to_string());
        let uid = USERS[process % USERS.len()];
        Process::start_as(test, &rig.socket(), &number, |command| {
            command.uid(uid).gid(uid);
        })
    };
    let mut clients: Vec<Process> = (0..processes).map(start).collect();
    clients.iter_mut().for_each(Process::go);
    let (mut asked, mut reused) = (0, 0);
    let mut ends: BTreeMap<bool, u64> = BTreeMap::new();
    for round in 0..ROUNDS {
        for (process, client) in clients.iter_mut().enumerate() {
            let (kind, fate) = (kind(process, round), fate(process, round));
            let took = client.line("TOOK ");
            let (again, ids) = took.split_once(' ').unwrap();
            let want = &alone[kind];
            if fate == Fate::Whole {
                assert_eq!(ids, want, "process {process} of {processes}, round {round}");
            } else {
                assert!(
                    !ids.is_empty() && want.starts_with(ids),
                    "{processes} {process}: {ids}; alone {want}"
                );
            }
            if fate == Fate::Killed {
                client.kill();
            }
            asked += prompt_tokens(kind);
            reused += again.parse::<u64>().unwrap();
            *ends.entry(fate == Fate::Whole).or_default() += 1;
        }
    }
    rig.assert_idle();
    let after = rig.client().status().unwrap().devices.remove(0);
    assert_eq!(after.sequences_done - before.sequences_done, ends[&true], "{processes} processes");
    let given_up = ends.get(&false).copied().unwrap_or(0);
    assert_eq!(after.sequences_cancelled - before.sequences_cancelled, given_up, "{processes} processes");
    (after.prefill_rows - before.prefill_rows + reused).saturating_sub(asked)
}

#[test]
fn whatever_the_company_each_answer_is_that_of_the_request_alone() {
    let Some(mut rig) = for_all_users(LITTLE_ROOM) else { return };
    let alone = alone();
    assert!(alone.iter().all(|ids| !ids.is_empty()));
    let again = [2, 7, 16, 64].map(|processes| run(&rig, processes, &alone));
    println!("rows computed again: {again:?}");
    assert!(again[3] > 0, "no sequence was parked: {again:?}");
    let reused = rig.client().status().unwrap().devices[0].reused_tokens();
    assert!(reused > 0, "nothing was reused");
    rig.assert_serves();
}
