//! Names of a hub: its list of files, its digests, and its token.

use serde_json::json;

use crate::server::{Answered, Asked, Server};
use crate::{command, directory, model, names, pull, run, sha256};

/// A hub with a repository `own/er` of one whole model, one in parts, and a small file.
fn hub() -> Server {
    let list = json!({
        "sha": "c0ffee",
        "siblings": [
            {"rfilename": "README.md", "size": 5},
            {"rfilename": "m-Q4_K_M.gguf", "lfs": {"sha256": sha256(&model(600_000)), "size": 600_000}},
            {"rfilename": "big/m-F16-00001-of-00002.gguf", "lfs": {"sha256": sha256(&model(7000)), "size": 7000}},
            {"rfilename": "big/m-F16-00002-of-00002.gguf", "lfs": {"sha256": sha256(&model(9000)), "size": 9000}},
            {"rfilename": "m-wrong.gguf", "lfs": {"sha256": sha256(b"other"), "size": 7000}},
            {"rfilename": "m-long.gguf", "lfs": {"sha256": sha256(&model(7000)), "size": 6000}},
        ],
    });
    Server::start(move |asked: &Asked| {
        let file = |bytes| Answered::of(&model(bytes), asked, None);
        match asked.path.as_str() {
            "/api/models/own/er/revision/main?blobs=true" => {
                Answered { body: list.to_string().into_bytes(), ..Answered::status(200) }
            }
            "/api/models/own/bad/revision/main?blobs=true" => {
                Answered { body: b"<html>".to_vec(), ..Answered::status(200) }
            }
            // Another host, by name.
            "/own/er/resolve/c0ffee/m-Q4_K_M.gguf" => {
                let port = asked.headers["host"].rsplit(':').next().unwrap();
                let to = format!("http://localhost:{port}/store");
                Answered { headers: vec![("Location", to)], ..Answered::status(302) }
            }
            "/store" => file(600_000),
            "/own/er/resolve/c0ffee/big/m-F16-00002-of-00002.gguf" => file(9000),
            path if path.starts_with("/own/er/resolve/c0ffee/") => file(7000),
            _ => Answered::status(401),
        }
    })
}

#[test]
fn a_name_is_found_on_the_hub_and_its_digest_is_checked() {
    let (hub, models) = (hub(), directory());
    let address = hub.url("/");
    let mut asking = command(models.path(), &["own/er", "--hub", &address]);
    let ran = run(asking.env("ROCMFORGE_HUB_TOKEN", "secret"));
    assert_eq!((&ran.told["name"], &ran.file()["checked"]), (&"m-Q4_K_M".into(), &true.into()));
    assert_eq!(names(&models), ["m-Q4_K_M.gguf"]);
    let tokens: Vec<(String, Option<String>)> = hub
        .asked()
        .into_iter()
        .map(|asked| (asked.path, asked.headers.get("authorization").cloned()))
        .collect();
    let bearer = Some("Bearer secret".to_owned());
    let expected = [
        ("/api/models/own/er/revision/main?blobs=true", bearer.clone()),
        ("/own/er/resolve/c0ffee/m-Q4_K_M.gguf", bearer),
        // The token is not for other hosts.
        ("/store", None),
    ];
    assert_eq!(tokens, expected.map(|(path, token)| (path.to_owned(), token)));
}

#[test]
fn a_name_without_a_hub_says_how_to_name_one() {
    let models = directory();
    for arguments in [&["own/er"][..], &["own/er", "--hub", ""]] {
        let ran = pull(&models, arguments);
        assert_eq!((ran.code, ran.error()), (2, "NoHub"));
        assert!(
            ran.told["error"]["message"].as_str().is_some_and(|text| text.contains("ROCMFORGE_HUB")),
            "{}",
            ran.told
        );
    }
    let mut by_variable = command(models.path(), &["own/er"]);
    let hub = hub();
    assert_eq!(run(by_variable.env("ROCMFORGE_HUB", hub.url(""))).code, 0);
}

#[test]
fn parts_of_a_model_are_all_fetched() {
    let (hub, models) = (hub(), directory());
    let ran = pull(&models, &["own/er:F16", "--hub", &hub.url(""), "--name", "big"]);
    assert_eq!((ran.code, &ran.told["name"]), (0, &"big".into()), "{}", ran.told);
    assert_eq!(names(&models), ["big-00001-of-00002.gguf", "big-00002-of-00002.gguf"]);
    let one = pull(&models, &["own/er:F16", "--hub", &hub.url(""), "--sha256", &sha256(b"")]);
    assert_eq!((one.code, one.error()), (2, "OneDigest"));
}

#[test]
fn a_file_that_differs_from_the_hubs_list_is_deleted() {
    let (hub, models) = (hub(), directory());
    for (file, error) in [("m-wrong.gguf", "Digest"), ("m-long.gguf", "Size")] {
        let ran = pull(&models, &[&format!("own/er/{file}"), "--hub", &hub.url("")]);
        assert_eq!((ran.code, ran.error()), (1, error), "{file}");
    }
    assert_eq!(names(&models), [""; 0]);
    for (place, error) in [("own/er:Q2_K", "Hub"), ("own/bad", "Web"), ("own/none", "Status")] {
        assert_eq!(pull(&models, &[place, "--hub", &hub.url("")]).error(), error, "{place}");
    }
}
