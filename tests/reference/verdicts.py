#!/usr/bin/env python3
"""verdicts.py: what llama.cpp makes of model files. `cargo xtask verdicts` runs it; it uses none of our code.

    verdicts.py FILE...

For each file one line of JSON: `verdict` is "answers" (it was loaded and gave two tokens), "refuses", "dies" (the process ended by a
signal) or "hangs"; `why` the last that it said. Each file is tried in a process of its own, by the server inside the PyPI wheel
`xllamacpp`.
"""
import json
import os
import resource
import signal
import sys
import tempfile
import time

import xllamacpp as x

os.environ["GGML_NO_BACKTRACE"] = "1"  # a debugger for each failed assertion

PATIENCE = 20.0      # seconds
DATA_MAX = 4 << 30   # bytes: what asks for more is refused by the kernel
SAID = 20000         # bytes of what it said that may hold the reason


def main():
    for path in sys.argv[1:]:
        print(json.dumps(verdict(path)), flush=True)


def verdict(path):
    with tempfile.TemporaryFile() as log:
        child = os.fork()
        if child == 0:
            attempt(path, log.fileno())
        status = wait(child)
        log.seek(0)
        said = log.read().decode(errors="replace")
    if status is None:
        return {"verdict": "hangs", "why": f"no answer in {PATIENCE:.0f} s"}
    if os.WIFSIGNALED(status):
        return {"verdict": "dies", "why": signal.Signals(os.WTERMSIG(status)).name + ": " + reason(said)}
    return {"verdict": "answers", "why": ""} if status == 0 else {"verdict": "refuses", "why": reason(said)}


def wait(child):
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def attempt(path, log):
    """In the child: ends it."""
    try:
        os.dup2(log, 1)
        os.dup2(log, 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_DATA, (DATA_MAX, DATA_MAX))
        p = x.CommonParams()
        p.model.path = path
        p.n_ctx, p.n_parallel, p.warmup, p.verbosity, p.fit_params = 64, 1, False, 4, False
        p.cpuparams.n_threads = p.cpuparams_batch.n_threads = 1
        server = x.Server(p)
        # Tokens by number: what text they are is not asked here.
        reply = server.handle_completions({"prompt": [3, 4], "n_predict": 2, "temperature": 0, "ignore_eos": True})
        good = "error" not in reply and reply["usage"]["completion_tokens"] == 2
        print("\nreply:", str(reply)[:300], flush=True)
        os._exit(0 if good else 1)
    except BaseException as error:  # whatever it is, the parent goes on
        print("\nraised:", error, flush=True)
        # Its log is written by a thread of its own, some of it later.
        until = time.monotonic() + 1.0
        while b" E " not in os.pread(log, 1 << 30, 0) and time.monotonic() < until:
            time.sleep(0.005)
        os._exit(1)


def reason(said):
    """What failed where an assertion did, else the first line that calls itself an error, else the last."""
    lines = [line.strip() for line in said[-SAID:].splitlines() if line.strip()]
    asserted = [line.split("GGML_ASSERT", 1)[1] for line in lines if "GGML_ASSERT" in line]
    if asserted:
        return "GGML_ASSERT" + asserted[0][:200]
    errors = [line.split(" E ", 1)[1] for line in lines if " E " in line]
    return (errors or lines or ["nothing was said"])[0 if errors else -1][:200]


main()
