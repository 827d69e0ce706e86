//! Drafted tokens, against a scripted server.

use rocmforge_client::wire::*;

use crate::command_line::{generate, run};
use crate::server::{Server, end};

#[test]
fn run_states_how_many_tokens_may_be_drafted_and_says_how_many_were() {
    for (arguments, wanted) in [(&[][..], 0), (&["--draft", "1"], 1), (&["--draft", "32"], 32)] {
        let server = Server::greeting(move |mut peer| {
            let (stream, request) = generate(&mut peer);
            assert_eq!((request.drafts(), request.ext.len()), (wanted, usize::from(wanted > 0)));
            let ext = number_ext([(EXT_END_DRAFTED, 12), (EXT_END_ACCEPTED, 9)]);
            peer.send(stream, Op::End, &GenerateEnd { ext, ..end() });
        });
        let (code, text, stats) =
            run(&server, &[&["run", "m", "more", "--json", "--stats"], arguments].concat());
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        let counts = ["drafted_tokens", "accepted_tokens"].map(|name| json[name].as_u64());
        assert_eq!((code, counts), (0, [Some(12), Some(9)]), "{arguments:?}");
        assert!(stats.contains("generated 3 tokens (9 of 12 drafted), "), "{stats}");
        server.join();
    }
    let server = Server::greeting(|_| ());
    for usage in [["--draft", "0"], ["--draft", "33"], ["--draft", "-1"]] {
        assert_eq!(run(&server, &[&["run", "m", "p"][..], &usage].concat()).0, 2, "{usage:?}");
    }
}
