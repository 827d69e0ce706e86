"""Hellos and frame headers: sections 2 and 3 of PROTOCOL.md."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, fields

from .errors import InvalidRequest, ProtocolError, Refused, UnsupportedVersion
from .messages import NAMES
from .messages.limits import DESCRIPTORS, PAYLOAD, SMALLEST_MAX_FRAME

MAGIC = b"RFG1"
VERSION_MAJOR, VERSION_MINOR = 1, 0
UNSUPPORTED_MAJOR = 101
CLIENT_HELLO = struct.Struct("<4sHHHHIQ64s")
SERVER_HELLO = struct.Struct("<4sHHHHHHQQIIII16s16s")
HEADER = struct.Struct("<IIHBBI")
NAME_BYTES_MAX = 64

MORE, CRC = 1, 2
REPLY, ITEM, END, ERROR = 0x8000, 0x8001, 0x8002, 0x8003


@dataclass(slots=True, kw_only=True)
class ClientHello:
    """What a client says first."""

    min_major: int = VERSION_MAJOR
    max_major: int = VERSION_MAJOR
    minor: int = VERSION_MINOR
    max_frame: int = PAYLOAD
    features: int = 0
    name: str = ""

    def encode(self) -> bytes:
        name = self.name.encode("utf-8")
        if len(name) > NAME_BYTES_MAX:
            raise InvalidRequest(f"the client's name has {len(name)} bytes, at most {NAME_BYTES_MAX} are allowed")
        return CLIENT_HELLO.pack(
            MAGIC, self.min_major, self.max_major, self.minor, len(name), self.max_frame, self.features, name
        )

    @classmethod
    def decode(cls, data: bytes) -> ClientHello:
        """Reads one, as a server would."""
        magic, low, high, minor, length, max_frame, features, name = CLIENT_HELLO.unpack(data)
        if magic != MAGIC or length > NAME_BYTES_MAX or any(name[length:]):
            raise ProtocolError("the client's hello is none")
        try:
            text = name[:length].decode("utf-8")
        except UnicodeDecodeError:
            raise ProtocolError("the client's name is not UTF-8") from None
        return cls(min_major=low, max_major=high, minor=minor, max_frame=max_frame, features=features, name=text)


@dataclass(slots=True, kw_only=True)
class ServerHello:
    """What the daemon answers."""

    status: int
    major: int
    minor: int
    min_major: int
    max_major: int
    max_minor: int
    features: int
    features_unknown: int
    max_frame: int
    max_streams: int
    initial_credit: int
    retry_after_ms: int
    server_id: bytes
    boot_id: bytes

    def encode(self) -> bytes:
        """Its bytes, as a server would write them."""
        return SERVER_HELLO.pack(MAGIC, *(getattr(self, one.name) for one in fields(self)))

    @classmethod
    def decode(cls, data: bytes) -> ServerHello:
        magic, *values = SERVER_HELLO.unpack(data)
        if magic != MAGIC:
            raise ProtocolError("the first bytes of the server are not a hello of this protocol")
        return cls(**dict(zip((one.name for one in fields(cls)), values, strict=True)))

    def check(self) -> None:
        """Raises the reason why the connection was refused, or cannot be used."""
        if self.status == UNSUPPORTED_MAJOR or (self.status == 0 and self.major != VERSION_MAJOR):
            known = f"{self.min_major} to {self.max_major}" if self.status else f"{self.major}"
            raise UnsupportedVersion(f"the daemon speaks version {known} of the protocol, this client {VERSION_MAJOR}")
        if self.status:
            name = NAMES.get(self.status, "Unknown")
            raise Refused(f"the daemon refused the connection: {name} ({self.status})", self.status, self.retry_after_ms)
        bounds = {"max_frame": (SMALLEST_MAX_FRAME, PAYLOAD), "max_streams": (1, 1 << 32), "initial_credit": (1, 1 << 32)}
        for field, (low, high) in bounds.items():
            if not low <= getattr(self, field) <= high:
                raise ProtocolError(f"the server's hello has {field} {getattr(self, field)}, but {low} to {high} are allowed")


@dataclass(slots=True, kw_only=True)
class Header:
    """The 16 bytes before each payload."""

    length: int
    stream: int
    op: int
    flags: int = 0
    n_fds: int = 0
    crc_or_zero: int = 0

    def encode(self) -> bytes:
        return HEADER.pack(self.length, self.stream, self.op, self.flags, self.n_fds, self.crc_or_zero)

    @classmethod
    def decode(cls, data: bytes, length_max: int) -> Header:
        length, stream, op, flags, n_fds, crc = HEADER.unpack(data)
        if length > length_max:
            raise ProtocolError(f"a frame of {length} bytes, at most {length_max} were agreed")
        if flags & ~(MORE | CRC) or n_fds > DESCRIPTORS or (crc and not flags & CRC):
            raise ProtocolError(f"a header with flags {flags:#04x}, {n_fds} descriptors and checksum {crc:#010x}")
        return cls(length=length, stream=stream, op=op, flags=flags, n_fds=n_fds, crc_or_zero=crc)

    def checksum(self, payload: bytes) -> int:
        """CRC-32 of the header's first 12 bytes and the payload."""
        return zlib.crc32(self.encode()[:12] + payload)

    def check_payload(self, payload: bytes) -> None:
        if self.flags & CRC and self.checksum(payload) != self.crc_or_zero:
            raise ProtocolError(f"a payload with checksum {self.checksum(payload):#010x}, the header says {self.crc_or_zero:#010x}")


def frame(stream: int, op: int, payload: bytes, *, flags: int = 0, n_fds: int = 0, length_max: int = PAYLOAD) -> bytes:
    """A whole frame. `InvalidRequest` if the payload is longer than agreed."""
    if len(payload) > length_max:
        raise InvalidRequest(f"the request has {len(payload)} bytes, at most {length_max} were agreed")
    header = Header(length=len(payload), stream=stream, op=op, flags=flags, n_fds=n_fds)
    if flags & CRC:
        header.crc_or_zero = header.checksum(payload)
    return header.encode() + payload
