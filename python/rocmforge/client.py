"""The client for threads."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, Unpack

from .address import socket_path
from .answers import Score, embedding_of, relevance_of, score_of
from .connection import CONNECT_TIMEOUT, REPLY_TIMEOUT, Connection, dial
from .errors import Disconnected, InvalidRequest, ProtocolError, RocmforgeError, ServerError, Silent
from .messages import (
    ChatMessage,
    DetokenizeRequest,
    FailRequest,
    GenerateEnd,
    GenerateItem,
    GenerateRequest,
    ListRequest,
    LoadReply,
    LoadRequest,
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
from .streams import Stream
from .wire import Call, End, Item, Message, Reply, StreamCall

RETRY_TIMEOUT = 5.0
"""Seconds in which a request that is safe to repeat is repeated, if the connection ends or the daemon stops."""

RETRY_PAUSE = 0.02
PARTS_MAX = 256
"""Most parts of one list. Each fills a frame, so a list of more is none of models."""

DRAINING, UNAVAILABLE = 302, 303


def client_name() -> str:
    """The name for the daemon's log."""
    return "rocmforge-python"


def is_passing(error: RocmforgeError) -> bool:
    """True if a repeated request on a new connection may succeed."""
    going = isinstance(error, ServerError) and error.retryable and error.code in (DRAINING, UNAVAILABLE)
    return going or isinstance(error, Disconnected | Silent)


class Answer(Generic[Item, End]):
    """The answer to a request, as an iterator over its items. `end` is set once they are all read.

    An answer that is closed before its end, or that nobody holds any more, is cancelled. It is also a context manager.
    """

    def __init__(self, connection: Connection, stream: Stream, request: StreamCall[Item, End]) -> None:
        self._connection, self._stream, self._request = connection, stream, request
        self.end: End | None = None

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        if self.end is not None or self._stream.abandoned:
            raise StopIteration
        message = self._connection.next(self._stream, None)
        if isinstance(message, self._request.end()):
            self.end = message
            raise StopIteration
        assert isinstance(message, self._request.item())
        return message

    def close(self) -> None:
        """Cancels the request if it has not ended."""
        if self.end is None:
            self._connection.close_stream(self._stream)
            self._stream.abandoned = True

    def wait(self) -> End:
        """Reads what is left, and returns the end."""
        for _ in self:
            pass
        if self.end is None:
            raise Disconnected("the answer was closed before its end")
        return self.end

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "end", True) is None and not self._stream.ended and not self._stream.abandoned:
            self._connection.drop_stream(self._stream)


class Taken:
    """The parts of a model's answer that are read. `ids`, `logprobs` and `prompt_ids` grow with it."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.logprobs: list[Any] = []
        self.prompt_ids: list[int] = []
        self._rest_is_read = False

    def take(self, item: GenerateItem) -> str:
        """Adds an item's tokens; returns its text."""
        self.ids += item.ids
        self.prompt_ids += item.prompt_ids
        self.logprobs += item.logprobs
        return item.text

    def rest(self, end: GenerateEnd | None) -> str:
        """The text that came with the end, once."""
        if end is None or self._rest_is_read:
            return ""
        self._rest_is_read = True
        return end.text


class Generation(Taken):
    """An answer of a model, as an iterator over the pieces of its text.

    `ids`, `logprobs` and `prompt_ids` grow as it is read; `end` has the reason, the usage and the times. As `Answer`, it is
    cancelled if it is closed, left as a context, or held by nobody before its end.
    """

    def __init__(self, answer: Answer[GenerateItem, GenerateEnd]) -> None:
        super().__init__()
        self.items = answer
        """The daemon's messages, which reading the pieces takes."""

    @property
    def end(self) -> GenerateEnd | None:
        """The end of the answer, once all pieces are read."""
        return self.items.end

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        for item in self.items:
            if text := self.take(item):
                return text
        if text := self.rest(self.end):
            return text
        raise StopIteration

    def text(self) -> str:
        """All text that is left to read."""
        return "".join(self)

    def close(self) -> None:
        """Cancels the request if it has not ended."""
        self.items.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Client:
    """A client of one daemon, for any number of threads. It connects at the first request, and again after a restart.

    `socket` is the daemon's socket: without it `$ROCMFORGE_SOCKET`, the user's own daemon's, or the system's. With `server_uids`,
    only a daemon of one of these users is trusted, instead of root, the user rocmforge and the caller.
    """

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
        self._connection: Connection | None = None
        self._connecting = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection, which cancels all requests. A later request connects again."""
        with self._connecting:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def connection(self) -> Connection:
        """The current connection; connects if there is none, or if it has ended."""
        with self._connecting:
            if self._connection is None or not self._connection.usable:
                peer, hello = dial(self.socket, self._server_uids, client_name(), self._connect_timeout)
                self._connection = Connection(peer, hello)
            return self._connection

    # Requests as they are on the wire.

    def call(self, request: Call[Reply], descriptors: Sequence[int] = ()) -> Reply:
        """Sends a request and waits for its reply. It is repeated if the connection ends, because that changes nothing."""
        give_up = time.monotonic() + RETRY_TIMEOUT
        while True:
            try:
                message = self._call_once(request, request.OP, descriptors)
                assert isinstance(message, request.reply())
                return message
            except RocmforgeError as error:
                if not is_passing(error) or time.monotonic() > give_up:
                    raise
            time.sleep(RETRY_PAUSE)

    def stream(self, request: StreamCall[Item, End]) -> Answer[Item, End]:
        """Sends a request that is answered by items. It is never repeated."""
        connection = self.connection()
        return Answer(connection, connection.open(request, request.OP), request)

    def fail(self, code: int) -> None:
        """Has the daemon answer with an error of this code, for tests of error paths."""
        self._call_once(FailRequest(code=code), FailRequest.OP, ())

    def _call_once(self, request: Message, op: int, descriptors: Sequence[int]) -> Message:
        connection = self.connection()
        stream = connection.open(request, op, descriptors)
        try:
            return connection.next(stream, self._reply_timeout)
        finally:
            if not stream.ended:
                connection.close_stream(stream)

    # Generation.

    def generate(self, request: GenerateRequest) -> Generation:
        """Starts the generation of a request that has all its fields."""
        return Generation(self.stream(request))

    def complete(self, model: str, prompt: str | Sequence[int], **options: Unpack[Options]) -> Generation:
        """Goes on with a text or with token ids."""
        return self.generate(complete_request(model, prompt, options))

    def chat(
        self, model: str, messages: str | Sequence[Mapping[str, Any] | ChatMessage], **options: Unpack[Options]
    ) -> Generation:
        """Answers the last message of a chat; a text is one message of a user."""
        return self.generate(chat_request(model, messages, options))

    def score(self, model: str, prompt: str | Sequence[int], *, top_logprobs: int = 0) -> Score:
        """How likely a model finds a text."""
        return score_of(self.stream(score_request(model, prompt, top_logprobs)))

    def embed(
        self, model: str, prompt: str | Sequence[int], *, pooling: str | None = None, normalise: bool = True
    ) -> list[float]:
        """A text's embedding, of length 1 if normalised. `pooling` is `mean`, `first` or `last`; without it, as the file says."""
        return embedding_of(self.stream(embed_request(model, prompt, pooling, normalise)).wait())

    def rank(self, model: str, query: str, documents: Sequence[str]) -> list[float]:
        """The relevance of each document to the query: higher is more relevant, and models differ in its range.

        The documents are asked for one after the other. The model must be a reranker.
        """
        return [relevance_of(self.stream(rank_request(model, query, document)).wait()) for document in documents]

    def tokenize(self, model: str, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """The token ids of a text."""
        return self.call(TokenizeRequest(model=model, text=text, add_special=add_special, parse_special=parse_special)).ids

    def detokenize(self, model: str, ids: Sequence[int], *, show_special: bool = False) -> str:
        """The text of token ids."""
        return self.call(DetokenizeRequest(model=model, ids=list(ids), show_special=show_special)).text

    # Models and the daemon.

    def models(self) -> list[ModelSummary]:
        """All models that the daemon knows by name."""
        found: list[ModelSummary] = []
        for _ in range(PARTS_MAX):
            reply = self.call(ListRequest(after=found[-1].name if found else ""))
            found += reply.models
            if not reply.more or not reply.models:
                return found
        raise ProtocolError(f"a list of more than {PARTS_MAX} parts")

    def show(self, model: str) -> ShowReply:
        """A model's sizes, types and state, without its metadata and tensors."""
        return self.call(ShowRequest(model=model, full=False, skip_metadata=0, skip_tensors=0))

    def load(self, model: str) -> LoadReply:
        """Maps a model of the daemon's by its name."""
        return self.call(load_request(model, False))

    def load_file(self, path: str | os.PathLike[str], name: str | None = None) -> LoadReply:
        """Passes an open file to the daemon under a name, without one that of the file without `.gguf`."""
        descriptor, name = open_model(path, name)
        try:
            return self.call(load_request(name, True), [descriptor])
        finally:
            os.close(descriptor)

    def unload(self, model: str) -> UnloadReply:
        """Unmaps a model once its requests end."""
        return self.call(UnloadRequest(name=model, request_id=secrets.randbits(128)))

    def ping(self, payload: bytes = b"") -> bytes:
        """Has the daemon send these bytes back."""
        return self.call(PingRequest(payload=payload)).payload

    def status(self) -> StatusReply:
        """The state of the daemon and its devices."""
        return self.call(StatusRequest())


def load_request(name: str, by_descriptor: bool) -> LoadRequest:
    return LoadRequest(name=name, by_descriptor=by_descriptor, request_id=secrets.randbits(128))


def open_model(path: str | os.PathLike[str], name: str | None) -> tuple[int, str]:
    """A descriptor of a regular file, and the model's name."""
    file = Path(path)
    # A pipe would block here until somebody writes to it.
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not file.is_file():
        os.close(descriptor)
        raise InvalidRequest(f"{file} is not a regular file")
    return descriptor, name if name is not None else file.name.removesuffix(".gguf")
