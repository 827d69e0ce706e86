#!/usr/bin/env python3
"""make_perplexity.py: llama.cpp's perplexity of a text, for tests/scenario/perplexity.rs. It uses none of our code.

    make_perplexity.py MODEL.gguf COPY.gguf COMMAND... > tests/reference/expected/perplexity.json

COPY has the same weights in F32: `llama-quantize --allow-requantize MODEL.gguf COPY.gguf f32`. Of the model itself, the other engine
rounds activations to 8 bits and keys and values to 16, which raises the perplexity by 1 %. COMMAND runs llama-perplexity; the
copy and the text must have the same paths for it.
"""
import hashlib
import json
import pathlib
import re
import subprocess
import sys

# The package base-files of Debian has it on every system.
TEXT = "/usr/share/common-licenses/GPL-3"
CONTEXT, CHUNKS = 512, 8


def main():
    model, copy, *command = sys.argv[1:]
    version = subprocess.run([*command, "--version"], check=True, capture_output=True, text=True)
    release = re.search(r"version: (.*)", version.stdout + version.stderr).group(1)
    exact = ["--cache-type-k", "f32", "--cache-type-v", "f32", "--flash-attn", "off"]
    measured = [*command, "-m", copy, "-f", TEXT, "-c", str(CONTEXT), "--chunks", str(CHUNKS), *exact]
    run = subprocess.run(measured, check=True, capture_output=True, text=True)
    # After each chunk, the perplexity of all so far.
    found = re.findall(r"\[(\d+)\]([0-9.]+)", run.stdout + run.stderr)
    assert [int(number) for number, _ in found] == list(range(1, CHUNKS + 1)), run
    digest = lambda path: hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()  # noqa: E731
    kept = {"oracle": f"llama-perplexity {release}, weights in F32", "model_sha256": digest(model), "text": TEXT, "text_sha256": digest(TEXT)}
    kept |= {"context": CONTEXT, "perplexity": [float(value) for _, value in found]}
    json.dump(kept, sys.stdout)
    print()


if __name__ == "__main__":
    main()
