"""Bounds what the chunks of a shared log take of this machine's memory."""

from __future__ import annotations

import logging

from cacheblend_rag.engines.vllm.connector.stored_tokens import Row, StoredTokens

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
