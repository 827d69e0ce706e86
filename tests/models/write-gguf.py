#!/usr/bin/env python3
"""Writes good GGUF files of every kind with the `gguf` package (pip install gguf==0.19.0), which shares no code with this project.

    write-gguf.py DIR

DIR/headers  files that show what a header can hold, and mean nothing
DIR/models   whole small models of every architecture, tensor type and tokenizer that is served; weights are random
DIR/refused  what the package writes and nobody here reads: files named after what is wrong with them

Beside each good file lies what the package's own reader says of it, as describe-gguf.py prints it; a model in parts has one
such description for each. `cargo xtask models` runs this; the same files come out every time.
"""

import importlib
import json
import pathlib
import sys

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType as Kind
from gguf import MODEL_TENSOR as Role
from gguf import quants

describe = importlib.import_module("describe-gguf").describe  # beside this file


def main():
    out = pathlib.Path(sys.argv[1])
    for below, write in [("headers", headers), ("models", models)]:
        (out / below).mkdir(parents=True)
        write(out / below)
        for path in sorted((out / below).glob("*.gguf")):
            path.with_suffix(".json").write_text(json.dumps(describe(path, data=True), separators=(",", ":")))
    (out / "refused").mkdir()
    refused(out / "refused")


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# Headers.

INTEGERS = {Kind.UINT8: 8, Kind.INT8: -8, Kind.UINT16: 16, Kind.INT16: -16, Kind.UINT32: 32, Kind.INT32: -32,
            Kind.UINT64: 64, Kind.INT64: -64}
FLOATS = {Kind.FLOAT32: np.finfo(np.float32), Kind.FLOAT64: np.finfo(np.float64)}
TEXTS = {"empty": "", "space": " ", "ascii": "hello", "accents": "schlüssel, e\u0301 \u00e9", "cjk": "你好，世界 こんにちは 안녕", "emoji": "\U0001f469\u200d\U0001f680 \U0001f1fa\U0001f1f3",
         "right-to-left": "\u202bשלום مرحبا\u202c", "control": "a\0b\x01\x1b[2J\x7f\r\n\t", "mark": "\ufeff\ufffe\uffff\ufffd",
         "last": "\U0010ffff", "long": "0123456789abcdef" * 65536, "json": '{"a": ["\\u0000", "\\\\"]}'}


def extremes(kind):
    if kind in INTEGERS:
        bits = INTEGERS[kind]
        low, high = (0, 2 ** bits - 1) if bits > 0 else (-2 ** (-bits - 1), 2 ** (-bits - 1) - 1)
        return [low, high, 1, high // 2, low + 1]
    info = FLOATS[kind]
    return [0.0, -0.0, 1.5, float(info.max), float(info.min), float(info.tiny), float(info.smallest_subnormal), float("inf"),
            float("-inf"), float("nan"), 0.1]


def test_writer(out, name, alignment=None, **options):
    writer = gguf.GGUFWriter(out / f"{name}.gguf", "test", **options)
    if alignment:
        writer.add_custom_alignment(alignment)
    return writer


def refused(out):
    writer = test_writer(out, "nested")
    writer.add_array("array of arrays", [[1, 2], [3]])
    finish(writer)
    finish(test_writer(out, "big-endian", endianess=gguf.GGUFEndian.BIG))
    writer = test_writer(out, "key")
    writer.add_uint32("schlüssel", 1)
    finish(writer)
    for name, shape in [("five-dimensions", (1, 2, 1, 2, 1)), ("no-values", (0, 4)), ("no-dimensions", ())]:
        writer = test_writer(out, name)
        writer.add_tensor("t", np.zeros(shape, np.float32))
        finish(writer)
    writer = test_writer(out, "long-name")
    writer.add_tensor("t" * 65, np.zeros(1, np.float32))
    finish(writer)
    for alignment in [1, 4, 131072]:
        writer = test_writer(out, f"aligned-{alignment}", alignment)
        writer.add_tensor("t", np.zeros(1, np.float32))
        finish(writer)


def headers(out):
    def new(name, alignment=None, **options):
        return test_writer(out, name, alignment, **options)

    finish(new("nothing"))

    writer = new("scalars")
    for kind in [*INTEGERS, *FLOATS]:
        for number, value in enumerate(extremes(kind)):
            writer.add_key_value(f"{kind.name.lower()}.{number}", value, kind)
    writer.add_bool("bool.false", False)
    writer.add_bool("bool.true", True)
    finish(writer)

    writer = new("texts")
    for name, text in TEXTS.items():
        writer.add_key_value(f"text.{name}", text, Kind.STRING)
    writer.add_array("text.all", list(TEXTS.values()))
    writer.add_array("text.none of them has anything", [""] * 100)
    writer.add_array("text.one", ["one"])
    for key in ["a", "A-b_c.d/e:f g", "~!@#$%^&*()+|{}[]<>?,;'\"\\`=", "k" * 1000, "k" * 65535]:
        writer.add_string(key, "value")
    finish(writer)

    writer = new("arrays")
    for kind in [*INTEGERS, *FLOATS]:
        values = extremes(kind)
        for count in [1, 2, 3, 7, len(values), 1000, 20000]:
            some = (values * (count // len(values) + 1))[:count]
            writer.add_key_value(f"{kind.name.lower()}.{count}", some, Kind.ARRAY, sub_type=kind)
    for count in [1, 2, 9, 1000]:
        writer.add_array(f"bool.{count}", [n % 3 == 0 for n in range(count)])
    writer.add_array("bytes", bytes(range(256)))
    writer.add_array("string.50000", [f"token {n * n % 1009}" for n in range(50000)])
    finish(writer)

    writer = new("many-entries")
    for number in range(5000):
        writer.add_uint32(f"entry.{number}", number)
    finish(writer)

    for alignment in [8, 16, 32, 64, 128, 4096, 65536]:
        writer = new(f"aligned-{alignment}", alignment)
        for number, count in enumerate([1, 3, 32, 33, 5000]):
            writer.add_tensor(f"t{number}", numbers(number, count))
        finish(writer)

    writer = new("shapes")
    for shape in [(1,), (7,), (1, 1), (1, 9), (9, 1), (3, 5), (2, 3, 5), (1, 1, 1), (2, 3, 5, 7), (1, 1, 1, 1), (4, 1, 1, 4),
                  (1, 100003), (100003, 1), (65536,), (31, 33)]:
        writer.add_tensor("shape " + "x".join(map(str, shape)), numbers(len(shape), int(np.prod(shape))).reshape(shape))
    finish(writer)

    writer = new("types")
    for dtype in [np.float32, np.float16, np.float64, np.int8, np.int16, np.int32, np.int64]:
        writer.add_tensor(f"plain {np.dtype(dtype).name}", (numbers(1, 15) * 100).astype(dtype).reshape(3, 5))
    for kind in Type:
        # The package has Q8_1's blocks, which no file holds, at 40 bytes; ggml's are of 36.
        if kind is Type.Q8_1:
            continue
        values, size = gguf.GGML_QUANT_SIZES[kind]
        for rows, cols in [(1, 1), (3, 2), (5, 7)]:
            writer.add_tensor(f"{kind.name} {rows}x{cols}", raw(rows * cols, rows, cols * size), raw_dtype=kind)
        if kind in QUANTISED:
            quantised = quants.quantize(numbers(kind, 6 * values).reshape(2, 3 * values), kind)
            writer.add_tensor(f"{kind.name} quantised", quantised, raw_dtype=kind)
    finish(writer)

    writer = new("names")
    for name in ["t", "t" * 63, "blk.0.attn_q.weight", "with space", "schlüssel", "重み", "a/b\\c:d", '"quoted"']:
        writer.add_tensor(name, numbers(1, 4))
    finish(writer)

    writer = new("many-tensors")
    for number in range(10000):
        writer.add_tensor(f"blk.{number}.weight", numbers(number, 1 + number % 3))
    finish(writer)

    # By way of a temporary file, as for models that do not fit in memory.
    writer = new("spooled", use_temp_file=True)
    for number in range(5):
        writer.add_tensor(f"t{number}", numbers(number, 10 + number))
    finish(writer)


def numbers(seed, count):
    """Random numbers, about -1..1: those of a generator that is the same everywhere."""
    return (raw(seed, count * 4).view(np.uint32).astype(np.float64) / 2 ** 31 - 1).astype(np.float32)


def raw(seed, *shape):
    """Random bytes."""
    count = int(np.prod(shape))
    words = np.arange(1, count // 8 + 2, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    words += np.uint64((int(seed) * 0xD1342543DE82EF95 + 0x2545F4914F6CDD1D) % 2 ** 64)
    for shift, factor in [(30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)]:
        words = (words ^ (words >> np.uint64(shift))) * np.uint64(factor)
    return np.ascontiguousarray((words ^ (words >> np.uint64(31))).view(np.uint8)[:count].reshape(shape))


# What the package can quantise by itself.
QUANTISED = {Type.BF16, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.TQ1_0, Type.TQ2_0, Type.MXFP4}


# Models.

class Model:
    """A small model of some architecture; `options` are its differences from a plain Llama."""

    layers, heads, kv_heads, experts, used = 2, 4, 2, 4, 2

    def __init__(self, path, arch="llama", **options):
        self.arch, self.options = arch, options
        self.hidden = options.get("hidden", 64)
        self.ffn = options.get("ffn", 96 if self.hidden == 64 else 256)
        self.head_dim = options.get("head_dim", self.hidden // self.heads)
        self.seed = sum(map(ord, path.name))
        split = options.get("split", {})
        self.writer = gguf.GGUFWriter(path, arch, **split)
        if "alignment" in options:
            self.writer.add_custom_alignment(options["alignment"])

    def write(self):
        self.metadata()
        tokenizer = self.options.get("tokenizer", spm)
        self.vocab = tokenizer(self.writer)
        self.tensors()
        finish(self.writer)

    def metadata(self):
        w, options = self.writer, self.options
        w.add_type(gguf.GGUFType.MODEL)
        w.add_name("a small model of random weights")
        w.add_license("MIT")
        w.add_tags(["text-generation", "größe:klein"])
        w.add_languages(["en", "de"])
        w.add_quantization_version(gguf.GGML_QUANT_VERSION)
        w.add_file_type(gguf.LlamaFileType.ALL_F32)
        w.add_context_length(512)
        w.add_embedding_length(self.hidden)
        w.add_block_count(self.layers)
        each = (lambda n: [n] * self.layers) if options.get("each_layer") else (lambda n: n)
        w.add_feed_forward_length(each(self.ffn))
        w.add_head_count(each(self.heads))
        w.add_head_count_kv(each(self.kv_heads))
        w.add_layer_norm_rms_eps(1e-5)
        w.add_rope_dimension_count(self.head_dim)
        if options.get("widths") or self.head_dim != self.hidden // self.heads:
            w.add_key_length(self.head_dim)
            w.add_value_length(self.head_dim)
        if "theta" in options:
            w.add_rope_freq_base(options["theta"])
        if options.get("experts"):
            w.add_expert_count(self.experts)
            w.add_expert_used_count(self.used)
            if self.arch != "llama":
                w.add_expert_feed_forward_length(self.ffn)
        for name, *values in options.get("calls", []):
            getattr(w, name)(*values)

    def name(self, role, layer=None, end="weight"):
        return gguf.TENSOR_NAMES[role].format(bid=layer) + "." + end

    def add(self, name, kind, *shape, center=0.0, spread=None):
        self.seed += 1
        spread = spread if spread is not None else (3.0 / shape[-1]) ** 0.5
        values = (center + spread * numbers(self.seed, int(np.prod(shape)))).astype(np.float32).reshape(shape)
        if kind is Type.F32:
            self.writer.add_tensor(name, values)
        elif kind is Type.F16:
            self.writer.add_tensor(name, values.astype(np.float16))
        elif kind in QUANTISED:
            self.writer.add_tensor(name, quants.quantize(values, kind), raw_dtype=kind)
        else:
            self.writer.add_tensor(name, blocks(kind, values.size, spread, self.seed).reshape(*shape[:-1], -1), raw_dtype=kind)

    def matrix(self, role, layer, *shape, bias=False):
        kind = self.options.get("type", Type.F32)
        self.add(self.name(role, layer), kind, *shape)
        if bias:
            self.add(self.name(role, layer, "bias"), Type.F32, shape[-2], spread=0.3)

    def norm(self, role, layer, size):
        self.add(self.name(role, layer), Type.F32, size, center=1.0, spread=0.3)

    def tensors(self):
        options = self.options
        if options.get("last_first"):
            self.norm(Role.OUTPUT_NORM, None, self.hidden)
        if not options.get("tied"):
            self.add(self.name(Role.OUTPUT), options.get("table", options.get("type", Type.F32)), self.vocab, self.hidden)
        self.add(self.name(Role.TOKEN_EMBD), options.get("table", options.get("type", Type.F32)), self.vocab, self.hidden, spread=1.0)
        layers = range(self.layers)
        for layer in reversed(layers) if options.get("last_first") else layers:
            self.layer(layer)
        if not options.get("last_first"):
            self.norm(Role.OUTPUT_NORM, None, self.hidden)
        for name, low, high in options.get("factors", []):
            self.writer.add_tensor(name, np.linspace(low, high, self.head_dim // 2, dtype=np.float32))

    def layer(self, layer):
        q, kv, bias = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.options.get("bias", False)
        self.norm(Role.ATTN_NORM, layer, self.hidden)
        for role, rows in [(Role.ATTN_Q, q), (Role.ATTN_K, kv), (Role.ATTN_V, kv)]:
            self.matrix(role, layer, rows, self.hidden, bias=bias)
        if self.options.get("head_norms"):
            self.norm(Role.ATTN_Q_NORM, layer, self.head_dim)
            self.norm(Role.ATTN_K_NORM, layer, self.head_dim)
        self.matrix(Role.ATTN_OUT, layer, self.hidden, q)
        self.norm(Role.FFN_NORM, layer, self.hidden)
        if self.options.get("experts"):
            self.add(self.name(Role.FFN_GATE_INP, layer), Type.F32, self.experts, self.hidden)
            self.matrix(Role.FFN_GATE_EXP, layer, self.experts, self.ffn, self.hidden)
            self.matrix(Role.FFN_UP_EXP, layer, self.experts, self.ffn, self.hidden)
            self.matrix(Role.FFN_DOWN_EXP, layer, self.experts, self.hidden, self.ffn)
        else:
            self.matrix(Role.FFN_GATE, layer, self.ffn, self.hidden)
            self.matrix(Role.FFN_UP, layer, self.ffn, self.hidden)
            self.matrix(Role.FFN_DOWN, layer, self.hidden, self.ffn)


def blocks(kind, count, spread, seed):
    """Blocks of K-quants, which the package reads and does not make: random bits under scales that give about that spread."""
    _, size = gguf.GGML_QUANT_SIZES[kind]
    data = raw(seed, count // 256, size)
    half = lambda value: np.frombuffer(np.float16(value).tobytes(), np.uint8)
    if kind is Type.Q6_K:
        data[:, 192:208] = 64
        data[:, 208:210] = half(spread / (32 * 64))
        return data
    # Scales and minima of six bits each; all 32, so that a minimum shifts half of a scale's range.
    steps = {Type.Q4_K: 15, Type.Q5_K: 31}[kind]
    data[:, 0:2] = half(2 * spread / (steps * 32))
    data[:, 2:4] = half(spread / 32)
    data[:, 4:12], data[:, 12:16] = 32, 0
    return data


# Tokenizers: each returns how many tokens it has.

WORDS = ["▁the", "▁a", "in", "er", "▁o", "on", "▁", "t", "h", "e", "a", "ab", "b"]
CHAT = "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"


def spm(w, types=True, extra=0):
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)] + WORDS + [f"▁w{n}" for n in range(extra)]
    kinds = [gguf.TokenType.UNKNOWN] + [gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.BYTE] * 256
    kinds += [gguf.TokenType.NORMAL] * (len(tokens) - len(kinds))
    w.add_tokenizer_model("llama")
    w.add_tokenizer_pre("default")
    w.add_token_list(tokens)
    w.add_token_scores([0.0] * 259 + [-1.0 - n for n in range(len(tokens) - 259)])
    if types:
        w.add_token_types(kinds)
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    w.add_unk_token_id(0)
    w.add_add_bos_token(True)
    w.add_add_eos_token(False)
    w.add_add_space_prefix(True)
    return len(tokens)


def bpe(pre, **extras):
    def write(w):
        visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = iter(range(256, 512))
        tokens = [chr(byte) if byte in visible else chr(next(others)) for byte in range(256)]
        merges = ["t h", "th e", "Ġ the", "Ġ a", "i n", "o n"]
        tokens += [merge.replace(" ", "") for merge in merges]
        special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "[PAD1]", "[PAD2]"]
        kinds = [gguf.TokenType.NORMAL] * len(tokens) + [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.UNUSED] * 2
        tokens += special
        w.add_tokenizer_model("gpt2")
        if pre:
            w.add_tokenizer_pre(pre)
        w.add_token_list(tokens)
        w.add_token_types(kinds)
        # Newer converters write merges whose parts hold spaces with the spaces of the alphabet.
        w.add_token_merges(merges)
        w.add_bos_token_id(tokens.index("<|im_start|>"))
        w.add_eos_token_id(tokens.index("<|im_end|>"))
        w.add_pad_token_id(tokens.index("<|endoftext|>"))
        if extras.get("template"):
            w.add_chat_template(extras["template"])
        if extras.get("turns"):
            w.add_eot_token_id(tokens.index("<|im_end|>"))
        return len(tokens)

    return write


PRES = [None, "default", "gpt-2", "smollm", "starcoder", "falcon", "llama-bpe", "dbrx", "glm4", "qwen2", "qwen35", "deepseek-llm",
        "deepseek-coder"]
SCALING = gguf.RopeScalingType


def models(out):
    def write(name, *args, **options):
        Model(out / f"{name}.gguf", *args, **options).write()

    qwen2 = dict(bias=True, tied=True, theta=1e6, tokenizer=bpe("qwen2"))
    qwen3 = dict(head_norms=True, head_dim=32, theta=1e6, tokenizer=bpe("qwen2"))
    write("llama")
    write("llama-widths", widths=True, theta=500000.0)
    write("llama-bias", bias=True)
    write("llama-tied", tied=True)
    write("llama-each-layer", each_layer=True)
    write("llama-experts", experts=True)
    write("qwen2", "qwen2", **qwen2)
    write("qwen3", "qwen3", **qwen3)
    write("qwen3-tied", "qwen3", **qwen3, tied=True)
    write("qwen3moe", "qwen3moe", **qwen3, experts=True)

    for kind in [Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.MXFP4]:
        write(f"llama-{kind.name.lower()}", type=kind)
        write(f"qwen3moe-{kind.name.lower()}", "qwen3moe", **qwen3, experts=True, type=kind, table=Type.F16)
    for kind in [Type.Q4_K, Type.Q5_K, Type.Q6_K]:
        write(f"llama-{kind.name.lower()}", type=kind, table=Type.Q8_0, hidden=256)
        write(f"qwen2-{kind.name.lower()}", "qwen2", **qwen2, type=kind, hidden=256)

    for pre in PRES:
        write(f"llama-tokens-{pre}", tokenizer=bpe(pre))
    write("llama-tokens-spm-untyped", tokenizer=lambda w: spm(w, types=False))
    write("llama-tokens-spm-more", tokenizer=lambda w: spm(w, extra=1000))
    write("llama-chat", tokenizer=bpe("llama-bpe", template=CHAT, turns=True))
    named = [{"name": "default", "template": CHAT}, {"name": "tool_use", "template": CHAT + "{{ tools }}"}]
    write("qwen3-chats", "qwen3", **{**qwen3, "tokenizer": bpe("qwen2", template=named)})

    yarn = [("add_rope_scaling_type", SCALING.YARN), ("add_rope_scaling_factor", 4.0), ("add_rope_scaling_orig_ctx_len", 128)]
    write("llama-linear", calls=[("add_rope_scaling_type", SCALING.LINEAR), ("add_rope_scaling_factor", 2.0)])
    write("llama-unscaled", calls=[("add_rope_scaling_type", SCALING.NONE)])
    write("llama-yarn", calls=yarn)
    write("qwen2-yarn", "qwen2", **qwen2, calls=yarn)
    write("llama-factors", factors=[(gguf.TENSOR_NAMES[Role.ROPE_FREQS] + ".weight", 1.0, 16.0)])
    longrope = [("add_rope_scaling_type", SCALING.LONGROPE), ("add_rope_scaling_attn_factors", 1.19), ("add_rope_scaling_orig_ctx_len", 64)]
    write("llama-longrope", calls=longrope, factors=[("rope_factors_long.weight", 1.0, 8.0), ("rope_factors_short.weight", 1.0, 1.5)])
    about = [("add_author", "nobody"), ("add_version", "v1.0"), ("add_organization", "none"), ("add_basename", "small"), ("add_url", "example.org"),
             ("add_size_label", "100K"), ("add_base_model_count", 1), ("add_base_model_name", 0, "none"), ("add_dataset_count", 1),
             ("add_dataset_name", 0, "none"), ("add_sampling_top_k", 40), ("add_sampling_temp", 0.8), ("add_vocab_size", 272), ("add_causal_attention", True)]
    write("llama-described", calls=about)

    for alignment in [8, 64, 4096]:
        write(f"llama-aligned-{alignment}", alignment=alignment)
    write("llama-odd", hidden=96, ffn=33, head_dim=24)
    write("llama-last-first", last_first=True)
    write("llama-parts", split=dict(split_max_tensors=9))
    write("llama-parts-first-small", split=dict(split_max_tensors=5, small_first_shard=True))
    write("qwen3moe-parts", "qwen3moe", **qwen3, experts=True, split=dict(split_max_size=200000))


main()
