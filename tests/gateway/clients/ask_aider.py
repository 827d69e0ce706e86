"""aider edits a file with an answer of the gateway at the address of the first argument.

The model is small and knows nothing, so a grammar says which edits it may write. Prints the package's version; a failed
assertion is a failure.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

# Its context holds aider's instructions, a token for nearly each character.
MODEL = "openai/endless"
GRAMMAR = r'root ::= "hello.py\n```\nprint(\"" [a-z] "\")\n```\n"'


def edited(base, more):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "hello.py")
        file.write_text('print("hello")\n')
        settings = Path(folder, "settings.yml")
        extra = {"max_tokens": 200, "extra_body": {"grammar": GRAMMAR}}
        # JSON is YAML too.
        settings.write_text(json.dumps([{"name": MODEL, "edit_format": "whole", "extra_params": extra}]))
        server = ["--openai-api-base", f"{base}/v1", "--openai-api-key", "unused"]
        models = ["--model", MODEL, "--weak-model", MODEL, "--model-settings-file", settings, "--map-tokens", "0"]
        quiet = ["--no-git", "--no-check-update", "--no-show-model-warnings", "--no-show-release-notes", "--analytics-disable"]
        ask = ["--yes-always", "--message", "Print a letter.", *more, "hello.py"]
        # Otherwise the package downloads prices.
        local = {**os.environ, "HOME": folder, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        command = [sys.executable, "-m", "aider", *server, *models, *quiet, *ask]
        done = subprocess.run(command, cwd=folder, env=local, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        text = file.read_text()
        assert done.returncode == 0 and re.fullmatch(r'print\("[a-z]"\)\n', text), (text, done.stdout, done.stderr)


def main():
    base = sys.argv[1]
    edited(base, ["--stream"])
    edited(base, ["--no-stream"])
    print("aider-chat", version("aider-chat"))


main()
