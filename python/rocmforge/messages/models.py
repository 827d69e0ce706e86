"""Messages of the protocol: models.

`write_messages.py` writes this file from PROTOCOL.md, which says what each field means.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Annotated, ClassVar

from ..wire import Call, Each, Ext, Message, Text, U128, U32, U64
from .limits import DIMS, ENDS, ENTRIES, KEY, LABEL, MODELS, NAME, VALUE


class ModelState(IntEnum):
    REGISTERED = 0
    MAPPED = 1
    DRAINING = 2
    POISONED = 3
    UNUSABLE = 4


@dataclass(slots=True, kw_only=True)
class ModelSummary(Message):
    name: Annotated[str, Text(NAME)]
    state: ModelState
    file_bytes: U64
    architecture: Annotated[str, Text(LABEL)]
    sequences: U32
    reason: Annotated[str, Text(VALUE)]
    ext: Ext = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class ListReply(Message):
    models: Annotated[list[ModelSummary], Each(MODELS)]
    more: bool
    ext: Ext = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class ListRequest(Call[ListReply]):
    OP: ClassVar[int] = 18

    @classmethod
    def reply(cls) -> type[ListReply]:
        return ListReply

    after: Annotated[str, Text(NAME)]
    ext: Ext = field(default_factory=dict)


class PagesState(IntEnum):
    AS_THEY_COME = 0
    COMING = 1
    HERE = 2
    GIVEN_BACK = 3
    REFUSED = 4
    FAILED = 5


class Residency(IntEnum):
    NONE = 0
    POPULATE = 1
    LOCK = 2


@dataclass(slots=True, kw_only=True)
class HostMemory(Message):
    wanted: Residency
    state: PagesState
    mapped_bytes: U64
    resident_bytes: U64
    locked_bytes: U64
    read_bytes: U64
    cached_bytes: U64 | None = None
    reason: Annotated[str, Text(VALUE)]
    ext: Ext = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class MetadataEntry(Message):
    key: Annotated[str, Text(KEY)]
    kind: Annotated[str, Text(LABEL)]
    value: Annotated[str, Text(VALUE)]


@dataclass(slots=True, kw_only=True)
class TensorEntry(Message):
    name: Annotated[str, Text(LABEL)]
    dtype: Annotated[str, Text(LABEL)]
    dims: Annotated[list[U64], Each(DIMS)]
    offset_bytes: U64
    bytes: U64


@dataclass(slots=True, kw_only=True)
class TypeCount(Message):
    dtype: Annotated[str, Text(LABEL)]
    tensors: U32
    bytes: U64


@dataclass(slots=True, kw_only=True)
class ShowReply(Message):
    summary: ModelSummary
    gguf_version: U32
    parameters: U64
    weight_bytes: U64
    context_length: U32
    hidden: U32
    layers: U32
    heads: U32
    kv_heads: U32
    head_dim: U32
    ffn: U32
    vocab: U32
    tokenizer: Annotated[str, Text(LABEL)]
    chat_template: bool
    end_of_generation: Annotated[list[U32], Each(ENDS)]
    types: Annotated[list[TypeCount], Each(ENTRIES)]
    metadata_total: U32
    tensors_total: U32
    metadata: Annotated[list[MetadataEntry], Each(ENTRIES)]
    tensors: Annotated[list[TensorEntry], Each(ENTRIES)]
    host: HostMemory
    ext: Ext = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class ShowRequest(Call[ShowReply]):
    OP: ClassVar[int] = 19

    @classmethod
    def reply(cls) -> type[ShowReply]:
        return ShowReply

    model: Annotated[str, Text(NAME)]
    full: bool
    skip_metadata: U32
    skip_tensors: U32
    ext: Ext = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class LoadReply(Message):
    summary: ModelSummary
    mapped_now: bool
    elapsed_us: U64
    ext: Ext = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class LoadRequest(Call[LoadReply]):
    OP: ClassVar[int] = 20

    @classmethod
    def reply(cls) -> type[LoadReply]:
        return LoadReply

    name: Annotated[str, Text(NAME)]
    by_descriptor: bool
    request_id: U128
    ext: Ext = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class UnloadReply(Message):
    was_mapped: bool
    draining_sequences: U32
    ext: Ext = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class UnloadRequest(Call[UnloadReply]):
    OP: ClassVar[int] = 21

    @classmethod
    def reply(cls) -> type[UnloadReply]:
        return UnloadReply

    name: Annotated[str, Text(NAME)]
    request_id: U128
    ext: Ext = field(default_factory=dict)
