#!/usr/bin/env python3
"""Describes a GGUF header as JSON by the `gguf` package (pip install gguf==0.19.0), which shares no code with this project.

    describe-gguf.py MODEL.gguf > MODEL.json

Floats are printed as the shortest decimal of the same f64, so that a reader gets the same bits back.
"""

import hashlib
import importlib.metadata
import json
import sys

import gguf


def value(field):
    kind = field.types[0].name
    if kind == "STRING":
        return kind, bytes(field.parts[field.data[0]]).decode()
    if kind != "ARRAY":
        return kind, field.parts[field.data[0]][0].item()
    element = field.types[-1].name
    if element == "STRING":
        return "ARRAY STRING", [bytes(field.parts[i]).decode() for i in field.data]
    return "ARRAY " + element, [field.parts[i][0].item() for i in field.data]


def main():
    reader = gguf.GGUFReader(sys.argv[1])
    fields = [f for f in reader.fields.values() if not f.name.startswith("GGUF.")]
    with open(sys.argv[1], "rb") as file:
        sha256 = hashlib.sha256(file.read()).hexdigest()
    json.dump(
        {
            "reader": "gguf " + importlib.metadata.version("gguf"),
            "sha256": sha256,
            "version": int(reader.fields["GGUF.version"].parts[-1][0]),
            "alignment": int(reader.alignment),
            "metadata": [[f.name, *value(f)] for f in fields],
            "tensors": [
                [t.name, t.tensor_type.name, [int(d) for d in t.shape], int(t.data_offset), int(t.n_bytes)]
                for t in reader.tensors
            ],
        },
        sys.stdout,
        ensure_ascii=True,
        separators=(",", ":"),
    )
    print()


main()
