#!/usr/bin/env python3
"""Describes a GGUF header as JSON by the `gguf` package (pip install gguf==0.19.0), which shares no code with this project.

    describe-gguf.py MODEL.gguf > MODEL.json

Floats are printed as the shortest decimal of the same number as f64, so that a reader gets the same bits back; f64 and what is no
finite number as strings.
"""

import hashlib
import importlib.metadata
import json
import math
import sys

import gguf


def number(kind, value):
    if kind == "FLOAT64" or (isinstance(value, float) and not math.isfinite(value)):
        return repr(value)
    return value


def value(field):
    kind = field.types[0].name
    if kind == "STRING":
        return kind, bytes(field.parts[field.data[0]]).decode()
    if kind != "ARRAY":
        return kind, number(kind, field.parts[field.data[0]][0].item())
    element = field.types[-1].name
    if element == "STRING":
        return "ARRAY STRING", [bytes(field.parts[i]).decode() for i in field.data]
    return "ARRAY " + element, [number(element, field.parts[i][0].item()) for i in field.data]


def describe(path, data=False):
    """What the package reads in a file; with `data` each tensor's row ends with the sha256 of its bytes."""
    reader = gguf.GGUFReader(path)
    fields = [f for f in reader.fields.values() if not f.name.startswith("GGUF.")]
    with open(path, "rb") as file:
        sha256 = hashlib.sha256(file.read()).hexdigest()
    rows = [
        [t.name, t.tensor_type.name, [int(d) for d in t.shape], int(t.data_offset), int(t.n_bytes)]
        + ([hashlib.sha256(t.data.tobytes()).hexdigest()] if data else [])
        for t in reader.tensors
    ]
    return {
        "reader": "gguf " + importlib.metadata.version("gguf"),
        "sha256": sha256,
        "version": int(reader.fields["GGUF.version"].parts[-1][0]),
        "alignment": int(reader.alignment),
        "metadata": [[f.name, *value(f)] for f in fields],
        "tensors": rows,
    }


if __name__ == "__main__":
    json.dump(describe(sys.argv[1]), sys.stdout, ensure_ascii=True, separators=(",", ":"))
    print()
