#!/usr/bin/env python3
"""make_embeddings.py: llama.cpp's embeddings of a few texts, for tests/scenario/embeddings.rs. It uses none of our code.

    make_embeddings.py VERSION MODEL.gguf MEAN_URL LAST_URL > tests/reference/expected/embeddings.json

The URLs are those of two running `llama-server -m MODEL.gguf --embeddings --pooling mean` (and `last`) of that version.
"""
import hashlib
import json
import pathlib
import sys
import urllib.request

TEXTS = [
    "Once upon a time, there was a little girl named Lily.",
    "The sky is blue because of Rayleigh scattering.",
    "def fib(n):\n    return n if n < 2 else fib(n-1)+fib(n-2)",
    "a",
    " ".join(["The dog sat on the mat and looked at the moon."] * 8),
]


def embeddings(url):
    body = json.dumps({"input": TEXTS, "model": "m"}).encode()
    request = urllib.request.Request(f"{url}/v1/embeddings", body, {"Content-Type": "application/json"})
    data = json.load(urllib.request.urlopen(request))["data"]
    in_order = sorted(data, key=lambda entry: entry["index"])
    return [[round(number, 6) for number in entry["embedding"]] for entry in in_order]


def main():
    release, model, mean, last = sys.argv[1:]
    digest = hashlib.sha256(pathlib.Path(model).read_bytes()).hexdigest()
    found = {"oracle": f"llama-server {release}", "model_sha256": digest, "texts": TEXTS}
    found |= {"mean": embeddings(mean), "last": embeddings(last)}
    json.dump(found, sys.stdout)
    print()


if __name__ == "__main__":
    main()
