#!/usr/bin/env python3
"""make_tokens.py: another engine's token ids of varied texts, for the test in tokenizer.rs; uses none of our code.

    make_tokens.py OUT.json NAME=MODEL.gguf [NAME=MODEL.gguf ...]

The oracle is the `/tokenize` of llama.cpp's server inside the PyPI wheel `xllamacpp` (2026.10.11549 made the kept file).
Each text is encoded twice: `raw` without special tokens, `full` with those that the file adds and those in the text.
"""
import hashlib
import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys
import urllib.request

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  leading spaces and  double  ones ",
    "trailing newline\n",
    "\n\n\n\ttabs\t\tand \r\n line ends\r\n\r\n   \n",
    "I'll say we've won; they're sure it's DON'T, I'D, WE'LL.",
    "In 2024 there were 1234567890 stars, 3.14159 pies and -42 degrees.",
    "def fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n",
    "fn main() { let v: Vec<u32> = (0..10).map(|x| x * x).collect(); println!(\"{v:?}\"); }",
    "{\"name\": \"Ada\", \"born\": 1815, \"tags\": [\"maths\", null, true]}",
    "Größenwahn, naïve café, Ærøskøbing, İstanbul, œuvre",
    "Привет, мир! Как дела?",
    "你好，世界。今天天气怎么样？",
    "こんにちは世界、カタカナとひらがな。",
    "안녕하세요 세계",
    "مرحبا بالعالم، كيف الحال؟",
    "שלום עולם",
    "नमस्ते दुनिया, क्षत्रिय",
    "สวัสดีชาวโลก",
    "🙂🚀 👩‍👩‍👧 🇩🇪 ✈️ ½ ² Ⅷ ٣٤٥",
    "e\u0301 a\u0308 o\u0302\u0323 zero\u200bwidth\u200djoin \ufeff bom \u00a0nbsp\u3000wide",
    "https://example.com/path?query=1&b=%20#frag user@example.org C:\\dir\\file.txt",
    "\u0001\u0004\u001f\u007f\u0085 control \u2028 separators",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<s>Hi</s><unk><|endoftext|><0x41>▁▁under▁lines",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "supercalifragilisticexpialidocious antidisestablishmentarianism",
    "!!!???...,,,;;;:::---___***///\\\\\\|||~~~```^^^$$$%%%&&&@@@###",
    "\U00010348\U0001d11e\U00020000 \uffff \U0010ffff",
]


def main():
    out, *models = sys.argv[1:]
    made = {}
    for name, path in (m.split("=", 1) for m in models):
        # One process per model: the server's threads do not end by themselves.
        done = subprocess.run([sys.executable, __file__, "--answer", path], check=True, stdout=subprocess.PIPE)
        made[name] = {"model": pathlib.Path(path).name, "sha256": sha256(path), "texts": json.loads(done.stdout)}
    oracle = f"llama.cpp in xllamacpp {importlib.metadata.version('xllamacpp')}, /tokenize"
    head = {"made_by": "tests/reference/make_tokens.py", "oracle": oracle}
    # One text per line.
    models = ",\n".join(
        f"  {json.dumps(name)}: {{\n   \"model\": {json.dumps(m['model'])},\n   \"sha256\": {json.dumps(m['sha256'])},\n"
        "   \"texts\": [\n" + ",\n".join("    " + json.dumps(t) for t in m["texts"]) + "\n   ]\n  }"
        for name, m in made.items())
    text = json.dumps(head, indent=1).rstrip("}\n") + ',\n "models": {\n' + models + "\n }\n}\n"
    json.loads(text)
    pathlib.Path(out).write_text(text, encoding="utf-8")


def answer(model):
    import xllamacpp
    p = xllamacpp.CommonParams()
    p.model.path = model
    p.n_ctx, p.n_parallel, p.warmup, p.verbosity = 64, 1, False, -1
    stdout = os.dup(1)
    os.dup2(2, 1)  # the server's output goes to stderr
    server = xllamacpp.Server(p)

    def tokens(text, special):
        body = json.dumps({"content": text, "add_special": special, "parse_special": special}).encode()
        request = urllib.request.Request(server.listening_address + "/tokenize", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.loads(reply.read())["tokens"]

    made = [{"text": t, "raw": tokens(t, False), "full": tokens(t, True)} for t in TEXTS]
    with os.fdopen(stdout, "w", encoding="utf-8") as f:
        json.dump(made, f)
    os._exit(0)


def sha256(path):
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--answer"]:
        answer(sys.argv[2])
    else:
        main()
