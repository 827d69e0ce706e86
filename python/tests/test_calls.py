"""Answers with tool calls, by the same cases as the Rust client's parser.

Needs no daemon: `python3 -m unittest tests.test_calls` in the folder `python`.
"""

from __future__ import annotations

import json
import unittest
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from rocmforge import calls

KEPT = json.loads((Path(__file__).resolve().parents[2] / "tests/golden/calls/answers.json").read_text("utf-8"))


def events(parts: calls.Parts) -> list[dict[str, Any]]:
    """Events as the file has them."""
    def shown(content: str | calls.Call) -> Any:
        if isinstance(content, str):
            return content
        return asdict(content) | {"arguments": json.loads(content.arguments)}

    return [{kind: shown(content)} for kind, content in parts.events]


class Answers(unittest.TestCase):
    def test_every_kept_answer_has_its_events(self) -> None:
        self.assertEqual({one["form"] for one in KEPT["answers"]}, set(calls.FORMS))
        for one in KEPT["answers"]:
            with self.subTest(form=one["form"], answer=one["answer"]):
                self.assertEqual(events(calls.read(one["answer"], one["form"], KEPT["tools"])), one["events"])

    def test_without_tools_nothing_is_a_call(self) -> None:
        for one in KEPT["answers"]:
            if one["form"] != "harmony":
                self.assertEqual(calls.read(one["answer"], one["form"]).calls, [])

    def test_parts_are_told_apart(self) -> None:
        tools = [{"type": "function", "function": tool} for tool in KEPT["tools"]]
        answer = 'why</think>I look.<tool_call>{"name": "stop", "arguments": {}}</tool_call>'
        parts = calls.read(answer, "hermes", tools, in_reasoning=True)
        self.assertEqual((parts.reasoning, parts.text, parts.calls), ("why", "I look.", [calls.Call("stop", "{}")]))
        shown = cast(Any, SimpleNamespace(ext={calls.SHOW_CALLS: b"glm-tags"}))
        self.assertEqual((calls.form_of(shown), calls.form_of(cast(Any, SimpleNamespace(ext={})))), ("glm-tags", "generic"))
        self.assertEqual(calls.read("plain", "of a later version", tools).text, "plain")


if __name__ == "__main__":
    unittest.main()
