//! Dependencies: each is used, and each crate that the project is built on has a test that needs it.

use std::collections::BTreeSet;

use crate::source::{Source, files, root};

/// A crate that the project is built on, the code that uses it, and the test that fails without it.
struct Pillar {
    name: &'static str,
    /// A path or start of paths; some code there must name the crate.
    works_in: &'static str,
    /// File and function of a test that needs it.
    test: (&'static str, &'static str),
}

const PILLARS: [Pillar; 16] = [
    Pillar {
        name: "interprocess",
        works_in: "src/socket/listener.rs",
        test: ("src/socket/listener.rs", "a_second_daemon_is_refused_and_the_first_keeps_its_socket"),
    },
    Pillar {
        name: "interprocess",
        works_in: "src/socket/listener.rs",
        test: ("tests/scenario/activation.rs", "a_socket_from_systemd_is_served_and_stays"),
    },
    Pillar {
        name: "interprocess",
        works_in: "src/socket/connection.rs",
        test: ("tests/scenario/frames.rs", "half_a_frame_and_a_hang_up_harm_nobody"),
    },
    Pillar {
        name: "interprocess",
        works_in: "client/src/dial.rs",
        test: (
            "tests/scenario/clients.rs",
            "sixteen_processes_share_steps_and_get_the_answers_they_get_alone",
        ),
    },
    Pillar {
        name: "rustix",
        works_in: "src/socket/receive.rs",
        test: (
            "tests/scenario/descriptors.rs",
            "a_passed_file_answers_under_its_name_and_is_the_same_mapping",
        ),
    },
    Pillar {
        name: "bincode",
        works_in: "client/src/wire/codec.rs",
        test: ("client/tests/adversarial/edges.rs", "bytes_after_the_message_are_refused"),
    },
    Pillar {
        name: "serde",
        works_in: "client/src/wire/messages/",
        test: ("tests/scenario/requests.rs", "unknown_ops_and_payloads_fail_their_stream_alone"),
    },
    Pillar {
        name: "half",
        works_in: "src/backend/cpu/convert/",
        test: ("src/backend/cpu/convert/mod.rs", "all_f16_patterns_equal_half"),
    },
    Pillar {
        name: "half",
        works_in: "src/backend/cpu/convert/",
        test: ("src/backend/cpu/convert/mod.rs", "all_f16_patterns_equal_half"),
    },
    Pillar {
        name: "hip_sys",
        works_in: "src/backend/hip/device/binding/",
        test: ("tests/kernels/device.rs", "a_kernel_gets_its_arguments_and_its_shape"),
    },
    Pillar {
        name: "libloading",
        works_in: "src/backend/hip/device/binding/",
        test: ("src/backend/hip/device/binding/library.rs", "a_library_that_is_none_is_refused_by_name"),
    },
    Pillar {
        name: "memmap2",
        works_in: "src/tensor/map.rs",
        test: ("src/tensor/map.rs", "mapping_makes_no_page_resident_and_reading_does"),
    },
    Pillar {
        name: "tokio",
        works_in: "src/socket/",
        test: ("tests/scenario/frames.rs", "a_client_that_does_not_read_is_dropped_and_others_are_served"),
    },
    Pillar {
        name: "hyper",
        works_in: "client/gateway/src/serve.rs",
        test: ("tests/gateway/smuggling.rs", "a_bodys_length_is_told_in_one_way_or_the_request_is_refused"),
    },
    Pillar {
        name: "signal-hook",
        works_in: "src/daemon/",
        test: ("tests/scenario/lifecycle.rs", "a_stop_lets_running_answers_finish_and_refuses_new_ones"),
    },
    Pillar {
        name: "sd-notify",
        works_in: "src/daemon/",
        test: (
            "tests/scenario/activation.rs",
            "the_service_manager_is_told_of_readiness_life_reload_and_end",
        ),
    },
];

#[test]
fn pillars_work_and_have_their_test() {
    let all = files();
    let mut faults = Vec::new();
    for pillar in &PILLARS {
        let works = all.iter().any(|f| {
            f.path.starts_with(pillar.works_in)
                && f.code().iter().any(|(_, code)| names_crate(code, pillar.name))
        });
        if !works {
            faults.push(format!("{}: not used in {}", pillar.name, pillar.works_in));
        }
        let (path, function) = pillar.test;
        let header = format!("fn {function}(");
        let has_test = |f: &Source| {
            let lines: Vec<&str> = f.text.lines().collect();
            let at = lines.iter().position(|line| line.contains(&header));
            at.is_some_and(|at| lines[at.saturating_sub(4)..at].iter().any(|line| line.contains("test")))
        };
        if !all.iter().any(|f| f.path == path && has_test(f)) {
            faults.push(format!("{}: {path} has no test {function}", pillar.name));
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn every_dependency_is_used() {
    let all = files();
    let mut idle = Vec::new();
    for (manifest, code_in) in [
        ("Cargo.toml", "src/"),
        ("client/Cargo.toml", "client/src/"),
        ("client/gateway/Cargo.toml", "client/gateway/src/"),
        ("client/top/Cargo.toml", "client/top/src/"),
        ("xtask/Cargo.toml", "xtask/src/"),
        ("xtask/lab/Cargo.toml", "xtask/lab/src/"),
    ] {
        for name in dependencies(manifest) {
            let used = all
                .iter()
                .filter(|f| f.path.starts_with(code_in))
                .any(|f| f.code().iter().any(|(_, code)| names_crate(code, &name)));
            if !used {
                idle.push(format!("{manifest}: {name}"));
            }
        }
    }
    assert!(idle.is_empty(), "dependencies that no code uses:\n{}", idle.join("\n"));
}

/// The fuzz targets are a workspace of their own, and are built with `--locked`: a new dependency belongs to their lock, too.
#[test]
fn the_fuzz_targets_lock_has_every_dependency() {
    let lock = std::fs::read_to_string(root().join("fuzz/Cargo.lock")).expect("a lock can be read");
    let lock: toml::Table = lock.parse().expect("a lock is TOML");
    let packages = lock["package"].as_array().expect("packages are a list");
    let mut missing = Vec::new();
    for (manifest, package) in
        [("Cargo.toml", "rocmforge"), ("client/gateway/Cargo.toml", "rocmforge-gateway")]
    {
        let of_package = packages.iter().find(|one| one["name"].as_str() == Some(package));
        let locked: BTreeSet<String> = of_package.expect("a package of ours")["dependencies"]
            .as_array()
            .expect("dependencies are a list")
            .iter()
            // A version stands behind a name that several packages have.
            .filter_map(|name| name.as_str()?.split(' ').next())
            .map(|name| name.replace('-', "_"))
            .collect();
        let lacks = |name: &String| !locked.contains(name);
        missing.extend(needed(manifest).into_iter().filter(lacks).map(|name| format!("{manifest}: {name}")));
    }
    assert!(
        missing.is_empty(),
        "not in fuzz/Cargo.lock; run `cargo update --workspace` in fuzz:\n{}",
        missing.join("\n")
    );
}

#[test]
fn exactly_one_advisory_is_excepted() {
    let text = std::fs::read_to_string(root().join("deny.toml")).expect("deny.toml can be read");
    let deny: toml::Table = text.parse().expect("deny.toml is TOML");
    let ignored = deny["advisories"]["ignore"].as_array().expect("advisories.ignore is a list");
    let ids: Vec<&str> = ignored.iter().filter_map(|entry| entry["id"].as_str()).collect();
    assert_eq!(ids, ["RUSTSEC-2025-0141"]);
    assert!(
        ignored[0]["reason"].as_str().is_some_and(|reason| reason.len() > 20),
        "the exception has its reason"
    );
}

/// Names under `[dependencies]`, with `_` for `-` as in code.
fn dependencies(manifest: &str) -> Vec<String> {
    listed(manifest, |_| true)
}

/// As [`dependencies`], without those that a feature adds.
fn needed(manifest: &str) -> Vec<String> {
    listed(manifest, |one| one.get("optional").is_none())
}

fn listed(manifest: &str, wanted: impl Fn(&toml::Value) -> bool) -> Vec<String> {
    let text = std::fs::read_to_string(root().join(manifest)).expect("a manifest can be read");
    let table: toml::Table = text.parse().expect("a manifest is TOML");
    let all = table["dependencies"].as_table().expect("dependencies are a table");
    let names: BTreeSet<String> =
        all.iter().filter(|(_, one)| wanted(one)).map(|(name, _)| name.replace('-', "_")).collect();
    assert!(!names.is_empty(), "{manifest} has dependencies");
    names.into_iter().collect()
}

fn names_crate(code: &str, name: &str) -> bool {
    let word = name.replace('-', "_");
    let part_of_word = |c: char| c.is_alphanumeric() || c == '_';
    code.match_indices(&word).any(|(start, _)| {
        !code[..start].ends_with(part_of_word) && !code[start + word.len()..].starts_with(part_of_word)
    })
}
