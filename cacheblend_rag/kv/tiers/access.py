"""Controls access to one tier: detects its failures, and skips the tier while it fails."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Thread

from cacheblend_rag.errors import DamagedChunkError, ForeignChunkError
from cacheblend_rag.kv.chunk_kv import KVKey, NotFiniteError
from cacheblend_rag.kv.stored_chunk import told
from cacheblend_rag.kv.tiers.admission import RefusedError
from cacheblend_rag.kv.tiers.breaker import Breaker, OutError
from cacheblend_rag.kv.tiers.contract import Counters, TierContract
from cacheblend_rag.memory import lack_of_memory

logger = logging.getLogger(__name__)

SLOW_FAILURE_SECONDS = 0.25
"""A faster failure costs a request almost nothing, and may concern one chunk only."""


class Access:
    """Wraps every access to a tier.

    A tier that fails as a whole, or takes long to fail, is out of use, so that no request waits for
    it, until a trial succeeds.

    tier: its ``_entry`` is the trial. counts: where failures are counted. reading, writing: whether
    the tier is out of use, separately unless it fails as a whole. last_failure: its latest error.
    """

    def __init__(self, tier: TierContract, counts: Counters) -> None:
        self._tier, self._counts = tier, counts
        self.reading = Breaker()
        self.writing = self.reading if tier.fails_whole else Breaker()
        self.last_failure = ""
        # The causes that were logged since the last success, by whether it was reading.
        self._warned = {True: set[str](), False: set[str]()}

    @contextmanager
    def to_read(self, *keys: KVKey, timed: bool = True) -> Iterator[int]:
        """Wrap a read; see ``_around``."""
        with self._around(self.reading, keys, timed) as permit:
            yield permit

    @contextmanager
    def to_write(self, *keys: KVKey, timed: bool = True) -> Iterator[int]:
        """Wrap an access that takes the tier's lock; see ``_around``."""
        with self._around(self.writing, keys, timed) as permit:
            yield permit

    @contextmanager
    def _around(self, breaker: Breaker, keys: Sequence[KVKey], timed: bool) -> Iterator[int]:
        """Wrap an access: the one place that decides what is a failure, and tells the breaker.

        An error about a damaged, foreign, refused or not finite chunk is an answer; any other error
        is a failure, and is raised as OSError. Except for lack of memory, it is the tier's failure.
        keys: one to try the tier with while it is out of use. timed: whether a long duration counts
        as a failure; not for many chunks together. Raises OutError if the tier is out of use.
        """
        permit = self._permit(breaker, keys)
        began = breaker.clock()
        try:
            yield permit
        except (RefusedError, DamagedChunkError, ForeignChunkError, NotFiniteError):
            breaker.succeeded(permit)
            raise
        except Exception as error:
            if lack := lack_of_memory(error):  # not the tier's fault
                breaker.withdrawn(permit)
                raise OSError(errno.ENOMEM, lack) from None
            self.last_failure = told(error)
            slow = timed and breaker.clock() - began >= SLOW_FAILURE_SECONDS
            breaker.failed(permit, trips=self._tier.fails_whole or slow)
            if isinstance(error, OSError):
                raise
            logger.warning("%s tier: failed unexpectedly", self._tier.name, exc_info=True)
            raise OSError(f"{type(error).__name__}: {error}") from error
        if timed:  # otherwise each chunk reported for itself
            self._note_seconds(breaker, permit, breaker.clock() - began)

    def _note_seconds(self, breaker: Breaker, permit: int, seconds: float) -> None:
        """Tell the breaker that an access succeeded, unless it took too long."""
        most = self._tier.policy.timeout_seconds
        if most is not None and seconds > most:
            self._counts.add("errors")
            logger.warning("%s tier: took %.1f s, more than %g", self._tier.name, seconds, most)
            self.last_failure = f"took {seconds:.1f} s, more than {most:g}"
            breaker.failed(permit)
        else:
            breaker.succeeded(permit)
            self._warned[breaker is not self.writing].clear()

    def _permit(self, breaker: Breaker, keys: Sequence[KVKey]) -> int:
        permit = breaker.ask()
        if permit is None and breaker is self.reading:
            self._try_aside(keys)
        elif permit is None:
            permit = breaker.ask_for_trial()
        if permit is None:
            raise OutError("skipped for a while after a failure")
        return permit

    def _try_aside(self, keys: Sequence[KVKey]) -> None:
        """Run a trial on a separate thread if one is due, so that no request waits for it."""
        if keys and (permit := self.reading.ask_for_trial()) is not None:
            trial = Thread(target=self._try, args=(permit, keys[0]), daemon=True, name="kv-trial")
            try:
                trial.start()
            except RuntimeError:  # no thread can be started now: try later
                self.reading.failed(permit)

    def _try(self, permit: int, key: KVKey) -> None:
        began = self.reading.clock()
        try:
            self._tier._entry(key)
        except Exception as error:
            if lack_of_memory(error):
                self.reading.withdrawn(permit)
                return
            logger.warning("%s tier: still fails: %s", self._tier.name, error)
            self.reading.failed(permit)
            return
        most = self._tier.policy.timeout_seconds
        if most is not None and self.reading.clock() - began > most:
            self.reading.failed(permit)
            return
        logger.warning("%s tier: answers again", self._tier.name)
        self.reading.succeeded(permit)

    def could_not(self, what: str, key: KVKey, error: OSError, *, reading: bool) -> None:
        """Count a failure and log it: one warning per cause, until an access succeeds.

        Nothing is logged if the tier was out of use, which was logged before.
        """
        out = isinstance(error, OutError)
        self._counts.add(("skipped" if reading else "dropped") if out else "errors")
        kind = reading and self.reading is not self.writing
        warned, cause = self._warned[kind], what + told(error)
        level = logging.DEBUG if out or cause in warned else logging.WARNING
        if not out:
            warned.add(cause)
        logger.log(level, f"%s tier: could not {what}: %s", self._tier.name, key, error)
