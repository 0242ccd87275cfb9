"""Measures loads from disk and requests per second of a batch, by overlap and by arrival.

The requests draw their chunks by Zipf's law. All chunks are on disk, memory has room for a share of
them and is empty when a batch begins. The same batch is answered first come, first served, and in
groups that share chunks, in turn. Passages are made of the sentences of real ones.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from cacheblend_rag.bench.interleave import Advance
from cacheblend_rag.bench.plans import BatchPlan
from cacheblend_rag.bench.workload import (
    draw_passage,
    draw_ranks,
    sample_sentences,
    zipf_weights,
)
from cacheblend_rag.demo.passages import load_passages
from cacheblend_rag.engines.batch import answer_batch
from cacheblend_rag.engines.batch_order import (
    MOST_TOGETHER,
    MOST_WAIT,
    Grouping,
    by_overlap,
    chunks_of,
    in_order_of_arrival,
)
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.engines.transformers.given_model import GivenModel
from cacheblend_rag.kv import DiskTier, HostTier, KVKey, TieredKVStore
from cacheblend_rag.kv.reader import ChunkReader, StoredBytes
from cacheblend_rag.settings import BlendConfig
from cacheblend_rag.text.chunk import Chunk
from cacheblend_rag.text.instructed import SEPARATOR
from cacheblend_rag.text.prompt import BlendPrompt
from cacheblend_rag.text.registry import ChunkRegistry

ORDERS = {"arrival": in_order_of_arrival, "overlap": by_overlap}


@dataclass(frozen=True)
class BatchRow:
    """The batch in one order; medians over the turns.

    loads, loaded_bytes: chunks read from disk, and their bytes. mean_wait_groups,
    longest_wait_groups: how many groups later than in the order of arrival a request was served,
    0 for one that was served earlier.
    """

    order: str
    requests_per_second: float
    seconds: float
    loads: int
    loaded_bytes: int
    mean_wait_groups: float
    longest_wait_groups: int


@dataclass(frozen=True)
class _Run:
    seconds: float
    loads: int
    loaded_bytes: int
    token_ids: tuple[tuple[int, ...], ...]


class CountingDisk(DiskTier):
    """A folder of chunk KV. loads: chunks opened. loaded_bytes: all bytes read of files."""

    loads = loaded_bytes = 0

    def _open(self, key: KVKey) -> ChunkReader | None:
        self.loads += 1
        return super()._open(key)

    def _read(self, key: KVKey, start: int = 0, end: int | None = None) -> StoredBytes | None:
        read = super()._read(key, start, end)
        self.loaded_bytes += 0 if read is None else read.raw.numel()
        return read


def measure_batch(plan: BatchPlan, advance: Advance = lambda _: None) -> dict[str, Any]:
    """Return ``orders``, a row for each of ORDERS, what was saved, and the parameters.

    same_answers: how many requests got the same greedy tokens in all runs.
    """
    with tempfile.TemporaryDirectory(prefix="cacheblend-") as folder:
        bench = _Bench(plan, Path(folder), advance)
        runs = bench.runs()
    rows = {order: _row(order, runs[order], bench.waits(ORDERS[order])) for order in ORDERS}
    arrival, overlap = rows["arrival"], rows["overlap"]
    answers = zip(*(run.token_ids for found in runs.values() for run in found), strict=True)
    return {
        "model": plan.model,
        "requests": plan.requests,
        "chunks": plan.chunks,
        "drawn": plan.drawn,
        "chunk_tokens": plan.chunk_tokens,
        "exponent": plan.exponent,
        "ratio": plan.ratio,
        "repeat": plan.repeat,
        "stored_bytes": bench.stored_bytes,
        "host_bytes": bench.host_bytes,
        "most_together": MOST_TOGETHER,
        "most_wait_groups": MOST_WAIT,
        "loads_saved": 1 - overlap.loads / arrival.loads if arrival.loads else 0.0,
        "speedup": overlap.requests_per_second / arrival.requests_per_second,
        "same_answers": sum(len(set(told)) == 1 for told in answers),
        "orders": [asdict(row) for row in rows.values()],
        "runs": {order: [run.seconds for run in found] for order, found in runs.items()},
    }


class _Bench:
    """A model, a folder with the KV of all chunks, and the prompts of the batch."""

    def __init__(self, plan: BatchPlan, folder: Path, advance: Advance) -> None:
        self._plan, self._folder, self._advance = plan, folder, advance
        advance(f"loading {plan.model}")
        self._config = BlendConfig(
            recompute_ratio=plan.ratio, min_tokens=0, cost_model=False, reuse_prefix=False
        )
        self._sampling = SamplingParams.greedy(plan.answer_tokens, ignore_eos=True)
        self._given, self._registry = GivenModel.of(plan.model, None, None, None), ChunkRegistry()
        rng = random.Random(plan.seed)
        with closing(self._engine(TieredKVStore([DiskTier(folder)]))) as writer:
            chunks = self._chunks(writer, rng)
            self._prompts = self._drawn(chunks, rng)
            advance(f"precomputing {plan.chunks} chunks")
            writer.precompute(chunks, progress=False)
            self._keys = [chunks_of(writer.prepare(one).placed) for one in self._prompts]
        self.stored_bytes = DiskTier(folder).usage().nbytes
        self.host_bytes = round(plan.held * self.stored_bytes)

    def _engine(self, store: TieredKVStore) -> TransformersEngine:
        return TransformersEngine(
            self._given.model,
            tokenizer=self._given.tokenizer,
            config=self._config,
            store=store,
            registry=self._registry,
        )

    def _chunks(self, engine: TransformersEngine, rng: random.Random) -> list[Chunk]:
        sentences = sample_sentences()
        return [
            Chunk(draw_passage(rng, sentences, self._plan.chunk_tokens, engine))
            for _ in range(self._plan.chunks)
        ]

    def _drawn(self, chunks: Sequence[Chunk], rng: random.Random) -> list[BlendPrompt]:
        weights = zipf_weights(self._plan.chunks, self._plan.exponent)
        questions = [one.question for one in load_passages().questions]
        prompts = []
        for _ in range(self._plan.requests):
            parts: list[Chunk | str] = []
            for rank in draw_ranks(rng, weights, self._plan.drawn):
                parts += [chunks[rank], SEPARATOR]
            question = f"Question: {rng.choice(questions)}\nAnswer:"
            prompts.append(BlendPrompt.of(*parts, question))
        return prompts

    def runs(self) -> dict[str, list[_Run]]:
        """Answer the batch ``repeat`` times in each order; which order comes first alternates."""
        self._advance("warm-up")
        self._run(in_order_of_arrival, self._prompts[:2])
        runs: dict[str, list[_Run]] = {order: [] for order in ORDERS}
        for turn in range(self._plan.repeat):
            for order in sorted(ORDERS, reverse=bool(turn % 2)):
                self._advance(f"turn {turn + 1} of {self._plan.repeat}: by {order}")
                runs[order].append(self._run(ORDERS[order], self._prompts))
        return runs

    def waits(self, grouping: Grouping) -> list[int]:
        """Return by how many groups each request is later than in the order of arrival."""
        groups = grouping(self._keys)
        return [
            max(0, number - index // MOST_TOGETHER)
            for number, group in enumerate(groups)
            for index in group
        ]

    def _run(self, grouping: Grouping, prompts: Sequence[BlendPrompt]) -> _Run:
        """Answer prompts with empty memory; only groups by overlap announce what they share."""
        disk = CountingDisk(self._folder)
        store = TieredKVStore([HostTier(self.host_bytes), disk])
        with closing(self._engine(store)) as engine:
            requests = [engine._questions.request(one, self._sampling) for one in prompts]
            wanting = engine._wanting if grouping is by_overlap else _unannounced
            started = time.perf_counter()
            answers = answer_batch(engine._start, requests, wanting, grouping=grouping)
            seconds = time.perf_counter() - started
        told = tuple(answer.token_ids for answer in answers)
        return _Run(seconds, disk.loads, disk.loaded_bytes, told)


def _unannounced(_: Iterable[KVKey]) -> AbstractContextManager[None]:
    return nullcontext()


def _row(order: str, runs: Sequence[_Run], waits: Sequence[int]) -> BatchRow:
    seconds = median(run.seconds for run in runs)
    return BatchRow(
        order=order,
        requests_per_second=len(waits) / seconds,
        seconds=seconds,
        loads=round(median(run.loads for run in runs)),
        loaded_bytes=round(median(run.loaded_bytes for run in runs)),
        mean_wait_groups=mean(waits),
        longest_wait_groups=max(waits),
    )
