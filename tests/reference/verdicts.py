#!/usr/bin/env python3
"""verdicts.py: llama.cpp's verdict on model files. `cargo xtask verdicts` runs it; it uses none of our code.

    verdicts.py FILE...

For each file one line of JSON: `verdict` is "answers" (it was loaded and gave two tokens), "refuses", "dies" (the process
ended by a signal) or "hangs"; `why` is its last relevant output. Each file is tried in its own process, by the server inside
the PyPI wheel `xllamacpp`.
"""
import json
import os
import resource
import signal
import sys
import tempfile
import time

import xllamacpp as x

os.environ["GGML_NO_BACKTRACE"] = "1"  # else each failed assertion starts a debugger

PATIENCE = 20.0      # seconds
DATA_MAX = 4 << 30   # bytes: the kernel refuses larger allocations
SAID = 20000         # last bytes of the output that are searched for the reason


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
    """Tries the file and exits; runs in the child."""
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
        # Tokens by number: their text does not matter here.
        reply = server.handle_completions({"prompt": [3, 4], "n_predict": 2, "temperature": 0, "ignore_eos": True})
        good = "error" not in reply and reply["usage"]["completion_tokens"] == 2
        print("\nreply:", str(reply)[:300], flush=True)
        os._exit(0 if good else 1)
    except BaseException as error:  # any error ends only the child
        print("\nraised:", error, flush=True)
        # A separate thread writes the log, some of it late.
        until = time.monotonic() + 1.0
        while b" E " not in os.pread(log, 1 << 30, 0) and time.monotonic() < until:
            time.sleep(0.005)
        os._exit(1)


def reason(said):
    """The failed assertion if there is one, else the first error line, else the last line."""
    lines = [line.strip() for line in said[-SAID:].splitlines() if line.strip()]
    asserted = [line.split("GGML_ASSERT", 1)[1] for line in lines if "GGML_ASSERT" in line]
    if asserted:
        return "GGML_ASSERT" + asserted[0][:200]
    errors = [line.split(" E ", 1)[1] for line in lines if " E " in line]
    return (errors or lines or ["nothing was said"])[0 if errors else -1][:200]


main()
