#!/usr/bin/env python3
"""Writes rocmforge/messages from PROTOCOL.md: the messages of section 7, the ops of 6, the errors of 8, the limits of 9.

    write_messages.py write      write the files
    write_messages.py check      fail if a file is not what would be written
"""

import pathlib
import re
import sys

HERE = pathlib.Path(__file__).resolve().parent
DOCUMENT = HERE.parent / "PROTOCOL.md"
FOLDER = HERE / "rocmforge" / "messages"

# The file of each group of section 7, by the line before its first table.
GROUPS = {
    "Connection:": "connection", "Models:": "models", "Weights on a device:": "weights",
    "Tokens and generation:": "tokens", "Daemon:": "daemon",
}
STREAMED = "`Item`s and `End`"
NUMBERS = {"u8": "U8", "u16": "U16", "u32": "U32", "u64": "U64", "u128": "U128", "f32": "F32", "bool": "bool", "Ext": "Ext"}
HEAD = '"""{about}\n\n`write_messages.py` writes this file from PROTOCOL.md, which says what each field means.\n"""\n\n'


def section(text: str, number: int) -> str:
    return re.split(r"^## ", text, flags=re.MULTILINE)[number]


def rows(text: str) -> list[list[str]]:
    """The cells of each row of a page's tables, without their heads."""
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return [cells for cells in found if not set(cells[0]) <= {"-"} and cells[0] not in ("op", "code", "what")]


class Shape:
    """A struct or an enum: its rows are fields, or numbered variants."""

    def __init__(self, kind: str, name: str) -> None:
        self.kind, self.name = kind, name
        self.rows: list[list[str]] = []

    def mixed(self) -> bool:
        """True for an enum of which a variant has content."""
        return self.kind == "enum" and any(len(row) > 2 for row in self.rows)

    def needs(self) -> set[str]:
        """Names of shapes that it is made of."""
        kinds = [row[1] if self.kind == "struct" else row[2] for row in self.rows if len(row) > (self.kind == "enum") + 1]
        return {name for kind in kinds if (name := kind.strip("[]?")) not in NUMBERS and name != "string"}


def parse_shapes(text: str) -> dict[str, list[Shape]]:
    """The shapes of each group."""
    groups: dict[str, list[Shape]] = {}
    group = ""
    for part in section(text, 7).split("```fields\n")[1:]:
        before, fields = section(text, 7).split(part, 1)[0], part.split("```")[0]
        heads = [line for line in before.splitlines() if line in GROUPS]
        group = GROUPS[heads[-1]]
        for line in fields.splitlines():
            words = line.split()
            if line.startswith("  "):
                groups[group][-1].rows.append(words)
            else:
                groups.setdefault(group, []).append(Shape(*words))
    return groups


def annotation(kind: str, limits: list[str]) -> str:
    if kind.endswith("?"):
        return f"{annotation(kind[:-1], limits)} | None"
    if kind == "[u8]":
        return f"Annotated[bytes, Blob({limits[0]})]"
    if kind.startswith("["):
        return f"Annotated[list[{annotation(kind[1:-1], limits[1:])}], Each({limits[0]})]"
    if kind == "string":
        return f"Annotated[str, Text({limits[0]})]"
    return NUMBERS.get(kind, kind)


def sorted_by_need(shapes: list[Shape], requests: dict[str, tuple[int, str]]) -> list[Shape]:
    """The same, each after those that it is made of and those that answer it."""
    names = {shape.name: shape for shape in shapes}
    done: dict[str, Shape] = {}

    def add(shape: Shape) -> None:
        answers = answers_of(shape.name, requests)
        for need in sorted(shape.needs() | set(answers)):
            if need in names and need not in done:
                add(names[need])
        done.setdefault(shape.name, shape)

    for shape in shapes:
        add(shape)
    return list(done.values())


def answers_of(name: str, requests: dict[str, tuple[int, str]]) -> list[str]:
    if name not in requests:
        return []
    answer = requests[name][1]
    stem = name.removesuffix("Request")
    return [f"{stem}Item", f"{stem}End"] if answer == STREAMED else [answer] if answer.endswith("Reply") else []


def parse_requests(text: str) -> dict[str, tuple[int, str]]:
    """Op and answer of each request, by the name of its payload."""
    return {payload: (int(op, 0), answer) for op, _, sender, payload, answer in rows(section(text, 6)) if sender == "client"}


def class_of(shape: Shape, requests: dict[str, tuple[int, str]]) -> str:
    if shape.kind == "enum":
        return variants_of(shape) if shape.mixed() else choice_of(shape)
    answers = answers_of(shape.name, requests)
    base = {0: "Message", 1: f"Call[{''.join(answers)}]", 2: f"StreamCall[{', '.join(answers)}]"}[len(answers)]
    if shape.name in requests and not answers:
        base = "Signal"
    lines = ["@dataclass(slots=True, kw_only=True)", f"class {shape.name}({base}):"]
    if shape.name in requests:
        lines += [f"    OP: ClassVar[int] = {requests[shape.name][0]}", ""]
        if len(answers) == 1:
            lines += ["    @classmethod", f"    def reply(cls) -> type[{answers[0]}]:", f"        return {answers[0]}", ""]
        if len(answers) == 2:
            for what, answer in zip(("item", "end"), answers, strict=True):
                lines += ["    @classmethod", f"    def {what}(cls) -> type[{answer}]:", f"        return {answer}", ""]
    for field, kind, *limits in shape.rows:
        default = " = field(default_factory=dict)" if kind == "Ext" else " = None" if kind.endswith("?") else ""
        lines.append(f"    {field}: {annotation(kind, limits)}{default}")
    return "\n".join(lines)


def choice_of(shape: Shape) -> str:
    names = [f"    {re.sub(r'(?<=[a-z])(?=[A-Z])', '_', name).upper()} = {number}" for number, name in shape.rows]
    return "\n".join([f"class {shape.name}(IntEnum):", *names])


def variants_of(shape: Shape) -> str:
    classes = []
    for number, name, *content in shape.rows:
        lines = ["@dataclass(slots=True)", f"class {shape.name}{name}(Variant):", f"    NUMBER: ClassVar[int] = {number}"]
        if content:
            lines += ["", f"    value: {annotation(content[0], content[1:])}"]
        classes.append("\n".join(lines))
    union = " | ".join(f"{shape.name}{name}" for _, name, *_ in shape.rows)
    return "\n\n\n".join([*classes, f"{shape.name} = {union}"])


def module(name: str, groups: dict[str, list[Shape]], requests: dict[str, tuple[int, str]]) -> str:
    shapes = sorted_by_need(groups[name], requests)
    body = "\n\n\n".join(class_of(shape, requests) for shape in shapes)

    def uses(words: list[str]) -> list[str]:
        return [word for word in words if re.search(rf"\b{word}\b", body)]

    limits = uses(sorted(limit_names()))
    wire = uses(["Blob", "Call", "Each", "Ext", "F32", "Message", "Signal", "StreamCall", "Text", "U128", "U16", "U32", "U64", "U8", "Variant"])
    dataclasses = uses(["dataclass", "field"])
    typing = uses(["Annotated", "ClassVar"])
    lines = ["from __future__ import annotations", ""]
    if dataclasses:
        lines.append(f"from dataclasses import {', '.join(dataclasses)}")
    if uses(["IntEnum"]):
        lines.append("from enum import IntEnum")
    if typing:
        lines.append(f"from typing import {', '.join(typing)}")
    lines += ["", f"from ..wire import {', '.join(wire)}"]
    if limits:
        lines.append(f"from .limits import {', '.join(limits)}")
    own = {shape.name for shape in shapes}
    for other in sorted(set(groups) - {name}):
        theirs = sorted({need for shape in shapes for need in shape.needs() - own} & {shape.name for shape in groups[other]})
        if theirs:
            lines.append(f"from .{other} import {', '.join(theirs)}")
    return HEAD.format(about=f"Messages of the protocol: {name}.") + "\n".join(lines) + f"\n\n\n{body}\n"


def limit_names() -> dict[str, int]:
    found = {name: int(value) for name, value in rows(section(DOCUMENT.read_text("utf-8"), 9))}
    return {name.replace("`", "").replace(" ", "_").upper(): value for name, value in found.items()}


def limits_module() -> str:
    lines = [f"{name} = {value}" for name, value in limit_names().items()]
    return HEAD.format(about="Limits of the protocol: bytes of texts, elements of lists.") + "\n".join(lines) + "\n"


def codes_module(text: str) -> str:
    errors = [(int(code), name.strip("`"), retryable == "yes", about) for code, name, retryable, about in rows(section(text, 8))]
    lines = ["from enum import IntEnum", "", "", "class ErrorCode(IntEnum):"]
    lines += ['    """Why a request failed. The hundreds are a number\'s class."""', ""]
    for code, name, _, about in errors:
        lines += [f"    {re.sub(r'(?<=[a-z])(?=[A-Z])', '_', name).upper()} = {code}", f'    """{about[0].upper()}{about[1:]}."""']
    names = {name: code for code, name, _, _ in errors}
    lines += ["", "", "NAMES = {", *(f'    {code}: "{name}",' for name, code in names.items()), "}"]
    lines += ['"""The protocol\'s name of each code."""']
    return HEAD.format(about="Errors of the protocol.") + "\n".join(lines) + "\n"


def index(groups: dict[str, list[Shape]]) -> str:
    lines = []
    names = []
    for group, shapes in groups.items():
        own = sorted(
            [shape.name for shape in shapes]
            + [f"{shape.name}{row[1]}" for shape in shapes if shape.mixed() for row in shape.rows]
        )
        names += own
        lines += [f"from .{group} import (", *(f"    {name}," for name in own), ")"]
    lines.insert(0, "from .codes import NAMES, ErrorCode")
    lines += ["", "__all__ = [", *(f'    "{name}",' for name in sorted([*names, "ErrorCode", "NAMES"])), "]"]
    return HEAD.format(about="All messages of the protocol.") + "\n".join(lines) + "\n"


def files() -> dict[str, str]:
    text = DOCUMENT.read_text("utf-8")
    groups, requests = parse_shapes(text), parse_requests(text)
    made = {f"{name}.py": module(name, groups, requests) for name in groups}
    return {**made, "limits.py": limits_module(), "codes.py": codes_module(text), "__init__.py": index(groups)}


def main() -> None:
    command = sys.argv[1] if len(sys.argv) == 2 else ""
    if command not in ("write", "check"):
        sys.exit(__doc__)
    made = files()
    if command == "write":
        for name, text in made.items():
            (FOLDER / name).write_text(text, "utf-8")
        return
    kept = {path.name: path.read_text("utf-8") for path in FOLDER.glob("*.py")}
    other = sorted(name for name in kept.keys() | made.keys() if kept.get(name) != made.get(name))
    if other:
        sys.exit(f"{', '.join(other)}: not what PROTOCOL.md says; `python3 python/write_messages.py write` writes them")
    print(f"{len(made)} files agree")


if __name__ == "__main__":
    main()
