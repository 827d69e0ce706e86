"""Client of rocmforged, the daemon that serves GGUF models over a Unix socket.

    from rocmforge import Client

    with Client() as client:
        for piece in client.chat("smollm2-135m-instruct-q4_1", "Why is the sky blue?", max_tokens=60):
            print(piece, end="", flush=True)

`AsyncClient` has the same methods for asyncio. `rocmforge.messages` has all messages of the protocol, for `Client.call` and
`Client.stream`.
"""

from .answers import Score
from .asynchronous import AsyncAnswer, AsyncClient, AsyncGeneration
from .client import Answer, Client, Generation
from .errors import (
    Cancelled,
    CapacityError,
    DeviceError,
    Disconnected,
    InvalidRequest,
    ModelError,
    ModelNotFound,
    PermissionDenied,
    ProtocolError,
    Refused,
    RequestError,
    RocmforgeError,
    ServerError,
    Silent,
    Timeout,
    TooManyStreams,
    Unavailable,
    UnsupportedVersion,
    UntrustedServer,
)
from .messages import ChatMessage, ErrorCode
from .options import Options

__all__ = [
    "Answer", "AsyncAnswer", "AsyncClient", "AsyncGeneration", "Cancelled", "CapacityError", "ChatMessage", "Client",
    "DeviceError", "Disconnected", "ErrorCode", "Generation", "InvalidRequest", "ModelError", "ModelNotFound", "Options",
    "PermissionDenied", "ProtocolError", "Refused", "RequestError", "RocmforgeError", "Score", "ServerError", "Silent", "Timeout",
    "TooManyStreams", "Unavailable", "UnsupportedVersion", "UntrustedServer",
]
