"""Why a request failed.

`RocmforgeError`
  `ServerError`: the daemon answered with an error; its text and numbers are those of the daemon
    `RequestError`, `CapacityError`, `ModelError`, `DeviceError`: by the class of its code
  `InvalidRequest`: the request breaks a limit of the protocol, and was not sent
  `Unavailable`, `PermissionDenied`, `UntrustedServer`, `UnsupportedVersion`, `Refused`: no connection came about
  `Disconnected`, `Silent`, `ProtocolError`: the connection ended
  `TooManyStreams`, `Timeout`: this client's own bounds
"""

from __future__ import annotations


class RocmforgeError(Exception):
    """Any failure. Its text says what happened; `hint` says what to do, and is empty if the text says it all."""

    hint: str = ""
    retryable: bool = False
    """The same request may succeed later."""

    def __str__(self) -> str:
        text = super().__str__()
        return f"{text}: {self.hint}" if self.hint else text


class InvalidRequest(RocmforgeError, ValueError):
    """The request breaks a limit of the protocol, and was not sent."""


class Unavailable(RocmforgeError, ConnectionError):
    """No daemon answers at the socket, or not in time."""

    hint = (
        "is rocmforged running? `systemctl status rocmforged.socket rocmforged.service` shows its state; another socket is"
        " named by Client(socket=...) or ROCMFORGE_SOCKET"
    )
    retryable = True


class PermissionDenied(RocmforgeError, PermissionError):
    """The user may not connect to the socket."""

    hint = "join the socket's group, usually `rocmforge-users`, and log in again"


class UntrustedServer(RocmforgeError):
    """A process of another user serves the socket. No request was sent."""

    hint = "if it is the right daemon, name its uid: Client(server_uids=[...])"


class UnsupportedVersion(RocmforgeError):
    """Client and daemon share no major version of the protocol."""

    hint = "update the older of both"


class Refused(RocmforgeError, ConnectionError):
    """The daemon refused the connection in its hello. `code` is an `ErrorCode`'s number."""

    def __init__(self, text: str, code: int, retry_after_ms: int) -> None:
        super().__init__(text)
        self.code, self.retry_after_ms = code, retry_after_ms
        self.retryable = 300 <= code < 400


class TooManyStreams(RocmforgeError):
    """As many requests are open as the connection allows."""

    hint = "wait for one of them, or use another Client"


class Timeout(RocmforgeError, TimeoutError):
    """No answer arrived in time; the request is cancelled."""


class Silent(RocmforgeError, ConnectionError):
    """The daemon sent nothing, and did not answer a ping."""

    hint = "it hangs or is stopped; `systemctl status rocmforged.service` shows its state"
    retryable = True


class Disconnected(RocmforgeError, ConnectionError):
    """The connection ended."""

    retryable = True


class ProtocolError(RocmforgeError):
    """The daemon broke the protocol; the connection is closed."""


class ServerError(RocmforgeError):
    """The daemon answered with an error."""

    def __init__(self, code: int, name: str, message: str, retryable: bool, retry_after_ms: int, detail: dict[str, str]) -> None:
        super().__init__(f"{name}: {message}")
        self.code = code
        """An `ErrorCode` as a number; a newer daemon may send one that this client does not know."""
        self.name = name
        """The code's name in the protocol."""
        self.message = message
        """What happened and what to do, in the daemon's words."""
        self.retryable = retryable
        self.retry_after_ms = retry_after_ms
        """For a retryable error: wait at least so many milliseconds."""
        self.detail = detail
        """Numbers and names of the message, by key."""


class RequestError(ServerError):
    """Class 2: something is wrong with the request."""


class Cancelled(RequestError):
    """Code 210: the request was cancelled."""


class CapacityError(ServerError):
    """Class 3: the daemon has no room for the request now, or never."""


class ModelError(ServerError):
    """Class 4: the model is missing, damaged or unsupported."""


class ModelNotFound(ModelError):
    """Code 400: no model has that name."""


class DeviceError(ServerError):
    """Class 5: the device failed, or its memory is used up."""


def server_error(code: int, name: str, message: str, retryable: bool, retry_after_ms: int, detail: dict[str, str]) -> ServerError:
    """The error of this code, as its own class or its hundreds' class."""
    kinds: dict[int, type[ServerError]] = {210: Cancelled, 400: ModelNotFound}
    classes: dict[int, type[ServerError]] = {2: RequestError, 3: CapacityError, 4: ModelError, 5: DeviceError}
    kind = kinds.get(code) or classes.get(code // 100, ServerError)
    return kind(code, name, message, retryable, retry_after_ms, detail)
