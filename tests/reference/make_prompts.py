#!/usr/bin/env python3
"""make_prompts.py: Jinja's output for chat templates, for the test in template.rs; uses none of our code.

    make_prompts.py OUT.json NAME=TEMPLATE.jinja|MODEL.gguf [...]

The oracle is the PyPI package `jinja2` (3.1.6 made the kept file), set up as transformers 5 does it in
utils/chat_template_utils.py: immutable sandbox, trim_blocks, lstrip_blocks, loop controls, `tojson` as json.dumps
without escapes, `raise_exception`, and `strftime_now` (here at a fixed time, UTC). The PyPI package `gguf` reads models.
"""
import datetime
import hashlib
import importlib.metadata
import json
import pathlib
import sys

import jinja2
import jinja2.ext
import jinja2.sandbox

NOW = 1721952000  # 2024-07-26
BOS, EOS = "<bos>", "<eos>"
TOOLS = [
    {"type": "function", "function": {
        "name": "get_weather", "description": "The weather at a place; \"now\" <b>only</b>, 20 °C & more.",
        "parameters": {"type": "object", "properties": {
            "place": {"type": "string", "description": "City, as in Zürich or 東京"},
            "unit": {"type": "string", "enum": ["C", "F"]}}, "required": ["place"]}}},
    {"type": "function", "function": {
        "name": "roll", "description": "Rolls dice.",
        "parameters": {"type": "object", "properties": {"sides": {"type": "integer", "minimum": 2}, "bias": {
            "type": "number", "default": 0.5}, "fair": {"type": "boolean", "default": True}}, "required": []}}},
]


def m(role, content, **fields):
    return {"role": role, "content": content, **fields}


CALL = {"type": "function", "id": "call12345", "function": {"name": "get_weather", "arguments": {"place": "Zürich", "days": 2}}}
CASES = [
    {"name": "one question", "messages": [m("user", "Hi there")]},
    {"name": "system", "messages": [m("system", "You are terse.\nVery."), m("user", "What is 2+2?")]},
    {"name": "turns", "messages": [m("system", "Be kind."), m("user", "  Hello  "), m("assistant", "Hi!\n"), m("user", "Bye")]},
    {"name": "continued", "messages": [m("user", "Count"), m("assistant", "1, 2,")], "add_generation_prompt": False},
    {"name": "thoughts", "messages": [m("user", "Why?"), m("assistant", "<think>\nHm.\n</think>\n\nBecause."), m("user", "Sure?")]},
    {"name": "unicode", "messages": [m("user", "Größe 你好 🙂 <|im_end|> {{ 7*7 }} {% if %} \"'<&>\\ \u0301\u2028\t|")]},
    {"name": "empty content", "messages": [m("user", "")]},
    {"name": "no messages", "messages": []},
    {"name": "answer first", "messages": [m("assistant", "Hello, I speak first."), m("user", "ok")]},
    {"name": "unknown role", "messages": [m("user", "a"), m("narrator", "b")]},
    {"name": "tools", "messages": [m("user", "Weather in Zürich?")], "tools": TOOLS},
    {"name": "tool call", "tools": TOOLS, "messages": [
        m("user", "Weather?"), m("assistant", "", tool_calls=[CALL]),
        m("tool", "{\"celsius\": 21.5}", name="get_weather", tool_call_id="call12345"), m("assistant", "21.5 °C"), m("user", "Thanks")]},
    {"name": "without thinking", "messages": [m("user", "Quick!")], "variables": {"enable_thinking": False}},
]


class Refused(Exception):
    pass


def raise_exception(message):
    raise Refused(message)


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def strftime_now(format):
    return datetime.datetime.fromtimestamp(NOW, datetime.timezone.utc).strftime(format)


def environment():
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = strftime_now
    return env


def render(source, case):
    try:
        return {"text": environment().from_string(source).render(
            messages=case["messages"], tools=case.get("tools"), documents=None, bos_token=BOS, eos_token=EOS,
            add_generation_prompt=case.get("add_generation_prompt", True), **case.get("variables", {}))}
    except Refused as error:
        return {"refused": str(error)}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"}


def source_of(path):
    if path.endswith(".gguf"):
        from gguf import GGUFReader
        return GGUFReader(path).fields["tokenizer.chat_template"].contents()
    return pathlib.Path(path).read_text(encoding="utf-8")


def main():
    out, *templates = sys.argv[1:]
    rendered = {}
    for name, path in (t.split("=", 1) for t in templates):
        source = source_of(path)
        rendered[name] = {"sha256": hashlib.sha256(source.encode()).hexdigest(),
                          "prompts": [render(source, case) for case in CASES]}
    lines = [" " + json.dumps("made_by") + ': "tests/reference/make_prompts.py"',
             f' "oracle": "jinja2 {importlib.metadata.version("jinja2")}, set up as transformers 5 does"',
             f' "now_unix_s": {NOW}, "bos_token": "{BOS}", "eos_token": "{EOS}"',
             ' "cases": [\n' + ",\n".join("  " + json.dumps(c, ensure_ascii=False) for c in CASES) + "\n ]",
             ' "templates": {\n' + ",\n".join(
                 f'  {json.dumps(n)}: {{"sha256": "{r["sha256"]}", "prompts": [\n'
                 + ",\n".join("   " + json.dumps(p, ensure_ascii=False) for p in r["prompts"]) + "\n  ]}"
                 for n, r in rendered.items()) + "\n }"]
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    json.loads(text)
    pathlib.Path(out).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
