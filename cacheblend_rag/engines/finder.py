"""Finds stored chunks in the tokens of prompts, whoever sends them.

A search must not wait: the catalogue is read and written, and chunks are added to the index, on a
thread of the finder's own. A chunk is found a moment after it was stored.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread

import numpy as np

from cacheblend_rag.engines.catalog import (
    TURNS,
    Catalog,
    CatalogChunk,
    Name,
    News,
    encoded,
    id_of,
    record_name,
    same_lead_in,
    turns_of,
)
from cacheblend_rag.engines.found_chunk import (
    Deletions,
    FoundChunk,
    Variant,
    Vocabulary,
    chain,
    chosen,
)
from cacheblend_rag.errors import CacheBlendError
from cacheblend_rag.kv.chunk_kv import chunk_id, namespace_id, prefix_ids
from cacheblend_rag.prefill.conversation_kv import gaps_between, turn_context
from cacheblend_rag.prefill.lead_in import LeadInId
from cacheblend_rag.text.anchors import Tokens
from cacheblend_rag.text.token_index import TokenIndex, TokenRun

logger = logging.getLogger(__name__)

LEAST_RUN = 32
"""Tokens of the shortest chunk, or part of one, that is found."""
LEAST_TURN = 8
"""The same of a conversation's turns."""
EDGES = 4
"""Most tokens that a chunk may lack in a prompt to count as the document before the next one."""
STEP = 16
"""A part of a chunk begins and ends at a multiple of so many of its tokens. Whoever knows a part
could otherwise try, one token after another, what comes next: ``cached_tokens`` would tell."""
CUTS = sorted(product(range(3), repeat=2), key=sum)
"""How many tokens at the edges of a part may be another chunk's."""
LONGEST_CHAIN = 64
"""Most chunks before another that are compared with its document context."""
LONGEST_LEAD = 8192
"""Most tokens at the beginning of a prompt that are compared with lead-ins."""
MOST_ABSENT = 1 << 16
"""Tokens of its chunks that a prompt may lack, all together, besides one for each of its own: they
are handed on with each part, and the KV of whole chunks is read for their parts."""
MOST_CHUNKS, MOST_TOKENS = 1 << 20, 1 << 29
"""Of all namespaces; of more, those that became known first are forgotten."""
MANY = 256
"""Chunks from which on they are added to the index together."""
MISSING_SECONDS = 30.0
"""For so long KV is believed to be missing that the store lacked."""
MOST_MISSING = 1 << 16
REFRESH_SECONDS, CLOSE_SECONDS = 0.5, 10.0


@dataclass(frozen=True, slots=True)
class Run:
    """Chunks of one document that were precomputed together.

    tokens: of the lead-in, and of the document from ``context_start`` on. spans: [start, end) of
    each chunk in them. keys: the chunk id and the context id of each. fresh, lost: indices of the
    chunks whose KV was computed just now, and of those whose KV is not stored. conversation: the
    key of the one whose turns they are, or "".
    """

    lead_in: LeadInId
    tokens: Sequence[int]
    spans: Sequence[tuple[int, int]]
    keys: Sequence[tuple[str, str]]
    context_start: int = 0
    fresh: Collection[int] = ()
    lost: Collection[int] = ()
    conversation: str = ""


@dataclass(slots=True)
class KnownTokens:
    """The chunks of a namespace: an index from tokens to ids, and each chunk's variants."""

    index: TokenIndex[str]
    variants: dict[str, tuple[Variant, ...]] = field(default_factory=dict)


class Known(dict[str, KnownTokens]):
    """The chunks of all namespaces."""

    def __missing__(self, namespace: str) -> KnownTokens:
        least = LEAST_TURN if namespace.startswith(TURNS) else LEAST_RUN
        return self.setdefault(namespace, KnownTokens(TokenIndex(least)))


class Finder:
    """Knows the tokens of chunks that were stored, by namespace; ``deletions`` those deleted.

    A chunk stays known when its KV is lost, until it is deleted.

    Args:
        open_catalog: opens what keeps them; it may take a while, and is called on the finder's
            thread. None keeps them in this process' memory.
        vocabulary: returns what the model's tokenizer says, on the finder's thread.
        unconfirmed_context: see LeadInConfig.
        keeps_exact: whether stored KV is reused as it was computed, in no lower precision.
    """

    def __init__(
        self,
        open_catalog: Callable[[], Catalog] | None = None,
        *,
        vocabulary: Callable[[], Vocabulary] = Vocabulary,
        unconfirmed_context: bool = True,
        keeps_exact: bool = False,
    ) -> None:
        self._open_catalog = open_catalog
        self._catalog: Catalog | None = None
        self._find_vocabulary, self._vocabulary = vocabulary, Vocabulary()
        self._unconfirmed_context, self._keeps_exact = unconfirmed_context, keeps_exact
        self.deletions = Deletions()
        self._known = Known()
        self._records: dict[str, tuple[Name, ...]] = {}
        self._missing: dict[Name, float] = {}
        self._tokens, self._looked_at = 0, 0.0
        self._going = Counter[Name]()
        self._lock = Lock()
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name="cacheblend-finder", daemon=True)
        self._thread.start()

    # For any thread: nothing here waits

    def find(
        self,
        namespace: str,
        token_ids: Sequence[int],
        *,
        taken: Iterable[tuple[int, int]] = (),
        conversation: str = "",
        until: int = 0,
    ) -> list[FoundChunk]:
        """Return the chunks in a prompt, in order; its last token is in none.

        Args:
            namespace: whose chunks are looked for.
            token_ids: the prompt.
            taken: spans of it, in order, in which none is looked for.
            conversation: the key of one whose earlier turns are looked for, too; or "".
            until: so many tokens may hold turns: from there on, there is the new question.
        """
        taken, own = [*taken], namespace_id(namespace)
        last = len(token_ids) - 1
        found = self._passages(own, token_ids, [*gaps_between(0, taken, last)])
        if conversation:
            taken = sorted((*taken, *((one.start, one.end) for one in found)))
            gaps = gaps_between(0, taken, min(until, last))
            found += self._turns(own, conversation, token_ids, gaps)
        return sorted(found, key=lambda one: one.start)

    def knows(self, namespace: str, conversation: str) -> bool:
        """Whether turns of a conversation are known."""
        return _inner(namespace, conversation) in self._known

    def _turns(
        self,
        namespace: str,
        conversation: str,
        token_ids: Sequence[int],
        gaps: Iterable[tuple[int, int]],
    ) -> list[FoundChunk]:
        """Return the parts of a conversation's turns; exact if the prompt begins as they did."""
        known = self._known.get(turns_of(namespace, conversation))
        if known is None:
            return []
        runs = [run for start, end in gaps for run in known.index.find(token_ids, start, end)]
        begins = sorted({run.start - run.skip for run in runs if run.start >= run.skip})
        before = dict(zip(begins, prefix_ids(token_ids, begins), strict=True))
        found = []
        for run in runs:
            if (held := self._held(known, run)) is None:
                continue
            variants, tokens = held
            begin = run.start - run.skip
            context = turn_context(before[begin], conversation) if begin in before else ""
            exact = [one for one in variants if one.name.context_id == context]
            one = self._found((*exact, variants[-1])[0], run, tokens, (), is_turn=True)
            goes_on = [*tokens[: run.skip].tolist()] == [*token_ids[max(0, begin) : run.start]]
            found.append(replace(one, is_exact=bool(exact) and goes_on and self._keeps_exact))
        return found

    def _held(self, known: KnownTokens, run: TokenRun[str]) -> tuple[list[Variant], Tokens] | None:
        """Return the KV of a run's chunk and all of its tokens; None if it is being forgotten."""
        variants = known.variants.get(run.name, ())
        left = [one for one in variants if not self._going[one.name]]
        try:
            return (left, known.index.tokens(run.name)) if left else None
        except KeyError:  # forgotten this very moment
            return None

    def _passages(
        self, namespace: str, token_ids: Sequence[int], gaps: Sequence[tuple[int, int]]
    ) -> list[FoundChunk]:
        known = self._known.get(namespace)
        if known is None:
            return []
        found: list[FoundChunk] = []
        left = MOST_ABSENT + len(token_ids)
        chains: list[str] = []  # of the chunks right before a run, from each of them on
        runs = [run for start, end in gaps for run in known.index.find(token_ids, start, end)]
        leads = cache(lambda: self._confirmed_leads(token_ids[: runs[0].start]))
        for run in runs:
            before, chains = chains, []
            run = _as_whole(known, run, token_ids)
            if (held := self._held(known, run)) is None:
                continue
            variants, tokens = held
            run = _in_steps(run, len(tokens))
            absent = len(tokens) - (run.end - run.start)
            if run.end - run.start < LEAST_RUN or absent > left:
                continue
            if absent <= EDGES:
                chains = [chain(one, run.name) for one in (*before[1 - LONGEST_CHAIN :], "")]
            variant = chosen(
                variants,
                before,
                leads,
                self._is_missing,
                unconfirmed_context=self._unconfirmed_context,
            )
            if variant is not None:
                left -= absent
                found.append(self._found(variant, run, tokens, before))
        return found

    def _found(
        self,
        variant: Variant,
        run: TokenRun[str],
        tokens: Tokens,
        before: Sequence[str],
        *,
        is_turn: bool = False,
    ) -> FoundChunk:
        name = variant.name
        return FoundChunk(
            name,
            run.start,
            run.end,
            before=tuple(tokens[: run.skip].tolist()),
            after=tuple(tokens[run.skip + run.end - run.start :].tolist()),
            protected=not is_turn and variant.is_contextual and variant.follows not in before,
            is_missing=self._is_missing(name),
            deletions=self.deletions.number(name.namespace, name.chunk_id),
            is_turn=is_turn,
        )

    def _confirmed_leads(self, beginning: Sequence[int]) -> Collection[str]:
        """Return the hashes of all prefixes of a prompt's beginning, of BOS, and of no token."""
        lengths = range(min(len(beginning), LONGEST_LEAD) + 1)
        plain = chunk_id(()), chunk_id(self._vocabulary.opening)
        return {*plain, *prefix_ids(beginning, lengths)}

    def _is_missing(self, name: Name) -> bool:
        return time.monotonic() < self._missing.get(name, 0.0)

    def note_missing(self, names: Iterable[Name]) -> None:
        """Note that the store lacks the KV of some chunks, which stay known."""
        until = time.monotonic() + MISSING_SECONDS
        if len(self._missing) > MOST_MISSING:
            self._missing = {}
        self._missing.update((name, until) for name in names)

    def learn(self, namespace: str, run: Run) -> None:
        """Add the chunks that were precomputed and stored, or found to be stored."""
        self._tasks.put(lambda: self._learn(_inner(namespace, run.conversation), run))

    def forget(
        self,
        namespace: str,
        lead_in: LeadInId,
        keys: Iterable[tuple[str, str]],
        conversation: str = "",
    ) -> None:
        """Forget deleted chunks by their chunk and context ids: they are not found from now on."""
        known = _inner(namespace, conversation)
        names = {Name(known, chunk, context, lead_in) for chunk, context in keys}
        if names:
            self.deletions.note(names)
            with self._lock:
                self._going.update(names)
            called_at = time.monotonic()
            self._tasks.put(lambda: self._forget(names, called_at))

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
                task = self._tasks.get(timeout=REFRESH_SECONDS if self._catalog else None)
                if task is None:
                    break
                self._try(task)
            except Empty:
                pass
            self._try(self._refresh)
            self._try(self._trim)
        if self._catalog is not None:
            self._catalog.close()

    def _try(self, task: Callable[[], None]) -> None:
        """Run a task; whatever fails, chunks that are known stay known."""
        try:
            task()
        except Exception:
            logger.warning("chunks of some documents are not found in prompts", exc_info=True)

    def _read_vocabulary(self) -> None:
        self._vocabulary = self._find_vocabulary()

    def _open(self) -> None:
        if self._open_catalog is None:
            return
        try:
            self._catalog = self._open_catalog()
        except CacheBlendError as error:  # no weights in files, say: nothing tells models apart
            logger.warning("tokens of stored chunks are kept in memory only: %s", error)
        self._refresh()

    def _refresh(self, *, at_once: bool = False) -> None:
        if self._catalog is not None:
            self._catalog.refresh(self._take, at_once=at_once)

    def _take(self, news: News) -> None:
        """Take what other servers changed in the catalogue."""
        chunks = [one for several in news.added.values() for one in several]
        if len(chunks) >= MANY:  # many at once are many times faster than one by one
            for namespace in {one.name.namespace for one in chunks}:
                self._known[namespace].index.add_many(
                    (one.tokens, one.name.chunk_id)
                    for one in chunks
                    if one.name.namespace == namespace
                )
        for record, several in news.added.items():
            self._enter(record, several)
        for record in news.removed:
            self.deletions.note(self._strike(record))
        for record in news.lost:
            if told := self._told(record):
                self._record(told)

    def _enter(self, record: str, chunks: Sequence[CatalogChunk]) -> None:
        """Know the chunks of a record from now on."""
        if record in self._records:
            return
        told = {one.name: one for one in chunks}
        self._records[record] = tuple(told)
        for name, one in told.items():
            known = self._known[name.namespace]
            if name.chunk_id not in known.index:
                known.index.add(one.tokens, name.chunk_id)
            old = known.variants.get(name.chunk_id, ())
            self._tokens += 0 if old else len(one.tokens)
            known.variants[name.chunk_id] = (*old, Variant(name, one.follows, record))

    def _strike(self, record: str) -> list[Name]:
        """Know the chunks of a record no longer; returns those that no other record tells of."""
        gone = []
        for name in self._records.pop(record, ()):
            known = self._known[name.namespace]
            left = [one for one in known.variants[name.chunk_id] if one.record != record]
            known.variants[name.chunk_id] = tuple(left)
            if not any(one.name == name for one in left):
                gone.append(name)
            if not left:
                self._tokens -= len(known.index.tokens(name.chunk_id))
                del known.variants[name.chunk_id]
                known.index.discard(name.chunk_id)
        return gone

    def _learn(self, namespace: str, run: Run) -> None:
        placed = dict(self._stored(namespace, run))
        for one in placed.values():
            self._missing.pop(one.name, None)
        fresh = [one for place, one in placed.items() if place in run.fresh]
        again = {one.record for each in fresh for one in self._variants(each.name)}
        for record in again:  # another server may be removing it
            self._record(self._told(record))
        new = {one.name: one for one in placed.values() if not self._variants(one.name)}
        if new:
            self._enter(self._record([*new.values()]), [*new.values()])

    def _record(self, chunks: Sequence[CatalogChunk]) -> str:
        """Write a record, where there is a catalogue, and return its name."""
        content = encoded(chunks)
        if self._catalog is not None:
            self._catalog.add(content)
        return record_name(content)

    def _stored(self, namespace: str, run: Run) -> Iterator[tuple[int, CatalogChunk]]:
        """Yield the chunks of a run that are stored and long enough to be found, with their places.

        The chain of what is before a chunk is None where there is other text between.
        """
        lead, tokens = same_lead_in(run.lead_in), run.tokens
        context, behind = self._context(namespace, run), run.spans[0][0]
        for place, ((start, end), (own_id, context_id)) in enumerate(
            zip(run.spans, run.keys, strict=True)
        ):
            own = np.asarray(tokens[start:end], dtype=np.uint32)
            name = Name(namespace, own_id, context_id, lead)
            if not self._vocabulary.is_blank(tokens[behind:start]):
                context = None
            if place not in run.lost and len(own) >= self._known[namespace].index.least:
                follows = (context or "") if context_id else ""
                yield place, CatalogChunk(name, own, follows)
            context, behind = None if context is None else chain(context, own_id), end

    def _context(self, namespace: str, run: Run) -> str | None:
        """Return the ``chain`` of the known chunks before a run's first one.

        None if there is other text, too.
        """
        index, first = self._known[namespace].index, run.spans[0][0]
        context, end = "", run.context_start
        for one in index.find(run.tokens, run.context_start, first):
            if one.end - one.start < len(index.tokens(one.name)):
                continue
            if not self._vocabulary.is_blank(run.tokens[end : one.start]):
                return None
            context, end = chain(context, one.name), one.end
        return context if self._vocabulary.is_blank(run.tokens[end:first]) else None

    def _forget(self, names: Collection[Name], called_at: float) -> None:
        """Remove deleted chunks from their records, those that others have just added included.

        called_at: when they were deleted; one look for news after that is enough for several.
        """
        if self._looked_at <= called_at:
            self._looked_at = time.monotonic()
            self._refresh(at_once=True)
        for record in {one.record for name in names for one in self._variants(name)}:
            self._remove(record, names)
        with self._lock:
            self._going -= Counter(names)

    def _remove(self, record: str, names: Collection[Name]) -> None:
        """Remove a record; what it tells beside these names goes to another one."""
        left = [one for one in self._told(record) if one.name not in names]
        if left:
            self._enter(self._record(left), left)
        self._strike(record)
        if self._catalog is not None:
            self._catalog.remove(record)

    def _told(self, record: str) -> list[CatalogChunk]:
        """Return the chunks of a record that is known."""
        return [
            CatalogChunk(name, self._known[name.namespace].index.tokens(name.chunk_id), one.follows)
            for name in self._records.get(record, ())
            for one in self._variants(name)
            if one.record == record
        ]

    def _variants(self, name: Name) -> list[Variant]:
        """Return what is known of a chunk, once for each record that tells of it."""
        variants = self._known[name.namespace].variants.get(name.chunk_id, ())
        return [one for one in variants if one.name == name]

    def _trim(self) -> None:
        """Forget what became known first in the namespace with most chunks, if there are too many.

        Nobody tells of documents that are never deleted, so that they would grow for ever.
        """
        while (
            sum(len(known.variants) for known in self._known.values()) > MOST_CHUNKS
            or self._tokens > MOST_TOKENS
        ):
            most = max(self._known, key=lambda one: len(self._known[one].variants))
            first = next(r for r, names in self._records.items() if names[0].namespace == most)
            self._remove(first, self._records[first])


def _inner(namespace: str, conversation: str) -> str:
    """Return the namespace of chunks, or of a conversation's turns, by its id."""
    own = namespace_id(namespace)
    return turns_of(own, conversation) if conversation else own


def _as_whole(known: KnownTokens, run: TokenRun[str], token_ids: Sequence[int]) -> TokenRun[str]:
    """Return a part of a chunk as the whole chunk that has the same tokens, if there is one.

    The longer one may go on alike by a token or two: a line break before both, say.
    """
    own = np.asarray(token_ids[run.start : run.end], dtype=np.uint32)
    for first, last in CUTS:
        name = id_of(own[first : len(own) - last])
        if name == run.name:
            return run
        if name in known.index:
            return replace(run, name=name, start=run.start + first, end=run.end - last, skip=0)
    return run


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
