#!/usr/bin/env python3
"""make_words.py: another engine's words of 10,000 random texts, for the test in src/model/tokenizer/pretokenizer/words.rs.

    make_words.py OUT.json

The oracle is the PyPI package `tokenizers` (0.23.3 made the kept file), with the expressions of the models' own
tokenizer.json. It uses none of our code. Texts are joined pieces of an alphabet, drawn by the generator below, which the
test repeats. Kept are hashes: 32-bit FNV-1a of the words' lengths in bytes, each as four little-endian bytes, for every
ten texts. A word is never empty, so a length of 0 ends each text.
"""
import importlib.metadata
import json
import sys

from tokenizers import Regex, pre_tokenizers

TEXTS, TOGETHER, PIECES, SEED = 10_000, 10, 24, 0x9E3779B97F4A7C15

# Letters with and without case, title case, modifiers, marks alone and after letters; numbers of three kinds; white space
# of many kinds; punctuation and symbols; control characters. All are older than any Unicode table in use.
ALPHABET = [
    "a", "b", "s", "t", "re", "ll", "A", "B", "S", "VE", "Word", "word", "WORD", "camelCase", "XMLHttp", "é", "É", "ß", "ñ",
    "Ж", "ж", "Σ", "ς", "ǅ", "ǈ", "ʰ", "ˮ", "ª", "º", "中", "文", "一", "龥", "ぁ", "ん", "ア", "ヿ", "・", "ー", "한", "א",
    "ب", "ك", "क", "ष", "ि", "्", "ท", "ี", "\u0301", "\u0308", "\u0323", "\u20dd", "0", "1", "23", "4567", "½", "²", "Ⅷ", "٣",
    " ", " ", " ", "  ", "\t", "\n", "\r\n", "\r", "\u00a0", "\u3000", "\u2028", "\u0085", "\u200b", "\x01", "\x7f", "'", "'",
    "'s", "'S", "'t", "'re", "'LL", "'d", "’", "\"", "#", "$", "%", "&", "(", ")", "*", "+", ",", "-", ".", "/", "/", "//", ":",
    ";", "<", "=", ">", "?", "@", "[", "\\", "]", "^", "_", "`", "{", "|", "}", "~", "…", "—", "。", "、", "！", "€", "©", "→",
    "🙂", "👩‍👧", "𐍈", "𝄞",
]

CASED = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
         r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
         r"|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
EXPRESSIONS = {
    "gpt-4o": [CASED % (CONTRACTION, CONTRACTION, "{1,3}")],
    "tekken": [CASED % ("", "", "")],
    "deepseek-v3": [
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
}


def texts():
    state = SEED
    for _ in range(TEXTS):
        text, left = "", None
        while left is None or left > 0:
            state ^= state << 13 & (1 << 64) - 1
            state ^= state >> 7
            state ^= state << 17 & (1 << 64) - 1
            if left is None:
                left = 1 + (state >> 32) % PIECES
            else:
                text, left = text + ALPHABET[(state >> 32) % len(ALPHABET)], left - 1
        yield text


def fnv(found, number):
    for byte in number.to_bytes(4, "little"):
        found = (found ^ byte) * 0x01000193 & 0xFFFFFFFF
    return found


def hashed(numbers_of_texts):
    """A hash for the numbers of every ten texts."""
    made, found = [], 0x811C9DC5
    for count, numbers in enumerate(numbers_of_texts, 1):
        for number in numbers:
            found = fnv(found, number)
        if count % TOGETHER == 0:
            made.append(f"{found:08x}")
            found = 0x811C9DC5
    return made


def lengths(expressions):
    splits = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in expressions]
    split = pre_tokenizers.Sequence(splits)
    for text in texts():
        words = [word for word, _ in split.pre_tokenize_str(text)]
        assert "".join(words) == text
        yield [*(len(word.encode()) for word in words), 0]


def main():
    facts = {
        "made_by": "tests/reference/make_words.py",
        "oracle": f"tokenizers {importlib.metadata.version('tokenizers')}",
        "alphabet": ALPHABET,
    }
    head = "".join(f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in facts.items())
    body = ",\n".join(f'  "{name}": "{" ".join(hashed(lengths(expressions)))}"' for name, expressions in EXPRESSIONS.items())
    with open(sys.argv[1], "w", encoding="utf-8") as out:
        out.write(f'{{\n{head} "hashes": {{\n{body}\n }}\n}}\n')


if __name__ == "__main__":
    main()
