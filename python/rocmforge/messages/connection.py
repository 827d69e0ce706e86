"""Messages of the protocol: connection.

`write_messages.py` writes this file from PROTOCOL.md, which says what each field means.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from ..wire import Blob, Call, Each, Ext, Message, Signal, Text, U16, U32
from .limits import DETAILS, ERROR, LABEL, OPS, PING, VALUE


@dataclass(slots=True, kw_only=True)
class Cancel(Signal):
    OP: ClassVar[int] = 1

    ext: Ext = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Credit(Signal):
    OP: ClassVar[int] = 2

    items: U32
    ext: Ext = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class PingReply(Message):
    payload: Annotated[bytes, Blob(PING)]
    ext: Ext = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class PingRequest(Call[PingReply]):
    OP: ClassVar[int] = 16

    @classmethod
    def reply(cls) -> type[PingReply]:
        return PingReply

    payload: Annotated[bytes, Blob(PING)]
    ext: Ext = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class FailRequest(Signal):
    OP: ClassVar[int] = 27

    code: U16
    ext: Ext = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class DetailEntry(Message):
    key: Annotated[str, Text(LABEL)]
    value: Annotated[str, Text(VALUE)]


@dataclass(slots=True, kw_only=True)
class WireError(Message):
    code: U16
    retryable: bool
    retry_after_ms: U32
    message: Annotated[str, Text(ERROR)]
    detail: Annotated[list[DetailEntry], Each(DETAILS)]
    ext: Ext = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Limits(Message):
    frame_bytes_max: U32
    streams_max: U32
    fds_max: U32
    initial_credit: U32
    context_tokens_max: U32
    stop_texts_max: U32
    stop_text_bytes_max: U32
    top_logprobs_max: U32
    ext: Ext = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class OpInfo(Message):
    op: U16
    name: Annotated[str, Text(LABEL)]


@dataclass(slots=True, kw_only=True)
class InfoReply(Message):
    version: Annotated[str, Text(LABEL)]
    ops: Annotated[list[OpInfo], Each(OPS)]
    limits: Limits
    ext: Ext = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class InfoRequest(Call[InfoReply]):
    OP: ClassVar[int] = 17

    @classmethod
    def reply(cls) -> type[InfoReply]:
        return InfoReply

    ext: Ext = field(default_factory=dict)
