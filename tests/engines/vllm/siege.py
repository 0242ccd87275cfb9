"""Strangers and neighbours at one server: ``python -m tests.engines.vllm.siege --minutes 30``.

Starts `serve demo`. Some threads send mutated orders and malformed bodies for as long as it is
told, the others ask questions whose answers are known. Ends with 1 when the server died, a
neighbour's answer changed or failed, or memory kept growing.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from cacheblend_rag import BlendConfig, SamplingParams, StoreConfig, open_engine
from cacheblend_rag.demo import MODEL_FOLDER
from cacheblend_rag.demo.corpus import generate_prompts
from cacheblend_rag.engines.vllm.connector.settings import ConnectorSettings
from cacheblend_rag.engines.vllm.protocol.job import BlendJob, SentChunk, SentLeadIn
from cacheblend_rag.engines.vllm.serve import RunningServer, running_server
from cacheblend_rag.errors import CacheBlendError
from tests.engines.vllm.demo_prompts import HEAD, documents, text
from tests.engines.vllm.hostile import mutated
from tests.resident import resident_mib

FLAGS = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "4096")
ANSWER = SamplingParams(max_tokens=12)
CONFIG = BlendConfig(min_tokens=0, recompute_ratio=0.15, cost_model=False)
GROWTH = 1.15
"""Of memory, from the first third of the time on."""
SECONDS = 30.0
logger = logging.getLogger("siege")


def main() -> int:
    """Lay siege; returns the exit code."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--minutes", type=float, default=30.0)
    asked.add_argument("--threads", type=int, default=16)
    asked.add_argument("--seed", type=int, default=0)
    options = asked.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logger.setLevel(logging.INFO)
    sys.set_int_max_str_digits(0)  # some of what is sent
    with (
        tempfile.TemporaryDirectory(prefix="cacheblend-siege-") as folder,
        running_server(
            MODEL_FOLDER,
            served_name="demo",
            settings=ConnectorSettings(store=StoreConfig(kv_path=folder)),
            flags=FLAGS,
        ) as server,
    ):
        return Siege(server, options.minutes * 60, options.threads, options.seed).run()


class Siege:
    """Half of the threads are strangers, half are neighbours."""

    def __init__(self, server: RunningServer, seconds: float, threads: int, seed: int) -> None:
        self._server, self._seconds, self._threads, self._seed = server, seconds, threads, seed
        self._ends = time.monotonic() + seconds
        self._done: Counter[str] = Counter()
        self._wrong: list[str] = []
        self._lock = threading.Lock()

    def run(self) -> int:
        """Return 0 when all held."""
        engine = open_engine(self._server.url, model="demo", config=CONFIG, instruction=HEAD)
        prompts = list(generate_prompts("adjacent", 8, 5))
        engine.precompute(documents(*prompts), progress=False)
        known = {text(p): engine.generate(text(p), ANSWER).token_ids for p in prompts}

        def ask(draw: random.Random) -> str:
            prompt = draw.choice([*known])
            config = CONFIG.with_changes(min_tokens=draw.choice([0, 1, 2]))  # not all from a cache
            found = engine.generate(prompt, ANSWER, config=config)
            if found.token_ids != known[prompt]:
                self._note(f"an answer changed: {found.text!r}, {found.report.reason}")
            return "blended" if found.report.blended else str(found.report.reason)

        workers = [
            threading.Thread(
                target=self._work, args=(ask if index % 2 else self._attack, self._seed + index)
            )
            for index in range(self._threads)
        ]
        for worker in workers:
            worker.start()
        memory = list(self._watch())
        for worker in workers:
            worker.join()
        after = {p: engine.generate(p, ANSWER).token_ids for p in known}
        if after != known:
            self._note("answers changed for good")
        engine.close()
        settled, last = max(memory[: max(len(memory) // 3, 1)]), memory[-1]
        if last > settled * GROWTH:
            self._note(f"memory grew from {settled:.0f} to {last:.0f} MiB")
        logger.info("%s", json.dumps(dict(self._done.most_common()), indent=1))
        logger.info("memory: %.0f, %.0f at a third, %.0f MiB", memory[0], settled, last)
        logger.info("%s", "\n".join(self._wrong) or "all held")
        return bool(self._wrong)

    def _work(self, act: Callable[[random.Random], str], seed: int) -> None:
        draw = random.Random(seed)
        while time.monotonic() < self._ends:
            try:
                did = act(draw)
            except CacheBlendError as error:
                self._note(f"a neighbour failed: {error}")
                did = "failed"
            with self._lock:
                self._done[did] += 1

    def _attack(self, draw: random.Random) -> str:
        """Send one thing that no client of ours would; returns what came of it."""
        body = hostile_body(draw)
        path = draw.choice(["/v1/completions"] * 8 + ["/v1/chat/completions", "/invocations"])
        sent = Request(  # noqa: S310
            f"{self._server.url}{path}", body, {"Content-Type": "application/json"}
        )
        try:
            with urlopen(sent, timeout=SECONDS) as answer:  # noqa: S310
                return f"HTTP {answer.status}"
        except HTTPError as error:
            return f"HTTP {error.code}"
        except TimeoutError:
            return "no answer in time"
        except (URLError, HTTPException, OSError) as error:
            if self._server.process.poll() is not None:
                self._note(f"the server ended with {self._server.process.returncode}")
            return type(error).__name__

    def _watch(self) -> Iterator[float]:
        """Yield the memory of the server's processes, MiB, until time is up or it died."""
        while time.monotonic() < self._ends:
            if self._server.process.poll() is not None:
                self._note(f"the server ended with {self._server.process.returncode}")
                self._ends = 0.0
            yield resident_mib(self._server.process.pid)
            time.sleep(min(10.0, self._seconds / 10))

    def _note(self, what: str) -> None:
        with self._lock:
            if len(self._wrong) < 20:
                self._wrong.append(what)


def hostile_body(draw: random.Random) -> bytes:
    """Return a request with an order in which something is wrong, or no request at all."""
    if draw.random() < 0.02:
        return draw.choice(
            [b"", b"{", b"\xff" * 100, b"[" * 10_000, b" " * 20_000_000, b'{"a":' * 90 + b"}" * 90]
        )
    lead_in = SentLeadIn("document", "0" * 32, 2048)
    spans = (SentChunk(3, 60), SentChunk(70, 120, "0" * 32, True))
    order = draw.choice(
        [
            BlendJob("blend", lead_in, spans, config=CONFIG, report_id="1" * 32),
            BlendJob("precompute", lead_in, spans, tokens=tuple(range(5, 160))),
            BlendJob("evict", lead_in, keys=(("0" * 32, ""),)),
            BlendJob("prefetch", lead_in, keys=(("0" * 32, ""),)),
            BlendJob("status", lead_in),
            BlendJob("report", lead_in, report_id="1" * 32),
        ]
    )
    params: Any = order.to_params()
    if draw.random() < 0.9:
        params = mutated(params, draw, deepest=900)
    body = {
        "model": "demo",
        "prompt": [draw.randrange(3, 2000) for _ in range(draw.choice([2, 150]))],
        "max_tokens": draw.choice([1, 2, 8]),
        "cache_salt": draw.choice(["cacheblend-x", "other"]),
        "kv_transfer_params": params,
        "stream": draw.random() < 0.2,
    }
    if draw.random() < 0.1:
        body = mutated(body, draw, deepest=900)
    return json.dumps(body).encode()


if __name__ == "__main__":
    sys.exit(main())
