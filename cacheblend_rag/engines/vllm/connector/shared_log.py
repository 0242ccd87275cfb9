"""Keeps to a TokenLog on a server that may be away: for now, or since before this one started."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence

from cacheblend_rag.engines.vllm.connector.stored_tokens import Name, Row, StoredTokens, TokenLog
from cacheblend_rag.engines.vllm.connector.token_objects import ObjectTokens
from cacheblend_rag.engines.vllm.connector.token_stream import RedisTokens
from cacheblend_rag.kv.tiers.breaker import Breaker
from cacheblend_rag.settings.tier_url import REDIS_SCHEMES, TierUrl

logger = logging.getLogger(__name__)

MOST_WAITING = 100_000
"""Most chunks whose addition or removal waits for the server; the oldest are given up."""

_Change = tuple[Sequence[StoredTokens], Collection[Name], Collection[Name]]
"""Added, those of them as new ones, and removed."""


class SharedLog:
    """A TokenLog that never raises: what fails is tried again, after a second, later less often.

    Until then changes wait in memory. The first failure of several is a warning.

    Args:
        log: that may fail in any way.
        name: the tier's, for the log.
        read_only: whether it is only read.
    """

    def __init__(self, log: TokenLog, name: str, *, read_only: bool = False) -> None:
        self._log, self._name, self._read_only = log, name, read_only
        self._reading, self._writing = Breaker(), Breaker()
        self._waiting: deque[_Change] = deque()
        self._count = 0
        self._has_read = self._warned = False

    @classmethod
    def of(cls, url: TierUrl, model: str, *, read_only: bool) -> SharedLog:
        """Return the log of one model in the tier of a URL, Redis or an object store.

        Raises MissingExtraError, StoreError and ConfigError, as RedisTokens and ObjectTokens.
        """
        if url.scheme in REDIS_SCHEMES:
            return cls(RedisTokens(url, model), url.name, read_only=read_only)
        return cls(ObjectTokens(url, model, read_only=read_only), url.name, read_only=read_only)

    def add(self, stored: Sequence[StoredTokens], fresh: Collection[Name] = ()) -> bool:
        """Write chunks that are missing, as TokenLog says."""
        return self._change((stored, fresh, ()))

    def discard(self, names: Collection[Name]) -> None:
        """Remove chunks."""
        self._change(((), (), names))

    def news(self) -> Iterator[Mapping[Row, StoredTokens | None]]:
        """Yield what was removed and added since the last call, as TokenLog says."""
        permit = _permit(self._reading)
        if permit is not None:
            try:
                yield from self._log.news()
            except Exception as error:  # whatever the server sends
                self._failed(self._reading, permit, error)
            else:
                self._has_read = True
                self._worked(self._reading, permit)
        self._write()

    def has_lost(self) -> bool:
        """Return whether the server lost what it held, as TokenLog says."""
        return self._log.has_lost() and not self._read_only

    def close(self) -> None:
        """Write what waits if the server answers, and close the log."""
        self._write()
        self._log.close()

    def _change(self, change: _Change) -> bool:
        if self._read_only:
            return False
        self._waiting.append(change)
        self._count += _size(change)
        while self._count > MOST_WAITING and len(self._waiting) > 1:
            self._count -= _size(self._waiting.popleft())
        return self._write() and not self._reading.is_out

    def _write(self) -> bool:
        """Write what waits; returns whether nothing is left.

        Nothing is written before all has been read: what is there already need not be written.
        """
        while self._waiting:
            if not self._has_read:
                return False
            permit = _permit(self._writing)
            if permit is None:
                return False
            added, fresh, removed = self._waiting[0]
            try:
                if added:
                    self._log.add(added, fresh)
                if removed:
                    self._log.discard(removed)
            except Exception as error:  # whatever the server answers
                self._failed(self._writing, permit, error)
                return False
            self._worked(self._writing, permit)
            self._count -= _size(self._waiting.popleft())
        return True

    def _failed(self, breaker: Breaker, permit: int, error: Exception) -> None:
        breaker.failed(permit)
        if not self._warned:
            logger.warning(
                "%s tier: chunks that other servers store are not found in prompts for now (%s: "
                "%.200s); it is tried again",
                self._name,
                type(error).__name__,
                " ".join(str(error).split()),
            )
        self._warned = True

    def _worked(self, breaker: Breaker, permit: int) -> None:
        breaker.succeeded(permit)
        if self._warned and not self._reading.is_failing and not self._writing.is_failing:
            logger.info("%s tier: chunks that other servers store are found again", self._name)
            self._warned = False


def _size(change: _Change) -> int:
    added, _, removed = change
    return len(added) + len(removed)


def _permit(breaker: Breaker) -> int | None:
    permit = breaker.ask()
    return breaker.ask_for_trial() if permit is None else permit
