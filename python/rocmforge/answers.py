"""What the daemon answered, put together from its messages."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from .errors import ProtocolError
from .messages import GenerateEnd, GenerateItem, TokenLogprob

EMBEDDING, RELEVANCE = 4, 7
"""Keys of a `GenerateEnd`'s extensions."""


@dataclass(slots=True, kw_only=True)
class Score:
    """How likely a model finds a text."""

    ids: list[int]
    """The text's tokens."""
    logprobs: list[TokenLogprob]
    """Of each token but the first, which has none before it."""
    logprob: float
    """Their sum, in natural logarithms."""
    perplexity: float | None
    """e to the power of the negated mean; none for a text of one token."""


def score_of(items: Iterable[GenerateItem]) -> Score:
    """The score that items tell; those with ids are of the answer, not of the text."""
    ids: list[int] = []
    logprobs: list[TokenLogprob] = []
    for item in items:
        ids += item.prompt_ids
        if not item.ids:
            logprobs += item.logprobs
    total = math.fsum(one.logprob for one in logprobs)
    try:
        perplexity = math.exp(-total / len(logprobs)) if logprobs else None
    except OverflowError:
        perplexity = math.inf
    return Score(ids=ids, logprobs=logprobs, logprob=total, perplexity=perplexity)


def embedding_of(end: GenerateEnd) -> list[float]:
    """The embedding in the end of an answer."""
    data = end.ext.get(EMBEDDING)
    if data is None or len(data) % 4:
        raise ProtocolError("the answer to a request for an embedding has none")
    return list(struct.unpack(f"<{len(data) // 4}f", data))


def relevance_of(end: GenerateEnd) -> float:
    """The relevance in the end of an answer."""
    data = end.ext.get(RELEVANCE)
    if data is None or len(data) != 4:
        raise ProtocolError("the answer to a request for a relevance has none")
    (value,) = struct.unpack("<f", data)
    return float(value)
