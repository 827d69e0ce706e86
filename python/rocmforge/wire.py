"""Payloads as bytes: section 5 of PROTOCOL.md.

A message is a dataclass. The annotation of each field says how it is written, and `encode` and `decode` read that. So the
messages, which `write_messages.py` writes from the document, need no code of their own.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

from .errors import InvalidRequest, ProtocolError

CRITICAL = 0x8000
"""Bit of an extension's key: who does not know the key fails the request."""

EXTENSIONS_MAX, EXTENSION_BYTES_MAX = 16, 4096

KNOWN_EXTENSIONS: dict[str, dict[int, int]] = {
    "GenerateRequest": {0x8001: 255, 0x8002: 65536, 0x8003: 4096, 0x8004: 524288, 0x8005: 4096, 0x8006: 4096, 0x8007: 4096,
                        0x8008: 524288},
    "GenerateEnd": {4: 524288},
}
"""Most bytes of known extensions: the critical ones, and those above the usual limit."""


class Message:
    """A struct of section 7."""

    __slots__ = ()


Reply = TypeVar("Reply", bound=Message)
Item = TypeVar("Item", bound=Message)
End = TypeVar("End", bound=Message)
Decoded = TypeVar("Decoded", bound=Message)


class Signal(Message):
    """A message of a client without an answer of its own."""

    __slots__ = ()
    OP: ClassVar[int]


class Call(Message, Generic[Reply]):
    """A request that is answered by one reply."""

    __slots__ = ()
    OP: ClassVar[int]

    @classmethod
    def reply(cls) -> type[Reply]:
        """The type of its reply."""
        raise NotImplementedError


class StreamCall(Message, Generic[Item, End]):
    """A request that is answered by any number of items and an end."""

    __slots__ = ()
    OP: ClassVar[int]

    @classmethod
    def item(cls) -> type[Item]:
        """The type of its items."""
        raise NotImplementedError

    @classmethod
    def end(cls) -> type[End]:
        """The type of its end."""
        raise NotImplementedError


class Variant:
    """One variant of an enum in which variants have content; `value` holds it."""

    __slots__ = ()
    NUMBER: ClassVar[int]


class Reader:
    """Reads a payload in order. Every failure is a `ProtocolError`."""

    __slots__ = ("data", "at")

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> bytes:
        if count > len(self.data) - self.at:
            raise ProtocolError(f"{count} bytes at offset {self.at} reach past the payload's {len(self.data)}")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def count(self, limit: int, what: str) -> int:
        count = self.number(8)
        if count > limit:
            raise ProtocolError(f"{count} {what}, at most {limit}")
        return count

    def one_of(self, count: int) -> int:
        byte = self.number(1)
        if byte >= count:
            raise ProtocolError(f"byte {byte} where 0 or 1 is expected")
        return byte


class Kind:
    """How values of one type are read and written. `where` names the field in an error."""

    def read(self, reader: Reader) -> Any:
        raise NotImplementedError

    def write(self, out: bytearray, value: Any, where: str) -> None:
        raise NotImplementedError


@dataclass(frozen=True)
class Unsigned(Kind):
    """An unsigned integer of this many bytes."""

    size: int

    def read(self, reader: Reader) -> int:
        return reader.number(self.size)

    def write(self, out: bytearray, value: Any, where: str) -> None:
        if not isinstance(value, int) or not 0 <= value < 1 << 8 * self.size:
            raise InvalidRequest(f"{where} is {value!r}, not a number from 0 to {(1 << 8 * self.size) - 1}")
        out += value.to_bytes(self.size, "little")


class Float(Kind):
    """A number of 32 bits in single precision."""

    def read(self, reader: Reader) -> float:
        (value,) = struct.unpack("<f", reader.take(4))
        return float(value)

    def write(self, out: bytearray, value: Any, where: str) -> None:
        try:
            out += struct.pack("<f", value)
        except (struct.error, OverflowError, TypeError):
            raise InvalidRequest(f"{where} is {value!r}, not a number in single precision") from None


class Bool(Kind):
    """One byte, 0 or 1."""

    def read(self, reader: Reader) -> bool:
        return bool(reader.one_of(2))

    def write(self, out: bytearray, value: Any, where: str) -> None:
        if not isinstance(value, bool):
            raise InvalidRequest(f"{where} is {value!r}, not true or false")
        out.append(value)


@dataclass(frozen=True)
class Blob(Kind):
    """At most so many bytes."""

    limit: int

    def read(self, reader: Reader) -> bytes:
        return reader.take(reader.count(self.limit, "bytes"))

    def write(self, out: bytearray, value: Any, where: str) -> None:
        if not isinstance(value, bytes | bytearray):
            raise InvalidRequest(f"{where} is {type(value).__name__}, not bytes")
        if len(value) > self.limit:
            raise InvalidRequest(f"{where} has {len(value)} bytes, at most {self.limit} are allowed")
        out += len(value).to_bytes(8, "little")
        out += value


@dataclass(frozen=True)
class Text(Kind):
    """Text of at most so many bytes in UTF-8."""

    limit: int

    def read(self, reader: Reader) -> str:
        try:
            return reader.take(reader.count(self.limit, "bytes")).decode("utf-8")
        except UnicodeDecodeError as error:
            raise ProtocolError(f"a text is not UTF-8: {error}") from None

    def write(self, out: bytearray, value: Any, where: str) -> None:
        if not isinstance(value, str):
            raise InvalidRequest(f"{where} is {type(value).__name__}, not text")
        try:
            data = value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"{where} cannot be written in UTF-8: {error.reason}") from None
        Blob(self.limit).write(out, data, where)


@dataclass(frozen=True)
class Each(Kind):
    """At most so many elements. `of` is filled in from the annotation."""

    limit: int
    of: Kind | None = None

    def element(self) -> Kind:
        assert self.of is not None, "the kind of the elements comes from the annotation"
        return self.of

    def read(self, reader: Reader) -> list[Any]:
        count, of = reader.count(self.limit, "elements"), self.element()
        if of == Unsigned(4):
            return list(struct.unpack(f"<{count}I", reader.take(4 * count)))
        return [of.read(reader) for _ in range(count)]

    def write(self, out: bytearray, value: Any, where: str) -> None:
        if isinstance(value, str | bytes) or not hasattr(value, "__len__"):
            raise InvalidRequest(f"{where} is {type(value).__name__}, not a list")
        if len(value) > self.limit:
            raise InvalidRequest(f"{where} has {len(value)} elements, at most {self.limit} are allowed")
        out += len(value).to_bytes(8, "little")
        of = self.element()
        for one in value:
            of.write(out, one, where)


@dataclass(frozen=True)
class Optional(Kind):
    """A value or none."""

    of: Kind

    def read(self, reader: Reader) -> Any:
        return self.of.read(reader) if reader.one_of(2) else None

    def write(self, out: bytearray, value: Any, where: str) -> None:
        out.append(value is not None)
        if value is not None:
            self.of.write(out, value, where)


@dataclass(frozen=True)
class Choice(Kind):
    """A number of an enum without content."""

    of: type[IntEnum]

    def read(self, reader: Reader) -> IntEnum:
        number = reader.number(4)
        try:
            return self.of(number)
        except ValueError:
            raise ProtocolError(f"{self.of.__name__} has no variant {number}") from None

    def write(self, out: bytearray, value: Any, where: str) -> None:
        if not isinstance(value, self.of):
            raise InvalidRequest(f"{where} is {value!r}, not a {self.of.__name__}")
        out += value.to_bytes(4, "little")


@dataclass(frozen=True)
class Tagged(Kind):
    """A variant's number, then its content if it has one."""

    variants: tuple[type[Variant], ...]

    def read(self, reader: Reader) -> Variant:
        number = reader.number(4)
        for variant in self.variants:
            if variant.NUMBER == number:
                return variant(*(kind.read(reader) for _, kind in fields(variant)))
        raise ProtocolError(f"there is no variant {number} of {self.variants[0].__name__} and its like")

    def write(self, out: bytearray, value: Any, where: str) -> None:
        if not isinstance(value, self.variants):
            names = ", ".join(variant.__name__ for variant in self.variants)
            raise InvalidRequest(f"{where} is {type(value).__name__}, not one of {names}")
        out += value.NUMBER.to_bytes(4, "little")
        for name, kind in fields(type(value)):
            kind.write(out, getattr(value, name), f"{where}.{name}")


@dataclass(frozen=True)
class Struct(Kind):
    """A message inside another."""

    of: type[Message]

    def read(self, reader: Reader) -> Message:
        return _read(self.of, reader)

    def write(self, out: bytearray, value: Any, where: str) -> None:
        if not isinstance(value, self.of):
            raise InvalidRequest(f"{where} is {type(value).__name__}, not a {self.of.__name__}")
        _write(out, value)


@dataclass(frozen=True)
class Extensions(Kind):
    """Pairs of a key and bytes, no key twice. `known` has keys with limits of their own."""

    known: tuple[tuple[int, int], ...] = ()

    def limit(self, key: int) -> int:
        return dict(self.known).get(key, EXTENSION_BYTES_MAX)

    def read(self, reader: Reader) -> dict[int, bytes]:
        found: dict[int, bytes] = {}
        for _ in range(reader.count(EXTENSIONS_MAX, "extensions")):
            key = reader.number(2)
            if key & CRITICAL and key not in dict(self.known):
                raise ProtocolError(f"extension {key:#06x} is critical, and this client does not know it")
            if key in found:
                raise ProtocolError(f"extension {key:#06x} occurs twice")
            found[key] = reader.take(reader.count(self.limit(key), "bytes of an extension"))
        return found

    def write(self, out: bytearray, value: Any, where: str) -> None:
        if not isinstance(value, dict) or len(value) > EXTENSIONS_MAX:
            raise InvalidRequest(f"{where} is not a table of at most {EXTENSIONS_MAX} extensions")
        out += len(value).to_bytes(8, "little")
        for key, data in value.items():
            Unsigned(2).write(out, key, where)
            Blob(self.limit(key)).write(out, data, f"{where}[{key:#06x}]")


U8 = Annotated[int, Unsigned(1)]
U16 = Annotated[int, Unsigned(2)]
U32 = Annotated[int, Unsigned(4)]
U64 = Annotated[int, Unsigned(8)]
U128 = Annotated[int, Unsigned(16)]
F32 = Annotated[float, Float()]
Ext = Annotated[dict[int, bytes], Extensions()]


def _kind(hint: Any, owner: str) -> Kind:
    """How a field of this annotation is written."""
    if hint is bool:
        return Bool()
    if get_origin(hint) is Annotated:
        inner, kind = get_args(hint)[:2]
        if isinstance(kind, Each):
            return Each(kind.limit, _kind(get_args(inner)[0], owner))
        if isinstance(kind, Extensions):
            return Extensions(tuple(KNOWN_EXTENSIONS.get(owner, {}).items()))
        assert isinstance(kind, Kind)
        return kind
    if get_origin(hint) in (Union, UnionType):
        inner = get_args(hint)
        if NoneType in inner:
            return Optional(_kind(next(one for one in inner if one is not NoneType), owner))
        return Tagged(inner)
    if issubclass(hint, IntEnum):
        return Choice(hint)
    return Struct(hint)


_FIELDS: dict[type, tuple[tuple[str, Kind], ...]] = {}


def fields(shape: type) -> tuple[tuple[str, Kind], ...]:
    """Names and kinds of a shape's fields, in order."""
    if shape not in _FIELDS:
        _FIELDS[shape] = _fields(shape)
    return _FIELDS[shape]


def _fields(shape: type) -> tuple[tuple[str, Kind], ...]:
    hints = get_type_hints(shape, include_extras=True)
    names = getattr(shape, "__dataclass_fields__", {})
    return tuple((name, _kind(hints[name], shape.__name__)) for name in names if get_origin(hints[name]) is not ClassVar)


def _read(shape: type[Decoded], reader: Reader) -> Decoded:
    return shape(**{name: kind.read(reader) for name, kind in fields(shape)})


def _write(out: bytearray, message: Message) -> None:
    shape = type(message)
    for name, kind in fields(shape):
        kind.write(out, getattr(message, name), f"{shape.__name__}.{name}")


def encode(message: Message) -> bytes:
    """The payload of a message. `InvalidRequest` names the field that breaks a limit."""
    out = bytearray()
    _write(out, message)
    return bytes(out)


def decode(shape: type[Decoded], payload: bytes) -> Decoded:
    """The message of a payload, which ends with it. `ProtocolError` says what breaks a rule."""
    reader = Reader(payload)
    message = _read(shape, reader)
    if reader.at != len(payload):
        raise ProtocolError(f"{len(payload) - reader.at} bytes after the {shape.__name__}")
    return message
