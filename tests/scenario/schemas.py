"""Checks answers against their JSON schemas with the published package jsonschema.

Standard input holds a list of pairs of a schema and an answer's text. Prints the number of pairs; a failed one is a failure.
"""

import json
import sys

import jsonschema

pairs = json.load(sys.stdin)
for schema, text in pairs:
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    faults = [fault.message for fault in validator.iter_errors(json.loads(text))]
    assert not faults, (faults, text, schema)
print(len(pairs))
