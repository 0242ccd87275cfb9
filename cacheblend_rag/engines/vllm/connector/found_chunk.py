"""A stored chunk that was found in a prompt, and the stored KV among which it was chosen."""

from __future__ import annotations

import hashlib
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from threading import Lock

from cacheblend_rag.engines.vllm.connector.stored_tokens import Name, Row
from cacheblend_rag.engines.vllm.protocol.job import BlendJob, SentChunk
from cacheblend_rag.kv.chunk_kv import chunk_id

EDGES = 4
"""Most tokens that a chunk may lack in a prompt to count as the document before the next one."""
Generation = tuple[Name, int]
"""Name of stored KV, and which time of storing it: another number when it was stored anew."""
FoundAt = tuple[Name, int, int, int, int, bool]
"""Name, generation, start, end, how many of its tokens are missing before, whether protected."""
LEADS = {"document": 0, "instruction": 1, "bos": 2, "none": 3}
"""Which lead-in is preferred among those that a chunk was computed after: the one that is most like
what a prompt has before a chunk. ``document`` knows who "she" is, and begins as ``instruction``
does; the next two have at least the first token that attention needs (an attention sink)."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One of the KV caches that are stored for a chunk: in its document, or without it.

    follows: see ``StoredTokens``. generation: changes each time the KV is stored again.
    """

    name: Name
    follows: str
    generation: int
    row: Row | None

    @property
    def is_contextual(self) -> bool:
        return self.name.lead_in.name == "document" and bool(self.name.context_id)

    @property
    def rank(self) -> tuple[int, bool, int]:
        """Which one is taken where none continues its document."""
        return LEADS.get(self.name.lead_in.name, 9), bool(self.name.context_id), self.generation


@dataclass(frozen=True, slots=True)
class FoundChunk:
    """A stored chunk, or a part of one, in a prompt.

    sent: as jobs name it, with its own lead-in. name, generation: to forget it by.
    """

    sent: SentChunk
    name: Name
    generation: int

    @property
    def at(self) -> FoundAt:
        """Which stored KV stands where in the prompt: all that a blend takes of it, in few bytes.

        Its own tokens are left out, which the chunk's id names, and of which there may be thousands
        beside those in the prompt.
        """
        sent = self.sent
        return self.name, self.generation, sent.start, sent.end, len(sent.before), sent.protected


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What the finder needs from the model's tokenizer.

    is_blank: whether tokens are a text of white space, or none. opening: the tokens that a text
    begins with (BOS), usually one or none.
    """

    is_blank: Callable[[Sequence[int]], bool] = operator.not_
    opening: Sequence[int] = ()


def chain(before: str, chunk_id: str) -> str:
    """Return the hash of a sequence of chunks that ends with a chunk; before: of those before it.

    The hash of no chunk is "".
    """
    text = f"{before}/{chunk_id}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


KEPT = 1 << 16
"""Deleted chunks that are remembered; once there were more, each deletion counts for all chunks."""


class Deletions:
    """How often each chunk was deleted, here or by another replica; for several threads.

    Prompts in which chunks were searched need none of it: they name what was stored at which time.
    """

    def __init__(self) -> None:
        self._counts: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._dropped = 0
        self._lock = Lock()

    def note(self, names: Iterable[Name]) -> None:
        """Count the deletion of chunks."""
        with self._lock:
            for name in names:
                key = name.namespace, name.chunk_id
                self._counts[key] = self._counts.pop(key, 0) + 1
                if len(self._counts) > KEPT:
                    self._dropped += self._counts.popitem(last=False)[1]

    def mark(self, namespace: str, job: BlendJob, token_ids: Sequence[int]) -> str:
        """Return what a blend's blocks depend on beside its job: "" if nothing was deleted.

        Args:
            namespace: of its chunks, as a namespace_id.
            job: the blend.
            token_ids: the prompt.
        """
        if not self._counts:
            return ""
        keys = [
            (namespace, chunk_id(chunk.own_tokens(token_ids)))
            for chunk in job.chunks
            if not chunk.turn
        ]
        with self._lock:
            counts = [self._counts.get(key, 0) for key in keys]
            dropped = self._dropped
        return f" {dropped} {counts}" if dropped or any(counts) else ""
