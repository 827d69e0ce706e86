"""Messages of the protocol: weights.

`write_messages.py` writes this file from PROTOCOL.md, which says what each field means.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Annotated, ClassVar

from ..wire import Call, Each, Ext, Message, StreamCall, Text, U32, U64, U8, Variant
from .limits import DEVICES, ERROR, EVENTS, LABEL, LAYERS, MODELS, NAME, PARTS, VALUE


@dataclass(slots=True)
class PreloadAll(Variant):
    NUMBER: ClassVar[int] = 0


@dataclass(slots=True)
class PreloadCritical(Variant):
    NUMBER: ClassVar[int] = 1


@dataclass(slots=True)
class PreloadFirst(Variant):
    NUMBER: ClassVar[int] = 2

    value: U32


@dataclass(slots=True)
class PreloadLayers(Variant):
    NUMBER: ClassVar[int] = 3

    value: Annotated[list[U32], Each(LAYERS)]


Preload = PreloadAll | PreloadCritical | PreloadFirst | PreloadLayers


@dataclass(slots=True, kw_only=True)
class LoadToDeviceEnd(Message):
    tensors: U32
    device_bytes: U64
    elapsed_us: U64
    ext: Ext = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class LoadToDeviceItem(Message):
    tensors: U32
    tensors_total: U32
    device_bytes: U64
    device_bytes_total: U64
    bytes_per_second: U64
    ext: Ext = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class LoadToDeviceRequest(StreamCall[LoadToDeviceItem, LoadToDeviceEnd]):
    OP: ClassVar[int] = 29

    @classmethod
    def item(cls) -> type[LoadToDeviceItem]:
        return LoadToDeviceItem

    @classmethod
    def end(cls) -> type[LoadToDeviceEnd]:
        return LoadToDeviceEnd

    model: Annotated[str, Text(NAME)]
    what: Preload
    ext: Ext = field(default_factory=dict)


@dataclass(slots=True)
class CacheScopeAll(Variant):
    NUMBER: ClassVar[int] = 0


@dataclass(slots=True)
class CacheScopeModel(Variant):
    NUMBER: ClassVar[int] = 1

    value: Annotated[str, Text(NAME)]


CacheScope = CacheScopeAll | CacheScopeModel


@dataclass(slots=True, kw_only=True)
class ClearCacheReply(Message):
    parts: U64
    device_bytes: U64
    ext: Ext = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class ClearCacheRequest(Call[ClearCacheReply]):
    OP: ClassVar[int] = 30

    @classmethod
    def reply(cls) -> type[ClearCacheReply]:
        return ClearCacheReply

    scope: CacheScope
    ext: Ext = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class StreamedFit(Message):
    resident_bytes: U64
    step_bytes: U64


@dataclass(slots=True)
class FitWhole(Variant):
    NUMBER: ClassVar[int] = 0


@dataclass(slots=True)
class FitStreamed(Variant):
    NUMBER: ClassVar[int] = 1

    value: StreamedFit


@dataclass(slots=True)
class FitNo(Variant):
    NUMBER: ClassVar[int] = 2

    value: U64


Fit = FitWhole | FitStreamed | FitNo


@dataclass(slots=True, kw_only=True)
class LeavingEntry(Message):
    id: U64
    model: Annotated[str, Text(NAME)]
    device_bytes: U64


@dataclass(slots=True, kw_only=True)
class PlanReply(Message):
    device: U32
    context_tokens: U32
    weight_bytes: U64
    resident_bytes: U64
    kv_bytes: U64
    scratch_bytes: U64
    available_bytes: U64
    budget_bytes: U64
    others_bytes: U64
    fit: Fit
    leaving: Annotated[list[LeavingEntry], Each(MODELS)]
    leaving_bytes: U64
    load_ms: U64 | None = None
    queued: U32
    ext: Ext = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class PlanRequest(Call[PlanReply]):
    OP: ClassVar[int] = 31

    @classmethod
    def reply(cls) -> type[PlanReply]:
        return PlanReply

    model: Annotated[str, Text(NAME)]
    context_tokens: U32
    ext: Ext = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class DeviceMemory(Message):
    kind: Annotated[str, Text(LABEL)]
    device: Annotated[str, Text(LABEL)]
    weight_bytes: U64
    kv_bytes: U64
    scratch_bytes: U64
    staging_bytes: U64
    graph_bytes: U64
    taken_bytes: U64
    budget_bytes: U64
    available_bytes: U64
    total_bytes: U64
    free_bytes: U64
    others_bytes: U64
    sequences_running: U32
    sequences_queued: U32
    decode_rows: U64
    prefill_rows: U64
    loads: U64
    hits: U64
    load_bytes: U64
    evictions: U64
    evicted_bytes: U64
    load_waits: U64
    load_wait_us: U64
    bytes_per_second: U64
    ext: Ext = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class LoadingProgress(Message):
    tensors: U32
    tensors_total: U32
    device_bytes: U64
    device_bytes_total: U64


@dataclass(slots=True, kw_only=True)
class Rules(Message):
    pinned: bool
    priority: U8
    layers_min: U32
    idle_s: U32


@dataclass(slots=True, kw_only=True)
class ResidencyEntry(Message):
    id: U64
    device: U32
    model: Annotated[str, Text(NAME)]
    parts: Annotated[str, Text(PARTS)]
    weight_bytes: U64
    kv_bytes: U64
    scratch_bytes: U64
    rules: Rules
    sequences: U32
    idle_ms: U64 | None = None
    eviction_place: U32
    loading: LoadingProgress | None = None
    ext: Ext = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class ResidencyReply(Message):
    devices: Annotated[list[DeviceMemory], Each(DEVICES)]
    models: Annotated[list[ResidencyEntry], Each(MODELS)]
    more: bool
    ext: Ext = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class ResidencyRequest(Call[ResidencyReply]):
    OP: ClassVar[int] = 32

    @classmethod
    def reply(cls) -> type[ResidencyReply]:
        return ResidencyReply

    after: U64
    ext: Ext = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class SetRulesReply(Message):
    rules: Rules
    host_pinned: bool
    host_reason: Annotated[str, Text(VALUE)]
    ext: Ext = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class SetRulesRequest(Call[SetRulesReply]):
    OP: ClassVar[int] = 33

    @classmethod
    def reply(cls) -> type[SetRulesReply]:
        return SetRulesReply

    model: Annotated[str, Text(NAME)]
    pinned: bool | None = None
    priority: U8 | None = None
    layers_min: U32 | None = None
    idle_s: U32 | None = None
    ext: Ext = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class SubscribeEnd(Message):
    ext: Ext = field(default_factory=dict)


class EventKind(IntEnum):
    LOADED = 0
    EVICTED = 1
    DEVICE_LOST = 2
    MODEL_MAPPED = 3
    MODEL_UNMAPPED = 4
    MODEL_POISONED = 5


@dataclass(slots=True, kw_only=True)
class EventEntry(Message):
    kind: EventKind
    id: U64
    model: Annotated[str, Text(NAME)]
    part: U32
    parts: U32
    device_bytes: U64
    text: Annotated[str, Text(ERROR)]
    ext: Ext = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class SubscribeItem(Message):
    missed: U64
    events: Annotated[list[EventEntry], Each(EVENTS)]
    ext: Ext = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class SubscribeRequest(StreamCall[SubscribeItem, SubscribeEnd]):
    OP: ClassVar[int] = 34

    @classmethod
    def item(cls) -> type[SubscribeItem]:
        return SubscribeItem

    @classmethod
    def end(cls) -> type[SubscribeEnd]:
        return SubscribeEnd

    ext: Ext = field(default_factory=dict)
