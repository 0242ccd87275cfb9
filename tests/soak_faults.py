"""A mixed load over a Redis that dies, hangs, drips and lies: ``python -m tests.soak_faults``.

Threads ask questions and chat turns, index, evict and register on the embedded engine with the
bundled model, over a small memory, Redis behind a proxy, and a disk. The proxy by turns passes,
refuses, hangs, drips a byte a second, answers random bytes, answers with what it answered before,
and cuts answers short; two chunks' values are exchanged in Redis itself, too.

Ends with 1 when a request fails or takes longer than ``--bound``, an answer is not the one that a
store without faults gives with the same chunks found, memory or threads grow, Redis is not used
again once it is well, or KV is not complete after a repair (`precompute(verify=True)`, as
`index --repair` does it).
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import redis

from cacheblend_rag import BlendConfig, Document, SamplingParams, TransformersEngine, open_engine
from cacheblend_rag.demo.corpus import generate_prompts
from cacheblend_rag.kv import Entry, HostTier, KVKey, StoredChunk, TieredKVStore
from tests.engines.vllm.demo_prompts import HEAD, documents, text
from tests.faulty_proxy import FAULTS, PASSES, FaultyProxy, State
from tests.local_servers import HOST, redis_server

CONFIG = BlendConfig(min_tokens=0, cost_model=False)
RATIOS = (0.0, 0.15)
"""Without recomputing, an answer is what the stored KV says."""
ANSWER = SamplingParams(max_tokens=8)
ASKERS = 3
TIMEOUT_SECONDS = 1.0
"""Of one answer of Redis."""
LONGEST_STATE, SHORTEST_STATE = 20.0, 4.0
GROWTH = 1.15
"""Of memory, from the first third of the time on."""
MORE_THREADS = 8
RECOVERY_SECONDS = 120.0
"""Within which a tier that is well again is used: it is tried once a minute at least."""
logger = logging.getLogger("soak")


class PartOfAStore(HostTier):
    """Memory without some of its chunks: what a request found may be found again, and no more."""

    def __init__(self) -> None:
        super().__init__(None)
        self.hidden: frozenset[KVKey] = frozenset()

    def _entry(self, key: KVKey) -> Entry | None:
        return None if key in self.hidden else super()._entry(key)

    def _load(self, key: KVKey) -> StoredChunk | None:
        return None if key in self.hidden else super()._load(key)


Asked = tuple[str, float, frozenset[int]]
"""A prompt, its ratio, and where the chunks begin that were found."""


class Seen:
    """What was answered and how long everything took; the breaches that were noticed."""

    def __init__(self, bound: float) -> None:
        self.bound = bound
        self.answers: dict[Asked, tuple[int, ...]] = {}
        self.times: Counter[str] = Counter()
        self.slowest: dict[tuple[str, State], float] = defaultdict(float)
        self.found_in: Counter[str] = Counter()
        self.breaches: list[str] = []
        self._lock = threading.Lock()

    def breach(self, what: str) -> None:
        """Note that a promise was broken."""
        with self._lock:
            if len(self.breaches) < 20:
                self.breaches.append(what)

    @contextmanager
    def timed(self, what: str, state: State) -> Iterator[None]:
        """Time one request; one that raises, or takes too long, is a breach."""
        began = time.monotonic()
        try:
            yield
        except Exception as error:
            self.breach(f"{what} failed while the proxy {state}: {type(error).__name__}: {error}")
        took = time.monotonic() - began
        with self._lock:
            self.times[what] += 1
            self.slowest[what, state] = max(self.slowest[what, state], took)
        if took > self.bound:
            self.breach(f"{what} took {took:.1f} s while the proxy {state}")

    def answered(self, asked: Asked, token_ids: tuple[int, ...]) -> None:
        """Note an answer; the same request with the same chunks found has one."""
        with self._lock:
            first = self.answers.setdefault(asked, token_ids)
        if first != token_ids:
            self.breach(f"one request was answered by {first} and by {token_ids}")


class Load:
    """Threads that use an engine as applications do, until time is up."""

    def __init__(self, engine: TransformersEngine, proxy: FaultyProxy, seen: Seen) -> None:
        self._engine, self._proxy, self._seen = engine, proxy, seen
        self.prompts = generate_prompts("adjacent", 6, 5)
        self.asked = [text(prompt) for prompt in self.prompts]
        for prompt, other in zip(self.prompts, self.prompts[1:], strict=False):
            turn = f"{prompt.question.answer}\n\nQuestion: {other.question.question}\nAnswer:"
            self.asked.append(f"{text(prompt)} {turn}")
        unique = {one.document_id: one for one in documents(*self.prompts)}
        self.documents: list[Document] = list(unique.values())
        self._over = threading.Event()

    def run(self, seconds: float, seed: int) -> tuple[list[float], list[int]]:
        """Work for so long; returns memory, MiB, and counts of threads, ten and more of each."""
        acts: list[Callable[[random.Random], None]] = [self.ask] * ASKERS + [self.index]
        workers = [
            threading.Thread(target=self._work, args=(act, random.Random(seed + number)))
            for number, act in enumerate(acts)
        ]
        memory, threads = list[float](), list[int]()
        ends = time.monotonic() + seconds
        for worker in workers:
            worker.start()
        while time.monotonic() < ends:
            time.sleep(min(seconds / 12, 10.0))
            memory.append(resident_mib())
            threads.append(threading.active_count())
        self._over.set()
        for worker in workers:
            worker.join(3 * self._seen.bound)
            if worker.is_alive():
                self._seen.breach("a request does not end")
        return memory, threads

    def _work(self, act: Callable[[random.Random], None], draw: random.Random) -> None:
        while not self._over.is_set():
            act(draw)

    def ask(self, draw: random.Random) -> None:
        """Ask a question, or go on with a chat, and note which chunks were found."""
        number, ratio = draw.randrange(len(self.asked)), draw.choice(RATIOS)
        what = "question" if number < len(self.prompts) else "chat turn"
        with self._seen.timed(what, self._proxy.state):
            self.answer(self.asked[number], ratio)

    def answer(self, prompt: str, ratio: float) -> bool:
        """Ask, and note the answer; returns whether all chunks of the prompt were found."""
        config = CONFIG.with_changes(recompute_ratio=ratio)
        done = self._engine.generate(prompt, ANSWER, config=config)
        hits = [chunk for chunk in done.report.chunks if chunk.hit]
        self._seen.found_in.update(str(chunk.tier) for chunk in hits)
        found = frozenset(chunk.start for chunk in hits)
        self._seen.answered((prompt, ratio, found), tuple(done.token_ids))
        return len(hits) == len(self._engine.prepare(prompt).placed)

    def index(self, draw: random.Random) -> None:
        """Forget a document, make it known, or compute what is missing of a few."""
        document, state = draw.choice(self.documents), self._proxy.state
        match draw.randrange(4):
            case 0:
                with self._seen.timed("evict", state):
                    self._engine.evict_document(document.document_id)
            case 1:
                with self._seen.timed("register", state):
                    self._engine.register([document])
            case _:
                with self._seen.timed("precompute", state):
                    self._engine.precompute(draw.sample(self.documents, 3), progress=False)
        time.sleep(draw.uniform(0, 0.5))


def main() -> int:
    """Run the load; returns the exit code."""
    asked = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    asked.add_argument("--minutes", type=float, default=20.0)
    asked.add_argument("--seed", type=int, default=0)
    asked.add_argument(
        "--bound", type=float, default=20.0, help="seconds that any request may take"
    )
    options = asked.parse_args()
    logging.basicConfig(level=logging.CRITICAL, format="%(message)s", stream=sys.stdout)
    logger.setLevel(logging.INFO)
    seen = Seen(options.bound)
    with (
        tempfile.TemporaryDirectory(prefix="cacheblend-soak-") as folder,
        redis_server() as server,
        FaultyProxy(server.port) as proxy,
    ):
        upstream = redis.Redis(HOST, server.port)
        engine = opened(Path(folder), proxy.port)
        load = Load(engine, proxy, seen)
        engine.precompute(load.documents, progress=False)
        turns = Turns(proxy, upstream, random.Random(options.seed))
        with turns.taken(options.minutes * 60):
            memory, threads = load.run(options.minutes * 60, options.seed)
        check_growth(seen, memory, threads)
        check_recovery(load, engine, seen)
        check_answers(load, engine, seen)
        tell(seen, turns, engine.store.stats()["redis"], memory, threads)
        engine.close()
    logger.info("%s", "\n".join(seen.breaches) or "all held")
    return bool(seen.breaches)


def opened(folder: Path, port: int) -> TransformersEngine:
    """Return an engine over a memory that holds a few chunks, Redis and a disk."""
    tiers = [
        "host://?capacity=4MiB",
        f"redis://{HOST}:{port}/0?timeout={TIMEOUT_SECONDS}",
        f"disk://{folder}/disk",
    ]
    engine = open_engine(
        "transformers", model="demo", config=CONFIG, instruction=HEAD, kv_path=folder, tiers=tiers
    )
    return cast(TransformersEngine, engine)


class Turns:
    """The proxy's states, one after the other; between any two faults it passes."""

    def __init__(self, proxy: FaultyProxy, upstream: redis.Redis, draw: random.Random) -> None:
        self._proxy, self._upstream, self._draw = proxy, upstream, draw
        self.exchanged = 0

    @contextmanager
    def taken(self, seconds: float) -> Iterator[None]:
        """Take turns for so long, each state at least once, and pass in the end."""
        over = threading.Event()
        each = min(max(seconds / (2 * len(FAULTS)), SHORTEST_STATE), LONGEST_STATE)
        thread = threading.Thread(target=self._take, args=(each, over))
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            self._proxy.state = PASSES

    def _take(self, each: float, over: threading.Event) -> None:
        while True:
            for fault in FAULTS:
                for state in (PASSES, fault):
                    self._proxy.state = state
                    self._exchange()
                    if over.wait(each):
                        return

    def _exchange(self) -> None:
        """Put two chunks' bytes under each other's names."""
        names = sorted(self._upstream.scan_iter("*kv:*"))
        if len(names) >= 2:
            one, other = self._draw.sample(names, 2)
            values = self._upstream.mget(one, other)
            if None not in values:
                self._upstream.mset({one: values[1], other: values[0]})
                self.exchanged += 1


def check_growth(seen: Seen, memory: list[float], threads: list[int]) -> None:
    """Neither memory nor threads are more at the end than after a third of the time."""
    third = max(len(memory) // 3, 1)
    for what, counts, most in (
        ("memory, MiB,", memory, max(memory[:third]) * GROWTH),
        ("threads", threads, max(threads[:third]) + MORE_THREADS),
    ):
        if counts[-1] > most:
            seen.breach(f"{what} grew from {max(counts[:third]):.0f} to {counts[-1]:.0f}")


def check_recovery(load: Load, engine: TransformersEngine, seen: Seen) -> None:
    """Redis is used again, and what is precomputed again is complete."""
    ends = time.monotonic() + RECOVERY_SECONDS
    before = seen.found_in["redis"]
    while seen.found_in["redis"] == before and time.monotonic() < ends:
        engine.release()
        engine.precompute(load.documents, progress=False)
        load.ask(random.Random(0))
        time.sleep(1.0)
    if seen.found_in["redis"] == before:
        seen.breach(f"Redis was not used again within {RECOVERY_SECONDS:.0f} s")
    engine.precompute(load.documents, progress=False, verify=True)
    chunks = [chunk for one in load.documents for chunk in one.to_chunks()]
    lacking = engine.store.contains_many([engine.key(chunk) for chunk in chunks]).count(False)
    if lacking:
        seen.breach(f"{lacking} of {len(chunks)} chunks have no KV after precomputing again")
    for prompt in load.asked:
        for ratio in RATIOS:
            if not load.answer(prompt, ratio):
                seen.breach("not every chunk is found after precomputing again")


def check_answers(load: Load, engine: TransformersEngine, seen: Seen) -> None:
    """Every answer is that of a store in memory, with the same chunks found."""
    part = PartOfAStore()
    reference = TransformersEngine(
        engine.model, tokenizer=engine.tokenizer, config=CONFIG, instruction=HEAD,
        store=TieredKVStore([part]),
    )  # fmt: skip
    reference.precompute(load.documents, progress=False)
    for (prompt, ratio, found), token_ids in seen.answers.items():
        placed = reference.prepare(prompt).placed
        part.hidden = frozenset(one.key for one in placed if one.start not in found)
        config = CONFIG.with_changes(recompute_ratio=ratio)
        right = reference.generate(prompt, ANSWER, config=config)
        hits = {chunk.start for chunk in right.report.chunks if chunk.hit}
        if hits != found:
            seen.breach(f"the reference found {sorted(hits)} in place of {sorted(found)}")
        elif tuple(right.token_ids) != token_ids:
            seen.breach(f"a wrong answer at ratio {ratio}: {token_ids}, not {right.token_ids}")
    reference.close()


def tell(
    seen: Seen,
    turns: Turns,
    counts: Mapping[str, int | None],
    memory: list[float],
    threads: list[int],
) -> None:
    """Print what was asked, and the slowest request of each kind by the proxy's state."""
    states = (PASSES, *FAULTS)
    logger.info("slowest, seconds, while the proxy ... (bound: %g s)\n", seen.bound)
    logger.info("| request | times | %s |", " | ".join(states))
    logger.info("| --- |%s", " --- |" * (len(states) + 1))
    for what, times in sorted(seen.times.items()):
        slowest = " | ".join(f"{seen.slowest[what, state]:.2f}" for state in states)
        logger.info("| %s | %d | %s |", what, times, slowest)
    logger.info("\nchunks found in: %s", dict(seen.found_in.most_common()))
    logger.info("kinds of answers compared: %d", len(seen.answers))
    logger.info("values exchanged in Redis: %d", turns.exchanged)
    told = ("hits", "errors", "skipped", "dropped", "quarantined")
    logger.info("redis: %s", {name: counts[name] for name in told})
    logger.info("memory: %.0f MiB at first, %.0f at last", memory[0], memory[-1])
    logger.info(
        "threads: %d at first, %d at last, %d at most\n", threads[0], threads[-1], max(threads)
    )


def resident_mib() -> float:
    """Return this process' resident memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


if __name__ == "__main__":
    sys.exit(main())
