"""Finds stored chunks in the tokens of prompts, whoever sends them.

A search must not wait: the catalogue is read and written, and chunks are added to the index, on a
thread of the finder's own. A chunk is found a moment after it was stored.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread

from cacheblend_rag.engines.catalog import (
    Catalog,
    CatalogChunk,
    ComputedRun,
    Name,
    News,
    chain,
    encoded,
    record_name,
    turns_of,
)
from cacheblend_rag.engines.found_chunk import (
    LEAST_RUN,
    Deletions,
    FoundChunk,
    KnownTokens,
    KnownVariants,
    Variant,
    Vocabulary,
    chosen,
)
from cacheblend_rag.errors import CacheBlendError
from cacheblend_rag.kv.chunk_kv import KVKey, chunk_id, namespace_id, prefix_ids
from cacheblend_rag.prefill.conversation_kv import gaps_between, turn_context
from cacheblend_rag.prefill.lead_in import LeadInId
from cacheblend_rag.text.reencoded import SameText, reencoding
from cacheblend_rag.text.token_index import Match, Tokens

logger = logging.getLogger(__name__)

EDGES = 4
"""Most tokens that a chunk may lack in a prompt to count as the document before the next one."""
STEP = 16
"""A part of a chunk begins and ends at a multiple of so many of its tokens. Whoever knows a part
could otherwise try, one token after another, what comes next: ``cached_tokens`` would tell."""
LONGEST_CHAIN = 64
"""Most chunks before another that are compared with its document context."""
LONGEST_LEAD = 8192
"""Most tokens at the beginning of a prompt that are compared with lead-ins."""
MOST_ABSENT = 1 << 16
"""Most tokens of partly found chunks that a prompt may lack, besides one for each of its own: the
KV of a whole chunk is read even if only a part of it is used."""
MISSING_SECONDS = 30.0
"""For so long KV is believed to be missing that the store lacked."""
MOST_MISSING = 1 << 16
REFRESH_SECONDS, CLOSE_SECONDS = 0.5, 10.0


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
        self._known = KnownVariants()
        self._missing: dict[Name, float] = {}
        self._looked_at = 0.0
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
        found = [*self._passages(own, token_ids, gaps_between(0, taken, last))]
        if conversation:
            taken = sorted((*taken, *((one.start, one.end) for one in found)))
            gaps = gaps_between(0, taken, min(until, last))
            found += self._turns(own, conversation, token_ids, gaps)
        return sorted(found, key=lambda one: one.start)

    def has(self, namespace: str, lead_in: LeadInId, key: KVKey) -> bool:
        """Whether a chunk's KV is known to be stored, and is not being deleted."""
        own = namespace_id(namespace)
        name, known = Name(own, key.chunk_id, key.context_id, lead_in), self._known.get(own)
        return known is not None and name in (one.name for one in self._held(known, key.chunk_id))

    def knows(self, namespace: str, conversation: str) -> bool:
        """Whether turns of a conversation are known."""
        return _inner(namespace, conversation) in self._known

    def _turns(
        self,
        namespace: str,
        conversation: str,
        token_ids: Sequence[int],
        gaps: Iterable[tuple[int, int]],
    ) -> Iterator[FoundChunk]:
        """Yield the turns found; exact if the prompt begins as it did when they were computed."""
        known = self._known.get(turns_of(namespace, conversation))
        if known is None:
            return
        matches = [one for start, end in gaps for one in known.index.find(token_ids, start, end)]
        begins = sorted({one.start - one.skip for one in matches if one.start >= one.skip})
        before = dict(zip(begins, prefix_ids(token_ids, begins), strict=True))
        for match in matches:
            if not (variants := self._held(known, match.name)):
                continue
            tokens = variants[0].tokens
            begin = match.start - match.skip
            context = turn_context(before[begin], conversation) if begin in before else ""
            exact = [one for one in variants if one.name.context_id == context]
            goes_on = [*tokens[: match.skip].tolist()] == [*token_ids[max(0, begin) : match.start]]
            is_exact = bool(exact) and goes_on and self._keeps_exact
            for one in self._found((*exact, variants[-1])[0], match):
                yield replace(one, is_turn=True, is_exact=is_exact)

    def _held(self, known: KnownTokens, chunk_id: str) -> list[Variant]:
        """Return the variants of a chunk that are not being deleted."""
        return [one for one in known.variants.get(chunk_id, ()) if not self._going[one.name]]

    def _passages(
        self, namespace: str, token_ids: Sequence[int], gaps: Iterable[tuple[int, int]]
    ) -> Iterator[FoundChunk]:
        known = self._known.get(namespace)
        if known is None:
            return
        is_same = SameText(self._vocabulary.says)
        left = MOST_ABSENT + len(token_ids)
        chains: list[str] = []  # of the chunks right before a match, from each of them on
        matches = [
            one
            for start, end in gaps
            for one in known.index.find(token_ids, start, end, is_same=is_same)
        ]
        leads = cache(lambda: self._confirmed_leads(token_ids[: matches[0].start]))
        for match in matches:
            before, chains = chains, []
            if not (variants := self._held(known, match.name)):
                continue
            tokens = variants[0].tokens
            part = _in_steps(match, len(tokens))
            if part is None or part.tokens < LEAST_RUN:
                continue
            absent = len(tokens) - part.tokens
            if absent > left:
                continue
            if len(tokens) - (part.stop - part.skip) <= EDGES:
                chains = [chain(one, part.name) for one in (*before[1 - LONGEST_CHAIN :], "")]
            variant = chosen(
                variants,
                before,
                leads,
                self._is_missing,
                unconfirmed_context=self._unconfirmed_context,
            )
            if variant is not None:
                left -= absent
                is_protected = variant.is_contextual and variant.follows not in before
                altered = self._altered(token_ids, tokens, part)
                for one in self._found(variant, part):
                    yield replace(one, protected=is_protected, altered=altered)

    def _found(self, variant: Variant, match: Match[str]) -> Iterator[FoundChunk]:
        """Yield a FoundChunk for each run of tokens that the prompt and a chunk share."""
        name = variant.name
        for run in match.runs:
            yield FoundChunk(
                name,
                run.start,
                run.end,
                before=run.skip,
                after=len(variant.tokens) - run.skip - run.tokens,
                is_missing=self._is_missing(name),
                deletions=self.deletions.number(name.namespace, name.chunk_id),
            )

    def _altered(self, prompt: Sequence[int], own: Tokens, part: Match[str]) -> str | None:
        """Return how a chunk stands in a prompt, as ChunkReport has it."""
        first, *others = part.runs
        how: str | None = "a part"
        if others:
            here = prompt[first.end : others[0].start]
            gap = own[first.skip + first.tokens : others[0].skip].tolist()
            how = reencoding(self._vocabulary.says(here), self._vocabulary.says(gap))
        elif part.skip <= EDGES and len(own) - part.stop <= EDGES:
            return None
        return f"{how}: {part.tokens} of {len(own)} tokens found"

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

    def learn(self, namespace: str, run: ComputedRun) -> None:
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
        self._known.enter(news.added)
        for record in news.removed:
            self.deletions.note(self._known.strike(record))
        for record in news.lost:
            if told := self._known.told(record):
                self._record(told)

    def _learn(self, namespace: str, run: ComputedRun) -> None:
        placed = dict(
            run.stored(namespace, self._known[namespace].index, self._vocabulary.is_blank)
        )
        for one in placed.values():
            self._missing.pop(one.name, None)
        fresh = [one for place, one in placed.items() if place in run.fresh]
        again = {one.record for each in fresh for one in self._known.variants(each.name)}
        for record in again:  # another server may be removing it
            self._record(self._known.told(record))
        new = {one.name: one for one in placed.values() if not self._known.variants(one.name)}
        if new:
            self._known.enter({self._record([*new.values()]): [*new.values()]})

    def _record(self, chunks: Sequence[CatalogChunk]) -> str:
        """Write a record, where there is a catalogue, and return its name."""
        content = encoded(chunks)
        if self._catalog is not None:
            self._catalog.add(content)
        return record_name(content)

    def _forget(self, names: Collection[Name], called_at: float) -> None:
        """Remove deleted chunks from their records, those that others have just added included.

        called_at: when they were deleted; one look for news after that is enough for several.
        """
        if self._looked_at <= called_at:
            self._looked_at = time.monotonic()
            self._refresh(at_once=True)
        for record in {one.record for name in names for one in self._known.variants(name)}:
            self._remove(record, names)
        with self._lock:
            self._going -= Counter(names)

    def _remove(self, record: str, names: Collection[Name]) -> None:
        """Remove a record; what it tells beside these names goes to another one."""
        left = [one for one in self._known.told(record) if one.name not in names]
        if left:
            self._known.enter({self._record(left): left})
        self._known.strike(record)
        if self._catalog is not None:
            self._catalog.remove(record)

    def _trim(self) -> None:
        """Remove the oldest records while there are too many chunks."""
        while record := self._known.surplus():
            self._remove(record, {one.name for one in self._known.told(record)})


def _inner(namespace: str, conversation: str) -> str:
    """Return the namespace of chunks, or of a conversation's turns, by its id."""
    own = namespace_id(namespace)
    return turns_of(own, conversation) if conversation else own


def _in_steps(match: Match[str], length: int) -> Match[str] | None:
    """Cut off what is known of a chunk's part beyond whole steps, but for the chunk's own edges."""
    first, stop = match.skip, match.stop
    if first > EDGES:
        first = -(-first // STEP) * STEP
    if length - stop > EDGES:
        stop = stop // STEP * STEP
    return match.within(first, stop)
