"""A prompt over the fake stack: chunks stored, chunks placed in it, and ranks that agree."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from cacheblend_rag import BlendConfig, TieredKVStore
from cacheblend_rag.blend import FusedKV, RingKV
from cacheblend_rag.blend.stack import Geometry, Reduction
from cacheblend_rag.blend.steps import run_to_end as run
from cacheblend_rag.kv.chunk_kv import ChunkKV, KVKey, chunk_id, fingerprint
from cacheblend_rag.kv.timings import Speeds
from cacheblend_rag.prefill.lead_in import PlacedChunk
from cacheblend_rag.prefill.policy import LEAST_CHANGE, Controller, Decision, Rates, StoredPart
from cacheblend_rag.prefill.prompt_pass import Destination, FusedPrompt, PromptPass
from cacheblend_rag.trace import Trace
from tests.blend.fake_stack import VOCABULARY, FakeStack, plain_kv

T = TypeVar("T")
FINGERPRINT = fingerprint({"model": "fake"})
LEAD = 2
"""Tokens that chunks are computed behind."""
SPANS = {"a": (3, 10), "b": (12, 18), "c": (18, 26)}
TOKENS, QUESTION = 30, 26


def prompt_ids(seed: int = 4) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (TOKENS,), generator=draw)


def placed(protected: str = "", names: str = "abc") -> list[PlacedChunk]:
    ids = prompt_ids()
    return [
        PlacedChunk(
            KVKey(chunk_id(ids[start:end].tolist()), FINGERPRINT),
            start, end, name in protected, f"doc {name}",
        )
        for name, (start, end) in SPANS.items()
        if name in names
    ]  # fmt: skip


def chunk_kv(stack: FakeStack, chunk: PlacedChunk, *, prior: bool = True) -> ChunkKV:
    """A chunk's KV behind two other tokens, and a prior that is drawn, of changed tokens."""
    own = prompt_ids()[chunk.start : chunk.end]
    keys, values, _ = plain_kv(stack, torch.cat((torch.tensor([1, 2]), own)))
    draw = torch.Generator().manual_seed(chunk.start)
    scores = LEAST_CHANGE + torch.rand(len(own), generator=draw) if prior else None
    return ChunkKV.of(keys[:, :, LEAD:].clone(), values[:, :, LEAD:].clone(), LEAD, scores)


def filled(chunks: Sequence[PlacedChunk], *, prior: bool = True) -> TieredKVStore:
    store = TieredKVStore.open()
    for chunk in chunks:
        store.put(chunk.key, chunk_kv(FakeStack(), chunk, prior=prior))
    return store


def prompt_pass(
    store: TieredKVStore,
    chunks: Sequence[PlacedChunk],
    stack: FakeStack | None = None,
    options: dict[str, Any] | None = None,
    **config: Any,
) -> PromptPass:
    source = store.fetch(chunk.key for chunk in chunks)
    settings = BlendConfig(**{"min_tokens": 0, **config})
    return PromptPass(
        stack or FakeStack(), prompt_ids(), chunks, source, settings, **(options or {})
    )


def finished(work: PromptPass) -> FusedPrompt:
    return run(work.steps())


class Ring(Destination):
    """Keeps two layers, and notes each once it is final."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def buffer(self, geometry: Geometry, tokens: int) -> FusedKV:
        return RingKV(geometry, tokens)

    def finish_layer(self, layer: int, fused: FusedKV) -> None:
        keys, values = fused.layer(layer)
        self.layers[layer] = keys.clone(), values.clone()


class Whole(Ring):
    """The same over a buffer of all layers."""

    def buffer(self, geometry: Geometry, tokens: int) -> FusedKV:
        return Destination.buffer(self, geometry, tokens)


class Decides:
    """A controller that has decided already: to load the parts that begin at some tokens."""

    learn = Controller.learn

    def __init__(self, starts: Iterable[int], why: str | None = None) -> None:
        self.starts, self.why = set(starts), why
        self.rates, self.speeds, self.parts = Rates(), Speeds(), list[StoredPart]()
        self.clock: Callable[[], float] = time.perf_counter

    def decide(
        self, tokens: int, parts: list[StoredPart], config: BlendConfig, *, held: int
    ) -> Decision:
        assert held == 0
        assert tokens == TOKENS
        self.parts = parts
        load = tuple(part for part in parts if part.start in self.starts)
        return Decision(load, self.why)  # type: ignore[arg-type]


class Ranks:
    """Two ranks, each a thread: what one asks the other, it waits for, as real ones do."""

    def __init__(self) -> None:
        self._met = threading.Barrier(2, timeout=20)
        self._parts: list[Any] = [None, None]

    def stack(self, rank: int) -> FakeStack:
        def reduced(part: Tensor, how: Reduction) -> Tensor:
            both = torch.stack(self._exchanged(rank, part))
            return both.sum(0) if how == "sum" else both.amax(0)

        return FakeStack(reduced=reduced, first=lambda part: self._exchanged(rank, part)[0])

    def run(self, work: Callable[[int, FakeStack], T]) -> list[T]:
        """Have both do their work at a time; raises what one of them raises."""
        found: list[Any] = [None, None]

        def of(rank: int) -> None:
            try:
                found[rank] = work(rank, self.stack(rank))
            except BaseException as error:
                found[rank] = error
                self._met.abort()

        threads = [threading.Thread(target=of, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        errors = [each for each in found if isinstance(each, BaseException)]
        errors.sort(key=lambda error: isinstance(error, threading.BrokenBarrierError))
        if errors:
            raise errors[0]
        return found

    def _exchanged(self, rank: int, part: Tensor) -> list[Tensor]:
        self._parts[rank] = part.clone()
        self._met.wait()
        both = list(self._parts)
        self._met.wait()
        return both


def traces_alone_and_of_ranks(**config: Any) -> tuple[Trace, Trace]:
    """The traces of a pass by one rank, and by two, which must agree."""

    def traced_by(_: int, stack: FakeStack | None) -> Trace:
        trace = finished(prompt_pass(filled(placed()), placed(), stack, trace=True, **config)).trace
        assert trace is not None
        return trace

    first, second = Ranks().run(traced_by)
    assert first == second
    return traced_by(0, None), first


def give_up(store: TieredKVStore, stack: FakeStack, *, ring: bool, steps: int) -> None:
    """Begin a pass, give it up after some steps, and expect that nothing holds what it read."""
    source = store.fetch(chunk.key for chunk in placed())
    work = PromptPass(
        stack, prompt_ids().to(stack.device), placed(), source,
        BlendConfig(recompute_ratio=0.3, min_tokens=0),
        destination=Ring() if ring else Destination(),
    )  # fmt: skip
    running = work.steps()
    for _ in range(steps):
        next(running)
    running.close()
    source.close()
    kept = weakref.ref(source)
    del running, work, source
    gc.collect()
    assert kept() is None
