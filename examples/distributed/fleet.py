"""Two replicas behind nginx, one Redis and one S3: reuse each other's KV, and lose no request.

Run it with ``python examples/distributed/fleet.py``; it needs no GPU. README.md beside it tells
what happens, step by step.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any
from urllib.request import urlopen

from services import (
    Program,
    check_installed,
    make_bucket,
    proxy,
    redis_server,
    replica,
    s3_server,
)

from cacheblend_rag import BlendConfig, Document, SamplingParams, open_engine
from cacheblend_rag.demo.passages import load_passages
from cacheblend_rag.errors import EngineUnavailableError

IN_A_PROMPT, LATE = 4, 12
"""Documents from LATE on are asked for only once Redis is gone."""
HEAD = "Answer from the passages.\n\n"
CONFIG = BlendConfig(recompute_ratio=0.0, min_tokens=0, cost_model=False)
SHORT = 8
WAIT_SECONDS = 600.0


@dataclass
class Counts:
    """What became of the answers that were asked for. hits: chunks by the tier they came from.

    ended: streams that the death of a replica ended with an error.
    """

    requests: int = 0
    answered: int = 0
    ended: int = 0
    lost: int = 0
    retried: int = 0
    misses: int = 0
    hits: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)


class Client:
    """Asks one address, from several threads, and counts."""

    def __init__(self, url: str, model: str, documents: Sequence[Document]) -> None:
        self.engine: Any = open_engine(
            url, model=model, instruction=HEAD, lead_in="document", config=CONFIG
        )
        self.engine.register(documents)
        self.counts, self._lock = Counts(), Lock()
        self._retried = 0

    def ask(
        self,
        prompt: str,
        tokens: int = SHORT,
        *,
        streamed: bool = False,
        begun: Callable[[], None] = lambda: None,
    ) -> str | None:
        """Return an answer's text, None if it ended with an error. begun: after its first piece."""
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=tokens > SHORT, temperature=0.0)
        try:
            answer = None
            if streamed:
                for delta in self.engine.stream(prompt, sampling):
                    begun()
                    answer = delta.generation
            else:
                answer = self.engine.generate(prompt, sampling)
        except EngineUnavailableError as error:
            with self._lock:
                self.counts.requests += 1
                expected = streamed and "broke off" in str(error)
                self.counts.ended += expected
                self.counts.lost += not expected
                self.counts.errors.append(str(error))
            return None
        chunks = answer.report.chunks
        with self._lock:
            self.counts.requests += 1
            self.counts.answered += 1
            self.counts.hits.update(chunk.tier for chunk in chunks if chunk.hit)
            self.counts.misses += sum(not chunk.hit for chunk in chunks)
        return str(answer.text)

    def take(self) -> Counts:
        """Return the counts since the last call."""
        with self._lock:
            taken, self.counts = self.counts, Counts()
        before, self._retried = self._retried, self.engine.transport.counts.retried
        taken.retried = self._retried - before
        return taken


class Fleet:
    """All programs of the fleet, running."""

    def __init__(self, folder: Path, model: str, stack: ExitStack) -> None:
        self._stack = stack
        self.redis, self.s3 = redis_server(folder), s3_server(folder)
        self._run(self.redis, self.s3)
        make_bucket(self.s3)
        self.one = replica(folder, "one", model, self.redis, self.s3)
        self.other = replica(folder, "other", model, self.redis, self.s3)
        self._run(self.one, self.other)
        self.proxy = proxy(folder, self.one, self.other)
        self._run(self.proxy)
        self.log = folder / "access.log"

    def _run(self, *programs: Program) -> None:
        for program in programs:
            program.start()
            self._stack.callback(program.stop)
        for program in programs:
            program.wait()

    def is_at_one(self) -> bool:
        """Whether nginx sends clients of this address to the first replica."""
        with urlopen(f"{self.proxy.url}/health", timeout=30) as answer:  # noqa: S310
            return str(answer.headers["X-Served-By"]).endswith(f":{self.one.port}")

    def served(self) -> dict[str, int]:
        """Return how many completions each replica has answered, by nginx's log."""
        names = {str(self.one.port): "one", str(self.other.port): "other"}
        found = Counter[str]()
        for line in self.log.read_text().splitlines():
            method, addresses, statuses = line.split("|")
            if method == "POST" and statuses.endswith("200"):
                found[names[addresses.rpartition(":")[2]]] += 1
        return dict(found)


def prompts_of(documents: Sequence[Document], questions: int) -> tuple[list[str], ...]:
    """Return prompts on documents before LATE, and on those from there on."""
    early, late = list[str](), list[str]()
    for number in range(questions):
        asked = number % len(documents)
        first = max(0, min(asked - 2, len(documents) - IN_A_PROMPT))
        retrieved = documents[first : first + IN_A_PROMPT]
        passages = "\n\n".join(chunk for document in retrieved for chunk in document.chunks)
        question = f"What is {documents[asked].document_id}?"
        prompt = f"{HEAD}{passages}\n\nQuestion: {question}\nAnswer:"
        if first + IN_A_PROMPT <= LATE:
            early.append(prompt)
        elif first >= LATE:
            late.append(prompt)
    return early, late


def until(wanted: Callable[[], bool], what: str) -> None:
    """Wait for something; raises SystemExit if it takes too long."""
    end = time.monotonic() + WAIT_SECONDS
    while not wanted():
        if time.monotonic() > end:
            raise SystemExit(f"{what} takes longer than {WAIT_SECONDS:.0f} s")
        time.sleep(0.05)


@contextmanager
def load(client: Client, prompts: Sequence[str], threads: int) -> Iterator[None]:
    """Keep asking prompts in turn, whole and streamed, while the block runs."""
    over = Event()

    def work(number: int) -> None:
        asked = number
        while not over.is_set():
            client.ask(prompts[asked % len(prompts)], streamed=asked % 3 == 0)
            asked += 1
            over.wait(1.0)  # a server that starts beside it needs the cores

    workers = [Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    try:
        yield
    finally:
        over.set()
        for worker in workers:
            worker.join()


def kill_under_load(fleet: Fleet, client: Client, prompts: Sequence[str], tokens: int) -> None:
    """Kill the first replica while whole requests and streams are at work on it."""
    begun: list[Event] = [Event() for _ in range(2)]
    with ThreadPoolExecutor() as pool:
        whole = [pool.submit(client.ask, prompt, tokens) for prompt in prompts[:2]]
        streams = [
            pool.submit(client.ask, prompt, tokens, streamed=True, begun=one.set)
            for prompt, one in zip(prompts[:2], begun, strict=True)
        ]
        # At once: streams may end while it is asked how many requests it runs.
        until(lambda: all(one.is_set() for one in begun), "the first token of streams")
        fleet.one.kill()
        _ = [answer.result() for answer in (*whole, *streams)]


def run(
    model: str, questions: int, threads: int, tokens: int, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Run the fleet; returns counts by step, and the requests that each replica answered."""
    documents = load_passages().documents()
    early, late = prompts_of(documents, questions)
    steps: dict[str, Counts] = {}
    with tempfile.TemporaryDirectory(prefix="fleet-") as name, ExitStack() as stack:
        tell("starting redis-server, an S3 endpoint, two replicas and nginx")
        fleet = Fleet(Path(name), model, stack)
        client = Client(fleet.proxy.url, model, documents)
        if not fleet.is_at_one():  # nginx decides
            fleet.one, fleet.other = fleet.other, fleet.one

        indexer = Client(fleet.one.url, model, documents)
        stored = indexer.engine.precompute(documents, progress=False)
        tell(f"replica one has precomputed {stored.computed} chunks")

        direct = Client(fleet.other.url, model, documents)
        for prompt in early[:3]:
            direct.ask(prompt)
        steps["asked of replica other"] = direct.take()

        with load(client, early, threads):
            tell("killing replica one under load")
            kill_under_load(fleet, client, early, tokens)
            steps["replica one killed"] = client.take()
            tell("restarting replica one")
            fleet.one.start()
            fleet.one.wait()
            steps["replica one restarts"] = client.take()
        back = Client(fleet.one.url, model, documents)
        again = back.engine.precompute(documents, progress=False)
        for prompt in early[:3]:
            back.ask(prompt)
        steps["asked of replica one"] = back.take()
        until(fleet.is_at_one, "nginx's next trial of replica one")
        before = fleet.served()
        tell(f"replica one is back: {again.skipped} chunks stored, {again.computed} to compute")

        with load(client, early, threads):
            tell("killing Redis under load")
            fleet.redis.kill()
            for prompt in (*late, early[0]):
                client.ask(prompt)
        steps["Redis killed"] = client.take()
        for one in (indexer, direct, client, back):
            one.engine.close()
        return {
            "steps": {step: {**vars(one), "hits": dict(one.hits)} for step, one in steps.items()},
            "served_before": before,
            "served": fleet.served(),
            "computed": stored.computed,
            "computed_after_restart": again.computed,
        }


COLUMNS = ("requests", "retried", "ended", "lost")
TIERS = ("host", "redis", "s3", "prefix cache")


def table(told: dict[str, Any]) -> str:
    """Return the counts as a table in Markdown."""
    steps = told["steps"]
    head = ["", *COLUMNS, *(f"hits: {tier}" for tier in TIERS), "misses"]
    lines = [head, ["---"] * len(head)]
    for step, counts in steps.items():
        hits = [counts["hits"].get(tier, 0) for tier in TIERS]
        lines.append([step, *(counts[name] for name in COLUMNS), *hits, counts["misses"]])
    sums = [sum(line[column] for line in lines[2:]) for column in range(1, len(head))]
    lines.append(["all", *sums])
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def main() -> int:
    """Run the fleet and print its counts; returns 1 if a request was lost."""
    options = argparse.ArgumentParser(description="A fleet of two replicas that loses no request.")
    options.add_argument("--model", default="smollm2", help="what the replicas serve")
    options.add_argument("--questions", type=int, default=40, help="more questions, more prompts")
    options.add_argument("--threads", type=int, default=2, help="that ask while replicas die")
    options.add_argument("--tokens", type=int, default=300, help="of answers that are cut off")
    options.add_argument("--json", action="store_true", help="print counts as JSON")
    given = options.parse_args()
    check_installed()
    told = run(
        given.model,
        given.questions,
        given.threads,
        given.tokens,
        lambda line: print(line, file=sys.stderr, flush=True),
    )
    print(json.dumps(told, indent=2) if given.json else table(told))
    if not given.json:
        before, served = told["served_before"], told["served"]
        print(f"\ncompletions by replica: {served}, until replica one was back: {before}")
    return int(any(counts["lost"] for counts in told["steps"].values()))


if __name__ == "__main__":
    sys.exit(main())
