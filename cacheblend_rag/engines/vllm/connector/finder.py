"""Finds stored chunks in the tokens of prompts, whoever sends them.

The scheduler asks for each request, so it must not wait: files are read and written, and chunks
added to the index, on a thread of the finder's own. A chunk is found a moment after it was stored.
"""

from __future__ import annotations

import logging
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count, islice
from pathlib import Path
from queue import Empty, SimpleQueue
from random import shuffle
from threading import Event, Lock, Thread

import numpy as np

from cacheblend_rag.engines.vllm.connector.found_chunk import (
    EDGES,
    Deletions,
    FoundChunk,
    Generation,
    Variant,
    Vocabulary,
    chain,
)
from cacheblend_rag.engines.vllm.connector.shared_log import SharedLog
from cacheblend_rag.engines.vllm.connector.stored_tokens import (
    Name,
    Row,
    StoredTokens,
    TokenLog,
    id_of,
)
from cacheblend_rag.engines.vllm.connector.token_file import TokenFile
from cacheblend_rag.engines.vllm.protocol.job import BlendJob, SentChunk, SentLeadIn
from cacheblend_rag.engines.vllm.protocol.result import PrecomputeResult
from cacheblend_rag.errors import CacheBlendError
from cacheblend_rag.kv.chunk_kv import chunk_id, namespace_id, prefix_ids
from cacheblend_rag.settings.tier_url import TierUrl
from cacheblend_rag.text.token_index import TokenIndex, TokenRun

logger = logging.getLogger(__name__)

LEAST_RUN = 32
"""Tokens of the shortest chunk, or part of one, that is found."""
LONGEST_CHAIN = 64
"""Most chunks before another that are compared with its document context."""
LONGEST_LEAD = 8192
"""Most tokens at the beginning of a prompt that are compared with lead-ins."""
STEP = 16
"""A part of a chunk begins and ends at a multiple of so many of its tokens. Whoever knows a part
could otherwise try, one token after another, what comes next: ``cached_tokens`` would tell."""
MOST_ABSENT = 1 << 16
"""Tokens of its chunks that a prompt may lack, all together, besides one for each of its own: the
scheduler hands them on with each part, and the KV of whole chunks is read for their parts."""
MOST_CHUNKS = 1 << 20
"""Of all namespaces. The store does not tell what it drops to make room, so that they would grow
for ever; 5 GB if each has 512 tokens."""
MANY = 256
"""Chunks from which on they are added to the index together."""
REFRESH_SECONDS, CLOSE_SECONDS = 0.5, 10.0


@dataclass(slots=True)
class KnownTokens:
    """The stored chunks of a namespace: an index from tokens to ids, and each chunk's variants."""

    index: TokenIndex[str] = field(default_factory=lambda: TokenIndex(LEAST_RUN))
    variants: dict[str, tuple[Variant, ...]] = field(default_factory=dict)


class Finder:
    """Knows the tokens of stored chunks, by namespace, and which ones were deleted: ``deletions``.

    Args:
        place: the file that keeps them, the tier (Redis or an object store) that does and shares
            them with other machines, or None to keep them in this process' memory.
        model: returns a hash of what the KV depends on, and may take a while: it is called on the
            finder's thread. Chunks of other models are left out.
        read_only: whether the file or the tier is only read.
        vocabulary: returns what the model's tokenizer says, on the finder's thread.
        unconfirmed_context: see LeadInConfig.
    """

    def __init__(
        self,
        place: Path | TierUrl | None = None,
        model: Callable[[], str] = str,
        *,
        read_only: bool = False,
        vocabulary: Callable[[], Vocabulary] = Vocabulary,
        unconfirmed_context: bool = True,
    ) -> None:
        self._place, self._model, self._read_only = place, model, read_only
        self._find_vocabulary, self._vocabulary = vocabulary, Vocabulary()
        self._unconfirmed_context = unconfirmed_context
        self._known: defaultdict[str, KnownTokens] = defaultdict(KnownTokens)
        self._rows: dict[Row, Name] = {}
        self._leads: dict[SentLeadIn, SentLeadIn] = {}
        self._generations = count(1)
        self.deletions = Deletions()
        self._lock = Lock()
        self._log: TokenLog | None = None
        self._is_busy = False
        self._to_discard: list[Name] = []
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name="cacheblend-finder", daemon=True)
        self._thread.start()

    # Asked by the scheduler: nothing here waits

    def find(self, namespace: str, token_ids: Sequence[int]) -> list[FoundChunk]:
        """Return the stored chunks in a prompt, in order; its last token is in none."""
        known = self._known.get(namespace_id(namespace))
        found: list[FoundChunk] = []
        left = MOST_ABSENT + len(token_ids)
        if known is None:
            return found
        chains: list[str] = []  # of the chunks right before a run, from each of them on
        runs = known.index.find(token_ids, 0, len(token_ids) - 1)
        leads = cache(lambda: self._confirmed_leads(token_ids[: runs[0].start]))
        for run in runs:
            before, chains = chains, []
            variants = known.variants.get(run.name)
            if not variants:
                continue
            try:
                tokens = known.index.tokens(run.name)
            except KeyError:  # forgotten this very moment
                continue
            run = _in_steps(run, len(tokens))
            absent = len(tokens) - (run.end - run.start)
            if run.end - run.start < LEAST_RUN or absent > left:
                continue
            if absent <= EDGES:
                chains = [chain(one, run.name) for one in (*before[1 - LONGEST_CHAIN :], "")]
            chosen = self._chosen(variants, before, leads)
            if chosen is None:
                continue
            left -= absent
            sent = SentChunk(
                run.start,
                run.end,
                chosen.name.context_id,
                protected=chosen.is_contextual and chosen.follows not in before,
                before=tuple(tokens[: run.skip].tolist()),
                after=tuple(tokens[run.skip + run.end - run.start :].tolist()),
                lead_in=chosen.name.lead_in,
            )
            found.append(FoundChunk(sent, chosen.name, chosen.generation))
        return found

    def _chosen(
        self,
        variants: Sequence[Variant],
        chains: Sequence[str],
        leads: Callable[[], Collection[str]],
    ) -> Variant | None:
        """Return the KV that answers for a chunk, None if it would be that of another document.

        The rule is ChunkRegistry's: KV whose whole context stands right before the chunk, else KV
        without context, else KV of the only context that is known. A lead-in that is not the
        prompt's beginning is context, too.

        Args:
            variants: the chunk's.
            chains: of the chunks right before it, the longest first.
            leads: returns the lead-ins that the prompt confirms.
        """
        behind = {(one.name.lead_in.tokens, one.name.context_id) for one in variants}
        if len({lead for lead, _ in behind}) > 1 or not self._unconfirmed_context:
            variants = [one for one in variants if one.name.lead_in.tokens in leads()]
        ranked = sorted(variants, key=lambda one: one.rank)
        contexts = [one.follows if one.is_contextual else None for one in ranked]
        for context in (*chains, None):
            if context in contexts:
                return ranked[contexts.index(context)]
        return ranked[0] if len(behind) == 1 and self._unconfirmed_context else None

    def _confirmed_leads(self, beginning: Sequence[int]) -> Collection[str]:
        """Return the hashes of all prefixes of a prompt's beginning, of BOS, and of no token."""
        lengths = range(min(len(beginning), LONGEST_LEAD) + 1)
        plain = chunk_id(()), chunk_id(self._vocabulary.opening)
        return {*plain, *prefix_ids(beginning, lengths)}

    def learn(self, namespace: str, job: BlendJob, result: PrecomputeResult) -> None:
        """Add the chunks that a precompute job has stored, or found to be stored."""
        self._tasks.put(lambda: self._learn(namespace_id(namespace), job, result))

    def forget(self, namespace: str, lead_in: SentLeadIn, keys: Iterable[tuple[str, str]]) -> None:
        """Forget chunks by their chunk and context ids: they are not found from now on."""
        known = namespace_id(namespace)
        names = [Name(known, chunk, context, lead_in) for chunk, context in keys]
        if names:
            self.deletions.note(names)
            for name in names:
                self._drop(name)
            self._tasks.put(lambda: self._forget(names))

    def forget_lost(self, lost: Sequence[Generation]) -> None:
        """Forget chunks that a prompt's search found and the store lacked, late though it be told.

        What was stored anew after that search stays known.
        """
        if lost:
            self.deletions.note([one for one, number in lost if self._drop(one, generation=number)])
            self._tasks.put(lambda: self._forget_lost(lost))

    def settle(self, seconds: float = CLOSE_SECONDS) -> bool:
        """Wait until all that was learned so far can be found; returns whether it can."""
        done = Event()
        self._tasks.put(done.set)
        return done.wait(seconds)

    def close(self) -> None:
        """Write what is left to write, and end the thread."""
        self._tasks.put(None)
        self._thread.join(CLOSE_SECONDS)

    # On the finder's own thread

    def _run(self) -> None:
        self._try(self._read_vocabulary)
        self._try(self._open)
        while True:
            try:
                task = self._tasks.get(timeout=REFRESH_SECONDS if self._place else None)
                if task is None:
                    break
                self._try(task)
            except Empty:
                pass
            self._try(self._read_news)
            self._try(self._trim)
        if self._log is not None:
            self._log.close()

    def _try(self, task: Callable[[], None]) -> None:
        """Run a task; whatever fails, chunks that are known stay known."""
        try:
            task()
        except Exception:
            logger.warning("chunks of some documents are not found in prompts", exc_info=True)

    def _read_vocabulary(self) -> None:
        self._vocabulary = self._find_vocabulary()

    def _open(self) -> None:
        if self._place is None or self._is_still_missing():
            return
        self._is_busy = False
        try:
            self._log = self._opened(self._place, self._model())
        except CacheBlendError as error:  # no weights in files, say: nothing tells models apart
            self._place = None
            logger.warning("tokens of stored chunks are kept in memory only: %s", error)
        except (sqlite3.Error, OSError) as error:
            self._is_busy = self._give_up(error)
            return
        self._read_news()

    def _is_still_missing(self) -> bool:
        """Whether the file is for another process to make."""
        return self._read_only and isinstance(self._place, Path) and not self._place.exists()

    def _opened(self, place: Path | TierUrl, model: str) -> TokenLog:
        if isinstance(place, Path):
            return TokenFile(place, model, read_only=self._read_only)
        return SharedLog.of(place, model, read_only=self._read_only)

    def _give_up(self, error: Exception) -> bool:
        """Use an index in memory if the file cannot be opened; returns whether it was only locked.

        To one who only reads it, a file without tables is one that another process is making.
        """
        passing = ("locked", "no such table") if self._read_only else ("locked",)
        if isinstance(error, sqlite3.OperationalError) and any(
            why in str(error) for why in passing
        ):
            logger.debug("%s: %s", self._place, error)
            return True
        logger.warning(
            "%s cannot be used (%s): chunks stored from now on are found until the server ends; "
            "delete the file, and `precompute` fills it again",
            self._place,
            error,
        )
        self._log = self._place = None
        return False

    def _read_news(self) -> None:
        if self._log is None:
            is_new = self._place is not None and self._read_only and not self._is_still_missing()
            if self._is_busy or is_new:
                self._open()
            return
        if self._to_discard:
            self._discard_rows()
        try:
            for rows in self._log.news():
                for row, stored in rows.items():
                    if stored is None and (name := self._rows.pop(row, None)) is not None:
                        if self._drop(name, row):  # by another replica
                            self.deletions.note([name])
                        self._discard(name)
                self._add_many([(row, stored) for row, stored in rows.items() if stored])
            if self._log.has_lost():
                self._tell_all(self._log)
        except (sqlite3.Error, OSError) as error:
            self._give_up(error)

    def _tell_all(self, log: TokenLog) -> None:
        """Add all that is known to a log that lost it."""
        for known in list(self._known.values()):
            with self._lock:
                variants = [one for several in known.variants.values() for one in several]
            shuffle(variants)  # other replicas may be adding the same ones
            for first in range(0, len(variants), MANY):
                several = variants[first : first + MANY]
                tokens = [known.index.tokens(one.name.chunk_id) for one in several]
                told = zip(several, tokens, strict=True)
                log.add([StoredTokens(one.name, own, one.follows) for one, own in told])

    def _learn(self, namespace: str, job: BlendJob, result: PrecomputeResult) -> None:
        placed = list(self._stored(namespace, job, result))
        fresh = {one.name for place, one in placed if place in result.fresh}
        stored = [one for _, one in placed]
        is_told = False
        if self._log is not None:
            again = {one.name for one in stored} & {*self._to_discard}
            try:
                is_told = self._log.add(stored, fresh | again)
                self._to_discard = [name for name in self._to_discard if name not in again]
            except (sqlite3.Error, OSError) as error:
                self._give_up(error)
        if is_told:
            self._read_news()
        for one in stored:  # those that the log did not tell of
            self._add(one, None, anew=one.name in fresh and not is_told)

    def _stored(
        self, namespace: str, job: BlendJob, result: PrecomputeResult
    ) -> Iterable[tuple[int, StoredTokens]]:
        """Yield a job's chunks that are stored and long enough to be found, with their places."""
        lead, known = job.lead_in, self._known[namespace]
        first = job.chunks[0]
        behind = [
            (run.start, run.end, run.name)
            for run in known.index.find(job.tokens, first.context_start, first.start)
            if run.end - run.start == len(known.index.tokens(run.name))
        ]
        context, end = self._context(job, first, behind), first.start
        for place, sent in enumerate(job.chunks):
            tokens = _array(job, sent)
            own = id_of(tokens)
            if not self._vocabulary.is_blank(job.tokens[end : sent.start]):
                context = None
            if place not in result.lost and sent.end - sent.start >= LEAST_RUN:
                follows = (context or "") if sent.context_id else ""
                name = Name(namespace, own, sent.context_id, self._leads.setdefault(lead, lead))
                yield place, StoredTokens(name, tokens, follows)
            context, end = None if context is None else chain(context, own), sent.end

    def _context(
        self, job: BlendJob, first: SentChunk, behind: Sequence[tuple[int, int, str]]
    ) -> str | None:
        """Return the ``chain`` of the chunks before a job's first one, None if there is other text.

        behind: start, end and id of the chunks in its document context.
        """
        context, end = "", first.context_start
        for start, stop, own in (*behind, (first.start, first.start, "")):
            if not self._vocabulary.is_blank(job.tokens[end:start]):
                return None
            context, end = chain(context, own) if own else context, stop
        return context

    def _add_many(self, rows: Sequence[tuple[Row, StoredTokens]]) -> None:
        """Add chunks of the log; many at once are many times faster than one by one."""
        if len(rows) >= MANY:
            for namespace in {one.name.namespace for _, one in rows}:
                known = self._known[namespace]
                known.index.add_many(
                    (one.tokens, one.name.chunk_id)
                    for _, one in rows
                    if one.name.namespace == namespace
                )
        for row, stored in rows:
            self._add(stored, row)

    def _add(self, stored: StoredTokens, row: Row | None, *, anew: bool = True) -> None:
        name = stored.name
        known = self._known[name.namespace]
        if name.chunk_id not in known.index:
            known.index.add(stored.tokens, name.chunk_id)
        with self._lock:
            old = known.variants.get(name.chunk_id, ())
            others = tuple(one for one in old if one.name != name)
            if not anew and len(others) < len(old):
                return
            variant = Variant(name, stored.follows, next(self._generations), row)
            known.variants[name.chunk_id] = (*others, variant)
        if row is not None:
            self._rows[row] = name

    def _drop(self, name: Name, row: Row | None = None, generation: int | None = None) -> bool:
        """Stop finding a chunk, and return whether it was known.

        row, generation: only if it is that one.
        """
        known = self._known.get(name.namespace)
        if known is None:
            return False
        with self._lock:
            old = known.variants.get(name.chunk_id, ())
            left = tuple(
                one
                for one in old
                if one.name != name
                or row not in (None, one.row)
                or generation not in (None, one.generation)
            )
            if left:
                known.variants[name.chunk_id] = left
            else:
                known.variants.pop(name.chunk_id, None)
        return len(left) < len(old)

    def _discard(self, name: Name) -> None:
        """Remove a chunk's tokens if none of its variants is left."""
        known = self._known.get(name.namespace)
        if known is not None and name.chunk_id not in known.variants:
            known.index.discard(name.chunk_id)

    def _trim(self) -> None:
        """Forget what was stored first in the namespace with most chunks, if there are too many."""
        excess = sum(len(known.variants) for known in self._known.values()) - MOST_CHUNKS
        if excess > 0:
            most = max(self._known.values(), key=lambda known: len(known.variants))
            with self._lock:
                first = [*islice(most.variants.values(), excess + MOST_CHUNKS // 256)]
            self._forget([one.name for variants in first for one in variants])

    def _forget(self, names: Sequence[Name]) -> None:
        for name in names:  # again: some may have been learned meanwhile
            self._drop(name)
            self._discard(name)
        self._to_discard += names
        self._discard_rows()

    def _forget_lost(self, lost: Sequence[Generation]) -> None:
        """Remove from the log what nobody has stored anew meanwhile, as far as the log tells."""
        self._read_news()
        for name, generation in lost:  # again, as above
            self._drop(name, generation=generation)
        self._forget([name for name, _ in lost if not self._is_known(name)])

    def _is_known(self, name: Name) -> bool:
        known = self._known.get(name.namespace)
        return known is not None and any(
            one.name == name for one in known.variants.get(name.chunk_id, ())
        )

    def _discard_rows(self) -> None:
        """Remove what was forgotten from the log, too; while that is busy, it is tried again."""
        if self._log is not None:
            try:
                self._log.discard(self._to_discard)
            except (sqlite3.Error, OSError) as error:
                if self._give_up(error):
                    return
        self._to_discard = []


def _in_steps(run: TokenRun[str], length: int) -> TokenRun[str]:
    """Cut off what is known of a chunk's part beyond whole steps, but for the chunk's own edges."""
    first, end = run.skip, run.skip + run.end - run.start
    if first > EDGES:
        first = -(-first // STEP) * STEP
    if length - end > EDGES:
        end = max(end // STEP * STEP, first)
    return replace(
        run, start=run.start + first - run.skip, end=run.start + end - run.skip, skip=first
    )


def _array(job: BlendJob, sent: SentChunk) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    return np.asarray(job.tokens[sent.start : sent.end], dtype=np.uint32)
