"""A stored chunk that was found in a prompt, and the stored KV among which it was chosen."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cacheblend_rag.engines.vllm.connector.stored_tokens import Name, Row
from cacheblend_rag.engines.vllm.protocol import SentChunk

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
