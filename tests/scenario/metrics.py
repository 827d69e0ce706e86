"""Reads the text exposition format of Prometheus from standard input, strictly, and prints its values as JSON.

Written from the format's description, not from the program that writes it. Refused: a value without HELP and TYPE before it,
split families, duplicate series, misplaced labels, invalid escapes, counters that are negative or not named so.
"""

import json, math, re, sys

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"')
SAMPLE = re.compile(rf"({NAME})(?:\{{(.*)\}})? (\S+)$")
UNESCAPED = {'\\"': '"', "\\\\": "\\", "\\n": "\n"}


def labels_of(text):
    labels, at = {}, 0
    while at < len(text):
        found = LABEL.match(text, at)
        assert found, f"expected a label at {text[at:]!r}"
        name, value = found.groups()
        assert name not in labels and not name.startswith("__"), f"invalid or duplicate label {name}"
        labels[name] = re.sub(r'\\["\\n]', lambda escape: UNESCAPED[escape.group()], value)
        at = found.end()
        if at < len(text):
            assert text[at] == "," and at + 1 < len(text), f"expected a comma and a label at {text[at:]!r}"
            at += 1
    return labels


def main():
    text = sys.stdin.buffer.read().decode("utf-8")
    assert text.endswith("\n"), "the last line has no line end"
    helped, typed, series, done, values = set(), {}, set(), [], []
    for line in text[:-1].split("\n"):
        assert not any(ord(c) < 32 or ord(c) == 127 for c in line), f"control characters in {line!r}"
        if line.startswith("# HELP "):
            name, what = line[7:].split(" ", 1)
            assert re.fullmatch(NAME, name) and what and name not in helped, line
            helped.add(name)
        elif line.startswith("# TYPE "):
            name, kind = line[7:].split(" ")
            assert name in helped and name not in typed and kind in ("counter", "gauge"), line
            assert kind != "counter" or name.endswith("_total"), f"a counter's name lacks _total: {name}"
            assert kind != "gauge" or not name.endswith("_total"), f"a gauge's name ends in _total: {name}"
            typed[name] = kind
        else:
            found = SAMPLE.match(line)
            assert found, f"neither comment nor value: {line!r}"
            name, labels, value = found.group(1), labels_of(found.group(2) or ""), float(found.group(3))
            assert name in typed, f"{name} has no type"
            if not done or done[-1] != name:
                assert name not in done, f"the family {name} is split"
                done.append(name)
            key = (name, tuple(sorted(labels.items())))
            assert key not in series, f"the series {key} occurs twice"
            series.add(key)
            assert math.isfinite(value) and value >= 0, line
            values.append({"name": name, "labels": labels, "value": value})
    json.dump(values, sys.stdout)


main()
