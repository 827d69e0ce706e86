//! The program on a machine that has no thread left for it.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use rocmforge_client::wire::*;
use serde_json::Value;

use crate::server::{Server, end, item};

/// `nobody`: the kernel does not count the processes of root.
const NOBODY: u32 = 65534;

/// Runs a program that may have one thread alone, as a user who is not root.
fn alone(server: &Server, program: &Path, arguments: &[&str]) -> Output {
    let open = |path: &Path| fs::set_permissions(path, Permissions::from_mode(0o777)).unwrap();
    open(&server.socket());
    open(server.socket().parent().unwrap());
    // The folder of the build may be closed to other users.
    let copy = server.socket().with_file_name("program");
    // Copied by another process: a process that this one starts meanwhile could hold the copy open for writing, and then it
    // cannot be executed.
    assert!(Command::new("cp").arg(program).arg(&copy).status().unwrap().success());
    open(&copy);
    let mut command = Command::new("prlimit");
    command.arg("--nproc=1").arg(copy).args(arguments).current_dir("/").stdin(Stdio::null());
    command.env("ROCMFORGE_SOCKET", server.socket());
    let own = rustix::process::geteuid().as_raw();
    command.args(["--server-uid", &own.to_string()]);
    if own == 0 {
        command.uid(NOBODY).gid(NOBODY);
    }
    command.output().unwrap()
}

fn client_alone(server: &Server, arguments: &[&str]) -> Output {
    alone(server, Path::new(env!("CARGO_BIN_EXE_rocmforge-client")), arguments)
}

#[test]
fn without_a_thread_a_run_ends_with_an_error_that_says_so() {
    for json in [false, true] {
        let server = Server::greeting(|mut peer| {
            let Some(request) = peer.request() else { return };
            peer.try_send(request.header.stream, Op::Item, &item("x"));
            peer.try_send(request.header.stream, Op::End, &end());
        });
        let arguments = if json { &["run", "m", "p", "--json"][..] } else { &["run", "m", "p"] };
        let output = client_alone(&server, arguments);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(1), &b""[..]), "{stderr}");
        assert!(stderr.contains("no thread could be started") && stderr.contains("ulimit -u"), "{stderr}");
        if json {
            let error: Value = serde_json::from_str(&stderr).unwrap();
            assert_eq!(error["error"]["name"], "Resources");
        }
        server.join();
    }
}

#[test]
fn commands_that_need_no_thread_work_without_one() {
    let server = Server::greeting(|mut peer| {
        let request = peer.request().unwrap();
        peer.echo(&request);
    });
    let output = client_alone(&server, &["ping"]);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    server.join();
}
