//! Calls go down only: the order of the layers, and the files that may name outside crates or hold unsafe code.

use crate::source::{Source, files};

/// Highest first. A module uses those after it in the list, never those before it.
const LAYERS: [&str; 13] = [
    "socket",
    "session",
    "prefixes",
    "scheduler",
    "model",
    "cache",
    "backend",
    "program",
    "tensor",
    "numbers",
    "share",
    "aside",
    "lock",
];

/// Files that wire the layers together and stand above them all.
const WIRING: [&str; 4] = ["src/main.rs", "src/lib.rs", "src/config", "src/daemon"];

/// Names that only some files may use, and why.
struct Room {
    names: &'static [&'static str],
    /// Paths that start with one of these may use the names.
    may: &'static [&'static str],
    why: &'static str,
}

const ROOMS: [Room; 17] = [
    Room {
        names: &["tokio::net"],
        may: &["client/gateway/src/listen.rs"], // the only program with a network
        why: "sockets are interprocess types, and the daemon owns no network",
    },
    Room {
        names: &["std::os::unix::net", "std::net", "os::unix::net"],
        may: &[
            "client/gateway/src/access.rs", // addresses, and who may ask there
            "client/gateway/src/host.rs",   // addresses in a header
            "client/gateway/src/listen.rs",
            "fuzz/src/served.rs", // a client by hand, as in tests
            "fuzz/src/session.rs",
        ],
        why: "sockets are interprocess types, and the daemon owns no network",
    },
    Room {
        names: &["rustix::net"],
        may: &[
            "src/socket/",
            "src/daemon/journal.rs",
            "src/aside/processes.rs", // hands pipes from thread to thread
            "client/src/",
            "client/gateway/src/listen.rs",
            "fuzz/src/session.rs",
        ],
        why: "only the socket layer, the journal and the client open sockets",
    },
    Room {
        names: &["bincode"],
        may: &["client/src/wire/codec.rs"],
        why: "the wire's encoding can be replaced in one file",
    },
    Room {
        names: &["interprocess"],
        may: &["src/socket/", "src/daemon", "client/src/"],
        why: "only the socket layer and the client know sockets",
    },
    Room {
        names: &["ureq", "rustls"],
        may: &["client/src/cli/pull/"],
        why: "one command of the client fetches files, and nothing else asks a network",
    },
    Room {
        names: &["rocmforge_client"],
        may: &[
            "src/socket/",
            "src/session/",
            "src/daemon",
            "src/config.rs", // where both programs look for the socket
            "client/src/",
            "client/gateway/src/", // speaks through that library alone
            "client/top/src/",     // so does this
            "fuzz/src/body.rs",    // starts a gateway
            "fuzz/src/frame.rs",
            "fuzz/src/message.rs",
            "fuzz/src/session.rs",
        ],
        why: "wire types are not inner types: the session converts them",
    },
    Room {
        names: &["tokio", "tokio_util"],
        may: &[
            "src/socket/",
            "src/session/",
            "src/scheduler/",
            "src/daemon",
            "src/main.rs",
            "client/src/asynchronous/",
            "client/gateway/src/",
            "fuzz/src/served.rs", // starts a daemon
        ],
        why: "tasks serve sockets; models, caches and devices use no tasks",
    },
    Room {
        names: &["memmap2"],
        may: &["src/tensor/", "src/backend/cpu/memory.rs"],
        why: "one room holds file mappings and their guard, another anonymous memory",
    },
    Room {
        names: &["sd_notify", "signal_hook_tokio"],
        may: &["src/daemon", "src/main.rs", "src/socket/listener.rs", "client/gateway/src/inherited.rs"],
        why: "only the wiring talks to systemd and takes signals",
    },
    Room {
        names: &["minijinja", "minijinja_contrib"],
        may: &["src/model/template/"],
        why: "templates are rendered in one sandbox",
    },
    Room {
        names: &["llguidance", "toktrie"],
        may: &["src/model/constraint/"],
        why: "one place knows who compiles grammars",
    },
    Room {
        names: &["hip_sys", "libloading"],
        may: &["src/backend/hip/device/binding/"],
        why: "one place knows the HIP runtime's name and functions",
    },
    Room {
        names: &["parking_lot"],
        may: &["src/lock/", "src/scheduler/tests/", "src/model/store/tests.rs"],
        why: "every lock has its place in the order of src/lock.rs",
    },
    Room { names: &["loom"], may: &["src/lock/"], why: "one place knows the types that locks are made of" },
    Room {
        names: &["SystemTime"],
        may: &["src/model/template/", "client/gateway/src/clock.rs"],
        why: "the machine's clock jumps: the monotonic clock measures times, and only chat templates and HTTP need the date",
    },
    Room {
        names: &["half::"],
        may: &["src/tensor/", "src/backend/"],
        why: "only storage and arithmetic know half precision",
    },
];

/// The only files with unsafe code. Each unsafe block names its invariant; elsewhere the compiler refuses unsafe code.
const UNSAFE: [&str; 12] = [
    "src/tensor/map.rs",
    "src/tensor/guard",
    "src/tensor/pages.rs", // madvise and mlock of a mapping's pages
    "src/backend/cpu/",
    "src/backend/hip/device/binding/", // finds C functions in a library loaded at run time
    "src/backend/hip/device/driver/",  // calls these functions and owns the handles they return
    "src/aside/processes.rs",          // a thread with its own table of descriptors
    "src/socket/groups.rs",            // a socket option that no crate offers
    "src/daemon/inherited.rs",
    "src/daemon/allocator.rs",
    "client/gateway/src/inherited.rs",
    "client/src/peer.rs", // a socket option that crates refuse to tell without a process id
];

#[test]
fn layers_use_only_what_lies_below() {
    let mut faults = Vec::new();
    for file in files() {
        let Some(at) = layer_of(&file.path) else { continue };
        for (line, code) in file.code() {
            faults.extend(
                used_modules(code)
                    .filter(|used| !may_use(at, used))
                    .map(|used| format!("{}:{line}: {} uses {used}", file.path, LAYERS[at])),
            );
        }
    }
    assert!(faults.is_empty(), "upward uses:\n{}", faults.join("\n"));
}

#[test]
fn an_upward_use_is_found() {
    let upward = Source::new("src/cache/mod.rs", "use crate::session::Hub;\nuse crate::tensor::X;");
    let at = layer_of(&upward.path).expect("cache is a layer");
    let found: Vec<String> = upward
        .code()
        .iter()
        .flat_map(|(_, code)| used_modules(code).filter(|used| !may_use(at, used)).collect::<Vec<_>>())
        .collect();
    assert_eq!(found, ["session"]);
    let braces: Vec<String> = used_modules("use crate::{model::Model, tensor::{DType, lazy::Y}};").collect();
    assert_eq!(braces, ["model", "tensor"]);
}

#[test]
fn outside_crates_stay_in_their_rooms() {
    let mut faults = Vec::new();
    for file in files().iter().filter(|f| f.path.contains("src/") && !f.path.starts_with("xtask/")) {
        for (line, code) in file.code() {
            for room in &ROOMS {
                let named = room.names.iter().find(|name| names(code, name));
                if let Some(name) = named.filter(|_| !room.may.iter().any(|may| file.path.starts_with(may))) {
                    faults.push(format!("{}:{line}: names {name}; {}", file.path, room.why));
                }
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// Names of the standard library's locks. A crate's own locks may have the same names, but not this path.
const LOCKS: [&str; 4] = ["Mutex", "RwLock", "Condvar", "std::sync"];

#[test]
fn every_lock_of_the_daemon_has_a_rank() {
    let [locks @ .., standard] = LOCKS;
    let mut faults = Vec::new();
    for file in files().iter().filter(|f| f.path.starts_with("src/") && !f.path.starts_with("src/lock")) {
        for (line, code) in file.code().iter().filter(|(_, code)| names(code, standard)) {
            let lock = locks.into_iter().find(|lock| names(code, lock));
            faults.extend(lock.map(|lock| format!("{}:{line}: {standard}'s {lock}", file.path)));
        }
    }
    assert!(faults.is_empty(), "use the locks of src/lock.rs, which have a rank:\n{}", faults.join("\n"));
}

#[test]
fn unsafe_code_stays_in_its_rooms() {
    let mut faults = Vec::new();
    for file in files().iter().filter(|f| f.path.ends_with(".rs") && !f.is_test()) {
        let unsafe_line = file.code().iter().find(|(_, code)| names(code, "unsafe"));
        if let Some((line, _)) = unsafe_line.filter(|_| !UNSAFE.iter().any(|may| file.path.starts_with(may)))
        {
            faults.push(format!("{}:{line}: unsafe code outside {}", file.path, UNSAFE.join(", ")));
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn every_room_is_lived_in() {
    let all = files();
    let used = |name: &str| all.iter().any(|f| f.code().iter().any(|(_, code)| names(code, name)));
    let empty: Vec<&str> =
        ROOMS.iter().filter(|room| !room.may.is_empty()).flat_map(|room| room.names).copied().collect();
    let empty: Vec<&str> = empty.into_iter().filter(|name| !used(name)).collect();
    assert!(empty.is_empty(), "names of rooms that no code uses: {empty:?}");
}

/// Index in [`LAYERS`] of the file's module; `None` for wiring and for files outside the library.
fn layer_of(path: &str) -> Option<usize> {
    if WIRING.iter().any(|wiring| path.starts_with(wiring)) {
        return None;
    }
    let module = path.strip_prefix("src/")?.split(['/', '.']).next()?;
    let at = LAYERS.iter().position(|layer| *layer == module);
    assert!(at.is_some(), "{path}: neither a layer nor wiring; name it in xtask/tests/tidy/layers.rs");
    at
}

fn may_use(at: usize, module: &str) -> bool {
    LAYERS[at..].contains(&module)
}

/// Top-level modules of this crate that a line of code names: `crate::x`, and each `x` of `crate::{x, y::z}`.
fn used_modules(code: &str) -> impl Iterator<Item = String> {
    let mut found = Vec::new();
    for (start, _) in code.match_indices("crate::") {
        if start > 0 && code[..start].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == '$') {
            continue;
        }
        let rest = &code[start + "crate::".len()..];
        match rest.strip_prefix('{') {
            Some(list) => found.extend(heads(list)),
            None => found.push(word(rest)),
        }
    }
    // Names that are empty or start with a capital are items of the crate's root, not modules.
    found.into_iter().filter(|name| name.starts_with(|c: char| c.is_ascii_lowercase()))
}

/// First words of the entries of a `use` list, up to its closing brace.
fn heads(list: &str) -> Vec<String> {
    let mut depth = 0;
    let mut entry_starts = true;
    let mut found = Vec::new();
    for (i, c) in list.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            ',' if depth == 0 => entry_starts = true,
            _ if entry_starts && !c.is_whitespace() => {
                found.push(word(&list[i..]));
                entry_starts = false;
            }
            _ => {}
        }
    }
    found
}

fn word(text: &str) -> String {
    text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
}

/// True when `code` holds `name` as whole words. After a name that ends in `::` any text may follow.
fn names(code: &str, name: &str) -> bool {
    let part_of_word = |c: char| c.is_alphanumeric() || c == '_';
    code.match_indices(name).any(|(start, _)| {
        !code[..start].ends_with(part_of_word)
            && (name.ends_with("::") || !code[start + name.len()..].starts_with(part_of_word))
    })
}
