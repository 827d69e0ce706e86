//! Checks on the client's side for common problems between a user and the daemon, followed by the daemon's own
//! checks.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::process::{Command, ExitCode};

use rocmforge_client::wire::{CheckState, DoctorCheck, DoctorReply};
use rocmforge_client::{Client, DEFAULT_SOCKET};
use rustix::fs::{Access, AtFlags, CWD};
use serde_json::json;

use super::report::{Failure, Output};
use super::tables;

/// Help of the command, after its options.
pub const HELP: &str = "The daemon checks in a separate process, with its own user, groups and confinement. That takes up to half a\n\
    minute. The exit code is 0 whatever it finds.\n\n\
    Examples:\n  rocmforge-client doctor\n  rocmforge-client doctor --json | jq '.gpus[] | select(.works)'";

/// Members of this group may connect to the system's daemon.
const USERS: &str = "rocmforge-users";

const UNITS: [&str; 2] = ["rocmforged.socket", "rocmforged.service"];

/// Runs all checks and prints them. Fails if the daemon does not answer.
pub fn run(client: &Client, socket: &Path, output: Output) -> Result<ExitCode, Failure> {
    let mut checks = local(socket);
    let asked = client.doctor().and_then(|reply| Ok((reply, client.info()?.version)));
    let (mut reply, error) = match asked {
        Ok((reply, version)) => {
            checks.push(version_check(&version, env!("CARGO_PKG_VERSION")));
            (reply, None)
        }
        Err(error) => (DoctorReply { checks: vec![], gpus: vec![], ext: vec![] }, Some(error)),
    };
    checks.append(&mut reply.checks);
    reply.checks = checks;
    let Some(error) = error else {
        output.show(&reply, tables::doctor)?;
        return Ok(ExitCode::SUCCESS);
    };
    let failure = Failure::from(error);
    if output.json {
        return Ok(
            output.fail_with(&failure, json!({ "checks": super::report::for_scripts(json!(reply.checks)) }))
        );
    }
    output.show(&reply, tables::doctor)?;
    Ok(output.fail(&failure))
}

fn check(name: &str, state: CheckState, found: String, advice: String) -> DoctorCheck {
    DoctorCheck { name: name.to_owned(), state, found, advice, ext: vec![] }
}

fn local(socket: &Path) -> Vec<DoctorCheck> {
    let mut checks = Vec::new();
    if socket == Path::new(DEFAULT_SOCKET) {
        checks.extend(units());
    }
    checks.push(socket_check(socket));
    checks
}

/// State of systemd's units; `None` without systemd or without the units.
fn units() -> Option<DoctorCheck> {
    let output = Command::new("systemctl")
        .args(["show", "--property=Id,LoadState,ActiveState,Result", UNITS[0], UNITS[1]])
        .output()
        .ok()?;
    unit_check(&String::from_utf8_lossy(&output.stdout))
}

/// Parses the output of `systemctl show`: lines of KEY=VALUE, with an empty line between units.
fn unit_check(text: &str) -> Option<DoctorCheck> {
    let units: Vec<[&str; 4]> = text
        .split("\n\n")
        .filter_map(|unit| {
            let value = |key: &str| unit.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
            Some([value("Id")?, value("LoadState")?, value("ActiveState")?, value("Result")?])
        })
        .collect();
    let is_missing = |unit: &[&str; 4]| unit[1] != "loaded";
    if units.is_empty() || units.iter().all(is_missing) {
        return None;
    }
    let bad = units.iter().find(|[_, load, active, _]| *load == "loaded" && *active == "failed");
    let listens = units.iter().any(|[id, _, active, _]| *id == UNITS[0] && *active == "active");
    let (state, found, advice) = match bad {
        Some([id, _, _, result]) => {
            let limit = result.contains("start-limit");
            let why = if limit {
                "it ended too often in a short time, and systemd stopped restarting it".to_owned()
            } else {
                format!("result {result}")
            };
            let advice = "journalctl --unit=rocmforged --lines=50 says why it ended; once that is fixed: systemctl reset-failed \
                          rocmforged.service rocmforged.socket && systemctl start rocmforged.socket";
            (CheckState::Problem, format!("{id} failed: {why}"), advice.to_owned())
        }
        None if !listens => {
            let advice = "systemctl enable --now rocmforged.socket";
            (CheckState::Problem, format!("{} is not active", UNITS[0]), advice.to_owned())
        }
        None => {
            let states: Vec<String> =
                units.iter().map(|[id, _, active, _]| format!("{id} {active}")).collect();
            (CheckState::Good, states.join(", "), String::new())
        }
    };
    Some(check("systemd units", state, found, advice))
}

fn socket_check(socket: &Path) -> DoctorCheck {
    let name = socket.display().to_string();
    let problem = |found: String, advice: String| {
        check("socket", CheckState::Problem, format!("{name} {found}"), advice)
    };
    let start = "start the daemon: systemctl start rocmforged.socket, or rocmforged --socket; to use another socket, set --socket or ROCMFORGE_SOCKET";
    let meta = match fs::metadata(socket) {
        Ok(meta) => meta,
        Err(error) if error.kind() == ErrorKind::NotFound => {
            return problem("does not exist".into(), start.into());
        }
        Err(error) => return problem(format!("cannot be inspected: {error}"), start.into()),
    };
    if !meta.file_type().is_socket() {
        return problem("is not a socket".into(), start.into());
    }
    if rustix::fs::accessat(CWD, socket, Access::WRITE_OK, AtFlags::EACCESS).is_ok() {
        return check("socket", CheckState::Good, format!("{name} may be used"), String::new());
    }
    let groups = fs::read_to_string("/etc/group").unwrap_or_default();
    let user = user_name(rustix::process::geteuid().as_raw());
    problem("is not open to you".into(), group_advice(&groups, meta.gid(), &user))
}

/// How to get into the socket's group.
fn group_advice(groups: &str, gid: u32, user: &str) -> String {
    let by =
        |field: usize, value: &str| groups.lines().find(|line| line.split(':').nth(field) == Some(value));
    let Some(group) = by(2, &gid.to_string()) else {
        return format!(
            "its group {gid} is not in /etc/group: run systemd-sysusers rocmforge.conf to create {USERS}"
        );
    };
    let mut fields = group.split(':');
    let group_name = fields.next().unwrap_or(USERS);
    if group_name != USERS && by(0, USERS).is_none() {
        return format!(
            "the group {USERS} is missing: run systemd-sysusers rocmforge.conf to create it, then systemctl restart rocmforged.socket"
        );
    }
    if fields.nth(2).unwrap_or_default().split(',').any(|member| member == user) {
        return format!(
            "you joined {group_name} after you logged in: log in again, or use `newgrp {group_name}`"
        );
    }
    format!("have an administrator add you (adduser {user} {group_name}), then log in again")
}

fn user_name(uid: u32) -> String {
    let users = fs::read_to_string("/etc/passwd").unwrap_or_default();
    let line = users.lines().find(|line| line.split(':').nth(2) == Some(&uid.to_string()));
    line.and_then(|line| line.split(':').next()).map_or_else(|| uid.to_string(), str::to_owned)
}

fn version_check(daemon: &str, client: &str) -> DoctorCheck {
    let found = format!("daemon {daemon}, this client {client}");
    if daemon == client {
        return check("versions", CheckState::Good, found, String::new());
    }
    let advice = "systemctl restart rocmforged starts the installed daemon; models and pins survive it";
    check("versions", CheckState::Problem, found, advice.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn show(socket: (&str, &str), service: (&str, &str)) -> String {
        let unit = |id: &str, (active, result): (&str, &str)| {
            format!("Result={result}\nId={id}\nLoadState=loaded\nActiveState={active}\n")
        };
        format!("{}\n{}", unit(UNITS[0], socket), unit(UNITS[1], service))
    }

    #[test]
    fn units_that_failed_or_do_not_listen_are_told_with_what_to_do() {
        let good = unit_check(&show(("active", "success"), ("inactive", "success"))).unwrap();
        assert_eq!((good.state, good.advice.as_str()), (CheckState::Good, ""));
        let limit =
            unit_check(&show(("failed", "service-start-limit-hit"), ("failed", "start-limit-hit"))).unwrap();
        assert_eq!(limit.state, CheckState::Problem);
        assert!(limit.found.contains("too often") && limit.advice.contains("reset-failed"), "{limit:?}");
        let failed = unit_check(&show(("active", "success"), ("failed", "exit-code"))).unwrap();
        assert_eq!(failed.found, "rocmforged.service failed: result exit-code");
        let stopped = unit_check(&show(("inactive", "success"), ("inactive", "success"))).unwrap();
        assert!(stopped.advice.contains("enable --now"), "{stopped:?}");
        assert!(unit_check("").is_none());
        let missing = show(("inactive", "success"), ("inactive", "success")).replace("loaded", "not-found");
        assert!(unit_check(&missing).is_none());
    }

    #[test]
    fn the_way_into_the_group_depends_on_what_is_missing() {
        let groups = "root:x:0:\nrocmforge-users:x:990:alice,carol\nstaff:x:50:\n";
        assert!(group_advice(groups, 990, "alice").contains("log in again, or use `newgrp rocmforge-users`"));
        assert!(group_advice(groups, 990, "bob").contains("adduser bob rocmforge-users"));
        assert!(group_advice(groups, 50, "bob").contains("adduser bob staff"));
        assert!(group_advice(groups, 7, "bob").contains("group 7 is not in /etc/group"));
        assert!(group_advice("root:x:0:\n", 0, "bob").contains("the group rocmforge-users is missing"));
    }

    #[test]
    fn a_socket_that_is_not_there_or_none_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let missing = socket_check(&dir.path().join("api.sock"));
        assert!(
            missing.found.ends_with("does not exist") && missing.advice.contains("systemctl start"),
            "{missing:?}"
        );
        assert!(socket_check(dir.path()).found.ends_with("is not a socket"));
        let path = dir.path().join("real.sock");
        let _listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        assert_eq!(socket_check(&path).state, CheckState::Good);
    }

    #[test]
    fn other_versions_are_a_problem() {
        assert_eq!(version_check("1.2.3", "1.2.3").state, CheckState::Good);
        let other = version_check("1.2.3", "1.3.0");
        assert!(other.state == CheckState::Problem && other.advice.contains("restart"));
    }
}
