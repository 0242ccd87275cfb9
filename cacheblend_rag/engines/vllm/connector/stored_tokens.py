"""The tokens of stored chunks, and what keeps them for restarts and for replicas: a TokenLog.

Nothing that was kept is trusted: a chunk's tokens must have the hash that names them, and its other
values must be hashes and known names. What is found by it is still looked up in the store, whose KV
has checks of its own.
"""

from __future__ import annotations

import hashlib
import logging
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from cacheblend_rag.engines.vllm.protocol.job import SentLeadIn
from cacheblend_rag.settings import LeadInKind

MOST_TOKENS = 1 << 20
"""Of one chunk."""
Row = int | str
"""What a log calls a chunk: another row when it was stored anew."""
_HASH = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Name:
    """What a stored chunk is found and looked up by.

    namespace: its namespace_id. chunk_id, context_id: of its KV's key. lead_in: that it was
    computed after.
    """

    namespace: str
    chunk_id: str
    context_id: str
    lead_in: SentLeadIn


@dataclass(frozen=True, slots=True, eq=False)
class StoredTokens:
    """A stored chunk: tokens (tokens,) uint32.

    follows: the ``chain`` of the chunks that it was computed behind, "" if it was computed behind
    none, or behind other text too.
    """

    name: Name
    tokens: NDArray[np.uint32]
    follows: str = ""


def id_of(tokens: NDArray[np.uint32]) -> str:
    """Return the chunk id, as kv/chunk_kv.py's ``chunk_id`` does, many times faster."""
    return hashlib.blake2b(tokens.astype("<u4").tobytes(), digest_size=16).hexdigest()


class TokenLog(Protocol):
    """The chunks of one model, shared with other processes, which may change them at any time.

    Its methods may raise sqlite3.Error and OSError.
    """

    def add(self, stored: Sequence[StoredTokens], fresh: Collection[Name] = ()) -> bool:
        """Write chunks that are missing; those of ``fresh`` as new ones, even if they are there.

        Returns whether ``news`` will tell of them; not if it is only read, or cannot be reached.
        """

    def discard(self, names: Collection[Name]) -> None:
        """Remove chunks."""

    def news(self) -> Iterator[Mapping[Row, StoredTokens | None]]:
        """Yield what was removed and added since the last call, this object's changes included.

        Each yields rows: a chunk, or None if it was removed. Invalid rows are left out.
        """

    def has_lost(self) -> bool:
        """Return whether it lost what it held since the last call, as ``news`` found out.

        Then all that is known should be added again, and has new rows.
        """

    def close(self) -> None:
        """Close it."""


def checked(row: Sequence[object]) -> StoredTokens | None:
    """Return the chunk of a row, None if the row is invalid.

    row: namespace, chunk, context, kind, tokens and window of the lead-in, follows, and the tokens
    as little-endian bytes, four each.
    """
    namespace, chunk, context, lead, lead_tokens, window, follows, blob = row
    hashes, optional = (namespace, chunk), (context, lead_tokens, follows)
    if not isinstance(blob, bytes) or not blob or len(blob) % 4:
        return None
    if not all(isinstance(one, str) and _HASH.fullmatch(one) for one in hashes):
        return None
    if not all(one == "" or (isinstance(one, str) and _HASH.fullmatch(one)) for one in optional):
        return None
    if lead not in get_args(LeadInKind) or type(window) is not int or window < 0:
        return None
    tokens = np.frombuffer(blob, "<u4").astype(np.uint32)
    if id_of(tokens) != chunk or int(tokens.max()) >= 1 << 31:
        return None
    lead_in = _lead_in(str(lead), str(lead_tokens), window)
    name = Name(sys.intern(str(namespace)), str(chunk), str(context), lead_in)
    return StoredTokens(name, tokens, str(follows))


@lru_cache
def _lead_in(kind: str, tokens: str, window: int) -> SentLeadIn:
    """Return a lead-in, the same object for many chunks."""
    return SentLeadIn(kind, tokens, window)


logger = logging.getLogger(__name__)

MOST_KEPT = 1 << 29
"""Most tokens of all chunks that are taken from a server: 2 GiB."""
LEAST_COUNTED = 512
"""Tokens that a chunk counts as at least, for what else it takes."""


class TokenRoom:
    """Counts the tokens of chunks, by their rows."""

    def __init__(self) -> None:
        self._counted: dict[Row, int] = {}
        self._kept = 0
        self._is_full = False

    def takes(self, row: Row, one: StoredTokens) -> bool:
        """Count a chunk; returns whether there is room for it. The first without is a warning."""
        tokens = max(len(one.tokens), LEAST_COUNTED)
        if self._kept + tokens > MOST_KEPT:
            if not self._is_full:
                logger.warning("more chunks are stored than are found in prompts")
            self._is_full = True
            return False
        self._kept += tokens - self._counted.get(row, 0)
        self._counted[row] = tokens
        return True

    def free(self, row: Row) -> None:
        """Count a chunk no longer."""
        self._kept -= self._counted.pop(row, 0)

    def clear(self) -> None:
        """Count nothing."""
        self._counted, self._kept = {}, 0
