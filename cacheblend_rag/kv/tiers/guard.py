"""Guards a tier: detects its failures and late answers, and skips the tier while it fails."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread

from cacheblend_rag.errors import DamagedChunkError, ForeignChunkError
from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.kv.stored_chunk import told
from cacheblend_rag.kv.tiers.admission import RefusedError
from cacheblend_rag.kv.tiers.breaker import Breaker, OutError
from cacheblend_rag.kv.tiers.policy import Counters
from cacheblend_rag.memory import lack_of_memory

logger = logging.getLogger(__name__)

SLOW_FAILURE_SECONDS = 0.25
"""A failure that takes longer puts the tier out of use; a faster one may concern one chunk only."""


class Guard:
    """Wraps every use of a tier's storage.

    A tier that fails as a whole, or takes long to fail, is out of use, so that no request waits for
    it, until a trial succeeds.

    name: the tier's. counts: where failures are counted. trial: looks a chunk up in the tier.
    fails_whole: whether any failure affects the whole tier. timeout_seconds: see TierPolicy.
    reading, writing: whether the tier is out of use, separately unless it fails as a whole.
    last_failure: its latest error.
    """

    def __init__(
        self,
        name: str,
        counts: Counters,
        trial: Callable[[KVKey], object],
        *,
        fails_whole: bool,
        timeout_seconds: float | None,
    ) -> None:
        self.fails_whole, self.last_failure = fails_whole, ""
        self._name, self._counts, self._trial = name, counts, trial
        self._timeout_seconds = timeout_seconds
        self.reading = Breaker()
        self.writing = self.reading if fails_whole else Breaker()
        # The causes that were logged since the last success, of the breaker for writing or not.
        self._warned = {True: set[str](), False: set[str]()}

    @contextmanager
    def reads(self, key: KVKey) -> Iterator[None]:
        """Wrap a read; see ``_around``. Another thread runs trials while the tier is out of use."""
        permit = self.reading.ask()
        if permit is None:
            self._try_aside(key)
            raise OutError("skipped for a while after a failure")
        with self._around(self.reading, permit, timed=True):
            yield

    @contextmanager
    def writes(self, *, timed: bool = True) -> Iterator[None]:
        """Wrap a write; see ``_around``. While the tier is out of use, a write may be the trial."""
        permit = self.writing.ask()
        if permit is None:
            permit = self.writing.ask_for_trial()
        if permit is None:
            raise OutError("skipped for a while after a failure")
        with self._around(self.writing, permit, timed):
            yield

    def could_not(self, what: str, key: KVKey, error: OSError, *, reading: bool) -> None:
        """Count a failure and log it: one warning per cause, until an access succeeds.

        Nothing is logged if the tier was out of use, which was logged before.
        """
        out = isinstance(error, OutError)
        self._counts.add(("skipped" if reading else "dropped") if out else "errors")
        warned = self._warned[not reading or self.reading is self.writing]
        cause = what + told(error)
        level = logging.DEBUG if out or cause in warned else logging.WARNING
        if not out:
            warned.add(cause)
        logger.log(level, f"%s tier: could not {what}: %s", self._name, key, error)

    @contextmanager
    def _around(self, breaker: Breaker, permit: int, timed: bool) -> Iterator[None]:
        """Wrap a use: the one place that decides what is a failure, and tells the breaker.

        An error about a damaged, foreign or refused chunk is an answer; any other error
        is a failure, and is raised as OSError. Except for lack of memory, it is the tier's failure.
        timed: whether a long duration counts as a failure.
        """
        began = breaker.clock()
        try:
            yield
        except (RefusedError, DamagedChunkError, ForeignChunkError):
            breaker.succeeded(permit)
            raise
        except Exception as error:
            if lack := lack_of_memory(error):  # not the tier's fault
                breaker.withdrawn(permit)
                raise OSError(errno.ENOMEM, lack) from None
            self.last_failure = told(error)
            slow = timed and breaker.clock() - began >= SLOW_FAILURE_SECONDS
            breaker.failed(permit, trips=self.fails_whole or slow)
            if isinstance(error, OSError):
                raise
            logger.warning("%s tier: failed unexpectedly", self._name, exc_info=True)
            raise OSError(f"{type(error).__name__}: {error}") from error
        seconds, most = breaker.clock() - began, self._timeout_seconds
        if timed and most is not None and seconds > most:
            self._counts.add("errors")
            self.last_failure = f"took {seconds:.1f} s, more than {most:g}"
            logger.warning("%s tier: %s", self._name, self.last_failure)
            breaker.failed(permit)
        else:
            breaker.succeeded(permit)
            self._warned[breaker is self.writing].clear()

    def _try_aside(self, key: KVKey) -> None:
        """Run a trial on a separate thread if one is due, so that no request waits for it."""
        if (permit := self.reading.ask_for_trial()) is not None:
            trial = Thread(target=self._try, args=(permit, key), daemon=True, name="kv-trial")
            try:
                trial.start()
            except RuntimeError:  # no thread can be started now: try later
                self.reading.failed(permit)

    def _try(self, permit: int, key: KVKey) -> None:
        try:
            with self._around(self.reading, permit, timed=True):
                self._trial(key)
        except OSError as error:
            logger.warning("%s tier: still fails: %s", self._name, error)
        else:
            if not self.reading.is_out:
                logger.warning("%s tier: answers again", self._name)
