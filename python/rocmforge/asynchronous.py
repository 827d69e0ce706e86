"""The client for tasks of asyncio."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, Unpack

from .address import socket_path
from .answers import Score, embedding_of, relevance_of, score_of
from .client import (
    PARTS_MAX,
    RETRY_PAUSE,
    RETRY_TIMEOUT,
    Taken,
    client_name,
    is_passing,
    load_request,
    open_model,
)
from .connection import CONNECT_TIMEOUT, PING_AFTER, PING_TIMEOUT, READ_BYTES, REPLY_TIMEOUT, dial
from .errors import Disconnected, ProtocolError, RocmforgeError, Silent, Timeout
from .frames import ServerHello
from .messages import (
    ChatMessage,
    DetokenizeRequest,
    FailRequest,
    GenerateEnd,
    GenerateItem,
    GenerateRequest,
    ListRequest,
    LoadReply,
    ModelSummary,
    PingRequest,
    ShowReply,
    ShowRequest,
    StatusReply,
    StatusRequest,
    TokenizeRequest,
    UnloadReply,
    UnloadRequest,
)
from .options import Options, chat_request, complete_request, embed_request, rank_request, score_request
from .streams import Stream, Streams
from .wire import Call, End, Item, Message, Reply, StreamCall


class AsyncConnection:
    """One connection; a task of its own reads it while a request is open."""

    def __init__(self, peer: socket.socket, hello: ServerHello) -> None:
        self.peer, self.streams = peer, Streams(hello)
        peer.setblocking(False)
        self._arrived = asyncio.Condition()
        self._writing = asyncio.Lock()
        self._cancels: set[asyncio.Task[None]] = set()
        self._reader = asyncio.get_running_loop().create_task(self._read())

    @property
    def usable(self) -> bool:
        return self.streams.broken is None

    async def open(self, request: Message, op: int, descriptors: Sequence[int] = ()) -> Stream:
        """Sends a request."""
        async with self._writing:
            stream, data = self.streams.open(request, op, len(descriptors))
            try:
                await self._write(data, descriptors)
            except BaseException:
                self.streams.open_streams.pop(stream.id, None)
                raise
        return stream

    async def next(self, stream: Stream, timeout: float | None) -> Message:
        """The stream's next message; `Timeout` after so many seconds. Raises the daemon's error."""
        try:
            async with asyncio.timeout(timeout):
                async with self._arrived:
                    while (message := self.streams.take(stream)) is None:
                        await self._arrived.wait()
        except TimeoutError as error:
            if isinstance(error, RocmforgeError):
                raise
            raise Timeout(f"no answer within {timeout} s") from None
        granting = self.streams.grant(stream)
        if granting:
            await self._write_if_open(granting)
        return message

    def close_stream(self, stream: Stream) -> None:
        """Gives a stream up; its request is cancelled if it has not ended. The frame is written by a task of its own."""
        data = self.streams.abandon(stream)
        if data and self.usable:
            task = asyncio.get_running_loop().create_task(self._write_if_open(data))
            self._cancels.add(task)
            task.add_done_callback(self._cancels.discard)

    async def close(self) -> None:
        """Closes the connection; the daemon cancels its requests."""
        self.streams.fail(Disconnected("this client closed the connection"))
        self._reader.cancel()
        await asyncio.gather(self._reader, *self._cancels, return_exceptions=True)
        self.peer.close()
        async with self._arrived:
            self._arrived.notify_all()

    async def _write(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        """Writes a whole frame; needs `_writing`."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(REPLY_TIMEOUT):
                while descriptors:
                    try:
                        data = data[socket.send_fds(self.peer, [data], list(descriptors)) :]
                        break
                    except BlockingIOError:
                        await asyncio.sleep(RETRY_PAUSE)
                await loop.sock_sendall(self.peer, data)
        except OSError as error:
            raise self.streams.fail(Disconnected(f"the connection to the daemon ended: {error.strerror or error}")) from None
        except asyncio.CancelledError:
            # A frame that was cut short would be read as the beginning of the next.
            self.streams.fail(Disconnected("a request was cancelled while it was written"))
            raise

    async def _write_if_open(self, data: bytes) -> None:
        try:
            async with self._writing:
                await self._write(data)
        except Disconnected:
            pass

    async def _read(self) -> None:
        """Files frames until the connection ends; pings a daemon from which a request waits."""
        loop = asyncio.get_running_loop()
        pinged = False
        while self.usable:
            try:
                async with asyncio.timeout(PING_TIMEOUT if pinged else PING_AFTER):
                    data = await loop.sock_recv(self.peer, READ_BYTES)
                pinged = False
            except TimeoutError:
                data = None
            except OSError as error:
                self.streams.fail(Disconnected(f"the connection to the daemon ended: {error}"))
                data = None
            if data:
                self.streams.receive(data)
            elif data is not None:
                self.streams.fail(Disconnected("the daemon closed the connection"))
            elif pinged:
                waited = PING_AFTER + PING_TIMEOUT
                self.streams.fail(Silent(f"the daemon has not answered for {waited:.0f} s, not even a ping"))
            elif self.usable and self.streams.open_streams:
                pinged = await self._ping()
            async with self._arrived:
                self._arrived.notify_all()

    async def _ping(self) -> bool:
        """Asks the daemon for a sign of life; false if that would be one request too many."""
        try:
            stream = await self.open(PingRequest(payload=b""), PingRequest.OP)
        except RocmforgeError:
            return False
        stream.abandoned = True
        return True


class AsyncAnswer(Generic[Item, End]):
    """The answer to a request, as an asynchronous iterator over its items. `end` is set once they are all read.

    Closing it before its end cancels the request, and so does leaving it as a context.
    """

    def __init__(self, connection: AsyncConnection, stream: Stream, request: StreamCall[Item, End]) -> None:
        self._connection, self._stream, self._request = connection, stream, request
        self.end: End | None = None

    def __aiter__(self) -> AsyncIterator[Item]:
        return self

    async def __anext__(self) -> Item:
        if self.end is not None or self._stream.abandoned:
            raise StopAsyncIteration
        try:
            message = await self._connection.next(self._stream, None)
        except asyncio.CancelledError:
            self.close()
            raise
        if isinstance(message, self._request.end()):
            self.end = message
            raise StopAsyncIteration
        assert isinstance(message, self._request.item())
        return message

    def close(self) -> None:
        """Cancels the request if it has not ended."""
        if self.end is None and not self._stream.abandoned:
            self._connection.close_stream(self._stream)
            self._stream.abandoned = True

    async def wait(self) -> End:
        """Reads what is left, and returns the end."""
        async for _ in self:
            pass
        if self.end is None:
            raise Disconnected("the answer was closed before its end")
        return self.end

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncGeneration(Taken):
    """An answer of a model, as an asynchronous iterator over the pieces of its text. See `Generation`."""

    def __init__(self, answer: AsyncAnswer[GenerateItem, GenerateEnd]) -> None:
        super().__init__()
        self.items = answer

    @property
    def end(self) -> GenerateEnd | None:
        """The end of the answer, once all pieces are read."""
        return self.items.end

    def __aiter__(self) -> AsyncIterator[str]:
        return self

    async def __anext__(self) -> str:
        async for item in self.items:
            if text := self.take(item):
                return text
        if text := self.rest(self.end):
            return text
        raise StopAsyncIteration

    async def text(self) -> str:
        """All text that is left to read."""
        return "".join([piece async for piece in self])

    def close(self) -> None:
        """Cancels the request if it has not ended."""
        self.items.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient:
    """As `Client`, for the tasks of one event loop. A cancelled task cancels its request."""

    def __init__(
        self,
        socket: str | os.PathLike[str] | None = None,
        *,
        server_uids: Iterable[int] | None = None,
        connect_timeout: float = CONNECT_TIMEOUT,
        reply_timeout: float = REPLY_TIMEOUT,
    ) -> None:
        self.socket: Path = socket_path(socket)
        self._server_uids = None if server_uids is None else tuple(server_uids)
        self._connect_timeout, self._reply_timeout = connect_timeout, reply_timeout
        self._connection: AsyncConnection | None = None
        self._connecting = asyncio.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection, which cancels all requests. A later request connects again."""
        async with self._connecting:
            if self._connection is not None:
                await self._connection.close()
                self._connection = None

    async def connection(self) -> AsyncConnection:
        """The current connection; connects if there is none, or if it has ended."""
        async with self._connecting:
            if self._connection is None or not self._connection.usable:
                # The hellos wait in a thread: they take a moment, or until a daemon has started.
                peer, hello = await asyncio.to_thread(
                    dial, self.socket, self._server_uids, client_name(), self._connect_timeout
                )
                self._connection = AsyncConnection(peer, hello)
            return self._connection

    async def call(self, request: Call[Reply], descriptors: Sequence[int] = ()) -> Reply:
        """Sends a request and waits for its reply. It is repeated if the connection ends, because that changes nothing."""
        loop = asyncio.get_running_loop()
        give_up = loop.time() + RETRY_TIMEOUT
        while True:
            try:
                message = await self._call_once(request, request.OP, descriptors)
                assert isinstance(message, request.reply())
                return message
            except RocmforgeError as error:
                if not is_passing(error) or loop.time() > give_up:
                    raise
            await asyncio.sleep(RETRY_PAUSE)

    async def stream(self, request: StreamCall[Item, End]) -> AsyncAnswer[Item, End]:
        """Sends a request that is answered by items. It is never repeated."""
        connection = await self.connection()
        return AsyncAnswer(connection, await connection.open(request, request.OP), request)

    async def fail(self, code: int) -> None:
        """Has the daemon answer with an error of this code, for tests of error paths."""
        await self._call_once(FailRequest(code=code), FailRequest.OP, ())

    async def _call_once(self, request: Message, op: int, descriptors: Sequence[int]) -> Message:
        connection = await self.connection()
        stream = await connection.open(request, op, descriptors)
        try:
            return await connection.next(stream, self._reply_timeout)
        finally:
            if not stream.ended:
                connection.close_stream(stream)

    async def generate(self, request: GenerateRequest) -> AsyncGeneration:
        """Starts the generation of a request that has all its fields."""
        return AsyncGeneration(await self.stream(request))

    async def complete(self, model: str, prompt: str | Sequence[int], **options: Unpack[Options]) -> AsyncGeneration:
        """Goes on with a text or with token ids."""
        return await self.generate(complete_request(model, prompt, options))

    async def chat(
        self, model: str, messages: str | Sequence[Mapping[str, Any] | ChatMessage], **options: Unpack[Options]
    ) -> AsyncGeneration:
        """Answers the last message of a chat; a text is one message of a user."""
        return await self.generate(chat_request(model, messages, options))

    async def score(self, model: str, prompt: str | Sequence[int], *, top_logprobs: int = 0) -> Score:
        """How likely a model finds a text."""
        async with await self.stream(score_request(model, prompt, top_logprobs)) as answer:
            return score_of([item async for item in answer])

    async def embed(
        self, model: str, prompt: str | Sequence[int], *, pooling: str | None = None, normalise: bool = True
    ) -> list[float]:
        """A text's embedding, of length 1 if normalised. `pooling` is `mean`, `first` or `last`; without it, as the file says."""
        async with await self.stream(embed_request(model, prompt, pooling, normalise)) as answer:
            return embedding_of(await answer.wait())

    async def rank(self, model: str, query: str, documents: Sequence[str]) -> list[float]:
        """The relevance of each document to the query: higher is more relevant, and models differ in its range.

        The documents are asked for one after the other. The model must be a reranker.
        """
        found: list[float] = []
        for document in documents:
            async with await self.stream(rank_request(model, query, document)) as answer:
                found.append(relevance_of(await answer.wait()))
        return found

    async def tokenize(self, model: str, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """The token ids of a text."""
        request = TokenizeRequest(model=model, text=text, add_special=add_special, parse_special=parse_special)
        return (await self.call(request)).ids

    async def detokenize(self, model: str, ids: Sequence[int], *, show_special: bool = False) -> str:
        """The text of token ids."""
        return (await self.call(DetokenizeRequest(model=model, ids=list(ids), show_special=show_special))).text

    async def models(self) -> list[ModelSummary]:
        """All models that the daemon knows by name."""
        found: list[ModelSummary] = []
        for _ in range(PARTS_MAX):
            reply = await self.call(ListRequest(after=found[-1].name if found else ""))
            found += reply.models
            if not reply.more or not reply.models:
                return found
        raise ProtocolError(f"a list of more than {PARTS_MAX} parts")

    async def show(self, model: str) -> ShowReply:
        """A model's sizes, types and state, without its metadata and tensors."""
        return await self.call(ShowRequest(model=model, full=False, skip_metadata=0, skip_tensors=0))

    async def load(self, model: str) -> LoadReply:
        """Maps a model of the daemon's by its name."""
        return await self.call(load_request(model, False))

    async def load_file(self, path: str | os.PathLike[str], name: str | None = None) -> LoadReply:
        """Passes an open file to the daemon under a name, without one that of the file without `.gguf`."""
        descriptor, name = open_model(path, name)
        try:
            return await self.call(load_request(name, True), [descriptor])
        finally:
            os.close(descriptor)

    async def unload(self, model: str) -> UnloadReply:
        """Unmaps a model once its requests end."""
        return await self.call(UnloadRequest(name=model, request_id=secrets.randbits(128)))

    async def ping(self, payload: bytes = b"") -> bytes:
        """Has the daemon send these bytes back."""
        return (await self.call(PingRequest(payload=payload))).payload

    async def status(self) -> StatusReply:
        """The state of the daemon and its devices."""
        return await self.call(StatusRequest())
