"""Where the daemon's socket is, and who may serve it."""

from __future__ import annotations

import os
import pwd
import socket
import struct
from collections.abc import Iterable
from pathlib import Path

from .errors import InvalidRequest, UntrustedServer

DEFAULT_SOCKET = Path("/run/rocmforge/api.sock")
SOCKET_VARIABLE = "ROCMFORGE_SOCKET"
SOCKET_PATH_BYTES_MAX = 107
"""The kernel's `sun_path` has 108 bytes, the last of them zero."""

DAEMON_USER = "rocmforge"
NOBODY = (1 << 32) - 1
CREDENTIALS = struct.Struct("<iII")


def socket_path(named: str | os.PathLike[str] | None) -> Path:
    """The named socket, else `$ROCMFORGE_SOCKET`, else the user's own daemon's if it exists, else the system's."""
    path = Path(named or os.environ.get(SOCKET_VARIABLE) or _own_socket() or DEFAULT_SOCKET)
    length = len(os.fsencode(path))
    if not 1 <= length <= SOCKET_PATH_BYTES_MAX:
        raise InvalidRequest(f"the socket's path has {length} bytes, but 1 to {SOCKET_PATH_BYTES_MAX} are allowed: {path}")
    return path


def _own_socket() -> Path | None:
    """That of the user's own daemon, if it exists; root's is the system's."""
    directory = os.environ.get("XDG_RUNTIME_DIR")
    if not directory or os.geteuid() == 0:
        return None
    path = Path(directory) / "rocmforge" / "api.sock"
    return path if path.exists() else None


def check_server(peer: socket.socket, path: Path, server_uids: Iterable[int] | None) -> None:
    """Raises `UntrustedServer` unless root, the user `rocmforge`, the caller's own user or a named one serves the socket.

    Any other process could read prompts and forge answers.
    """
    _, uid, _ = CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    trusted = set(server_uids) if server_uids is not None else {0, os.geteuid(), *_daemon_uid()}
    if uid not in trusted:
        who = f"uid {uid}" if uid != NOBODY else "an unknown process outside this container"
        raise UntrustedServer(f"{path} is served by {who}, and no request was sent")


def _daemon_uid() -> list[int]:
    try:
        return [pwd.getpwnam(DAEMON_USER).pw_uid]
    except KeyError:
        return []
