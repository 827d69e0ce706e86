"""plain.py: small decoders in plain double-precision code, a second opinion beside oracle.py's engine.

llama.cpp on a CPU takes GELU from a table of half-precision numbers, which puts its answers off by some 1e-3 nats. It
also ignores the windows of phi3, and that gpt-oss was trained with YaRN's ends unrounded. With the same table, without
windows and with rounded ends, this module shows that nothing else differs; otherwise it computes the exact answers. It
uses none of our code: the PyPI package `gguf` reads the files.
"""
import numpy as np


def gelu(x):
    return 0.5 * x * (1 + np.tanh(0.79788456080286535588 * x * (1 + 0.044715 * x * x)))


def tabled_gelu(x):
    """llama.cpp's table: argument and result rounded to half precision, between -10 and 10."""
    rounded = gelu(x.astype(np.float16).astype(np.float64)).astype(np.float16).astype(np.float64)
    return np.where(x <= -10, 0, np.where(x >= 10, x, rounded))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


class Decoder:
    """What most architectures do; subclasses override the differences."""
    ignored = ()        # keys that llama.cpp does not read, or reads in another way than models were trained
    adjacent = False    # rotated pairs: neighbours, or half of the rotated values apart
    pattern = None      # one of every so many layers has no window
    activation = staticmethod(silu)
    both_ways = False   # a position sees later ones too

    def __init__(self, path, as_llama_cpp):
        from gguf import GGUFReader
        reader = GGUFReader(path)
        self.keys = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
        self.tensors = {t.name: np.array(t.data, np.float64).reshape(t.shape[::-1]) for t in reader.tensors}
        self.gelu = tabled_gelu if as_llama_cpp else gelu
        self.as_llama_cpp = as_llama_cpp
        self.leave_out(self.ignored if as_llama_cpp else ())
        self.layers, self.width = self.key("block_count"), self.key("embedding_length")
        self.heads = self.key("attention.head_count")
        self.kv_heads = self.key("attention.head_count_kv", self.heads)
        self.head_dim = self.key("attention.key_length", self.width // self.heads)
        self.rotated = self.key("rope.dimension_count", self.head_dim)
        self.factor = self.key("rope.scaling.factor", 1.0)
        self.epsilon = self.key("attention.layer_norm_rms_epsilon") or self.key("attention.layer_norm_epsilon")

    def leave_out(self, names):
        for name in names:
            self.keys.pop(f"{self.keys['general.architecture']}.{name}", None)

    def key(self, name, default=None):
        return self.keys.get(f"{self.keys['general.architecture']}.{name}", default)

    def logp(self, ids):
        """Log-probabilities of the next token after each of `ids`, one row per id."""
        x = self.rows(ids)
        logits = self.logits(self.linear("output" if "output.weight" in self.tensors else "token_embd",
                                         self.norm("output_norm", x)))
        logits = logits - logits.max(-1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    def rows(self, ids):
        """What the last layer leaves."""
        x = self.tensors["token_embd.weight"][ids] * self.embedding_scale()
        for layer in range(self.layers):
            x = self.block(layer, f"blk.{layer}.", x)
        return x

    def block(self, layer, at, x):
        x = x + self.attention(layer, at, self.norm(at + "attn_norm", x))
        return x + self.feed_forward(at, self.norm(at + "ffn_norm", x))

    def attention(self, layer, at, x):
        n, (q, k, v) = len(x), self.turned(layer, at, x)
        k, v = (np.repeat(t, self.heads // self.kv_heads, 1) for t in (k, v))
        back = np.arange(n)[:, None] - np.arange(n)
        window = self.key("attention.sliding_window") if self.local(layer) else n
        scores = self.scores(np.einsum("phd,shd->hps", q, k) * self.attention_scale()) - self.falls(np.abs(back))
        if self.both_ways:
            seen = np.abs(back) <= (window // 2 if self.local(layer) else n)
        else:
            seen = (back >= 0) & (back < window)
        weights = self.weights(at, np.where(seen, scores, -np.inf))
        return self.linear(at + "attn_output", np.einsum("hps,shd->phd", weights, v).reshape(n, -1))

    def turned(self, layer, at, x):
        """Queries, keys and values that attention uses."""
        q, k, v = self.qkv(at, x)
        q, k = self.head_norm(at + "attn_q_norm", q), self.head_norm(at + "attn_k_norm", k)
        return self.rotate(layer, q), self.rotate(layer, k), v

    def falls(self, distance):
        """What scores fall with the distance of positions, [heads, queries, positions]."""
        return 0.0

    def scores(self, x):
        return x

    def weights(self, at, scores):
        """Weights of positions from scores, [heads, queries, positions]."""
        return softmax(scores)

    def qkv(self, at, x):
        if at + "attn_qkv.weight" in self.tensors:
            q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
            rows = np.split(self.linear(at + "attn_qkv", x), [q, q + kv], axis=1)
        else:
            rows = [self.linear(at + f"attn_{part}", x) for part in "qkv"]
        return [row.reshape(len(x), -1, self.head_dim) for row in rows]

    def rotate(self, layer, x):
        half = self.rotated // 2
        angle = np.arange(len(x))[:, None] * self.frequencies(layer)
        first = np.arange(half) * (2 if self.adjacent else 1)
        second = first + (1 if self.adjacent else half)
        cos, sin = (f(angle)[:, None] * self.magnitude(layer) for f in (np.cos, np.sin))
        y = x.copy()
        y[..., first] = x[..., first] * cos - x[..., second] * sin
        y[..., second] = x[..., first] * sin + x[..., second] * cos
        return y

    def frequencies(self, layer):
        base, n = self.base(layer), self.rotated
        plain = base ** (-2.0 * np.arange(n // 2) / n)
        if not self.scaled(layer):
            return plain
        if self.key("rope.scaling.type") != "yarn":
            return plain / self.factor
        trained = self.key("rope.scaling.original_context_length")
        low, high = (n * np.log(trained / (turns * 2 * np.pi)) / (2 * np.log(base)) for turns in (32, 1))
        low, high = self.ends(low, high)
        low, high = max(0, low), min(n - 1, high)
        ramp = 1 - np.clip((np.arange(n // 2) - low) / max(0.001, high - low), 0, 1)
        return plain / self.factor * (1 - ramp) + plain * ramp

    def magnitude(self, layer):
        yarn = self.key("rope.scaling.type") == "yarn" and self.scaled(layer)
        return 1 + 0.1 * np.log(self.factor) if yarn else 1.0

    def ends(self, low, high):
        """The ends of YaRN's mix."""
        return np.floor(low), np.ceil(high)

    def scaled(self, layer):
        """Whether a layer scales positions."""
        return not self.local(layer)

    def local(self, layer):
        """Whether a layer's attention has a window."""
        if not self.pattern or not self.key("attention.sliding_window"):
            return False
        pattern = self.key("attention.sliding_window_pattern", self.pattern)
        return bool(pattern[layer]) if isinstance(pattern, list) else layer % pattern < pattern - 1

    def feed_forward(self, at, x):
        gate, up = self.linear(at + "ffn_gate", x), self.linear(at + "ffn_up", x)
        return self.linear(at + "ffn_down", self.activation(gate) * up)

    def linear(self, name, x):
        return x @ self.tensors[name + ".weight"].T + self.tensors.get(name + ".bias", 0.0)

    def norm(self, name, x):
        x = x - x.mean(-1, keepdims=True) if name + ".bias" in self.tensors else x
        scaled = x / np.sqrt((x * x).mean(-1, keepdims=True) + self.epsilon)
        return scaled * self.tensors[name + ".weight"] + self.tensors.get(name + ".bias", 0.0)

    def head_norm(self, name, x):
        return self.norm(name, x) if name + ".weight" in self.tensors else x

    def base(self, layer):
        return self.key("rope.freq_base", 10000.0)

    def attention_scale(self):
        return self.head_dim ** -0.5

    def embedding_scale(self):
        return 1.0

    def logits(self, x):
        return x


class Sandwich(Decoder):
    """Norms before and after."""

    def block(self, layer, at, x):
        x = x + self.norm(at + "post_attention_norm", self.attention(layer, at, self.norm(at + "attn_norm", x)))
        return x + self.norm(at + "post_ffw_norm", self.feed_forward(at, self.norm(at + "ffn_norm", x)))


class Qwen3(Decoder):
    def score(self, ids):
        """Of a text, by the classifier of its last row: the share of yes."""
        outputs = self.linear("cls.output", self.norm("output_norm", self.rows(ids)[-1:]))
        return float(softmax(outputs)[0, 0])


class Gemma3(Sandwich):
    pattern = 6

    def activation(self, x):
        return self.gelu(x)

    def base(self, layer):
        return self.key("rope.freq_base_swa", 10000.0) if self.local(layer) else super().base(layer)

    def attention_scale(self):
        return (self.width // self.heads if self.layers == 62 else self.head_dim) ** -0.5

    def embedding_scale(self):
        return self.width ** 0.5

    def logits(self, x):
        cap = self.key("final_logit_softcapping")
        return cap * np.tanh(x / cap) if cap else x


class Gemma2(Gemma3):
    pattern = 2

    def base(self, layer):
        return self.key("rope.freq_base", 10000.0)

    def scores(self, x):
        cap = self.key("attn_logit_softcapping", 50.0)
        return cap * np.tanh(x / cap)

    def attention_scale(self):
        return (self.width // self.heads if self.layers == 46 else self.head_dim) ** -0.5

    def logits(self, x):
        cap = self.key("final_logit_softcapping", 30.0)
        return cap * np.tanh(x / cap)


class Gemma3n(Gemma3):
    """Four streams, of which each layer computes the first; see the paper on AltUp and the model's own code."""
    pattern = 5

    def attention_scale(self):
        return 1.0

    def logits(self, x):
        cap = self.key("final_logit_softcapping", 30.0)
        return cap * np.tanh(x / cap)

    def rows(self, ids):
        x = self.tensors["token_embd.weight"][ids] * self.width ** 0.5
        width = self.tensors["per_layer_proj_norm.weight"].shape[0]
        parts = (self.linear("per_layer_model_proj", x) / self.width ** 0.5).reshape(len(x), self.layers, width)
        of_token = self.tensors["per_layer_token_embd.weight"][ids].reshape(parts.shape) * width ** 0.5
        inputs = (self.norm("per_layer_proj_norm", parts) + of_token) / 2 ** 0.5
        streams = np.stack([x] + [self.like(x, x @ m.T) for m in self.tensors["altup_proj.weight"]])
        self.shared = {}
        for layer in range(self.layers):
            streams = self.streams(layer, f"blk.{layer}.", streams, inputs[:, layer])
        others = zip(streams[1:], self.tensors["altup_unembd_proj.weight"])
        return sum((self.like(streams[0], s @ m.T) for s, m in others), streams[0]) / len(streams)

    @staticmethod
    def like(one, other):
        """`other` with the magnitude of `one`."""
        one, size = (np.sqrt((x * x).sum(-1, keepdims=True)) for x in (one, other))
        return other * one / size

    def routed(self, at, x):
        return np.tanh(self.linear(at + "altup_router", self.norm(at + "altup_router_norm", x) / self.width))

    def streams(self, layer, at, streams, own):
        n = len(streams)
        mix = self.linear(at + "altup_predict_coef", self.routed(at, streams[0])).reshape(-1, n, n)
        predicted = streams + np.einsum("tsi,ith->sth", mix, streams)
        first = predicted[0]
        y = self.norm(at + "attn_norm", first)
        low = self.norm(at + "laurel_post_norm", self.linear(at + "laurel_r", self.linear(at + "laurel_l", y))) + y
        x = (first + self.norm(at + "post_attention_norm", self.attention(layer, at, y)) + low) / 2 ** 0.5
        self.layer = layer
        x = x + self.norm(at + "post_ffw_norm", self.feed_forward(at, self.norm(at + "ffn_norm", x)))
        amounts = 1 + self.linear(at + "altup_correct_coef", self.routed(at, x))
        corrected = predicted + amounts.T[:, :, None] * (x - first)
        gate = self.gelu(self.linear(at + "inp_gate", corrected[0] * self.tensors[at + "altup_correct_scale.weight"]))
        corrected[1:] += self.norm(at + "post_norm", self.linear(at + "proj", gate * own))
        return corrected

    def activation(self, x):
        """Of the gate, of which layers at the front keep only the largest values."""
        scales = self.key("activation_sparsity_scale", [1.6448533535003662] * 10 + [-np.inf] * self.layers)
        if np.isfinite(scales[self.layer]):
            x = np.maximum(0, x - x.mean(-1, keepdims=True) - scales[self.layer] * x.std(-1, ddof=1, keepdims=True))
        return self.gelu(x)

    def turned(self, layer, at, x):
        """Later layers see the last keys and values that a layer with a window, or without, made for itself."""
        q, k, v = super().turned(layer, at, x)
        if layer < self.layers - self.key("attention.shared_kv_layers", max(0, self.layers - 20)):
            v = v / np.sqrt((v * v).mean(-1, keepdims=True) + self.epsilon)
            self.shared[self.local(layer)] = k, v
        return q, *self.shared[self.local(layer)]


class Starcoder2(Decoder):
    def feed_forward(self, at, x):
        return self.linear(at + "ffn_down", self.gelu(self.linear(at + "ffn_up", x)))


class Phi2(Starcoder2):
    def block(self, layer, at, x):
        y = self.norm(at + "attn_norm", x)
        return x + self.attention(layer, at, y) + self.feed_forward(at, y)


class Glm4(Sandwich):
    adjacent = True

    def feed_forward(self, at, x):
        gate, up = np.split(self.linear(at + "ffn_up", x), 2, axis=1)
        return self.linear(at + "ffn_down", silu(gate) * up)


class Phi3(Decoder):
    feed_forward = Glm4.feed_forward
    ignored = ("attention.sliding_window",)

    def local(self, layer):
        return bool(self.key("attention.sliding_window"))

    def frequencies(self, layer):
        long = self.key("context_length") > self.key("rope.scaling.original_context_length", self.key("context_length"))
        factors = self.tensors.get(f"rope_factors_{'long' if long else 'short'}.weight", 1.0)
        return self.base(layer) ** (-2.0 * np.arange(self.rotated // 2) / self.rotated) / factors

    def magnitude(self, layer):
        return self.key("rope.scaling.attn_factor", 1.0)


class Olmo2(Decoder):
    pattern = 4

    def block(self, layer, at, x):
        x = x + self.norm(at + "post_attention_norm", self.attention(layer, at, x))
        return x + self.norm(at + "post_ffw_norm", self.feed_forward(at, x))

    def head_norm(self, name, x):
        return self.norm(name, x.reshape(len(x), -1)).reshape(x.shape)


class Qwen2Moe(Decoder):
    def feed_forward(self, at, x):
        chances = softmax(self.linear(at + "ffn_gate_inp", x))
        best = np.argsort(-chances, axis=1)[:, :self.key("expert_used_count")]
        parts = {part: self.tensors[at + f"ffn_{part}_exps.weight"] for part in ("gate", "up", "down")}
        y = np.zeros_like(x)
        for token, experts in enumerate(best):
            for expert in experts:
                gate, up, down = (parts[part][expert] for part in ("gate", "up", "down"))
                y[token] += chances[token, expert] * (down @ (silu(gate @ x[token]) * (up @ x[token])))
        shared = silu(self.linear(at + "ffn_gate_shexp", x)) * self.linear(at + "ffn_up_shexp", x)
        opened = sigmoid(self.linear(at + "ffn_gate_inp_shexp", x))[:, None]
        return y + opened * self.linear(at + "ffn_down_shexp", shared)


class GptOss(Decoder):
    pattern = 2
    ignored = ("rope.scaling.type",)

    def leave_out(self, names):
        """llama.cpp reads the type, but rounds the ends of YaRN's mix."""

    def ends(self, low, high):
        return super().ends(low, high) if self.as_llama_cpp else (low, high)

    def scaled(self, layer):
        return True

    def weights(self, at, scores):
        sinks = np.broadcast_to(self.tensors[at + "attn_sinks.weight"][:, None, None], (*scores.shape[:2], 1))
        return softmax(np.concatenate([scores, sinks], -1))[..., :-1]

    def block(self, layer, at, x):
        x = x + self.attention(layer, at, self.norm(at + "attn_norm", x))
        return x + self.feed_forward(at, self.norm(at + "post_attention_norm", x))

    def feed_forward(self, at, x):
        logits = self.linear(at + "ffn_gate_inp", x)
        best = np.argsort(-logits, axis=1)[:, :self.key("expert_used_count")]
        y = np.zeros_like(x)
        for token, experts in enumerate(best):
            for expert, weight in zip(experts, softmax(logits[token, experts])):
                gate = np.minimum(self.expert(at + "ffn_gate_exps", expert, x[token]), 7)
                up = np.clip(self.expert(at + "ffn_up_exps", expert, x[token]), -7, 7)
                y[token] += weight * self.expert(at + "ffn_down_exps", expert, gate * sigmoid(1.702 * gate) * (up + 1))
        return y

    def expert(self, name, expert, x):
        return self.tensors[name + ".weight"][expert] @ x + self.tensors[name + ".bias"][expert]


class Granite(Decoder):
    adjacent = True

    def block(self, layer, at, x):
        scale = self.key("residual_scale") or 1.0
        x = x + scale * self.attention(layer, at, self.norm(at + "attn_norm", x))
        return x + scale * self.feed_forward(at, self.norm(at + "ffn_norm", x))

    def rotate(self, layer, x):
        return super().rotate(layer, x) if self.key("rope.scaling.finetuned", True) else x

    def attention_scale(self):
        return self.key("attention.scale") or super().attention_scale()

    def embedding_scale(self):
        return self.key("embedding_scale") or 1.0

    def logits(self, x):
        return x / self.key("logit_scale")


class Encoder(Decoder):
    """A text's rows see each other, and are pooled."""
    both_ways = True

    def embedding(self, ids):
        x = self.begun(self.tensors["token_embd.weight"][ids])
        for layer in range(self.layers):
            x = self.block(layer, f"blk.{layer}.", x)
        x = self.ended(x)
        return {1: x.mean(0), 2: x[0], 3: x[-1]}[self.key("pooling_type")]

    def ended(self, x):
        return self.norm("output_norm", x)


class GemmaEmbedding(Encoder, Gemma3):
    def begun(self, x):
        return x * self.embedding_scale()


class ModernBert(Encoder):
    def begun(self, x):
        return self.norm("token_embd_norm", x)

    def block(self, layer, at, x):
        x = x + self.attention(layer, at, self.norm(at + "attn_norm", x) if layer else x)
        return x + self.feed_forward(at, self.norm(at + "ffn_norm", x))

    def feed_forward(self, at, x):
        gate, up = np.split(self.linear(at + "ffn_up", x), 2, axis=1)
        return self.linear(at + "ffn_down", self.gelu(gate) * up)

    def norm(self, name, x):
        return super().norm(name, x - x.mean(-1, keepdims=True))

    def score(self, ids):
        """Of a text, by the classifier of the mean of its rows."""
        self.keys["modern-bert.pooling_type"] = 1
        x = self.gelu(self.linear("cls", self.embedding(ids)))
        return float(self.linear("cls.output", self.norm("cls.norm", x)).squeeze())

    def local(self, layer):
        return layer % 3 != 0

    def base(self, layer):
        return self.key("rope.freq_base_swa" if self.local(layer) else "rope.freq_base")


class Bert(Encoder, Starcoder2):
    """Norms follow each half of a layer."""

    def block(self, layer, at, x):
        x = self.norm(at + "attn_output_norm", x + self.attention(layer, at, x))
        return self.norm(at + "layer_output_norm", x + self.feed_forward(at, x))

    def begun(self, x):
        if "token_types.weight" in self.tensors:
            x = x + self.tensors["token_types.weight"][0]
        return self.norm("token_embd_norm", self.placed(x))

    def ended(self, x):
        return x

    def score(self, ids):
        """Of a text, by the classifier of its first row."""
        self.keys["bert.pooling_type"] = 2
        x = self.embedding(ids)
        x = np.tanh(self.linear("cls", x)) if "cls.weight" in self.tensors else x
        return float(self.linear("cls.output", x).squeeze())

    def placed(self, x):
        return x + self.tensors["position_embd.weight"][:len(x)]

    def rotate(self, layer, x):
        return x


class NomicBert(Bert):
    rotate = Decoder.rotate
    feed_forward = Decoder.feed_forward

    def placed(self, x):
        return x


class JinaBertV2(Bert):
    def falls(self, distance):
        whole = 2 ** int(np.floor(np.log2(self.heads)))
        halves = [2.0 ** (-8.0 * (h + 1) / whole) for h in range(whole)]
        between = [2.0 ** (-4.0 * (2 * h + 1) / whole) for h in range(self.heads - whole)]
        return np.array(halves + between)[:, None, None] * distance

    def block(self, layer, at, x):
        y = self.norm(at + "attn_output_norm", x + self.attention(layer, at, x))
        if at + "attn_norm_2.weight" in self.tensors:
            y = self.norm(at + "attn_norm_2", y + x)
        return self.norm(at + "layer_output_norm", y + self.feed_forward(at, y))

    def score(self, ids):
        """Of a text, by its first row and the only layer of the classifier."""
        self.keys["jina-bert-v2.pooling_type"] = 2
        return float(np.tanh(self.linear("cls", self.embedding(ids))).squeeze())

    def head_norm(self, name, x):
        return self.norm(name, x.reshape(len(x), -1)).reshape(x.shape) if name + ".weight" in self.tensors else x

    def feed_forward(self, at, x):
        up = self.linear(at + "ffn_up", x)
        if at + "ffn_gate.weight" in self.tensors:
            active = self.gelu(self.linear(at + "ffn_gate", x)) * up
        elif up.shape[1] == self.key("feed_forward_length"):
            active = self.gelu(up)
        else:
            active = self.gelu(up[:, :up.shape[1] // 2]) * up[:, up.shape[1] // 2:]
        return self.linear(at + "ffn_down", active)

    def placed(self, x):
        return x


class JinaBertV3(NomicBert):
    feed_forward = Bert.feed_forward


ENCODERS = {"bert": Bert, "nomic-bert": NomicBert, "jina-bert-v2": JinaBertV2, "jina-bert-v3": JinaBertV3, "modern-bert": ModernBert,
            "gemma-embedding": GemmaEmbedding}
KNOWN = {"gemma2": Gemma2, "gemma3": Gemma3, "gemma3n": Gemma3n, "starcoder2": Starcoder2, "phi2": Phi2, "glm4": Glm4, "olmo2": Olmo2, "qwen2moe": Qwen2Moe,
         "granite": Granite, "phi3": Phi3, "gpt-oss": GptOss}
GELU = (Gemma3, Starcoder2)


def answers(path, ids, lengths):
    """Log-probabilities after each of `lengths` ids: exact, and as llama.cpp computes them, with its table and without the
    keys that it ignores. Then whether there is a table, and whether an ignored key. None for an unknown architecture."""
    from gguf import GGUFReader
    fields = GGUFReader(path).fields
    name = fields["general.architecture"].contents()
    kind = KNOWN.get(name)
    if kind is None:
        return None
    rows = [length - 1 for length in lengths]
    exact, same = (kind(path, as_llama_cpp).logp(np.array(ids))[rows] for as_llama_cpp in (False, True))
    ignores = any(f"{name}.{key}" in fields for key in kind.ignored)
    return exact, same, issubclass(kind, GELU), ignores


def embeddings(path, ids, lengths):
    """Embeddings of the first of `lengths` ids: exact, and as llama.cpp computes them with its GELU table. Then whether it has
    one."""
    from gguf import GGUFReader
    name = GGUFReader(path).fields["general.architecture"].contents()
    models = [ENCODERS[name](path, as_llama_cpp) for as_llama_cpp in (False, True)]
    exact, same = (np.stack([model.embedding(np.array(ids[:length])) for length in lengths]) for model in models)
    return exact, same, name != "nomic-bert"


def scores(path, texts):
    """Scores of lists of ids by a classifier: exact, and as llama.cpp computes them with its GELU table."""
    from gguf import GGUFReader
    kind = {**ENCODERS, "qwen3": Qwen3}[GGUFReader(path).fields["general.architecture"].contents()]
    models = [kind(path, as_llama_cpp) for as_llama_cpp in (False, True)]
    return [[model.score(np.array(ids)) for ids in texts] for model in models]
