"""Tool calls and reasoning in a model's answer: pure text work.

Each family of models writes calls in a form of its own, which the daemon names with `Client.show`. `read` cuts a whole answer
into text, reasoning and calls by the rules of the Rust client. That one tells calls while they are written: where a call turns out
to be cut, to have a fault, or to be followed by one, it has told the call's beginning. Here such an object is text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .messages import ShowReply

SHOW_CALLS = 4
"""Key of a `ShowReply`'s extensions."""

FORMS = ("hermes", "llama", "mistral", "glm", "glm-tags", "harmony", "generic", "described")
"""The names of all forms; an unknown one is read as `generic`."""

SPACE = "\t\n\v\f\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u2028\u2029\u202f\u205f\u3000"
THINK = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
CALL, CALL_END = "<tool_call>", "</tool_call>"
LIST_END = "<|/tool_call|>"
MARKS = {
    "hermes": CALL, "glm-tags": CALL, "llama": "<|python_tag|>", "mistral": "[TOOL_CALLS]", "described": "<|tool_call|>",
}
CALL_ID, ARGS = "[CALL_ID]", "[ARGS]"
HEAD_BYTES_MAX = 512
"""Most bytes between the mark of calls and the arguments."""

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>", START, CHANNEL)
BEGINS = (START, CHANNEL, " to=", "to=")
NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,256}")


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool."""

    name: str
    arguments: str
    """A JSON object."""
    id: str | None = None
    """The name that the model gave to the call, in forms that have one."""


@dataclass(slots=True)
class Parts:
    """The parts of an answer."""

    events: list[tuple[str, str | Call]] = field(default_factory=list)
    """`text`, `reasoning` or `call`, each with its content, in their order."""

    def add(self, kind: str, content: str | Call) -> None:
        """Adds a part; adjacent texts become one."""
        if isinstance(content, str):
            if not content:
                return
            if self.events and self.events[-1][0] == kind:
                content = str(self.events.pop()[1]) + content
        self.events.append((kind, content))

    @property
    def text(self) -> str:
        """The text for the reader."""
        return "".join(str(content) for kind, content in self.events if kind == "text")

    @property
    def reasoning(self) -> str:
        """The model's reasoning, which is not part of the answer."""
        return "".join(str(content) for kind, content in self.events if kind == "reasoning")

    @property
    def calls(self) -> list[Call]:
        """The calls, in their order."""
        return [content for _, content in self.events if isinstance(content, Call)]


def form_of(shown: ShowReply) -> str:
    """The form in which a model writes calls: one of `FORMS`, or of a later daemon."""
    return shown.ext.get(SHOW_CALLS, b"generic").decode("utf-8", "replace")


def read(answer: str, form: str, tools: Sequence[Mapping[str, Any]] = (), *, in_reasoning: bool = False) -> Parts:
    """Cuts a whole answer into its parts.

    `tools` are those of the request, in OpenAI's form or as objects with `name` and `parameters`; without tools, only `harmony` has
    calls. `in_reasoning` says that the prompt ended with the begin mark of a reasoning.
    """
    form = form if form in FORMS else "generic"
    if form == "harmony":
        return _harmony(answer)
    functions = (tool.get("function", tool) for tool in tools)
    reader = _Reader(form, {str(one.get("name")): one.get("parameters") or {} for one in functions}, answer)
    reader.run(in_reasoning)
    return reader.parts


class _Reader:
    """Reads an answer of a form with marks, or of objects alone."""

    def __init__(self, form: str, tools: Mapping[str, Any], answer: str) -> None:
        self.form, self.tools, self.rest = form, tools, answer
        self.space = ""
        self.parts = Parts()

    def run(self, in_reasoning: bool) -> None:
        after: bool | None = False
        if in_reasoning:
            after = self.reasoning(THINK[0][1])
        else:
            self.skip_space()
            for mark, end in THINK:
                if self.rest.startswith(mark):
                    self.rest = self.rest[len(mark) :]
                    after = self.reasoning(end)
                    break
        while after is not None:
            after = self.start(after)

    def skip_space(self) -> None:
        rest = self.rest.lstrip(SPACE)
        self.space += self.rest[: len(self.rest) - len(rest)]
        self.rest = rest

    def reasoning(self, end: str) -> bool:
        words, found, self.rest = self.rest.partition(end)
        self.parts.add("reasoning", words.strip(SPACE))
        self.space = ""
        return bool(found) or not self.rest

    def start(self, after: bool) -> bool | None:
        """Reads from a place where a call without a mark may begin. Returns whether it ends with calls; none at the end."""
        self.skip_space()
        if not self.rest:
            if not after:
                self.parts.add("text", self.space)
            return None
        if after and self.form == "llama" and self.rest.startswith(";"):
            self.rest = self.rest[1:]
            return True
        objects = self.form in ("generic", "described", "llama") and may_begin(self.rest) is True
        if self.tools and (objects or self.form == "glm"):
            if self.candidate(0):
                return True
        elif after:
            self.space = ""
        return self.words()

    def words(self) -> bool | None:
        """Reads text up to calls, or to the end."""
        mark = MARKS.get(self.form) if self.tools else None
        while True:
            at = self.rest.find(mark) if mark else -1
            before = self.rest if at < 0 else self.rest[:at]
            words = before.rstrip(SPACE) if mark else before
            if words:
                self.parts.add("text", self.space + words)
                self.space = ""
            self.space += before[len(words) :]
            self.rest = self.rest[len(before) :]
            if at < 0 or mark is None:
                self.parts.add("text", self.space)
                return None
            if self.candidate(len(mark)):
                return True

    def candidate(self, mark: int) -> bool:
        """Reads what may be calls behind a mark of that length; true if they are."""
        calls, end = self.calls(mark)
        taken, self.rest = self.rest[:end], self.rest[end:]
        if calls is None:
            self.parts.add("text", self.space + taken)
        else:
            for call in calls:
                self.parts.add("call", call)
        self.space = ""
        return calls is not None

    def calls(self, mark: int) -> tuple[list[Call] | None, int]:
        """The calls and their end; without calls, the end of what is text."""
        if self.form == "mistral":
            return self.mistral(mark)
        if self.form == "glm-tags":
            end = self.rest.find(CALL_END, mark)
            inner, end = (self.rest[mark:], len(self.rest)) if end < 0 else (self.rest[mark:end], end + len(CALL_END))
            call = of_tags(inner, self.tools)
            return (None if call is None else [call]), end
        if self.form == "glm":
            line, found, _ = self.rest.partition("\n")
            if not found or line.strip(SPACE) not in self.tools:
                return None, len(line)
            return self.parted(line, len(line), None, len(line))
        return self.objects(mark)

    def objects(self, mark: int) -> tuple[list[Call] | None, int]:
        begins = may_begin(self.rest[mark:])
        if begins is not True:
            return None, mark if begins is False else len(self.rest)
        end = value_end(self.rest, mark)
        if end is None or end < 0:
            return None, len(self.rest) if end is None else mark
        value = self.rest[mark:end]
        closing = CALL_END if self.form == "hermes" else LIST_END if self.form == "described" and mark else None
        rest = self.rest[end:].lstrip(SPACE)
        if closing and rest.startswith(closing):
            end = len(self.rest) - len(rest) + len(closing)
        return of_json(value, None if mark else self.tools), end

    def mistral(self, mark: int) -> tuple[list[Call] | None, int]:
        after = self.rest[mark:].lstrip(SPACE)
        if after.startswith("[") and not ARGS.startswith(after) and not after.startswith(ARGS):
            return self.objects(mark)
        brace = after.find("{")
        if brace < 0 or len(after[:brace].encode()) >= HEAD_BYTES_MAX:
            return None, len(self.rest) if len(after.encode()) < HEAD_BYTES_MAX else mark
        head = after[:brace].split(ARGS, 1)[0]
        name, _, given = head.partition(CALL_ID)
        if not NAME.fullmatch(name.strip(SPACE)):
            return None, mark
        return self.parted(name, len(self.rest) - len(after) + brace, given, mark)

    def parted(self, name: str, at: int, given: str | None, no: int) -> tuple[list[Call] | None, int]:
        """The call of a name and of the object from `at`."""
        end = value_end(self.rest, at)
        if end is None or end < 0:
            return None, len(self.rest) if end is None else no
        call = of_parts(name, self.rest[at:end], given)
        return (None if call is None else [call]), end


def may_begin(text: str) -> bool | None:
    """Whether a text may be the beginning of an object, or of a list of objects; none if it is too short."""
    first = text.lstrip("\t\n\f\r ")
    second = first[1:].lstrip("\t\n\f\r ")
    if not first or (first[0] in "{[" and not second):
        return None
    return second[0] in '"}' if first[0] == "{" else first[0] == "[" and second[0] == "{"


def value_end(text: str, at: int) -> int | None:
    """The end of the list or object from `at`; none if it has no end, and -1 if none begins there."""
    depth, in_text, escaped = 0, False, False
    for index in range(at, len(text)):
        char = text[index]
        if in_text:
            if escaped:
                escaped = False
            elif char == "\\":
                escaped = True
            elif char == '"':
                in_text = False
        elif char == '"' and depth:
            in_text = True
        elif char in "{[":
            depth += 1
        elif char in "}]" and depth:
            depth -= 1
            if not depth:
                return index + 1
        elif not depth and char not in "\t\n\f\r ":
            return -1
    return None


def _loads(text: str) -> Any:
    """A JSON value.

    Raises ValueError for what is none, and for what only Python takes.
    """

    def constant(name: str) -> Any:
        raise ValueError(f"{name} is no JSON")

    try:
        value = json.loads(text, parse_constant=constant)
        _dumps(value).encode()
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    return value


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def of_json(text: str, known: Iterable[str] | None) -> list[Call] | None:
    """The calls of an object or of a list of objects. With `known`, every name must be one of them."""
    try:
        return _of_value(_loads(text), known)
    except (ValueError, RecursionError):
        return None


def _of_value(value: Any, known: Iterable[str] | None) -> list[Call] | None:
    if isinstance(value, list):
        found = [_of_value(one, known) for one in value]
        if not found or any(one is None for one in found):
            return None
        return [call for one in found for call in one or ()]
    if not isinstance(value, dict):
        return None
    for key in ("tool_calls", "tool_call"):
        if key in value:
            return _of_value(value[key], known)
    if isinstance(function := value.get("function"), dict):
        return _of_value({"id": value["id"], **function} if "id" in value else function, known)
    name = value.get("name")
    if not isinstance(name, str) or not name or (known is not None and name not in known):
        return None
    if "arguments" not in value and "parameters" not in value and known is not None:
        return None
    arguments = value["arguments"] if "arguments" in value else value.get("parameters")
    given_arguments = isinstance(arguments, dict)
    if isinstance(arguments, str):
        arguments = _loads(arguments)
    elif arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return None
    # As the Rust client, which has told a call by then, drops a name after the arguments.
    keys = list(value)
    before = keys[: min(keys.index(key) for key in ("arguments", "parameters") if key in value)] if given_arguments else keys
    given = value.get("id") if "id" in before else None
    return [Call(name, _dumps(arguments), given if isinstance(given, str) and given else None)]


def of_parts(name: str, arguments: str, given: str | None) -> Call | None:
    """The call of a name and of an object's text."""
    name = name.strip(SPACE)
    try:
        value = _loads(arguments)
    except ValueError:
        return None
    if not isinstance(value, dict) or not NAME.fullmatch(name):
        return None
    return Call(name, _dumps(value), (given or "").strip(SPACE) or None)


def of_tags(text: str, tools: Mapping[str, Any]) -> Call | None:
    """The call of a name and of pairs of `<arg_key>` and `<arg_value>`. Parameters that are strings are taken as they are."""
    name, mark, rest = text.partition("<arg_key>")
    name, rest = name.strip(SPACE), mark + rest
    properties = (tools.get(name) or {}).get("properties") or {}
    arguments: dict[str, Any] = {}
    while (rest := rest.lstrip(SPACE)).startswith("<arg_key>"):
        pair = re.match(r"<arg_key>(.*?)</arg_key>(.*)", rest, re.DOTALL)
        if pair is None:
            return None
        key, after = pair[1].strip(SPACE), pair[2].lstrip(SPACE)
        value, end, rest = after.removeprefix("<arg_value>").partition("</arg_value>")
        if not end or not after.startswith("<arg_value>"):
            return None
        arguments[key] = value
        if (properties.get(key) or {}).get("type") != "string":
            try:
                arguments[key] = _loads(value)
            except ValueError:
                pass
    if rest or not NAME.fullmatch(name):
        return None
    return Call(name, _dumps(arguments))


def _harmony(rest: str) -> Parts:
    """Reads an answer of gpt-oss: messages on channels."""
    parts = Parts()
    while rest:
        kind, name, header = "text", None, ""
        if rest.startswith(BEGINS):
            header, found, _ = rest.partition(MESSAGE)
            if not found:
                parts.add("text", rest)
                break
            says = header.replace("<|constrain|>", " ")
            if "to=functions." in says:
                name = re.split(r"[\s<]", says.split("to=functions.", 1)[1], maxsplit=1)[0]
            elif says.partition(CHANNEL)[2].lstrip(SPACE).startswith("analysis"):
                kind = "reasoning"
            header += found
        at, mark = min(((at, mark) for mark in ENDS if (at := rest.find(mark, len(header))) >= 0), default=(len(rest), ""))
        body = rest[len(header) : at]
        call = None if name is None else of_parts(name, body, None)
        if call is not None:
            parts.add("call", call)
        else:
            parts.add(kind, body if name is None else rest[:at])
        rest = rest[at + (0 if mark in (START, CHANNEL) else len(mark)) :]
    return parts
