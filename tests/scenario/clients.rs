//! Several clients share the daemon, cancel and disconnect. No client changes another's answer.

use rocmforge_client::wire::{ErrorCode, GenerateRequest, Prompt};
use rocmforge_client::{Client, Connection, Options};

use crate::child::{self, Process, ids_text};
use crate::raw::Raw;
use crate::rig::{Rig, TINY, answer, code, collect, story};

/// Number of concurrent client processes.
const CLIENTS: usize = 16;

/// Of each four clients, one cancels its request after so many items, and one is killed.
const CANCELLED_AFTER: usize = 3;

/// A request specific to this client: prompts and answers have mixed lengths.
fn request(client: usize) -> GenerateRequest {
    let words = ["Once", " upon", " a", " time", " there", " was", " a", " dog"];
    let prompt: String = words.iter().cycle().take(1 + client * 5).copied().collect();
    GenerateRequest {
        max_tokens: 60 + 20 * (client as u32 % 8),
        ignore_eog: true,
        ..GenerateRequest::new(TINY, Prompt::Text(prompt))
    }
}

/// The client process of [`sixteen_processes_share_steps_and_get_the_answers_they_get_alone`]; does nothing as a test.
#[test]
fn client_process() {
    let Some((socket, argument)) = child::inside() else { return };
    let number: usize = argument.parse().unwrap();
    let client = Client::new(Options { socket, ..Options::default() });
    let mut generation = client.generate(&request(number)).unwrap();
    let mut ids = Vec::new();
    let mut items = 0;
    while let Some(item) = generation.next_item().unwrap() {
        ids.extend(item.ids);
        items += 1;
        if number % 4 == 3 && items == CANCELLED_AFTER {
            println!("\nTOOK {}", ids_text(&ids));
            drop(generation);
            if number == CLIENTS - 1 {
                println!("WAITING");
                std::thread::sleep(crate::rig::PATIENCE); // waits to be killed with its connection open
            }
            return;
        }
    }
    println!("\nTOOK {}", ids_text(&ids));
}

#[test]
fn sixteen_processes_share_steps_and_get_the_answers_they_get_alone() {
    let mut rig = Rig::start();
    let client = rig.client();
    let alone: Vec<String> =
        (0..CLIENTS).map(|n| ids_text(&answer(&client, &request(n)).unwrap().ids)).collect();
    let before = client.status().unwrap();

    let mut processes: Vec<Process> = (0..CLIENTS)
        .map(|n| Process::start("clients::client_process", &rig.socket(), &n.to_string()))
        .collect();
    processes.iter_mut().for_each(Process::go);
    for (n, process) in processes.iter_mut().enumerate() {
        let took = process.line("TOOK ");
        if n % 4 == 3 {
            assert!(
                !took.is_empty() && alone[n].starts_with(&took),
                "client {n}: {took}; alone {}",
                alone[n]
            );
        } else {
            assert_eq!(took, alone[n], "client {n}");
        }
    }
    processes[CLIENTS - 1].kill();
    rig.assert_idle();
    let after = client.status().unwrap();
    let device = |status: &rocmforge_client::wire::StatusReply| {
        let device = &status.devices[0];
        (device.steps, device.step_sequences, device.sequences_done, device.sequences_cancelled)
    };
    let (then, now) = (device(&before), device(&after));
    let shared = (now.1 - then.1) as f64 / (now.0 - then.0) as f64;
    println!("sequences per step: {shared:.2}");
    assert!(shared > 1.5, "steps are not shared: {shared:.2} sequences per step");
    assert_eq!((now.2 - then.2) + (now.3 - then.3), CLIENTS as u64);
    rig.assert_serves();
}

#[test]
fn a_client_that_goes_away_leaves_nothing_behind() {
    let mut rig = Rig::start();
    for _ in 0..5 {
        let mut raw = Raw::connect(&rig);
        raw.send(1, rocmforge_client::wire::Op::Generate, &story(500));
        raw.receive();
        rig.eventually("the sequence runs", |status| status.devices[0].sequences_running > 0);
        drop(raw);
        rig.assert_idle();
    }
    rig.assert_serves();
}

#[test]
fn a_cancelled_request_says_so_and_its_neighbours_go_on() {
    let mut rig = Rig::start();
    let connection = Connection::connect(&rig.options()).unwrap();
    let mut first = connection.generate(&story(500)).unwrap();
    let mut second = connection.generate(&story(64)).unwrap();
    first.next_item().unwrap().unwrap();
    connection.cancel(first.stream()).unwrap();
    assert_eq!(code(collect(&mut first)), ErrorCode::Cancelled as u16);
    assert_eq!(collect(&mut second).unwrap().ids.len(), 64);
    rig.assert_idle();
    rig.assert_serves();
}

#[test]
fn a_request_without_credit_waits_and_others_do_not() {
    let mut rig = Rig::start();
    let connection = Connection::connect(&rig.options()).unwrap();
    let mut stalled = connection.generate(&story(200)).unwrap();
    rig.eventually("the request waits for credit", |_| {
        let sequences = rig.client().ps().unwrap().sequences;
        sequences.iter().any(|s| s.state == rocmforge_client::wire::SequenceState::Stalled && s.model == TINY)
    });
    rig.assert_serves();
    let answer = collect(&mut stalled).unwrap();
    assert_eq!(answer.ids, crate::rig::answer(&rig.client(), &story(200)).unwrap().ids);
    rig.assert_idle();
}

#[test]
fn connections_beyond_the_limit_are_refused_with_a_reason() {
    let mut rig = Rig::start_with("[limits]\nconnections_per_uid = 3");
    rig.eventually("only this connection is open", |status| status.connections == 1);
    let mut held: Vec<Raw> = Vec::new();
    let refused = loop {
        assert!(held.len() < 5, "more connections than the limit were accepted");
        let mut raw = Raw::silent(&rig);
        raw.write(&rocmforge_client::wire::ClientHello::new("many").to_bytes().unwrap());
        let hello = raw.hello();
        if hello.status != 0 {
            break hello;
        }
        held.push(raw);
    };
    assert_eq!(refused.status, ErrorCode::Quota as u16);
    assert!(refused.retry_after_ms > 0);
    drop(held);
    rig.assert_serves();
}

#[test]
fn requests_of_a_uid_are_bounded() {
    let mut rig = Rig::start_with("[limits]\nrequests_per_uid = 4\nrunning = 2");
    let connection = Connection::connect(&rig.options()).unwrap();
    let mut held: Vec<_> = (0..4).map(|_| connection.generate(&story(200)).unwrap()).collect();
    rig.eventually("two sequences run, two wait", |status| {
        (status.devices[0].sequences_running, status.devices[0].sequences_queued) == (2, 2)
    });
    assert_eq!(code(answer(&rig.client(), &story(4))), ErrorCode::Quota as u16);
    // All are read concurrently: their order is unspecified, and an unread answer keeps its place.
    let answers: Vec<_> = std::thread::scope(|scope| {
        let readers: Vec<_> = held.iter_mut().map(|held| scope.spawn(|| collect(held).unwrap())).collect();
        readers.into_iter().map(|reader| reader.join().unwrap()).collect()
    });
    assert!(answers.windows(2).all(|pair| pair[0] == pair[1]));
    rig.assert_serves();
}

#[test]
fn a_daemon_without_descriptors_waits_for_some_and_recovers() {
    let mut rig = Rig::start_with_few_descriptors();
    drop(rig.take_all_descriptors());
    rig.assert_serves();
    let lines = rig.log_text().lines().filter(|line| line.contains("cannot be accepted")).count();
    assert!(lines < 20, "failing accepts wrote {lines} log lines");
}
