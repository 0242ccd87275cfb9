"""What became of one chunk of a prompt, and the reasons for a miss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MissReason = Literal[
    "unknown",  # the chunk was given as such, but never registered
    "not stored",  # registered, but its KV is in no tier
    "other model",  # stored KV belongs to another model, tokenizer, lead-in or namespace
    "inseparable",  # the tokenizer cannot tell it from the text beside it
    "altered text",  # the text differs from the chunk the hint named
    "damaged",  # stored bytes failed their checksum and were quarantined
    "store error",  # a tier could not be read
    "no room",  # there is too little device memory to fuse the prompt's KV
    "too short",  # the prompt's reusable tokens are fewer than min_tokens
    "unsupported model",  # this model's KV cannot be blended
]


@dataclass(frozen=True)
class ChunkReport:
    """What became of one chunk of a prompt.

    start: index of its first token in the prompt. tokens: its length. hit: whether its KV was
    reused. reason: why not, None on a hit. tier: where the KV was found ("host", "disk"), None on
    a miss. recomputed: how many of its tokens were computed afresh.
    """

    chunk_id: str
    start: int
    tokens: int
    hit: bool
    reason: MissReason | None = None
    tier: str | None = None
    document_id: str | None = None
    recomputed: int = 0
