"""The kept frames of tests/golden, both ways. They are written by another implementation of the protocol.

Needs no daemon: `python3 -m unittest tests.test_wire` in the folder `python`.
"""

from __future__ import annotations

import json
import struct
import unittest
from enum import IntEnum
from pathlib import Path
from typing import Any

from rocmforge import messages
from rocmforge.errors import Disconnected, InvalidRequest, ProtocolError, RequestError, TooManyStreams, server_error
from rocmforge.frames import HEADER, ITEM, MORE, REPLY, ClientHello, Header, ServerHello, frame
from rocmforge.streams import Streams
from rocmforge.wire import Choice, Each, Extensions, Float, Kind, Message, Optional, Struct, Tagged, decode, encode, fields

FRAMES = Path(__file__).resolve().parents[2] / "tests" / "golden" / "frames"
HELLOS = {"ClientHello": ClientHello, "ServerHello": ServerHello}


def kept() -> list[tuple[str, bytes, dict[str, Any]]]:
    """Name, bytes and content of each frame."""
    found = []
    for path in sorted(FRAMES.glob("*.hex")):
        found.append((path.stem, bytes.fromhex(path.read_text()), json.loads(path.with_suffix(".json").read_text("utf-8"))))
    return found


def single(value: float) -> float:
    """The nearest number in single precision: JSON has its decimal digits."""
    (nearest,) = struct.unpack("<f", struct.pack("<f", value))
    return float(nearest)


def of_json(kind: Kind, value: Any) -> Any:
    """The value that JSON describes."""
    if isinstance(kind, Struct):
        return message_of(kind.of, value)
    if isinstance(kind, Optional):
        return None if value is None else of_json(kind.of, value)
    if isinstance(kind, Each):
        return [of_json(kind.element(), one) for one in value]
    if isinstance(kind, Choice):
        return next(one for one in kind.of if one.name.replace("_", "").lower() == value.lower())
    if isinstance(kind, Tagged):
        name, *content = [value] if isinstance(value, str) else next(iter(value.items()))
        variant = next(one for one in kind.variants if one.__name__.endswith(name))
        return variant(*(of_json(inner, one) for (_, inner), one in zip(fields(variant), content, strict=True)))
    if isinstance(kind, Extensions):
        return {key: bytes(data) for key, data in value}
    if isinstance(kind, Float):
        return single(value)
    return bytes(value) if isinstance(value, list) else value


def message_of(shape: type[Any], value: dict[str, Any]) -> Any:
    kinds = fields(shape)
    assert [name for name, _ in kinds] == list(value), f"other fields of {shape.__name__}"
    return shape(**{name: of_json(kind, value[name]) for name, kind in kinds})


def hello_of(value: dict[str, Any]) -> Any:
    left_out = ("message", "magic", "name_len")
    content = {name: bytes(one) if isinstance(one, list) else one for name, one in value.items() if name not in left_out}
    return HELLOS[value["message"]](**content)


class GoldenFrames(unittest.TestCase):
    def test_every_frame_is_read_and_written_the_same(self) -> None:
        seen: set[str] = set()
        for name, data, content in kept():
            with self.subTest(name):
                seen.add(content["message"])
                if content["message"] in HELLOS:
                    expected = hello_of(content)
                    self.assertEqual(type(expected).decode(data), expected)
                    self.assertEqual(expected.encode(), data)
                    continue
                shape = getattr(messages, content["message"])
                header = Header.decode(data[: HEADER.size], len(data))
                payload = data[HEADER.size :]
                header.check_payload(payload)
                self.assertEqual(header.length, len(payload))
                expected = message_of(shape, content["payload"])
                self.assertEqual(decode(shape, payload), expected)
                self.assertEqual(encode(expected), payload)
                again = frame(header.stream, header.op, encode(expected), flags=header.flags, n_fds=header.n_fds)
                self.assertEqual(again, data)
                self.assertEqual(header.op, getattr(shape, "OP", header.op))
        carried = {name for name in messages.__all__ if name.endswith(("Request", "Reply", "Item", "End"))}
        self.assertEqual(seen, carried | {"Cancel", "Credit", "WireError", *HELLOS})

    def test_a_payload_that_is_cut_or_too_long_is_refused(self) -> None:
        for name, data, content in kept():
            if content["message"] in HELLOS:
                continue
            shape, payload = getattr(messages, content["message"]), data[HEADER.size :]
            for end in range(len(payload)):
                with self.subTest(name, end=end), self.assertRaises(ProtocolError):
                    decode(shape, payload[:end])
            with self.subTest(name), self.assertRaises(ProtocolError):
                decode(shape, payload + b"\0")

    def test_a_changed_byte_gives_another_value_or_is_refused(self) -> None:
        for name, data, content in kept():
            if content["message"] in HELLOS:
                continue
            shape, payload = getattr(messages, content["message"]), data[HEADER.size :]
            for at in range(len(payload)):
                changed = bytearray(payload)
                changed[at] ^= 0x80
                with self.subTest(name, at=at):
                    try:
                        self.assertEqual(encode(decode(shape, bytes(changed))), bytes(changed))
                    except ProtocolError:
                        pass


class Limits(unittest.TestCase):
    def test_a_field_out_of_its_range_is_named(self) -> None:
        cases: list[tuple[Message, str]] = [
            (messages.Credit(items=1 << 32), "Credit.items"),
            (messages.Credit(items=-1), "Credit.items"),
            (messages.PingRequest(payload=b"x" * 257), "PingRequest.payload"),
            (messages.ListRequest(after="ä" * 128), "ListRequest.after"),
            (messages.ListRequest(after="\ud800"), "ListRequest.after"),
            (messages.TokenizeReply(ids=[0] * 261121), "TokenizeReply.ids"),
            (messages.Credit(items=1, ext={1: b"x" * 4097}), "Credit.ext"),
            (messages.Credit(items=1, ext={key: b"" for key in range(17)}), "Credit.ext"),
            (messages.TopToken(id=1, logprob=1e39), "TopToken.logprob"),
        ]
        for message, field in cases:
            with self.subTest(field), self.assertRaisesRegex(InvalidRequest, field):
                encode(message)

    def test_extensions_that_are_critical_or_twice_there_are_refused(self) -> None:
        for pairs in ([(0x8001, b"")], [(1, b""), (1, b"")]):
            data = len(pairs).to_bytes(8, "little")
            for key, content in pairs:
                data += key.to_bytes(2, "little") + len(content).to_bytes(8, "little") + content
            with self.assertRaises(ProtocolError):
                decode(messages.PingReply, bytes(8) + data)


def hello(**changes: int) -> ServerHello:
    content: dict[str, Any] = dict.fromkeys(
        ["status", "minor", "max_minor", "features", "features_unknown", "retry_after_ms"], 0
    )
    content |= {"major": 1, "min_major": 1, "max_major": 1, "max_frame": 65536, "max_streams": 2, "initial_credit": 4}
    return ServerHello(**{**content, **changes}, server_id=bytes(16), boot_id=bytes(16))


class OpenStreams(unittest.TestCase):
    def setUp(self) -> None:
        self.streams = Streams(hello())

    def answer(self, stream: int, op: int, message: Message) -> None:
        self.streams.receive(frame(stream, op, encode(message), flags=MORE if op == ITEM else 0))

    def item(self) -> Message:
        return messages.SubscribeItem(missed=0, events=[])

    def test_answers_come_in_any_order_and_in_any_pieces(self) -> None:
        first, _ = self.streams.open(messages.PingRequest(payload=b"1"), 16)
        second, _ = self.streams.open(messages.PingRequest(payload=b"2"), 16)
        self.assertEqual((first.id, second.id), (1, 3))
        with self.assertRaises(TooManyStreams):
            self.streams.open(messages.PingRequest(payload=b"3"), 16)
        both = frame(3, REPLY, encode(messages.PingReply(payload=b"2"))) + frame(1, REPLY, encode(messages.PingReply(payload=b"1")))
        for byte in both:
            self.streams.receive(bytes([byte]))
        self.assertEqual(self.streams.take(first), messages.PingReply(payload=b"1"))
        self.assertEqual(self.streams.take(second), messages.PingReply(payload=b"2"))
        self.assertEqual(self.streams.open_streams, {})

    def test_credit_is_granted_when_half_is_used(self) -> None:
        stream, _ = self.streams.open(messages.SubscribeRequest(), 34)
        for taken in (1, 2):
            self.answer(1, ITEM, self.item())
            self.assertEqual(self.streams.take(stream), self.item())
            granted = self.streams.grant(stream)
            self.assertEqual(granted, b"" if taken == 1 else frame(1, 2, encode(messages.Credit(items=2))))

    def test_frames_that_break_a_rule_end_the_connection(self) -> None:
        error = messages.WireError(code=109, retryable=False, retry_after_ms=0, message="m", detail=[])
        cases = [
            frame(5, REPLY, b""),
            frame(1, ITEM, encode(self.item())),
            frame(1, 0x7000, b""),
            frame(1, REPLY, b"", flags=MORE),
            frame(1, REPLY, b"", n_fds=1),
            Header(length=65537, stream=1, op=REPLY).encode(),
            Header(length=0, stream=1, op=REPLY, flags=4).encode(),
            frame(0, 0x8003, encode(error)),
        ]
        for data in cases:
            streams = Streams(hello())
            stream, _ = streams.open(messages.PingRequest(payload=b""), 16)
            streams.receive(data)
            with self.subTest(data=data), self.assertRaises(Exception) as raised:
                streams.take(stream)
            self.assertIs(raised.exception, streams.broken)

    def test_an_item_without_credit_ends_the_connection(self) -> None:
        self.streams.open(messages.SubscribeRequest(), 34)
        for _ in range(4):
            self.answer(1, ITEM, self.item())
        self.assertIsNone(self.streams.broken)
        self.answer(1, ITEM, self.item())
        self.assertIsInstance(self.streams.broken, ProtocolError)

    def test_frames_of_an_abandoned_stream_are_dropped_until_its_end(self) -> None:
        stream, _ = self.streams.open(messages.SubscribeRequest(), 34)
        self.answer(1, ITEM, self.item())
        self.assertEqual(self.streams.abandon(stream), frame(1, 1, encode(messages.Cancel())))
        self.answer(1, ITEM, self.item())
        self.assertIn(1, self.streams.open_streams)
        self.answer(1, 0x8002, messages.SubscribeEnd())
        self.assertEqual((self.streams.open_streams, self.streams.broken), ({}, None))

    def test_what_came_before_the_end_of_the_connection_is_still_read(self) -> None:
        stream, _ = self.streams.open(messages.SubscribeRequest(), 34)
        self.answer(1, ITEM, self.item())
        self.streams.fail(Disconnected("gone"))
        self.assertEqual(self.streams.take(stream), self.item())
        with self.assertRaisesRegex(Disconnected, "gone"):
            self.streams.take(stream)


class Errors(unittest.TestCase):
    def test_a_servers_error_has_the_class_of_its_code(self) -> None:
        names = {210: "Cancelled", 205: "RequestError", 301: "CapacityError", 400: "ModelNotFound", 401: "ModelError"}
        names |= {500: "DeviceError", 900: "ServerError", 777: "ServerError"}
        for code, name in names.items():
            error = server_error(code, "Name", "what to do", True, 7, {"limit": "4"})
            self.assertEqual(type(error).__name__, name)
            self.assertEqual((error.code, error.retry_after_ms, error.detail, str(error)), (code, 7, {"limit": "4"}, "Name: what to do"))
        self.assertIsInstance(server_error(210, "", "", False, 0, {}), RequestError)

    def test_every_code_of_the_document_has_a_name(self) -> None:
        self.assertTrue(issubclass(messages.ErrorCode, IntEnum))
        self.assertEqual(sorted(messages.NAMES), sorted(messages.ErrorCode))


if __name__ == "__main__":
    unittest.main()
