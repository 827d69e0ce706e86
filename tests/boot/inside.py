#!/usr/bin/env python3
"""Service tests on a real systemd, run as root inside the booted container of `tests/boot/container`.

Each scenario prints one line: its name, its time, and its measured figure. The first failure prints the journal and ends
the run with status 1. `--kills` and `--restarts` set how often the daemon is killed and restarted.
"""

import argparse
import contextlib
import ctypes
import grp
import json
import os
import pathlib
import pwd
import shutil
import subprocess
import sys
import threading
import time

from gateway import serves_http
from steps import expect, reload, run, shown, until

PACKAGE = pathlib.Path("/opt/boot/rocmforge.deb")
README = pathlib.Path("/opt/boot/README.md")
MODEL = "tinystories-260k-f32"
PROMPT = "Once upon a time"
# llama.cpp's answer on this file (greedy, f32): its smallest margin is 0.13 nats.
ANSWER = [432, 383, 286, 261, 376, 298, 315, 421, 395, 317, 426, 338]
SOCKET = "/run/rocmforge/api.sock"
SERVICE = "rocmforged.service"
DROP_INS = "/usr/lib/systemd/system/rocmforged.service.d"
# From Linux's sys/ptrace.h and wait.h.
PTRACE_SEIZE, PTRACE_INTERRUPT, WALL = 0x4206, 0x4207, 0x40000000
LOOKALIKE = pathlib.Path("/opt/boot/libamdhip64.so")


def main_pid():
    return int(shown(SERVICE, "MainPID"))


def client(*arguments, user="alice", **kwargs):
    return run("rocmforge-client", *arguments, user=user, **kwargs)


def answer(user="alice", tokens=12):
    done = client("--json", "run", MODEL, PROMPT, "--temperature", "0", "--max-tokens", str(tokens), user=user)
    return json.loads(done.stdout)


def assert_answers():
    ids = answer()["ids"]
    expect(ids == ANSWER, f"the answer differs from llama.cpp's: {ids}")


def drop_in(text):
    """Sets the test's drop-in for the service; an empty text removes its settings."""
    path = pathlib.Path(f"/run/systemd/system/{SERVICE}.d/boot-test.conf")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    run("systemctl", "daemon-reload")


class Loop(threading.Thread):
    """A client program that repeats a request; counts failures and records the longest time between two answers."""

    def __init__(self, stop):
        super().__init__()
        self.stop, self.answers, self.failures, self.gap = stop, 0, [], 0.0

    def run(self):
        last = time.monotonic()
        while not self.stop.is_set():
            done = client("--json", "tokenize", MODEL, PROMPT, check=False)
            if done.returncode == 0:
                now = time.monotonic()
                self.gap, last, self.answers = max(self.gap, now - last), now, self.answers + 1
            else:
                self.failures.append(done.stdout + done.stderr)


class Load:
    """Eight concurrent `Loop` programs."""

    def __enter__(self):
        self.stop = threading.Event()
        self.loops = [Loop(self.stop) for _ in range(8)]
        for loop in self.loops:
            loop.start()
        return self

    def __exit__(self, *_):
        self.stop.set()
        for loop in self.loops:
            loop.join()

    def figures(self):
        failures = [failure for loop in self.loops for failure in loop.failures]
        return sum(loop.answers for loop in self.loops), failures, max(loop.gap for loop in self.loops)


def readme_lines():
    """The README's commands for an administrator after the package is built, adapted to alice and this container's files."""
    section = README.read_text().split("## As a service\n")[1]
    lines = [line.split("#")[0].strip() for line in section.split("```sh\n")[1].split("```")[0].splitlines()]
    for there, here in [("target/release-packages/rocmforge_*.deb", str(PACKAGE)), ("$USER", "alice"),
                        ("smollm2-135m-instruct-q4_1", MODEL), ("~/.cache/rocmforge/models/*.gguf", f"/opt/boot/{MODEL}.gguf")]:
        expect(any(there in line for line in lines), f"the README does not contain {there}: {lines}")
        lines = [line.replace(there, here) for line in lines]
    return lines[next(number for number, line in enumerate(lines) if str(PACKAGE) in line):]


def installs(_):
    run("useradd", "--create-home", "alice")
    run("useradd", "--create-home", "bob")
    for line in readme_lines():
        if line.startswith("sudo "):
            run("sh", "-c", line.removeprefix("sudo "))
    expect(shown("rocmforged.socket", "ActiveState") == "active", "the socket is not listening")
    expect(run("systemctl", "is-enabled", "rocmforged.socket").stdout.strip() == "enabled", "the socket is not enabled")
    expect(shown(SERVICE, "ActiveState") == "inactive", "the daemon runs although no client connected")
    socket = os.stat(SOCKET)
    expect(socket.st_mode & 0o777 == 0o660, f"socket mode {socket.st_mode:o}")
    expect(grp.getgrgid(socket.st_gid).gr_name == "rocmforge-users", "the socket has another group")
    run("systemd-analyze", "verify", "--recursive-errors=yes", SERVICE, "rocmforged.socket", "rocmforge.slice", "rocmforge-metrics.service", "rocmforge-gateway.socket", "rocmforge-gateway.service")
    version = int(run("systemctl", "--version").stdout.split()[1])
    chosen = sorted(path.name for path in pathlib.Path(DROP_INS).glob("*")) if os.path.exists(DROP_INS) else []
    expect(chosen == [f"50-systemd-{n}.conf" for n in [253, 254, 258] if n <= version], f"systemd {version}: {chosen}")
    package = run("dpkg-query", "--show", "rocmforge").stdout.strip().replace("\t", " ")
    return f"{package}, systemd {version}, {len(chosen)} drop-ins of its version"


def starts_by_socket(_):
    started = time.monotonic()
    client("ping")
    first = time.monotonic() - started
    asked = [run("sh", "-c", line, user="alice").stdout for line in readme_lines() if not line.startswith("sudo ")]
    expect(len(asked) == 2 and MODEL in asked[0] and "there was" in asked[1], f"the README's commands print {asked}")
    assert_answers()
    expect(shown(SERVICE, "ActiveState") == "active", "the service is not active")
    expect("serving 1 models" in shown(SERVICE, "StatusText"), shown(SERVICE, "StatusText"))
    return f"first ping answered after {first * 1000:.0f} ms, including the daemon's start"


def keeps_others_out(_):
    done = client("--json", "list", user="bob", check=False)
    expect(done.returncode == 3, f"bob got status {done.returncode}: {done.stdout}{done.stderr}")
    expect("rocmforge-users" in done.stdout + done.stderr, f"bob's error does not name the group: {done.stdout}{done.stderr}")
    return "a user outside rocmforge-users gets an error that names the group"


def is_confined(_):
    run("systemd-analyze", "security", "--threshold=7", "--no-pager", SERVICE)
    pid, uid = main_pid(), pwd.getpwnam("rocmforge").pw_uid
    status = dict(line.split(":\t", 1) for line in open(f"/proc/{pid}/status").read().splitlines() if ":\t" in line)
    expect(status["Uid"].split()[0] == str(uid), f"uid {status['Uid']}")
    expect(int(status["CapEff"], 16) == 0 and int(status["CapBnd"], 16) == 0, "the daemon has capabilities")
    expect(status["NoNewPrivs"] == "1" and status["Seccomp"] == "2", "the daemon has no seccomp filter or may gain privileges")

    def within(*command):
        return run("nsenter", f"--target={pid}", "--mount", "--net", "setpriv", f"--reuid={uid}", f"--regid={uid}",
                   "--clear-groups", *command, check=False)

    links = within("ip", "-brief", "link").stdout.split()
    expect(links[:1] == ["lo"] and len([word for word in links if ":" in word and "@" in word]) == 0, f"links {links}")
    for place in ["/usr/x", "/etc/rocmforge/x", "/opt/x", "/home/x", "/var/x"]:
        expect(within("touch", place).returncode != 0, f"{place} can be written")
    expect(within("ls", "/home/alice").returncode != 0, "a home directory can be read")
    expect(within("sh", "-c", "cd /var/lib/rocmforge && touch x && rm x").returncode == 0, "its own state cannot be written")
    # A test process in the service's control group gets the same device rules.
    group = "/sys/fs/cgroup" + shown(SERVICE, "ControlGroup")
    tun = run("sh", "-c", f"echo $$ > {group}/cgroup.procs && exec 3<>/dev/net/tun", check=False)
    zero = run("sh", "-c", f"echo $$ > {group}/cgroup.procs && exec 3</dev/zero", check=False)
    expect(zero.returncode == 0, f"/dev/zero refused: {zero.stderr}")
    if os.path.exists("/dev/net/tun"):
        expect("not permitted" in tun.stderr, f"/dev/net/tun was opened: {tun.stderr}")
    place = f"{shown(SERVICE, 'ControlGroup')} {shown('rocmforge.slice', 'CPUWeight')}"
    expect(place == f"/rocmforge.slice/{SERVICE} 1000", place)
    score = run("systemd-analyze", "security", "--no-pager", SERVICE).stdout.strip().splitlines()[-1]
    return score.strip("→ ").replace(f"Overall exposure level for {SERVICE}: ", "exposure ")


def is_kept_from_all_else(_):
    """Runs the probe under the daemon's own unit: the kernel refuses everything that the daemon does not need."""
    unit = pathlib.Path(f"/usr/lib/systemd/system/{SERVICE}").read_text()
    wanted = [line for line in unit.splitlines()
              if not line.startswith(("#", "Type=", "Notify", "Exec", "Restart", "Watchdog", "Requires=", "After=", "FileDescriptor"))]
    text = "\n".join(wanted).replace("[Service]", "[Service]\nType=oneshot\nExecStart=/usr/bin/python3 /opt/boot/probe.py\n"
                                     "StandardOutput=file:/run/probe.json")
    pathlib.Path("/run/systemd/system/probe.service").write_text(text)
    run("systemctl", "daemon-reload")
    run("systemctl", "start", "probe.service")
    found = json.loads(pathlib.Path("/run/probe.json").read_text())
    may = {name for name, came in found.items() if came == "ok"}
    expect(may == {"unix", "write own state", "write own cache", "write private tmp", "zero"}, f"the unit allows {sorted(may)}: {found}")
    missing = [name for name, came in found.items() if name.startswith("device ") and came == "ENOENT"]
    return f"{len(found) - len(may)} attempts refused, {len(may)} needed ones allowed; {len(missing)} devices are missing here"


def reloads(_):
    pid = main_pid()
    more = pathlib.Path("/srv/models")
    more.mkdir()
    shutil.copy(f"/opt/boot/{MODEL}.gguf", more / "second.gguf")
    own = pathlib.Path("/etc/rocmforge/conf.d/own.toml")
    own.write_text('models = ["/var/lib/rocmforge/models", "/srv/models"]')
    reload(SERVICE)
    states = {model["name"]: model["state"] for model in json.loads(client("--json", "list").stdout)["models"]}
    expect(states == {"second": "registered", MODEL: "mapped"}, f"after the reload: {states}")
    expect(main_pid() == pid, "the reload restarted the daemon")
    own.unlink()
    reload(SERVICE)
    return "a drop-in of the configuration taken and dropped by reloads, process kept"


def tells_of_a_typo(_):
    """Clients are told of a wrong configuration, and however many ask, the socket stays."""
    own = pathlib.Path("/etc/rocmforge/conf.d/own.toml")
    own.write_text("[limits]\nstep_rowz = 32\n")
    failed = run("systemctl", "restart", SERVICE, check=False)
    status = shown(SERVICE, "ExecMainStatus")
    expect(failed.returncode != 0 and status == "78", f"a restart with a typo: {failed.returncode}, status {status}")
    for number in range(8):
        refused = client("ping", check=False)
        expect(refused.returncode == 3 and "step_rowz" in refused.stderr and "restart rocmforged" in refused.stderr,
               f"call {number} with a typo: status {refused.returncode}: {refused.stderr}")
    expect(shown("rocmforged.socket", "ActiveState") == "active", "eight clients closed the socket")
    # An administrator tries again, and clients call in between. Each restart and each call after it is a start.
    for number in range(3):
        run("systemctl", "restart", SERVICE, check=False)
        refused = client("ping", check=False)
        expect(refused.returncode == 3 and "step_rowz" in refused.stderr, f"after restart {number}: {refused.stderr}")
    expect(shown("rocmforged.socket", "ActiveState") == "active", "three restarts and their clients closed the socket")
    expect("step_rowz" in shown(SERVICE, "StatusText"), f"systemctl status says: {shown(SERVICE, 'StatusText')}")
    own.unlink()
    run("systemctl", "restart", SERVICE)
    assert_answers()
    return "eight clients told of the key, socket kept, mended by a restart"


def status_says(name, user="alice"):
    lines = client("status", user=user).stdout.splitlines()
    return next((line.removeprefix(name).strip() for line in lines if line.startswith(name + " ")), "")


def restart_is_a_pause(_):
    """Files passed by descriptor, rules and locks survive a restart and a kill."""
    mine = pathlib.Path("/home/alice/mine.gguf")
    shutil.copy(f"/opt/boot/{MODEL}.gguf", mine)
    shutil.chown(mine, "alice", "alice")
    mine.chmod(0o600)
    client("load", str(mine))
    client("rules", MODEL, "--priority", "9", "--keep-layers", "2", user="root")
    client("pin", MODEL, user="root")
    kept = status_says("kept", user="root")
    expect(kept.startswith("1 of at most 510 passed files, rules of 1 models, 1 locked"), f"kept: {kept!r}")
    pauses = []
    for how in [("restart",), ("kill", "--signal=KILL", "--kill-whom=main")]:
        expect(int(shown(SERVICE, "NFileDescriptorStore")) == 2, f"{shown(SERVICE, 'NFileDescriptorStore')} stored")
        started = time.monotonic()
        run("systemctl", *how, SERVICE)
        done = client("--json", "run", "mine", PROMPT, "--temperature", "0", "--max-tokens", "12")
        pauses.append(time.monotonic() - started)
        expect(json.loads(done.stdout)["ids"] == ANSWER, "the answer changed")
        until("rules and locks are restored", lambda: status_says("kept", user="root") == kept, 5)
        rules = json.loads(client("--json", "rules", MODEL, user="root").stdout)["rules"]
        expect((rules["pinned"], rules["priority"], rules["layers_min"]) == (True, 9, 2), f"rules: {rules}")
        locked = json.loads(client("--json", "show", MODEL).stdout)["host"]
        expect(locked["wanted"] == "lock", f"the model is no longer locked: {locked}")
    client("unload", "mine")
    client("unpin", MODEL, user="root")
    client("unload", MODEL, user="root")
    until("the store has only its list", lambda: shown(SERVICE, "NFileDescriptorStore") == "1", 5)
    return "a passed file answered {:.2f} s after a restart, {:.2f} s after a kill; rules and lock held".format(*pauses)


def obeys_its_policy(_):
    """Policy by user, group and administrators, with several real users; a refusal names its rule."""
    config = pathlib.Path("/etc/rocmforge/config.toml")
    text = config.read_text()
    run("groupadd", "ai")
    run("useradd", "--create-home", "--groups", "rocmforge-users,ai", "carol")
    run("useradd", "--create-home", "--groups", "rocmforge-users", "dave")
    for key, who in [("administrators = []", 'administrators = ["dave"]'), ('load = ["*"]', 'load = ["@ai"]')]:
        expect(f"\n#{key}\n" in text, f"the example does not show {key}")
        config.write_text(config.read_text().replace(f"\n#{key}\n", f"\n{who}\n"))
    reload(SERVICE)
    client("unload", MODEL, user="root")
    loads = {user: client("--json", "load", MODEL, user=user, check=False) for user in ["alice", "carol", "dave", "root"]}
    came = {user: done.returncode for user, done in loads.items()}
    expect(came == {"alice": 1, "carol": 0, "dave": 0, "root": 0}, f"exit status of load by user: {came}")
    error = json.loads(loads["alice"].stderr)["error"]
    expect(error["name"] == "Forbidden" and error["detail"]["rule"] == "policy.load", f"the refusal: {error}")
    expect(answer()["ids"] == ANSWER, "a user without the right to load cannot run either")
    expect(client("unload", MODEL, user="alice", check=False).returncode == 1, "alice could unload another user's model")
    client("unload", MODEL, user="dave")
    said = {user: status_says("you may", user) for user in ["alice", "dave"]}
    expect("policy.load" in said["alice"] and said["dave"].startswith("everything"), f"said: {said}")
    config.write_text(text)
    reload(SERVICE)
    client("load", MODEL)
    return "a user, a group, an administrator and root told apart; the refusal names policy.load"


def logs_with_fields(_):
    """The journal has user and model of a request as fields; it never has prompts or answers."""
    secret = "xyzzy-boot-secret"
    uid = pwd.getpwnam("alice").pw_uid
    refused = client("run", MODEL, secret, "--timeout", "1", "--max-tokens", "400", "--ignore-eog", check=False)
    expect(refused.returncode == 1, f"a request with a timeout of 1 ms succeeded: {refused.stdout}")
    run("journalctl", "--sync")
    text = run("journalctl", "--boot", "--output=json", f"RF_UID={uid}", "RF_MODEL=" + MODEL).stdout
    entries = [json.loads(line) for line in text.splitlines()]
    expect(any(e.get("RF_CODE") == "211" and e.get("MESSAGE_ID") and e.get("RF_REQUEST") for e in entries), f"the journal has no such entry: {text}")
    expect(all(e["_SYSTEMD_UNIT"] == SERVICE and e["SYSLOG_IDENTIFIER"] == "rocmforged" for e in entries), f"an entry is of another unit: {text}")
    everyone = run("journalctl", "--boot", "--output=json", "--output-fields=RF_UID", f"_SYSTEMD_UNIT={SERVICE}").stdout.splitlines()
    unknown = [line for line in everyone if json.loads(line).get("RF_UID") == "65534"]
    expect(not unknown, f"an entry lacks the client's uid: {unknown[:1]}")
    expect(secret not in run("journalctl", "--boot", "--output=export").stdout, "a prompt is in the journal")
    return f"{len(entries)} entries found by RF_UID and RF_MODEL, no prompt in any"


def writes_metrics(_):
    """For the node exporter, once enabled: the file exists while the daemon runs."""
    folder = pathlib.Path("/var/lib/prometheus/node-exporter")
    lacking = run("systemctl", "enable", "--now", "rocmforge-metrics.service", check=False)
    expect(lacking.returncode != 0 and "Assertion failed" in lacking.stderr, f"without the directory: {lacking}")
    told = run("systemctl", "status", "--no-pager", "rocmforge-metrics.service", check=False).stdout
    expect("AssertPathIsDirectory" in told and str(folder) in told, f"the status does not name the directory: {told}")
    folder.mkdir(parents=True)
    page = folder / "rocmforge.prom"
    run("systemctl", "enable", "--now", "rocmforge-metrics.service")
    until("counters are written", page.exists, 10)
    text = page.read_text()
    expect('rocmforge_requests_total{device="0",outcome="done"}' in text and page.stat().st_mode & 0o777 == 0o644, f"written: {text}")
    run("systemctl", "stop", SERVICE)
    until("the counters' file is removed with the daemon", lambda: not page.exists(), 10)
    assert_answers()
    until("the next daemon's counters are written", page.exists, 10)
    score = run("systemd-analyze", "security", "--no-pager", "rocmforge-metrics.service").stdout.strip().splitlines()[-1]
    run("systemctl", "disable", "--now", "rocmforge-metrics.service")
    # The limit is five starts in a minute, and earlier scenarios used some.
    run("systemctl", "reset-failed", SERVICE, "rocmforged.socket")
    return f"{len(text.splitlines())} lines; {score.strip('→ ')}"


def uses_the_lookalike(_):
    """The same unit with a GPU: the look-alike of libamdhip64 that runs the kernels on the CPU."""
    if not LOOKALIKE.exists():
        return "left out: no compiler for the look-alike"
    defaults = pathlib.Path("/etc/default/rocmforge")
    defaults.write_text(f"ROCMFORGE_HIP_LIB={LOOKALIKE}\n")
    run("systemctl", "restart", SERVICE)
    device = json.loads(client("--json", "status").stdout)["devices"][0]
    expect(device["kind"] == "hip" and "look-alike" in device["device"], f"computed on {device}")
    started = time.monotonic()
    assert_answers()
    took = time.monotonic() - started
    device = json.loads(client("--json", "status").stdout)["devices"][0]
    expect(device["tensors_loaded"] > 0, f"no weights were loaded: {device}")
    defaults.unlink()
    run("systemctl", "restart", SERVICE)
    kind = json.loads(client("--json", "status").stdout)["devices"][0]["kind"]
    expect(kind == "cpu", f"without the look-alike the device is {kind}")
    return f"llama.cpp's answer on {device['device']} in {took:.1f} s, {device['tensors_loaded']} tensors loaded"


def comes_back_from_a_crash_loop(_):
    """Kills the daemon every quarter of a second: clients wait or get an error, none hangs. Past the start limit doctor gives advice."""
    drop_in("[Unit]\nStartLimitBurst=100000\n")
    stop, times = threading.Event(), []

    def ask():
        while not stop.is_set():
            started = time.monotonic()
            done = client("--json", "ping", check=False)
            times.append((time.monotonic() - started, done.returncode, done.stderr))

    asking = threading.Thread(target=ask)
    asking.start()
    for _ in range(20):
        time.sleep(0.25)
        run("systemctl", "kill", "--signal=KILL", "--kill-whom=main", SERVICE, check=False)
    stop.set()
    asking.join()
    wrong = [(code, text) for _, code, text in times if code not in (0, 3)]
    expect(not wrong, f"neither answered nor refused for a missing daemon: {wrong[:1]}")
    longest = max(took for took, _, _ in times)
    expect(longest <= 8, f"a client waited {longest:.1f} s")
    until("the daemon answers again without help", lambda: client("ping", check=False).returncode == 0, 10)

    drop_in("")
    run("systemctl", "reset-failed", SERVICE, check=False)
    given_up = lambda: shown(SERVICE, "Result") == "start-limit-hit" or shown(SERVICE, "ActiveState") == "failed"
    began = time.monotonic()
    while not given_up():
        expect(time.monotonic() - began < 30, "systemd did not reach the start limit")
        client("ping", check=False)
        run("systemctl", "kill", "--signal=KILL", "--kill-whom=main", SERVICE, check=False)
        time.sleep(0.05)
    started = time.monotonic()
    refused = client("--json", "ping", check=False)
    waited = time.monotonic() - started
    expect(refused.returncode == 3 and waited <= 6, f"past the limit: status {refused.returncode} after {waited:.1f} s")
    doctor = client("doctor", check=False)
    expect(doctor.returncode == 3, f"doctor's status {doctor.returncode}")
    expect("too often" in doctor.stdout and "reset-failed" in doctor.stdout, f"doctor says: {doctor.stdout}{doctor.stderr}")
    run("systemctl", "reset-failed", SERVICE, "rocmforged.socket", check=False)
    run("systemctl", "start", "rocmforged.socket")
    assert_answers()
    return (f"{len(times)} requests during the kills, {sum(code == 0 for _, code, _ in times)} answered, longest wait {longest:.2f} s; "
            f"past the limit refused after {waited:.2f} s")


def doctor_finds_the_usual(_):
    """A missing socket, a user outside the group, one who joined it without a new login, another version."""
    def said(user="alice", **kwargs):
        done = client("doctor", user=user, check=False, **kwargs)
        return done.returncode, done.stdout
    code, text = said()
    expect(code == 0 and "rocmforged.socket active" in text, f"without a fault doctor ended with {code}: {text}")
    code, text = said("bob")
    expect(code == 3 and "adduser bob rocmforge-users" in text, f"doctor as bob: {code}: {text}")
    run("usermod", "--append", "--groups", "rocmforge-users", "bob")
    done = run("setpriv", "--reuid=bob", "--regid=bob", "--clear-groups", "rocmforge-client", "doctor", check=False)
    expect("log in again" in done.stdout, f"doctor in bob's old session: {done.stdout}")
    run("gpasswd", "--delete", "bob", "rocmforge-users")
    run("systemctl", "stop", "rocmforged.socket", SERVICE)
    code, text = said()
    expect(code == 3 and "does not exist" in text and "enable --now" in text, f"doctor without a socket: {code}: {text}")
    run("systemctl", "start", "rocmforged.socket")
    assert_answers()
    return "socket stopped, group missing, session too old: each reported with advice"


def survives_kills(options):
    drop_in("[Unit]\nStartLimitBurst=100000\n")
    before = int(shown(SERVICE, "NRestarts"))
    with Load() as load:
        for number in range(options.kills):
            time.sleep(0.5 + 2.5 * (number * 37 % options.kills) / options.kills)
            until("the daemon runs", lambda: main_pid() != 0, 10)
            run("systemctl", "kill", "--signal=KILL", "--kill-whom=main", SERVICE)
        until("the daemon answers", lambda: client("ping", check=False).returncode == 0, 10)
    answers, failures, gap = load.figures()
    expect(not failures, f"{len(failures)} requests failed, the first: {failures[:1]}")
    expect(int(shown(SERVICE, "NRestarts")) - before == options.kills, "systemd's restart count is wrong")
    expect(gap <= options.gap, f"{gap:.2f} s without an answer")
    assert_answers()
    return f"{options.kills} kills, {answers} answers, 0 failures, longest gap {gap:.2f} s"


def restarts_under_load(options):
    with Load() as load:
        for _ in range(options.restarts):
            run("systemctl", "restart", SERVICE)
            time.sleep(0.3)
    answers, failures, gap = load.figures()
    expect(not failures, f"{len(failures)} requests failed, the first: {failures[:1]}")
    expect(gap <= options.gap, f"{gap:.2f} s without an answer")
    return f"{options.restarts} restarts, {answers} answers, 0 failures, longest gap {gap:.2f} s"


def stop_process(_):
    run("systemctl", "kill", "--signal=STOP", "--kill-whom=main", SERVICE)
    return lambda: None


def stop_engine(pid):
    """Stops the engine's thread alone, as a debugger does: other threads, and requests that need no engine, continue."""
    threads = [(path.parent.name, path.read_text().strip()) for path in pathlib.Path(f"/proc/{pid}/task").glob("*/comm")]
    engines = [int(thread) for thread, name in threads if name == "engine"]
    expect(len(engines) == 1, f"threads of the daemon: {threads}")
    libc = ctypes.CDLL(None, use_errno=True)
    for request in (PTRACE_SEIZE, PTRACE_INTERRUPT):
        came = libc.ptrace(ctypes.c_long(request), ctypes.c_long(engines[0]), None, None)
        expect(came == 0, f"ptrace: {os.strerror(ctypes.get_errno())}")
    state = pathlib.Path(f"/proc/{pid}/task/{engines[0]}/stat")
    until("the engine's thread is stopped", lambda: state.read_text().rsplit(")", 1)[1].split()[0] == "t", 5)
    client("ping")
    client("tokenize", MODEL, PROMPT)

    def reap():
        """Reaps the killed thread: it waits for its tracer, and the process waits for it."""
        with contextlib.suppress(ChildProcessError):
            os.waitpid(engines[0], os.WNOHANG | WALL)

    return reap


def is_killed_when_hung(_):
    """Stops the whole process, then the engine alone while everything else still answers; the watchdog replaces both."""
    drop_in("[Unit]\nStartLimitBurst=100000\n[Service]\nWatchdogSec=3s\n")
    times = []
    for stop in (stop_process, stop_engine):
        run("systemctl", "restart", SERVICE)
        client("tokenize", MODEL, PROMPT)
        pid = main_pid()
        started = time.monotonic()
        reap = stop(pid)
        until("the watchdog starts another process", lambda: reap() or main_pid() not in (0, pid), 10)
        times.append(time.monotonic() - started)
        assert_answers()
    drop_in("[Unit]\nStartLimitBurst=100000\n")
    run("systemctl", "restart", SERVICE)
    expect(max(times) <= 3 + 2, f"the watchdog took too long: {times} s")
    return "a stopped process was replaced after {:.1f} s, one whose engine was stopped after {:.1f} s, with WatchdogSec=3s".format(*times)


def drains(_):
    client("ping")
    pid = main_pid()
    programs = [
        subprocess.Popen(
            ["setpriv", "--reuid=alice", "--regid=alice", "--init-groups", "rocmforge-client", "--json", "run", MODEL,
             PROMPT, "--ignore-eog", "--max-tokens", "400", "--temperature", "0"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(16)
    ]
    until("at least eight of sixteen requests run", lambda: len(json.loads(client("--json", "ps").stdout)["sequences"]) >= 8, 10)
    started = time.monotonic()
    run("systemctl", "stop", SERVICE)
    took = time.monotonic() - started
    done, told = 0, 0
    for program in programs:
        out, error = program.communicate(timeout=20)
        if program.returncode == 0:
            done += 1
        else:
            told += "draining" in (out + error).lower() or "stopping" in (out + error).lower()
    expect(done + told == 16, f"{done} finished, {told} of the others got an error with a reason")
    expect(took <= 10, f"stopping took {took:.1f} s")
    expect(shown(SERVICE, "ExecMainStatus") == "0" and shown(SERVICE, "Result") == "success", "the daemon did not end cleanly")
    expect(pid not in (0, main_pid()), "the daemon still runs")
    assert_answers()  # the socket starts it again
    return f"{done} answers finished, {told} refused with a reason, stopped after {took:.1f} s"


def upgrades(_):
    client("ping")
    pid, socket = main_pid(), os.stat(SOCKET).st_ino
    with Load() as load:
        run("dpkg", "--install", str(PACKAGE))
        time.sleep(0.5)
    answers, failures, gap = load.figures()
    expect(not failures, f"{len(failures)} requests failed, the first: {failures[:1]}")
    expect(main_pid() != pid, "the old daemon still runs")
    expect(os.stat(SOCKET).st_ino == socket, "the socket was made again")
    assert_answers()
    return f"{answers} answers meanwhile, 0 failures, longest gap {gap:.2f} s"


def goes(_):
    run("dpkg", "--remove", "rocmforge")
    expect(not os.path.exists(SOCKET), "the socket's name was left behind")
    expect(run("pgrep", "--exact", "rocmforged", check=False).returncode == 1, "a daemon was left running")
    expect(os.path.exists("/etc/rocmforge/config.toml"), "removing the package removed the configuration")
    os.remove(f"/var/lib/rocmforge/models/{MODEL}.gguf")
    run("dpkg", "--purge", "rocmforge")
    left = [path for path in [DROP_INS, "/usr/share/rocmforge", "/etc/rocmforge", "/var/lib/rocmforge", "/var/cache/rocmforge", "/run/rocmforge-priv"]
            if os.path.exists(path)]
    expect(not left, f"left behind: {left}")
    failed = run("systemctl", "list-units", "--failed", "--plain", "--no-legend").stdout
    expect(not failed, f"failed units: {failed}")
    return "removed and purged"


SCENARIOS = [installs, starts_by_socket, keeps_others_out, is_confined, is_kept_from_all_else, reloads, tells_of_a_typo, obeys_its_policy,
             logs_with_fields, writes_metrics, serves_http, restart_is_a_pause, uses_the_lookalike, survives_kills, restarts_under_load, is_killed_when_hung,
             comes_back_from_a_crash_loop, doctor_finds_the_usual, drains, upgrades, goes]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--restarts", type=int, default=20)
    parser.add_argument("--gap", type=float, default=5.0, help="maximum seconds that a client may wait for an answer")
    parser.add_argument("--only", nargs="*", default=[], help="run only these scenarios, after the installation")
    options = parser.parse_args()
    unknown = set(options.only) - {scenario.__name__ for scenario in SCENARIOS}
    expect(not unknown, f"no such scenarios: {sorted(unknown)}")
    for scenario in SCENARIOS:
        if options.only and scenario not in (installs, starts_by_socket) and scenario.__name__ not in options.only:
            continue
        started = time.monotonic()
        try:
            figure = scenario(options)
        except (AssertionError, subprocess.SubprocessError, OSError, KeyError, ValueError) as error:
            print(f"{scenario.__name__}: FAILED: {error}", flush=True)
            print(run("journalctl", "--boot", "--no-pager", "--lines=60", "--unit=rocmforge*", check=False).stdout)
            return 1
        print(f"{scenario.__name__:22} {time.monotonic() - started:6.1f} s  {figure}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
