"""Errors of the protocol.

`write_messages.py` writes this file from PROTOCOL.md, which says what each field means.
"""

from enum import IntEnum


class ErrorCode(IntEnum):
    """Why a request failed. The hundreds are a number's class."""

    NOT_PROTOCOL = 100
    """The first bytes are not a hello of this protocol."""
    UNSUPPORTED_MAJOR = 101
    """No common major version."""
    FRAME_TOO_LONG = 102
    """A frame is longer than agreed."""
    BAD_FRAME = 103
    """A header has unknown flags or a checksum without its flag, or a `Cancel` or `Credit` is malformed."""
    BAD_STREAM = 104
    """A stream id is even, used before, or not open."""
    TOO_MANY_STREAMS = 105
    """More streams are open than agreed."""
    BAD_DESCRIPTORS = 106
    """Descriptors are missing, unexpected, too many, or cut off by the kernel."""
    HANDSHAKE_TIMEOUT = 107
    """No hello arrived in time."""
    FRAME_TIMEOUT = 108
    """A frame was not finished in time."""
    OUTPUT_OVERFLOW = 109
    """The client does not read, and too much output waits for it."""
    BAD_CHECKSUM = 110
    """The payload does not match its checksum."""
    PEER_REFUSED = 111
    """This peer may not connect: the kernel does not tell its uid, or has none for it in the daemon's user namespace."""
    UNKNOWN_OP = 200
    """The op is unknown."""
    BAD_PAYLOAD = 201
    """The payload is not the op's message."""
    LIMIT_EXCEEDED = 202
    """A field or an answer is larger than allowed."""
    UNKNOWN_EXTENSION = 203
    """A critical extension is unknown."""
    INVALID_ARGUMENT = 204
    """A value is out of its range."""
    PROMPT_TOO_LONG = 205
    """The prompt does not fit the context."""
    TOKEN_OUT_OF_RANGE = 206
    """A token id is outside the vocabulary."""
    EMPTY_PROMPT = 207
    """The prompt has no tokens."""
    NO_CHAT_TEMPLATE = 208
    """The model's file has no chat template."""
    TEMPLATE_FAILED = 209
    """The chat template cannot render these messages, or is longer than 256 KiB."""
    CANCELLED = 210
    """The client cancelled the request."""
    DEADLINE_EXCEEDED = 211
    """The request's `timeout_ms` passed."""
    FORBIDDEN = 212
    """This uid is not allowed to do that."""
    SLOW_READER = 213
    """The client granted no credit for too long."""
    BUSY = 300
    """Too many requests wait, or all users together leave no descriptors or memory; on stream 0 also: the connection was idle and another user needs its place."""
    QUOTA = 301
    """The uid's quota, or its share of what users share, is used up."""
    SERVER_DRAINING = 302
    """The daemon is stopping."""
    UNAVAILABLE = 303
    """The daemon cannot serve now."""
    DOES_NOT_FIT = 304
    """The request can never fit the budget."""
    MODEL_NOT_FOUND = 400
    """No model has that name."""
    MODEL_CORRUPT = 401
    """The file is damaged, or lost bytes while mapped."""
    MODEL_CHANGED = 402
    """The file was replaced while mapped."""
    MODEL_UNSUPPORTED = 403
    """The architecture, tensor type or tokenizer is not supported."""
    NOT_AMODEL_FILE = 404
    """The file is not a GGUF file."""
    DEVICE_FAILED = 500
    """The device failed."""
    OUT_OF_MEMORY = 501
    """The device has no memory left."""
    INTERNAL = 900
    """A fault in the daemon."""


NAMES = {
    100: "NotProtocol",
    101: "UnsupportedMajor",
    102: "FrameTooLong",
    103: "BadFrame",
    104: "BadStream",
    105: "TooManyStreams",
    106: "BadDescriptors",
    107: "HandshakeTimeout",
    108: "FrameTimeout",
    109: "OutputOverflow",
    110: "BadChecksum",
    111: "PeerRefused",
    200: "UnknownOp",
    201: "BadPayload",
    202: "LimitExceeded",
    203: "UnknownExtension",
    204: "InvalidArgument",
    205: "PromptTooLong",
    206: "TokenOutOfRange",
    207: "EmptyPrompt",
    208: "NoChatTemplate",
    209: "TemplateFailed",
    210: "Cancelled",
    211: "DeadlineExceeded",
    212: "Forbidden",
    213: "SlowReader",
    300: "Busy",
    301: "Quota",
    302: "ServerDraining",
    303: "Unavailable",
    304: "DoesNotFit",
    400: "ModelNotFound",
    401: "ModelCorrupt",
    402: "ModelChanged",
    403: "ModelUnsupported",
    404: "NotAModelFile",
    500: "DeviceFailed",
    501: "OutOfMemory",
    900: "Internal",
}
"""The protocol's name of each code."""
