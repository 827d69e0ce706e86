"""The open requests of a connection, without any input or output: bytes come in, messages come out.

A stream's life: open, ended by its `Reply`, `End` or `Error`, taken by its owner, gone. If the owner gives it up first, the
stream is abandoned: what still comes is dropped until its end. `Connection` and `AsyncConnection` move the bytes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from .errors import Disconnected, ProtocolError, RocmforgeError, ServerError, TooManyStreams, server_error
from .frames import CRC, END, ERROR, HEADER, ITEM, MORE, REPLY, Header, ServerHello, frame
from .messages import NAMES, Cancel, Credit, WireError
from .wire import Call, Message, Signal, StreamCall, decode, encode

UNREAD_BYTES_MAX = 256 << 20
"""Most bytes of frames that wait to be taken, so that a broken daemon cannot fill the memory."""

STREAM_ID_MAX = (1 << 32) - 1


@dataclass(slots=True)
class Stream:
    """One open request."""

    id: int
    request: Message
    items: bool
    """It gets items and an end, not one reply."""
    credit: int
    """Items that the daemon may still send."""
    frames: deque[tuple[int, bytes]] = field(default_factory=deque)
    """Op and payload of each frame that nobody took."""
    ended: bool = False
    abandoned: bool = False


class Streams:
    """The streams of one connection."""

    def __init__(self, hello: ServerHello) -> None:
        self.hello = hello
        self.flags = CRC if hello.features & 1 else 0
        self.open_streams: dict[int, Stream] = {}
        self.broken: RocmforgeError | None = None
        """The first error that made the connection unusable."""
        self.heard = 0
        """Number of frames that came."""
        self._next_id = 1
        self._buffer = bytearray()
        self._unread_bytes = 0

    def open(self, request: Message, op: int, n_fds: int = 0) -> tuple[Stream, bytes]:
        """A stream for the request, and the frame that opens it. The frame must be written before that of the next stream."""
        if self.broken:
            raise self.broken
        if sum(not stream.ended for stream in self.open_streams.values()) >= self.hello.max_streams:
            raise TooManyStreams(f"{self.hello.max_streams} requests are open on this connection")
        if self._next_id > STREAM_ID_MAX:
            raise self.fail(Disconnected("all ids of requests are used: connect again"))
        data = frame(
            self._next_id, op, encode(request), flags=self.flags, n_fds=n_fds, length_max=self.hello.max_frame
        )
        items = isinstance(request, StreamCall)
        stream = Stream(self._next_id, request, items, self.hello.initial_credit if items else 0)
        self.open_streams[stream.id] = stream
        self._next_id += 2
        return stream, data

    def grant(self, stream: Stream) -> bytes:
        """The frame that lets the daemon send more items, once half of the credit is used; else nothing."""
        granted = self.hello.initial_credit - stream.credit - len(stream.frames)
        if stream.ended or stream.abandoned or not stream.items or 2 * granted < self.hello.initial_credit:
            return b""
        stream.credit += granted
        return frame(stream.id, Credit.OP, encode(Credit(items=granted)), flags=self.flags)

    def abandon(self, stream: Stream) -> bytes:
        """Gives a stream up. The frame that cancels its request, or nothing if it has ended."""
        self._unread_bytes -= sum(len(payload) for _, payload in stream.frames)
        stream.frames.clear()
        if stream.ended or stream.abandoned or self.broken:
            self.open_streams.pop(stream.id, None)
            return b""
        stream.abandoned = True
        return frame(stream.id, Cancel.OP, encode(Cancel()), flags=self.flags)

    def fail(self, error: RocmforgeError) -> RocmforgeError:
        """Makes the connection unusable; returns the first reason."""
        if self.broken is None:
            self.broken = error
        return self.broken

    def receive(self, data: bytes) -> None:
        """Takes bytes that came. What breaks a rule makes the connection unusable."""
        self._buffer += data
        try:
            while self.broken is None and self._take_frame():
                pass
        except RocmforgeError as error:
            self.fail(error)

    def take(self, stream: Stream) -> Message | None:
        """The stream's next message, or none if it has yet to come. Raises the daemon's error."""
        if not stream.frames:
            if self.broken:
                raise self.broken
            return None
        op, payload = stream.frames.popleft()
        self._unread_bytes -= len(payload)
        if stream.ended and not stream.frames:
            self.open_streams.pop(stream.id, None)
        if op == ERROR:
            raise self._error_of(payload)
        try:
            return decode(_answer(stream.request, op), payload)
        except ProtocolError as error:
            raise self.fail(error) from None

    def _take_frame(self) -> bool:
        """Files the first whole frame of the buffer; false if there is none."""
        if len(self._buffer) < HEADER.size:
            return False
        header = Header.decode(bytes(self._buffer[: HEADER.size]), self.hello.max_frame)
        end = HEADER.size + header.length
        if len(self._buffer) < end:
            return False
        payload = bytes(self._buffer[HEADER.size : end])
        del self._buffer[:end]
        header.check_payload(payload)
        if header.n_fds or bool(header.flags & MORE) != (header.op == ITEM):
            raise ProtocolError(f"a frame of op {header.op:#06x} with flags {header.flags:#04x} and {header.n_fds} descriptors")
        self.heard += 1
        self._file(header, payload)
        return True

    def _file(self, header: Header, payload: bytes) -> None:
        if header.stream == 0 and header.op == ERROR:
            raise self._error_of(payload)
        stream = self.open_streams.get(header.stream)
        if stream is None or stream.ended:
            raise ProtocolError(f"a frame for stream {header.stream}, which is not open")
        if header.op not in ((ITEM, END, ERROR) if stream.items else (REPLY, ERROR)):
            raise ProtocolError(f"unexpected op {header.op:#06x} on stream {stream.id}")
        if header.op == ITEM:
            if stream.credit == 0:
                raise ProtocolError(f"an item on stream {stream.id} without credit")
            stream.credit -= 1
        stream.ended = header.op != ITEM
        if stream.abandoned:
            if stream.ended:
                del self.open_streams[stream.id]
            return
        self._unread_bytes += len(payload)
        if self._unread_bytes > UNREAD_BYTES_MAX:
            raise ProtocolError(f"{self._unread_bytes} bytes of unread frames, but at most {UNREAD_BYTES_MAX} are kept")
        stream.frames.append((header.op, payload))

    def _error_of(self, payload: bytes) -> ServerError:
        error = decode(WireError, payload)
        detail = {entry.key: entry.value for entry in error.detail}
        name = NAMES.get(error.code, f"error {error.code}")
        return server_error(error.code, name, error.message, error.retryable, error.retry_after_ms, detail)


def _answer(request: Message, op: int) -> type[Message]:
    """The type of a request's answer by its op."""
    if isinstance(request, StreamCall):
        answer: type[Message] = request.item() if op == ITEM else request.end()
        return answer
    if isinstance(request, Call):
        reply: type[Message] = request.reply()
        return reply
    assert isinstance(request, Signal)
    raise ProtocolError(f"a reply to {type(request).__name__}, which has none")
