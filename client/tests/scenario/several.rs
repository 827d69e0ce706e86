//! Several answers to one prompt, against a scripted server.

use rocmforge_client::wire::*;

use crate::command_line::{generate, run};
use crate::server::{Server, end, item};

#[test]
fn run_prints_several_answers_one_after_the_other() {
    let scripted = || {
        Server::greeting(|mut peer| {
            let asked: Vec<(u32, GenerateRequest)> = (0..3).map(|_| generate(&mut peer)).collect();
            let seeds: Vec<Option<u64>> = asked.iter().map(|(_, request)| request.sampling.seed).collect();
            assert_eq!(seeds, [Some(u64::MAX), Some(0), Some(1)]);
            let mut ids: Vec<u128> = asked.iter().map(|(_, request)| request.request_id).collect();
            ids.dedup();
            assert_eq!(ids.len(), 3, "the daemon answers a repeated id with the first answer");
            // The last one ends first.
            for (number, (stream, _)) in asked.iter().enumerate().rev() {
                peer.send(*stream, Op::Item, &item(&format!("text {number}")));
                let seed = number as u64;
                peer.send(*stream, Op::End, &GenerateEnd { seed, ..end() });
            }
        })
    };
    let asked = ["run", "m", "p", "--n", "3", "--seed", "18446744073709551615"];
    let server = scripted();
    let (code, text, errors) = run(&server, &asked);
    let expected = "--- 1 of 3 ---\ntext 0!\n--- 2 of 3 ---\ntext 1!\n--- 3 of 3 ---\ntext 2!";
    assert_eq!((code, text.as_str()), (0, expected), "{errors}");
    server.join();
    let server = scripted();
    let (code, text, _) = run(&server, &[&asked[..], &["--json"]].concat());
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    let answers = json["answers"].as_array().unwrap();
    assert_eq!((code, answers.len()), (0, 3));
    for (number, answer) in answers.iter().enumerate() {
        assert_eq!(answer["text"], format!("text {number}!"));
        assert_eq!(answer["seed"], number);
    }
    server.join();
    let server = Server::greeting(|_| ());
    for usage in [&["--n", "0"][..], &["--n", "9"], &["--n", "2", "--session", "s"]] {
        assert_eq!(run(&server, &[&["run", "m", "p"], usage].concat()).0, 2, "{usage:?}");
    }
}

#[test]
fn run_prints_what_there_is_when_one_of_several_answers_fails() {
    let scripted = || {
        Server::greeting(|mut peer| {
            let asked: Vec<(u32, GenerateRequest)> = (0..2).map(|_| generate(&mut peer)).collect();
            peer.send(asked[0].0, Op::Item, &item("some"));
            let error = WireError::new(ErrorCode::DeadlineExceeded, "it took too long");
            peer.send(asked[0].0, Op::Error, &error);
            peer.send(asked[1].0, Op::Item, &item("all"));
            peer.send(asked[1].0, Op::End, &end());
        })
    };
    let server = scripted();
    let (code, text, errors) = run(&server, &["run", "m", "p", "--n", "2"]);
    assert_eq!((code, text.as_str()), (1, "--- 1 of 2 ---\nsome\n--- 2 of 2 ---\nall!"), "{errors}");
    assert!(errors.contains("it took too long"), "{errors}");
    server.join();
    let server = scripted();
    let (code, text, errors) = run(&server, &["run", "m", "p", "--n", "2", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&errors).unwrap();
    assert_eq!((code, text.as_str(), &json["answers"][1]["text"]), (1, "", &"all!".into()), "{json}");
    assert_eq!(json["error"]["name"], "DeadlineExceeded");
    server.join();
}
