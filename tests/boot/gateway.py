"""Service test of the HTTP gateway's units, as the package installs them."""

import json
import pwd
import urllib.request

from steps import expect, run, shown

SERVICE, SOCKET = "rocmforge-gateway.service", "rocmforge-gateway.socket"
ADDRESS = "http://127.0.0.1:11435"
USER = "rocmforge-gateway"


def ask(path, body=None):
    request = urllib.request.Request(ADDRESS + path, json.dumps(body).encode() if body else None,
                                     {"Content-Type": "application/json"} if body else {})
    with urllib.request.urlopen(request, timeout=20) as response:
        return json.load(response)


def serves_http(_):
    """Started by its socket as a user of its own, with no right but to ask the daemon; stopped, and started again."""
    run("systemctl", "start", SOCKET)
    expect(shown(SERVICE, "ActiveState") == "inactive", "the gateway runs although nobody connected")
    model = ask("/v1/models")["data"][0]["id"]
    asked = ["--temperature", "0", "--max-tokens", "12"]
    wanted = json.loads(run("rocmforge-client", "--json", "run", model, "Once upon a time", *asked, user="alice").stdout)["text"]
    body = {"model": model, "prompt": "Once upon a time", "temperature": 0, "max_tokens": 12}
    text = ask("/v1/completions", body)["choices"][0]["text"]
    expect(text == wanted, f"the gateway answers {text!r}, the client {wanted!r}")
    pid = int(shown(SERVICE, "MainPID"))
    status = dict(line.split(":\t", 1) for line in open(f"/proc/{pid}/status").read().splitlines() if ":\t" in line)
    expect(pwd.getpwuid(int(status["Uid"].split()[0])).pw_name == USER, f"uid {status['Uid']}")
    expect(len(run("getent", "-s", "files", "passwd", USER).stdout.splitlines()) == 1, "the daemon's configuration cannot name the user")
    expect(int(status["CapEff"], 16) == 0 and int(status["CapBnd"], 16) == 0, "the gateway has capabilities")
    expect(status["NoNewPrivs"] == "1" and status["Seccomp"] == "2", "the gateway has no seccomp filter or may gain privileges")
    run("systemctl", "stop", SERVICE)
    expect(ask("/v1/completions", body)["choices"][0]["text"] == wanted, "after a stop, the socket starts no gateway that answers")
    expect(int(shown(SERVICE, "MainPID")) not in (0, pid), "the stopped gateway still runs")
    run("systemd-analyze", "security", "--threshold=15", "--no-pager", SERVICE)
    score = run("systemd-analyze", "security", "--no-pager", SERVICE).stdout.strip().splitlines()[-1]
    run("systemctl", "stop", SOCKET, SERVICE)
    return f"started by its socket twice; {score.strip('→ ')}"
