#!/usr/bin/env python3
"""make_pieces.py: another engine's WordPiece tokens of 10,000 random texts, for the test in src/model/tokenizer/wordpiece.rs.

    make_pieces.py OUT.json

The oracle is the PyPI package `tokenizers` (0.23.3 made the kept file): BertNormalizer, BertPreTokenizer and WordPiece with
their defaults, which are those of BERT's models in small letters. It uses none of our code. The texts are made as in
make_words.py, of an alphabet with more characters that BERT treats in a way of its own. Kept are the vocabulary and hashes:
32-bit FNV-1a of the tokens' ids and an end mark of all ones, each as four little-endian bytes, for every ten texts.
"""
import importlib.metadata
import json
import sys

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

import make_words

# Letters that decompose or become two; ideographs in and between the blocks; a text of 100 and one of 101 letters;
# control, format and private characters, and those that stand for none.
make_words.ALPHABET += [
    "İ", "Å", "ǆ", "ﬁ", "ŉ", "ẞ", "ΐ", "각", "뷁", "ㄱ", "豈", "\U0002f800", "𠀀", "\U0002b820", "\U0002b920", "㐀", "々", "〇",
    "a" * 100, "b" * 101, "\x00", "\ufffd", "\ue000", "\u00ad", "\u200e", "\ufeff", "\u0345", "\u0903", "\u1160", "\u2003",
    "\u205f", "\x0b", "\x0c", "¡", "§", "¶", "·", "¿", "⸘", "״", "،", "[UNK]", "[CLS]", "##s", "▁a",
]
WORDS = ["word", "##word", "camel", "##case", "xml", "##http", "##re", "##quest", "re", "##ll", "ve", "##ve", "st", "##st",
         "as", "##ab", "bs", "##ss", "##23", "4567", "##ж", "жа", "##文", "##ss"]


def vocabulary(normalizer):
    """Most characters of the alphabet, alone and within words, and a few longer pieces."""
    found = sorted({c for piece in make_words.ALPHABET for c in normalizer.normalize_str(piece) if not c.isspace()})
    alone = [c for number, c in enumerate(found) if number % 11 != 3]
    inside = ["##" + c for number, c in enumerate(found) if number % 7 != 5]
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *alone, *inside, *WORDS]
    return list(dict.fromkeys(tokens))


def main():
    normalizer = normalizers.BertNormalizer()
    tokens = vocabulary(normalizer)
    model = models.WordPiece({token: number for number, token in enumerate(tokens)}, unk_token="[UNK]")
    tokenizer = Tokenizer(model)
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizers.BertPreTokenizer()
    tokens_of_texts = [tokenizer.encode(text).ids for text in make_words.texts()]
    made = make_words.hashed([*ids, 0xFFFFFFFF] for ids in tokens_of_texts)
    facts = {
        "made_by": "tests/reference/make_pieces.py",
        "oracle": f"tokenizers {importlib.metadata.version('tokenizers')}",
        "alphabet": make_words.ALPHABET,
        "vocabulary": tokens,
        "tokens": sum(map(len, tokens_of_texts)),
    }
    head = "".join(f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in facts.items())
    with open(sys.argv[1], "w", encoding="utf-8") as out:
        out.write(f'{{\n{head} "hashes": "{" ".join(made)}"\n}}\n')


if __name__ == "__main__":
    main()
