"""ToyEngine: what a third engine costs. Its model is a hash, its KV of a token is a number."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from cacheblend_rag.engines.answer import CANCELLED, FULL_PREFILL, Delta, FinishReason, Request
from cacheblend_rag.engines.backend import EngineSetup
from cacheblend_rag.engines.base import Engine
from cacheblend_rag.engines.stream import Stream, Take
from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.prefill.comparing import Compared, Comparison
from cacheblend_rag.prefill.lead_in import ChunkPlan
from cacheblend_rag.prefill.policy import NO_CHUNK, too_little
from cacheblend_rag.reason import Miss
from cacheblend_rag.report import Evicted, PrecomputeReport, PrefillReport
from cacheblend_rag.trace import Trace

KV = tuple[int, ...]
LAST_WORD = 256


class ToyEngine(Engine):
    """Answers what follows from the KV of all tokens of the prompt, computed or reused."""

    name = "toy"
    context_window = 1 << 15
    blend_refusal = None

    def __init__(self, tokenizer: Any, **settings: Any) -> None:
        self._kv: dict[KVKey, KV] = {}
        self._pool = ThreadPoolExecutor()
        setup = {"model_name": "hash", "identity": {"toy": "hash"}, **settings}
        super().__init__(EngineSetup(tokenizer=tokenizer, **setup))

    # A request

    def _start(self, request: Request) -> Stream[Delta]:
        def answer(push: Take[Delta]) -> Delta:
            for delta in self._answer(request):
                push(delta)
            return delta

        def begin(push: Take[Delta]) -> Future[Delta]:
            self._lifetime.check()
            return self._pool.submit(answer, push)

        return Stream(begin, request.cancel)

    def _answer(self, request: Request) -> Iterator[Delta]:
        if request.cancel.is_set():
            yield self._answered(request, "", (), "cancelled", CANCELLED)
            return
        kv, report = self._prefilled(request)
        sampling, text, ids, sent = request.sampling, "", list[int](), 0
        held_back = max(map(len, sampling.stop), default=1) - 1
        reason: FinishReason = "length"
        while len(ids) < sampling.max_tokens and reason == "length":
            drawn = sampling.seed if sampling.temperature else None
            ids.append(2 + hash((kv, drawn, *ids)) % (LAST_WORD - 2))
            text = self.tokenizer.decode(ids)
            ends = [text.index(stop) for stop in sampling.stop if stop in text]
            if ends:
                text, reason = text[: min(ends)], "stop"
            elif request.cancel.is_set():
                reason = "cancelled"
            elif len(text) - held_back > sent:
                yield Delta(text[sent : len(text) - held_back])
                sent = len(text) - held_back
        last = self._answered(request, text, ids, reason, report)
        yield replace(last, text=text[sent:])

    def _prefilled(self, request: Request) -> tuple[KV, PrefillReport]:
        """Return the KV of all tokens, and what was reused of it."""
        prepared, config = request.prepared, request.config
        kv = _computed(prepared.token_ids)
        if request.full or not prepared.parts:
            return kv, PrefillReport(FULL_PREFILL if request.full else NO_CHUNK)
        if stopped := request.steering.refusal:
            return kv, PrefillReport(
                stopped, chunks=[c.report(Miss.GUARD_STOPPED) for c in prepared.parts]
            )
        found = [(chunk, self._kv.get(chunk.key)) for chunk in prepared.parts]
        refused = too_little(sum(len(one or ()) for _, one in found), config.min_tokens)
        if refused:
            chunks = [c.report((one and refused[1]) or Miss.NOT_STORED) for c, one in found]
            return kv, PrefillReport(refused[0], chunks=chunks)
        chunks = []
        ratio = config.ratio
        for chunk, one in found:
            fresh, own = round(ratio * len(one or ())), one or kv[chunk.start : chunk.end]
            kv = kv[: chunk.start + fresh] + own[fresh:] + kv[chunk.end :]
            told = chunk.report(None, "host") if one else chunk.report(Miss.NOT_STORED)
            chunks.append(replace(told, recomputed=fresh))
        trace = Trace(rows=(sum(told.recomputed for told in chunks),)) if config.trace else None
        return kv, PrefillReport(None, "first", ratio=ratio, chunks=chunks, trace=trace)

    def _compare(
        self, request: Request, compared: Compared
    ) -> Generator[None, None, Comparison | None]:
        yield
        kv, report = self._prefilled(request)
        fresh = _computed(compared.reference or compared.prompt)
        return Comparison(float(kv[-len(fresh) :] != fresh[-len(kv) :])) if report.blended else None

    # The store's verbs

    def _store(self, plans: Sequence[ChunkPlan]) -> Generator[PrecomputeReport]:
        for plan in plans:
            if plan.key in self._kv:
                yield PrecomputeReport(skipped=1)
            else:
                self._kv[plan.key] = _computed(plan.token_ids)
                yield PrecomputeReport(computed=1, computed_tokens=len(plan.token_ids))

    def _verify(self, keys: Sequence[KVKey]) -> Mapping[KVKey, Any]:
        return {}  # a number is never damaged

    def _prefetch(self, keys: Sequence[KVKey]) -> None:
        """There is no slower tier."""

    def _evict(self, keys: Sequence[KVKey]) -> Evicted:
        return Evicted(sum(self._kv.pop(key, None) is not None for key in keys))

    def _release(self) -> int:
        freed = sum(8 * len(kv) for kv in self._kv.values())
        self._kv.clear()
        return freed

    def _stored_keys(self) -> Iterable[KVKey]:
        return [key for key in self._kv if key.fingerprint == self.fingerprint]

    def _close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


def _computed(token_ids: Iterable[int]) -> KV:
    return tuple(hash((token,)) for token in token_ids)
