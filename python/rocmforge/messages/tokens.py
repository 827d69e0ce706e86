"""Messages of the protocol: tokens.

`write_messages.py` writes this file from PROTOCOL.md, which says what each field means.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Annotated, ClassVar

from ..wire import Call, Each, Ext, F32, Message, StreamCall, Text, U128, U32, U64, Variant
from .limits import CHAT, IDS, NAME, ROLE, STOP, STOPS, TEXT, TOP


@dataclass(slots=True, kw_only=True)
class TokenizeReply(Message):
    ids: Annotated[list[U32], Each(IDS)]
    ext: Ext = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class TokenizeRequest(Call[TokenizeReply]):
    OP: ClassVar[int] = 24

    @classmethod
    def reply(cls) -> type[TokenizeReply]:
        return TokenizeReply

    model: Annotated[str, Text(NAME)]
    text: Annotated[str, Text(TEXT)]
    add_special: bool
    parse_special: bool
    ext: Ext = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class DetokenizeReply(Message):
    text: Annotated[str, Text(TEXT)]
    ext: Ext = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class DetokenizeRequest(Call[DetokenizeReply]):
    OP: ClassVar[int] = 25

    @classmethod
    def reply(cls) -> type[DetokenizeReply]:
        return DetokenizeReply

    model: Annotated[str, Text(NAME)]
    ids: Annotated[list[U32], Each(IDS)]
    show_special: bool
    ext: Ext = field(default_factory=dict)


class StopReason(IntEnum):
    END_OF_GENERATION = 0
    MAX_TOKENS = 1
    CONTEXT_FULL = 2
    STOP_TEXT = 3


@dataclass(slots=True, kw_only=True)
class Timings(Message):
    queue_us: U64
    load_us: U64
    prefill_us: U64
    decode_us: U64


@dataclass(slots=True, kw_only=True)
class Usage(Message):
    prompt_tokens: U32
    generated_tokens: U32


@dataclass(slots=True, kw_only=True)
class GenerateEnd(Message):
    stop_reason: StopReason
    text: Annotated[str, Text(TEXT)]
    usage: Usage
    timings: Timings
    seed: U64
    ext: Ext = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class TopToken(Message):
    id: U32
    logprob: F32


@dataclass(slots=True, kw_only=True)
class TokenLogprob(Message):
    logprob: F32
    top: Annotated[list[TopToken], Each(TOP)]


@dataclass(slots=True, kw_only=True)
class GenerateItem(Message):
    ids: Annotated[list[U32], Each(IDS)]
    text: Annotated[str, Text(TEXT)]
    logprobs: Annotated[list[TokenLogprob], Each(IDS)]
    prompt_ids: Annotated[list[U32], Each(IDS)]
    ext: Ext = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class ChatMessage(Message):
    role: Annotated[str, Text(ROLE)]
    content: Annotated[str, Text(TEXT)]


@dataclass(slots=True)
class PromptText(Variant):
    NUMBER: ClassVar[int] = 0

    value: Annotated[str, Text(TEXT)]


@dataclass(slots=True)
class PromptIds(Variant):
    NUMBER: ClassVar[int] = 1

    value: Annotated[list[U32], Each(IDS)]


@dataclass(slots=True)
class PromptChat(Variant):
    NUMBER: ClassVar[int] = 2

    value: Annotated[list[ChatMessage], Each(CHAT)]


Prompt = PromptText | PromptIds | PromptChat


@dataclass(slots=True, kw_only=True)
class SamplingOptions(Message):
    temperature: F32
    top_k: U32
    top_p: F32
    min_p: F32
    seed: U64 | None = None
    top_logprobs: U32


@dataclass(slots=True, kw_only=True)
class GenerateRequest(StreamCall[GenerateItem, GenerateEnd]):
    OP: ClassVar[int] = 26

    @classmethod
    def item(cls) -> type[GenerateItem]:
        return GenerateItem

    @classmethod
    def end(cls) -> type[GenerateEnd]:
        return GenerateEnd

    model: Annotated[str, Text(NAME)]
    prompt: Prompt
    max_tokens: U32
    sampling: SamplingOptions
    stop: Annotated[list[Annotated[str, Text(STOP)]], Each(STOPS)]
    ignore_eog: bool
    timeout_ms: U32
    request_id: U128
    ext: Ext = field(default_factory=dict)
