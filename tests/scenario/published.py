"""Makes tasks of published JSON schemas: each has a schema, and a question that an answer by it fits.

Arguments: the source distribution of the Python package jsonschema, which has JSON-Schema-Test-Suite, and the wheel of
bfcl-eval, which has the functions of the Berkeley Function-Calling Leaderboard. Prints a list of objects.
"""

import json
import sys
import tarfile
import zipfile

SUITE = "/json/tests/draft2020-12/"
# Its questions are of one function, or of one among several.
LEADERBOARD = ["simple_python", "live_simple", "multiple", "live_multiple"]
FUNCTIONS = 100
# The leaderboard's own names of types; the others are those of JSON Schema.
TYPES = {"dict": "object", "float": "number", "tuple": "array"}


def suite(path):
    """Each schema with a valid case: the question shows the first of them."""
    with tarfile.open(path) as archive:
        members = sorted((member for member in archive if SUITE in member.name and member.isfile()), key=lambda member: member.name)
        for member in members:
            file = member.name.split(SUITE)[1]
            if "/" in file:
                continue  # what implementations may leave out
            for group in json.load(archive.extractfile(member)):
                valid = [case["data"] for case in group["tests"] if case["valid"]]
                if valid:
                    question = f"Write JSON such as {json.dumps(valid[0])} and nothing else."
                    yield {"from": "JSON-Schema-Test-Suite", "name": f"{file}: {group['description']}", "schema": group["schema"], "question": question}


def renamed(schema):
    """A schema of the leaderboard with the types of JSON Schema."""
    if isinstance(schema, list):
        return [renamed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    # Below `properties` are names of the function, which may be those of keywords.
    schema = {
        key: {name: renamed(one) for name, one in value.items()} if key == "properties" else value if key in ("default", "enum") else renamed(value)
        for key, value in schema.items()
    }
    kind = schema.get("type")
    if kind == "any":
        del schema["type"]
    elif isinstance(kind, str):
        schema["type"] = TYPES.get(kind, kind)
    return schema


def functions(path):
    """The parameters of each function, with the first question that it answers."""
    seen = set()
    with zipfile.ZipFile(path) as archive:
        for part in LEADERBOARD:
            for line in archive.read(f"bfcl_eval/data/BFCL_v4_{part}.json").decode().splitlines():
                task = json.loads(line)
                asked = task["question"][0][-1]["content"]
                for function in task["function"]:
                    if function["name"] in seen:
                        continue
                    seen.add(function["name"])
                    question = f"{asked}\nAnswer with the arguments of the function {function['name']} ({function['description']}) as JSON and nothing else."
                    yield {"from": "BFCL", "name": function["name"], "schema": renamed(function["parameters"]), "question": question[:2000]}


def main():
    every = list(functions(sys.argv[2]))
    step = len(every) // FUNCTIONS
    json.dump([*suite(sys.argv[1]), *every[::step][:FUNCTIONS]], sys.stdout)


main()
