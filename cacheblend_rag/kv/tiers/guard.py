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
        self.fails_whole, self._last_failure = fails_whole, ""
        self._name, self._counts, self._trial = name, counts, trial
        self._timeout_seconds = timeout_seconds
        self.reading = Breaker()
        self.writing = self.reading if fails_whole else Breaker()
        # The causes that were logged since the last success, of the breaker for writing or not.
        self._warned = {True: set[str](), False: set[str]()}

    @contextmanager
    def reads(self, what: str, key: KVKey) -> Iterator[None]:
        """Wrap a read; see ``_around``. Another thread runs trials while the tier is out of use.

        what: is done, with ``%s`` for the key; if it fails, that is counted and logged.
        """
        with self._told(what, key, self.reading, "skipped"):
            permit = self.reading.ask()
            if permit is None:
                self._try_aside(key)
                raise OutError(self._last_failure)
            with self._around(self.reading, permit):
                yield

    @contextmanager
    def writes(self, what: str, key: KVKey) -> Iterator[None]:
        """As ``reads``, for a write. While the tier is out of use, a write may be the trial."""
        with self._told(what, key, self.writing, "dropped"), self.uses():
            yield

    @contextmanager
    def uses(self, *, timed: bool = True) -> Iterator[None]:
        """As ``writes``, but a failure is neither counted nor logged."""
        permit = self.writing.ask()
        if permit is None and (permit := self.writing.ask_for_trial()) is None:
            raise OutError(self._last_failure)
        with self._around(self.writing, permit, timed=timed):
            yield

    @contextmanager
    def _told(self, what: str, key: KVKey, breaker: Breaker, out_counts: str) -> Iterator[None]:
        """Count a failure and log it: one warning per cause, until an access succeeds.

        Of a tier that is out of use nothing is logged, since its failure was.
        """
        try:
            yield
        except OSError as error:
            out = isinstance(error, OutError)
            self._counts.add(out_counts if out else "errors")
            warned, cause = self._warned[breaker is self.writing], what + told(error)
            level = logging.DEBUG if out or cause in warned else logging.WARNING
            if not out:
                warned.add(cause)
            logger.log(level, f"%s tier: could not {what}: %s", self._name, key, error)
            raise

    @contextmanager
    def _around(self, breaker: Breaker, permit: int, *, timed: bool = True) -> Iterator[None]:
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
            self._last_failure = told(error)
            slow = timed and breaker.clock() - began >= SLOW_FAILURE_SECONDS
            breaker.failed(permit, trips=self.fails_whole or slow)
            if isinstance(error, OSError):
                raise
            logger.warning("%s tier: failed unexpectedly", self._name, exc_info=True)
            raise OSError(f"{type(error).__name__}: {error}") from error
        seconds, most = breaker.clock() - began, self._timeout_seconds
        if timed and most is not None and seconds > most:
            self._counts.add("errors")
            self._last_failure = f"took {seconds:.1f} s, more than {most:g}"
            logger.warning("%s tier: %s", self._name, self._last_failure)
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
            with self._around(self.reading, permit):
                self._trial(key)
        except OSError as error:
            logger.warning("%s tier: still fails: %s", self._name, error)
        else:
            if not self.reading.is_out:
                logger.warning("%s tier: answers again", self._name)
