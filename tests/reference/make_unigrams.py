#!/usr/bin/env python3
"""make_unigrams.py: another engine's Unigram tokens of 10,000 random texts, for the test in src/model/tokenizer/unigram.rs.

    make_unigrams.py OUT.json

The oracles are two PyPI packages. `sentencepiece` trains a small model here, and normalises the texts. Hugging Face's
`tokenizers` cuts them by that model's pieces. (0.2.3 and 0.23.3 made the kept file.) `sentencepiece` itself adds scores in
f32: where pieces come in two orders of equal sums, its answer depends on rounding. Versions 0.2.1 and 0.2.3 differ in six of the
texts. `tokenizers` adds in f64, where the sums are equal, and so does llama.cpp.

The texts are made as in make_words.py. Kept are the model's pieces, scores and compiled map of characters, and hashes: 32-bit
FNV-1a of the tokens' ids and an end mark of all ones, each as four little-endian bytes, for every ten texts.
"""
import importlib.metadata
import io
import json
import pathlib
import sys
import tempfile

import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tokenizers import models

import make_words

make_words.ALPHABET += ["ﬁ", "Å", "A\u030a", "½", "ｗｏｒｄ", "㌀", "\u3000", "\u00a0", "\u200b", "\ufeff", "\x00", "<unk>", "<s>", "▁", "▁word"]
# What the map replaces: sequences of one and two characters, one that becomes nothing, spaces of several kinds.
RULES = {"ﬁ": "fi", "A\u030a": "Å", "½": "1⁄2", "㌀": "アパート", "\u200b": "", "\ufeff": "", "\u3000": " ", "\u00a0": " ", "\t": " ",
         "\n": " ", "\r": " ", "\u0085": " ", "\u2028": " ", **{chr(0xff01 + n): chr(0x21 + n) for n in range(94)}}
NORMAL = 1  # the number of a kind of pieces in SentencePiece's models and in GGUF files


def cutter(pieces):
    """The other package's model of these pieces. Those of other kinds stand for what no text has."""
    texts = [(piece.piece if piece.type == NORMAL else f"\ufdd0{number}", piece.score) for number, piece in enumerate(pieces)]
    return models.Unigram(texts, unk_id=0, byte_fallback=False)


def main():
    texts = list(make_words.texts())
    with tempfile.TemporaryDirectory() as scratch:
        rules = pathlib.Path(scratch, "rules.tsv")
        code = lambda text: " ".join(f"{ord(c):X}" for c in text)
        rules.write_text("".join(f"{code(a)}\t{code(b)}\n" for a, b in RULES.items()), encoding="utf-8")
        out = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts[:4000]), model_writer=out, model_type="unigram", vocab_size=420, num_threads=1,
            character_coverage=0.98, hard_vocab_limit=False, normalization_rule_tsv=str(rules), minloglevel=2)
    model = sentencepiece_model_pb2.ModelProto.FromString(out.getvalue())
    encoder = sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())
    cut = cutter(model.pieces)
    tokens_of_texts = [[token.id for token in cut.tokenize(encoder.normalize(text))] for text in texts]
    others = sum(ids != encoder.encode(text) for ids, text in zip(tokens_of_texts, texts))
    made = make_words.hashed([*ids, 0xFFFFFFFF] for ids in tokens_of_texts)
    facts = {
        "made_by": "tests/reference/make_unigrams.py",
        "oracle": ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("sentencepiece", "tokenizers")),
        "alphabet": make_words.ALPHABET,
        "pieces": [piece.piece for piece in model.pieces],
        "scores": [piece.score for piece in model.pieces],
        "kinds": [piece.type for piece in model.pieces],
        "charsmap": model.normalizer_spec.precompiled_charsmap.hex(),
        "tokens": sum(map(len, tokens_of_texts)),
    }
    print(f"{others} of {len(texts)} texts are cut in another way by sentencepiece itself")
    head = "".join(f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in facts.items())
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        file.write(f'{{\n{head} "hashes": "{" ".join(made)}"\n}}\n')


if __name__ == "__main__":
    main()
