"""A connection for threads: whoever waits for a frame reads for all, so that it needs no thread of its own."""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path

from .address import check_server
from .errors import Disconnected, PermissionDenied, Refused, RocmforgeError, Silent, Timeout, Unavailable
from .frames import SERVER_HELLO, ClientHello, ServerHello
from .messages import PingRequest
from .streams import Stream, Streams
from .wire import Message

CONNECT_TIMEOUT = 2.0
"""Most seconds for connecting, including a full queue, a restart and the hello."""

ABSENT_TIMEOUT = 0.3
"""The part of it in which a socket without a listener is tried again."""

PAUSE = 0.02
REPLY_TIMEOUT = 30.0
"""Most seconds for one reply, and for writing a request. Items of an answer may take any time."""

PING_AFTER, PING_TIMEOUT = 30.0, 10.0
"""A daemon that sent nothing for so many seconds is pinged, and given up after so many more."""

READ_BYTES = 64 * 1024


def attempt(path: Path, server_uids: Iterable[int] | None, name: str, timeout: float) -> tuple[socket.socket, ServerHello]:
    """Connects once and exchanges hellos."""
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        peer.settimeout(timeout)
        peer.connect(os.fspath(path))
        peer.sendall(ClientHello(name=name).encode())
        check_server(peer, path, server_uids)
        data = b""
        while len(data) < SERVER_HELLO.size:
            more = peer.recv(SERVER_HELLO.size - len(data))
            if not more:
                raise ConnectionResetError(errno.ECONNRESET, "the daemon closed the connection during the hello")
            data += more
        hello = ServerHello.decode(data)
        hello.check()
    except BaseException:
        peer.close()
        raise
    return peer, hello


def dial(
    path: Path, server_uids: Iterable[int] | None, name: str, connect_timeout: float
) -> tuple[socket.socket, ServerHello]:
    """Connects, and tries again as long as a restart or a full queue may take."""
    begun = time.monotonic()
    trusted = None if server_uids is None else tuple(server_uids)
    while True:
        pause, patience = PAUSE, connect_timeout
        failed: RocmforgeError
        try:
            return attempt(path, trusted, name, max(0.01, begun + connect_timeout - time.monotonic()))
        except Refused as refused:
            failed, pause = refused, max(PAUSE, refused.retry_after_ms / 1000)
            if not refused.retryable:
                raise
        except PermissionError:
            raise PermissionDenied(f"no permission to use {path}") from None
        except (FileNotFoundError, ConnectionRefusedError) as error:
            failed, patience = _unavailable(path, error), min(ABSENT_TIMEOUT, connect_timeout)
        except OSError as error:
            if isinstance(error, RocmforgeError):
                raise
            failed = _unavailable(path, error)
        if time.monotonic() + pause > begun + patience:
            raise failed
        time.sleep(pause)


def _unavailable(path: Path, error: OSError) -> RocmforgeError:
    return Unavailable(f"the daemon does not answer at {path} ({error.strerror or error})")


class Connection:
    """One connection. Any number of threads may use it."""

    def __init__(self, peer: socket.socket, hello: ServerHello) -> None:
        self.peer, self.streams = peer, Streams(hello)
        peer.settimeout(None)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", int(REPLY_TIMEOUT), 0))
        self._hung_up = False
        """A frame could not be written."""
        self._writing = threading.Lock()
        """Held while a frame is written, so that frames are whole and ids rise on the wire."""
        self._state = threading.Condition(threading.Lock())
        """Guards `streams`. Taken after `_writing`, and never held while a frame is written."""
        self._reading = False
        self._dropped: deque[Stream] = deque()
        """Streams whose owners are gone, to be cancelled with the next frame. Appending needs no lock."""

    @property
    def usable(self) -> bool:
        """False if no request can be sent, also if the daemon closed the connection while nobody read."""
        if self.streams.broken is not None or self._hung_up:
            return False
        poll = select.poll()
        poll.register(self.peer, select.POLLRDHUP)
        return not poll.poll(0)

    def open(self, request: Message, op: int, descriptors: Sequence[int] = ()) -> Stream:
        """Sends a request."""
        with self._writing:
            self._cancel_dropped()
            with self._state:
                stream, data = self.streams.open(request, op, len(descriptors))
            try:
                self._write(data, descriptors)
            except RocmforgeError:
                with self._state:
                    self.streams.open_streams.pop(stream.id, None)
                raise
        return stream

    def next(self, stream: Stream, timeout: float | None) -> Message:
        """The stream's next message; `Timeout` after so many seconds. Raises the daemon's error."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._state:
            while True:
                message = self.streams.take(stream)
                if message is not None:
                    break
                if deadline is not None and time.monotonic() >= deadline:
                    raise Timeout(f"no answer within {timeout} s")
                self._read_or_wait(deadline)
            granting = self.streams.grant(stream)
        if granting:
            self._write_if_open(granting)
        return message

    def close_stream(self, stream: Stream) -> None:
        """Gives a stream up; its request is cancelled if it has not ended."""
        with self._writing:
            with self._state:
                data = self.streams.abandon(stream)
            self._write_if_open_locked(data)

    def drop_stream(self, stream: Stream) -> None:
        """As `close_stream`, from a finaliser, which may run in the middle of any of these functions."""
        self._dropped.append(stream)
        if self._writing.acquire(blocking=False):
            try:
                if self._state.acquire(blocking=False):
                    self._state.release()
                    self._cancel_dropped()
            finally:
                self._writing.release()

    def close(self) -> None:
        """Closes the connection; the daemon cancels its requests."""
        self.streams.fail(Disconnected("this client closed the connection"))
        try:
            self.peer.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other side has closed
        self.peer.close()

    def _cancel_dropped(self) -> None:
        """Cancels what finalisers left; needs `_writing`."""
        while self._dropped:
            stream = self._dropped.popleft()
            with self._state:
                data = self.streams.abandon(stream)
            self._write_if_open_locked(data)

    def _write_if_open(self, data: bytes) -> None:
        with self._writing:
            self._cancel_dropped()
            self._write_if_open_locked(data)

    def _write_if_open_locked(self, data: bytes) -> None:
        """Writes a frame that may come too late: frames that the daemon sent before it closed can still be read."""
        try:
            if data:
                self._write(data)
        except Disconnected:
            pass

    def _write(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        """Writes a whole frame; needs `_writing`. One cut short, because the daemon stopped reading, breaks the connection."""
        try:
            if descriptors:
                sent = socket.send_fds(self.peer, [data], list(descriptors))
                data = data[sent:]
            self.peer.sendall(data)
        except OSError as error:
            self._hung_up = True
            ended = Disconnected(f"the connection to the daemon ended: {error.strerror or error}")
            if isinstance(error, BlockingIOError):
                with self._state:
                    self.streams.fail(ended)
            # Otherwise the daemon hung up. It may have sent frames before, which are read first.
            raise ended from None

    def _read_or_wait(self, deadline: float | None) -> None:
        """Reads for all threads, or waits for the one that does; needs `_state`."""
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        if self._reading:
            self._state.wait(left)
            return
        self._reading = True
        self._state.release()
        try:
            data, error = self._receive(deadline)
        finally:
            self._state.acquire()
            self._reading = False
            self._state.notify_all()
        if data:
            self.streams.receive(data)
        if error:
            self.streams.fail(error)

    def _receive(self, deadline: float | None) -> tuple[bytes, RocmforgeError | None]:
        """Bytes that came until the deadline, or the reason why none will come. A silent daemon is pinged."""
        begun, pinged = time.monotonic(), False
        while True:
            now = time.monotonic()
            check = begun + PING_AFTER + (PING_TIMEOUT if pinged else 0)
            until = check if deadline is None else min(check, deadline)
            try:
                if not _readable(self.peer, max(0.0, until - now)):
                    if deadline is not None and time.monotonic() >= deadline:
                        return b"", None
                    if pinged:
                        return b"", Silent(f"the daemon has not answered for {PING_AFTER + PING_TIMEOUT:.0f} s, not even a ping")
                    pinged = self._ping()
                    begun = begun if pinged else time.monotonic()
                    continue
                data = self.peer.recv(READ_BYTES)
            except (OSError, ValueError) as error:
                return b"", Disconnected(f"the connection to the daemon ended: {error}")
            if data:
                return data, None
            return b"", Disconnected("the daemon closed the connection")

    def _ping(self) -> bool:
        """Asks the daemon for a sign of life; false if that would be one request too many."""
        try:
            stream = self.open(PingRequest(payload=b""), PingRequest.OP)
        except RocmforgeError:
            return False
        with self._state:
            stream.abandoned = True
        return True


def _readable(peer: socket.socket, timeout: float) -> bool:
    poll = select.poll()
    poll.register(peer, select.POLLIN)
    return bool(poll.poll(timeout * 1000))
