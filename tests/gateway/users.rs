//! Callers as users of the daemon, where its configuration gives the gateway users to act for. Each token is one, or each peer of a
//! Unix socket.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Instant;

use rocmforge_client::wire::{LimitUserRequest, UserEntry};
use rocmforge_gateway::{Settings, Tokens};
use serde_json::{Value, json};

use crate::door::Door;
use crate::http::Response;
use crate::rig::{PATIENCE, Rig, TINY};

const FIRST: u32 = 3_000_000_000;
const COUNT: u32 = 65_536;

/// The first two have numbers by their digests: 31352 and 43654.
const TOKENS: [&str; 3] = ["0123456789abcdef", "fedcba9876543210", "a-token-of-user-7"];
const USERS: [u32; 3] = [FIRST + 31_352, FIRST + 43_654, FIRST + 7];

const CPU: &str = "[device]\nbackend = 'cpu'\n";

fn own_uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// A configuration that lets the gateway act for so many users, from this uid on.
fn config_from(first: u32, count: u32) -> String {
    let uid = own_uid();
    format!("{CPU}[policy]\nsubordinates = {{ \"{uid}\" = [{first}, {count}] }}\n")
}

fn config(count: u32) -> String {
    config_from(FIRST, count)
}

fn tokens(lines: &str) -> Tokens {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tokens");
    std::fs::write(&file, lines).unwrap();
    std::fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    Tokens::read(&file).unwrap()
}

/// A gateway that serves [`TOKENS`], before a daemon with that configuration.
fn door(config: &str) -> Door {
    let [first, second, third] = TOKENS;
    let tokens = tokens(&format!("{first}\n{second}\n{third} 7\n"));
    Door::before(Rig::start_with(config), "127.0.0.1:0", Some(tokens), Settings::default())
}

fn body(prompt: &str) -> Value {
    json!({"model": TINY, "prompt": prompt, "max_tokens": 4, "temperature": 0})
}

/// Asks with the token of that place.
fn ask(door: &Door, token: usize, prompt: &str) -> Response {
    let (token, body) = (TOKENS[token], body(prompt).to_string());
    let mut connection = door.connect();
    connection.send(&format!(
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    ));
    connection.response().expect("a response")
}

/// Prompt tokens of an answer that were known before.
#[track_caller]
fn known(response: &Response) -> u64 {
    assert_eq!(response.status, 200, "{response:?}");
    response.json()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
}

/// The users of the daemon that had device time lately, without the test's own.
fn users(door: &Door) -> Vec<u32> {
    let all = door.rig.client().users().unwrap().users;
    let busy = |user: &&UserEntry| user.device_us_per_s > 0 && user.uid != own_uid();
    all.iter().filter(busy).map(|user| user.uid).collect()
}

fn prompt() -> String {
    "Once upon a time there was a little girl who lived by the sea. ".repeat(4)
}

#[test]
fn a_token_knows_no_prompt_of_another() {
    let door = door(&config(COUNT));
    let first = [(); 2].map(|()| known(&ask(&door, 0, &prompt())));
    assert!(first[0] == 0 && first[1] > 16, "{first:?}");
    for token in [1, 2] {
        assert_eq!([(); 2].map(|()| known(&ask(&door, token, &prompt()))), first, "of token {token}");
    }
    let mut expected = USERS;
    expected.sort_unstable();
    assert_eq!(users(&door), expected, "their numbers are those of the file and of the digests");
}

#[test]
fn a_limit_of_a_token_refuses_no_other() {
    let door = door(&config(COUNT));
    let none = LimitUserRequest { uid: Some(USERS[1]), requests: Some(0), ..LimitUserRequest::default() };
    door.rig.client().limit_user(&none).unwrap();
    let refused = ask(&door, 1, "a");
    assert_eq!(refused.status, 429, "{refused:?}");
    let message = refused.json()["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.contains(&format!("limit of uid {} to 0", USERS[1])), "{message}");
    assert_eq!((ask(&door, 0, "a").status, ask(&door, 2, "a").status), (200, 200));
}

#[test]
fn without_users_to_act_for_all_tokens_are_one() {
    let door = door(CPU);
    assert_eq!(known(&ask(&door, 0, &prompt())), 0);
    assert!(known(&ask(&door, 1, &prompt())) > 16);
    assert_eq!(users(&door), [0; 0]);
}

#[test]
fn a_gateway_follows_the_daemons_configuration() {
    let door = door(CPU);
    ask(&door, 0, &prompt());
    let until = Instant::now() + PATIENCE;
    let eventually = |what: &str, wanted: &dyn Fn(&Response) -> bool| {
        loop {
            let response = ask(&door, 0, &prompt());
            if wanted(&response) {
                return;
            }
            assert!(Instant::now() < until, "{what}: {response:?}");
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
    };
    door.rig.reload(&config(COUNT));
    eventually("the token becomes a user", &|_| users(&door) == [USERS[0]]);
    // The same number is another user now, so connections of before are of no use.
    door.rig.reload(&config_from(FIRST + COUNT, COUNT));
    eventually("it is a user of the new range", &|response| {
        response.status == 200 && users(&door).contains(&(USERS[0] + COUNT))
    });
    // Another number of users gives the token another number.
    door.rig.reload(&config(1000));
    eventually("it is another one", &|response| {
        response.status == 200 && users(&door).contains(&(FIRST + (0x9f9f_5111_f7b2_7a78_u64 % 1000) as u32))
    });
    door.rig.reload(CPU);
    eventually("it is the gateway's again", &|response| response.status == 200 && known(response) > 16);
}

#[test]
fn tokens_that_would_be_one_user_are_told_apart_or_refused() {
    let door = door(&config(1));
    assert_eq!(ask(&door, 0, "a").status, 200, "the earlier one keeps the number");
    for (token, why) in [(1, "lines 2 and 1 of the token file"), (2, "the number 7, but")] {
        let refused = ask(&door, token, "a");
        assert_eq!(refused.status, 403, "{refused:?}");
        assert!(refused.body.contains(why), "{refused:?}");
    }
    assert_eq!(users(&door), [FIRST]);
}

#[test]
fn a_peer_of_a_unix_socket_is_a_user_by_its_uid() {
    let rig = Rig::start_with(&config(COUNT));
    let path = rig.dir.path().join("door.sock");
    let door = Door::before(rig, &format!("unix:{}", path.display()), None, Settings::default());
    let mut stream = UnixStream::connect(&path).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let body = body("a").to_string();
    let head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n";
    write!(stream, "{head}Content-Length: {}\r\n\r\n{body}", body.len()).unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).unwrap();
    assert!(response.starts_with("HTTP/1.1 200 "), "{response}");
    assert_eq!(users(&door), [FIRST + own_uid()]);
}
