#!/usr/bin/env python3
"""Stands in for llama-server before its own tests: starts a daemon and a gateway by the options that the tests give.

An option that neither program has ends it, and the test that gives it fails.
"""
import os, signal, subprocess, sys, tempfile, time

# These change nothing that an answer shows, or are so here in any case.
SWITCHES = {"--no-slots", "--offline", "--cont-batching", "--jinja", "--no-jinja", "--embedding", "--reranking", "--metrics", "--no-ui", "--kv-unified", "--verbose"}
VALUES = {"--temp", "--seed", "--batch-size", "--ubatch-size", "--parallel", "--threads", "-fa", "--n-gpu-layers", "--n-predict", "--hf-file"}
OURS = {"--port", "--host", "--hf-repo", "--alias", "--ctx-size", "--api-key"}
STORY = "ggml-org/test-model-stories260K"


def options(arguments):
    arguments, given = list(arguments), {}
    while arguments:
        name = arguments.pop(0)
        if name in VALUES | OURS:
            given[name] = arguments.pop(0)
        elif name not in SWITCHES:
            sys.exit(f"neither program has {name}")
    if given.get("--hf-repo") != STORY:
        sys.exit(f"only {STORY} is here")
    return given


def main():
    given = options(sys.argv[1:])
    name, programs, folder = given.get("--alias", "model"), os.environ["ROCMFORGE_PROGRAMS"], tempfile.mkdtemp()
    os.mkdir(f"{folder}/models")
    os.symlink(os.environ["ROCMFORGE_STORY"], f"{folder}/models/{name}.gguf")
    with open(f"{folder}/config.toml", "w") as config:
        config.write(f"[device]\nbackend = 'cpu'\n[limits]\ncontext_tokens = {given.get('--ctx-size', 2048)}\n")
    daemon = [f"{programs}/rocmforged", "--socket", f"{folder}/api.sock", "--models", f"{folder}/models", "--config", f"{folder}/config.toml"]
    processes = [subprocess.Popen(daemon)]

    def end(*_):
        for process in reversed(processes):
            process.kill()  # no wait: this may have interrupted one
        subprocess.run(["rm", "-rf", folder])
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    while not os.path.exists(f"{folder}/api.sock"):
        time.sleep(0.01)
    # Its tests ask for models of many names.
    gateway = [f"{programs}/rocmforge-gateway", "--socket", f"{folder}/api.sock", "--alias", f"*={name}"]
    gateway += ["--listen", f"{given['--host']}:{given['--port']}"]
    if "--api-key" in given:
        with open(os.open(f"{folder}/tokens", os.O_WRONLY | os.O_CREAT, 0o600), "w") as tokens:
            tokens.write(given["--api-key"] + "\n")
        gateway += ["--token-file", f"{folder}/tokens"]
    processes.append(subprocess.Popen(gateway))
    processes[1].wait()
    end()


main()
