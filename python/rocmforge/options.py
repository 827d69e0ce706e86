"""What a request may ask for, by name, and its bytes on the wire."""

from __future__ import annotations

import json
import secrets
import struct
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from .errors import InvalidRequest
from .messages import ChatMessage, GenerateRequest, Prompt, PromptChat, PromptIds, PromptText, SamplingOptions

SESSION, FORM, PENALTIES, EXTRAS, SAMPLERS, SCORES, EMBEDDING, DOCUMENT = range(0x8001, 0x8009)
PRIORITY, SHIFT, MARKS = 1, 2, 3
FORMS = ("schema", "regex", "lark", "gbnf")
POOLINGS = {None: 0, "mean": 1, "first": 2, "last": 3}
SAMPLER_FIELDS = "<6fB4fII"


class Options(TypedDict, total=False):
    """Options of a generation, all of which may be left out. PROTOCOL.md states ranges; the daemon refuses other values."""

    max_tokens: int
    """Most tokens of the answer; 0, as without it, to the end of the context."""
    temperature: float
    """0.8 without it; 0 takes the most likely token."""
    top_k: int
    """40 without it; 0 keeps all."""
    top_p: float
    """0.95 without it; 1 keeps all."""
    min_p: float
    """0.05 without it; 0 drops none."""
    seed: int
    """Without it the daemon chooses one, and the end of the answer reports it."""
    top_logprobs: int
    """With each token, log-probabilities of so many most likely ones, at most 20; 0 for none."""
    stop: Sequence[str]
    """Texts at which the answer ends."""
    ignore_eog: bool
    """Goes on where the model would end its answer."""
    timeout: float
    """Seconds from the request's arrival until the daemon gives it up."""
    session: str
    """Name of a session that the request begins or goes on with."""
    priority: int
    """Place among the user's own requests, 0 to 255; 128 without it."""
    context_shift: int
    """Goes on when the context is full, and keeps so many first tokens."""
    marks: bool
    """Marks of reasoning and of tool calls are part of the text, also if they are control tokens."""
    schema: Mapping[str, Any] | bool | str
    """The answer is JSON by this schema."""
    regex: str
    """The whole answer matches this expression."""
    lark: str
    """The answer is one of this grammar in Lark's syntax."""
    gbnf: str
    """The answer is one of this grammar in llama.cpp's syntax."""
    repeat_penalty: float
    frequency_penalty: float
    presence_penalty: float
    penalty_last: int
    """So many last tokens count for penalties; 64 without it."""
    penalty_prompt: bool
    """Whether tokens of the prompt count; true without it."""
    logit_bias: Mapping[int, float]
    """Added to logits, by token id."""
    typical_p: float
    top_n_sigma: float
    xtc_probability: float
    xtc_threshold: float
    dynatemp_range: float
    dynatemp_exponent: float
    mirostat: int
    """0 or 2."""
    mirostat_tau: float
    mirostat_eta: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_last: int
    dry_breakers: Sequence[str]
    tools: Sequence[Mapping[str, Any]]
    """Of a chat: what its template describes to the model. The answer's text holds the calls in the model's own form, which
    `rocmforge.calls.read` reads; it needs `marks`."""
    variables: Mapping[str, Any]
    """Of a chat: further variables of its template, such as `enable_thinking`."""


PENALTY_DEFAULTS: dict[str, Any] = {
    "repeat_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "penalty_last": 64, "penalty_prompt": True,
    "logit_bias": {},
}
SAMPLER_DEFAULTS: dict[str, Any] = {
    "typical_p": 1.0, "top_n_sigma": 0.0, "xtc_probability": 0.0, "xtc_threshold": 0.1, "dynatemp_range": 0.0,
    "dynatemp_exponent": 1.0, "mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1, "dry_multiplier": 0.0, "dry_base": 1.75,
    "dry_allowed_length": 2, "dry_last": 4096, "dry_breakers": ("\n", ":", '"', "*"),
}


def request(model: str, prompt: Prompt, options: Options) -> GenerateRequest:
    """The request of these options. `InvalidRequest` names an option that does not exist, or that cannot be written."""
    unknown = set(options) - Options.__optional_keys__
    if unknown:
        raise InvalidRequest(f"there is no option {', '.join(sorted(unknown))}")
    sampling = SamplingOptions(
        temperature=options.get("temperature", 0.8),
        top_k=options.get("top_k", 40),
        top_p=options.get("top_p", 0.95),
        min_p=options.get("min_p", 0.05),
        seed=options.get("seed"),
        top_logprobs=options.get("top_logprobs", 0),
    )
    return GenerateRequest(
        model=model,
        prompt=prompt,
        max_tokens=options.get("max_tokens", 0),
        sampling=sampling,
        stop=list(options.get("stop", ())),
        ignore_eog=options.get("ignore_eog", False),
        timeout_ms=_milliseconds(options["timeout"]) if "timeout" in options else 0,
        request_id=secrets.randbits(128),
        ext=_extensions(dict(options)),
    )


def _milliseconds(seconds: float) -> int:
    if not 0 < seconds < 1 << 22:
        raise InvalidRequest(f"timeout is {seconds!r}, not a time in seconds")
    return max(1, round(1000 * seconds))


def _extensions(options: dict[str, Any]) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    if "session" in options:
        found[SESSION] = str(options["session"]).encode()
    if "priority" in options:
        found[PRIORITY] = _packed("priority", "<B", options["priority"])
    if "context_shift" in options:
        found[SHIFT] = _packed("context_shift", "<I", options["context_shift"])
    if options.get("marks"):
        found[MARKS] = b""
    forms = [name for name in FORMS if name in options]
    if len(forms) > 1:
        raise InvalidRequest(f"an answer has one form, not {' and '.join(forms)}")
    for name in forms:
        text = options[name] if isinstance(options[name], str) else json.dumps(options[name])
        found[FORM] = bytes([FORMS.index(name)]) + text.encode()
    if PENALTY_DEFAULTS.keys() & options.keys():
        found[PENALTIES] = _penalties({**PENALTY_DEFAULTS, **options})
    if SAMPLER_DEFAULTS.keys() & options.keys():
        found[SAMPLERS] = _samplers({**SAMPLER_DEFAULTS, **options})
    return found


def _penalties(options: dict[str, Any]) -> bytes:
    numbers = [options[name] for name in ("repeat_penalty", "frequency_penalty", "presence_penalty", "penalty_last")]
    head = _packed("penalties", "<3fIB", *numbers, bool(options["penalty_prompt"]))
    return head + b"".join(_packed("logit_bias", "<If", *pair) for pair in options["logit_bias"].items())


def _samplers(options: dict[str, Any]) -> bytes:
    *numbers, breakers = (options[name] for name in SAMPLER_DEFAULTS)
    data = _packed("samplers", SAMPLER_FIELDS, *numbers)
    for breaker in breakers:
        text = str(breaker).encode()
        data += _packed("dry_breakers", "<B", len(text)) + text
    return data


def _packed(what: str, layout: str, *values: Any) -> bytes:
    try:
        return struct.pack(layout, *values)
    except (struct.error, OverflowError) as error:
        raise InvalidRequest(f"{what}: {error}") from None


def text_or_ids(prompt: str | Sequence[int]) -> Prompt:
    """A text, or token ids."""
    return PromptText(prompt) if isinstance(prompt, str) else PromptIds(list(prompt))


def chat_request(
    model: str, messages: str | Sequence[Mapping[str, Any] | ChatMessage], options: Options
) -> GenerateRequest:
    """A chat. Fields of messages beside `role` and `content` go to the model's chat template as they are."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    chat: list[ChatMessage] = []
    further: list[dict[str, Any] | None] = []
    for message in messages:
        if isinstance(message, ChatMessage):
            chat.append(message)
            further.append(None)
            continue
        rest = {key: value for key, value in message.items() if key not in ("role", "content")}
        content = message.get("content")
        if content is None:
            rest["content"] = None
        try:
            chat.append(ChatMessage(role=message["role"], content=content or ""))
        except KeyError:
            raise InvalidRequest(f"a message has no role: {message!r}") from None
        further.append(rest or None)
    extras: dict[str, Any] = {name: options[name] for name in ("tools", "variables") if name in options}
    if any(further):
        extras["messages"] = further
    made = request(model, PromptChat(chat), options)
    if extras:
        made.ext[EXTRAS] = json.dumps(extras).encode()
    return made


def complete_request(model: str, prompt: str | Sequence[int], options: Options) -> GenerateRequest:
    """A text or token ids, to go on with."""
    if {"tools", "variables"} & options.keys():
        raise InvalidRequest("tools and variables are of chats alone")
    return request(model, text_or_ids(prompt), options)


def score_request(model: str, prompt: str | Sequence[int], top_logprobs: int) -> GenerateRequest:
    """Asks for the log-probabilities of a prompt. The one token of its answer says nothing of the prompt."""
    made = request(model, text_or_ids(prompt), {"max_tokens": 1})
    made.ext[SCORES] = _packed("top_logprobs", "<B", top_logprobs)
    return made


def embed_request(model: str, prompt: str | Sequence[int], pooling: str | None, normalise: bool) -> GenerateRequest:
    """Asks for the embedding of a prompt."""
    if pooling not in POOLINGS:
        raise InvalidRequest(f"pooling is {pooling!r}, not 'mean', 'first', 'last' or None")
    made = request(model, text_or_ids(prompt), {})
    made.ext[EMBEDDING] = bytes([POOLINGS[pooling], normalise])
    return made


def rank_request(model: str, query: str, document: str) -> GenerateRequest:
    """Asks for the relevance of a document to a query."""
    made = request(model, PromptText(query), {})
    made.ext[DOCUMENT] = document.encode()
    return made
