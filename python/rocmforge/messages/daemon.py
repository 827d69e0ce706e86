"""Messages of the protocol: daemon.

`write_messages.py` writes this file from PROTOCOL.md, which says what each field means.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Annotated, ClassVar

from ..wire import Call, Each, Ext, Message, Text, U32, U64, Variant
from .limits import CHECKS, DEVICES, LABEL, NAME, SEQUENCES, SESSIONS, USERS, VALUE


class SequenceState(IntEnum):
    QUEUED = 0
    PREFILL = 1
    DECODE = 2
    STALLED = 3
    PREPARING = 4


@dataclass(slots=True, kw_only=True)
class SequenceEntry(Message):
    id: U64
    uid: U32
    model: Annotated[str, Text(NAME)]
    state: SequenceState
    prompt_tokens: U32
    prefilled_tokens: U32
    generated_tokens: U32
    max_tokens: U32
    kv_pages: U32
    age_ms: U64
    queue_position: U32
    ext: Ext = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class PsReply(Message):
    sequences: Annotated[list[SequenceEntry], Each(SEQUENCES)]
    more: bool
    ext: Ext = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class PsRequest(Call[PsReply]):
    OP: ClassVar[int] = 22

    @classmethod
    def reply(cls) -> type[PsReply]:
        return PsReply

    after: U64
    ext: Ext = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class CancelRequestsReply(Message):
    cancelled: U32
    ext: Ext = field(default_factory=dict)


@dataclass(slots=True)
class RequestScopeId(Variant):
    NUMBER: ClassVar[int] = 0

    value: U64


@dataclass(slots=True)
class RequestScopeUid(Variant):
    NUMBER: ClassVar[int] = 1

    value: U32


RequestScope = RequestScopeId | RequestScopeUid


@dataclass(slots=True, kw_only=True)
class CancelRequestsRequest(Call[CancelRequestsReply]):
    OP: ClassVar[int] = 35

    @classmethod
    def reply(cls) -> type[CancelRequestsReply]:
        return CancelRequestsReply

    scope: RequestScope
    ext: Ext = field(default_factory=dict)


class LimitOrigin(IntEnum):
    EVERY_USER = 0
    CONFIGURATION = 1
    REQUEST = 2


@dataclass(slots=True, kw_only=True)
class LimitInForce(Message):
    value: U32
    origin: LimitOrigin


@dataclass(slots=True, kw_only=True)
class UserLimitsEntry(Message):
    uid: U32
    requests: LimitInForce
    connections: LimitInForce
    passed_models: LimitInForce
    share: LimitInForce
    ext: Ext = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class LimitUserReply(Message):
    users: Annotated[list[UserLimitsEntry], Each(USERS)]
    ext: Ext = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class LimitUserRequest(Call[LimitUserReply]):
    OP: ClassVar[int] = 36

    @classmethod
    def reply(cls) -> type[LimitUserReply]:
        return LimitUserReply

    uid: U32 | None = None
    clear: bool
    requests: U32 | None = None
    connections: U32 | None = None
    passed_models: U32 | None = None
    share: U32 | None = None
    ext: Ext = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class UserEntry(Message):
    uid: U32
    connections: U64
    requests: U64
    request_bytes: U64
    answer_bytes: U64
    descriptors: U64
    passed_models: U64
    header_bytes: U64
    sequences: U64
    kv_pages: U64
    text_us: U64
    frame_us: U64
    device_us_per_s: U64
    ext: Ext = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class UsersReply(Message):
    users: Annotated[list[UserEntry], Each(USERS)]
    more: bool
    ext: Ext = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class UsersRequest(Call[UsersReply]):
    OP: ClassVar[int] = 37

    @classmethod
    def reply(cls) -> type[UsersReply]:
        return UsersReply

    after: U32 | None = None
    ext: Ext = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class SessionEntry(Message):
    name: Annotated[str, Text(LABEL)]
    model: Annotated[str, Text(NAME)]
    messages: U32 | None = None
    tokens: U64
    age_ms: U64
    bytes: U64
    in_use: bool
    ext: Ext = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class SessionsReply(Message):
    sessions: Annotated[list[SessionEntry], Each(SESSIONS)]
    ext: Ext = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class SessionsRequest(Call[SessionsReply]):
    OP: ClassVar[int] = 38

    @classmethod
    def reply(cls) -> type[SessionsReply]:
        return SessionsReply

    ext: Ext = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class ForgetSessionReply(Message):
    forgotten: U32
    ext: Ext = field(default_factory=dict)


@dataclass(slots=True)
class SessionScopeAll(Variant):
    NUMBER: ClassVar[int] = 0


@dataclass(slots=True)
class SessionScopeName(Variant):
    NUMBER: ClassVar[int] = 1

    value: Annotated[str, Text(LABEL)]


SessionScope = SessionScopeAll | SessionScopeName


@dataclass(slots=True, kw_only=True)
class ForgetSessionRequest(Call[ForgetSessionReply]):
    OP: ClassVar[int] = 39

    @classmethod
    def reply(cls) -> type[ForgetSessionReply]:
        return ForgetSessionReply

    scope: SessionScope
    ext: Ext = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class DeviceStatus(Message):
    kind: Annotated[str, Text(LABEL)]
    device: Annotated[str, Text(LABEL)]
    isa: Annotated[str, Text(LABEL)]
    threads: U32
    activations: Annotated[str, Text(LABEL)]
    kv_type: Annotated[str, Text(LABEL)]
    sequences_running: U32
    sequences_queued: U32
    kv_pages_used: U32
    kv_pages_max: U32
    kv_bytes: U64
    steps: U64
    rows: U64
    decode_rows: U64
    prefill_rows: U64
    sequences_done: U64
    sequences_failed: U64
    sequences_cancelled: U64
    tensors_loaded: U64
    tensor_hits: U64
    device_bytes: U64
    step_sequences: U64
    ext: Ext = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class HostStatus(Message):
    locked_bytes: U64
    lock_bytes_max: U64
    locks_refused: U32
    reason: Annotated[str, Text(VALUE)]
    pressure: Annotated[str, Text(LABEL)]
    pressure_events: U64
    ext: Ext = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class StatusReply(Message):
    version: Annotated[str, Text(LABEL)]
    uptime_ms: U64
    pid: U32
    draining: bool
    connections: U32
    models_mapped: U32
    devices: Annotated[list[DeviceStatus], Each(DEVICES)]
    rss_anon_bytes: U64
    rss_file_bytes: U64
    host: HostStatus
    ext: Ext = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class StatusRequest(Call[StatusReply]):
    OP: ClassVar[int] = 23

    @classmethod
    def reply(cls) -> type[StatusReply]:
        return StatusReply

    ext: Ext = field(default_factory=dict)


class CheckState(IntEnum):
    GOOD = 0
    NOTE = 1
    PROBLEM = 2


@dataclass(slots=True, kw_only=True)
class DoctorCheck(Message):
    name: Annotated[str, Text(LABEL)]
    state: CheckState
    found: Annotated[str, Text(VALUE)]
    advice: Annotated[str, Text(VALUE)]
    ext: Ext = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class GpuEntry(Message):
    index: U32
    name: Annotated[str, Text(LABEL)]
    arch: Annotated[str, Text(LABEL)]
    pci: Annotated[str, Text(LABEL)]
    memory_bytes: U64
    memory_free_bytes: U64
    units: U32
    wave: U32
    code: Annotated[str, Text(LABEL)]
    works: bool
    ext: Ext = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class DoctorReply(Message):
    checks: Annotated[list[DoctorCheck], Each(CHECKS)]
    gpus: Annotated[list[GpuEntry], Each(DEVICES)]
    ext: Ext = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class DoctorRequest(Call[DoctorReply]):
    OP: ClassVar[int] = 28

    @classmethod
    def reply(cls) -> type[DoctorReply]:
        return DoctorReply

    ext: Ext = field(default_factory=dict)
