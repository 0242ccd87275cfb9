"""Malformed requests at the documents' routes: ``python -m tests.engines.vllm.documents_siege``.

Starts `serve demo` with two tenants, and sends so many mutated requests with right, wrong and
swapped keys, from several threads. Ends with 1 when an answer had a status of 500 or more that was
not meant (501, 503), a tenant saw another's document, or the server ended.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from cacheblend_rag import StoreConfig
from cacheblend_rag.demo import MODEL_FOLDER
from cacheblend_rag.engines.vllm.connector.settings import ConnectorSettings
from cacheblend_rag.engines.vllm.middleware.tenants import new_entry
from cacheblend_rag.engines.vllm.serve import RunningServer, running_server
from tests.engines.vllm.hostile import mutated
from tests.engines.vllm.siege import FLAGS
from tests.engines.vllm.test_tenants import METADATA, PLUGIN
from tests.resident import resident_mib

DOCUMENTS = "/v1/cacheblend/documents"
TENANTS = ("acme", "globex")
GROWTH = 1.2
logger = logging.getLogger("siege")


def main() -> int:
    """Lay siege; returns the exit code."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--requests", type=int, default=10_000)
    asked.add_argument("--threads", type=int, default=8)
    asked.add_argument("--seed", type=int, default=0)
    options = asked.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logger.setLevel(logging.INFO)
    sys.set_int_max_str_digits(0)  # some of what is sent
    with tempfile.TemporaryDirectory(prefix="cacheblend-siege-") as folder:
        keys, environment = prepared(Path(folder))
        with running_server(
            MODEL_FOLDER,
            served_name="demo",
            settings=ConnectorSettings(store=StoreConfig(kv_path=f"{folder}/kv")),
            flags=FLAGS,
            tenants=Path(folder) / "tenants.toml",
            environment=environment,
        ) as server:
            return Siege(server, keys, options.requests, options.threads, options.seed).run()


def prepared(folder: Path) -> tuple[dict[str, tuple[str, str]], dict[str, str]]:
    """Write the tenants' file; returns their keys, and the server's environment."""
    made = {name: new_entry(name) for name in TENANTS}
    (folder / "tenants.toml").write_text("".join(entry for _, _, entry in made.values()))
    info = folder / "metadata" / "cacheblend_rag-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(METADATA)
    (info / "entry_points.txt").write_text(PLUGIN)
    paths = [str(info.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    keys = {name: (ask, store) for name, (ask, store, _) in made.items()}
    return keys, {"PYTHONPATH": os.pathsep.join(paths)}


class Siege:
    """Threads that send malformed requests; two documents must stay their tenants'."""

    def __init__(
        self,
        server: RunningServer,
        keys: dict[str, tuple[str, str]],
        requests: int,
        threads: int,
        seed: int,
    ) -> None:
        self._server, self._keys, self._requests = server, keys, requests
        self._threads, self._seed = threads, seed
        self._done: Counter[str] = Counter()
        self._wrong: list[str] = []
        self._lock = threading.Lock()

    def run(self) -> int:
        """Return 0 when all held."""
        with httpx.Client(base_url=self._server.url, timeout=120) as client:
            for name, (_, store) in self._keys.items():
                body = {"chunks": [f"{name} keeps a secret. " * 40]}
                client.put(f"{DOCUMENTS}/kept", headers=key(store), json=body).raise_for_status()
        workers = [
            threading.Thread(target=self._work, args=(self._seed + index,))
            for index in range(self._threads)
        ]
        began = time.monotonic()
        for worker in workers:
            worker.start()
        memory: list[float] = []
        while any(worker.is_alive() for worker in workers):
            memory.append(resident_mib(self._server.process.pid))
            time.sleep(5.0)
        self._check_kept()
        if sum(self._done.values()) < self._requests // self._threads * self._threads:
            self._wrong.append("a thread of this siege ended early")
        settled, last = max(memory[: max(len(memory) // 3, 1)]), memory[-1]
        if last > settled * GROWTH:
            self._wrong.append(f"memory grew from {settled:.0f} to {last:.0f} MiB")
        logger.info("%s", json.dumps(dict(sorted(self._done.items())), indent=1))
        logger.info("%.0f s; memory: %.0f, then %.0f MiB", time.monotonic() - began, settled, last)
        logger.info("%s", "\n".join(self._wrong[:20]) or "all held")
        return bool(self._wrong)

    def _check_kept(self) -> None:
        with httpx.Client(base_url=self._server.url, timeout=120) as client:
            for name, (_, store) in self._keys.items():
                told = client.get(f"{DOCUMENTS}/kept", headers=key(store)).json()
                if not told.get("chunks", [{"text": ""}])[0]["text"].startswith(name):
                    self._wrong.append(f"{name} no longer has its document: {told}")

    def _work(self, seed: int) -> None:
        draw = random.Random(seed)
        with httpx.Client(base_url=self._server.url, timeout=120) as client:
            sent = 0
            while sent < self._requests // self._threads:
                try:
                    did = self._attack(client, draw)
                except httpx.LocalProtocolError:  # httpx itself refuses to send that
                    continue
                except httpx.HTTPError as error:
                    did = type(error).__name__
                    if self._server.process.poll() is not None:
                        self._note(f"the server ended with {self._server.process.returncode}")
                        return
                sent += 1
                with self._lock:
                    self._done[did] += 1

    def _attack(self, client: httpx.Client, draw: random.Random) -> str:
        name = draw.choice(TENANTS)
        ask, store = self._keys[name]
        given = draw.choice([store] * 6 + [ask, store.upper(), store[:-1], "", name])
        method, path, body = request(draw)
        if path == f"{DOCUMENTS}/kept" and method in {"PUT", "DELETE"}:
            given = ask  # who may only ask
        headers = {**key(given), "x-session-id": draw.choice(TENANTS), **odd_headers(draw)}
        answer = client.request(method, path, headers=headers, content=body)
        if answer.status_code >= 500 and answer.status_code not in {501, 503}:
            self._note(f"{method} {path[:80]} {body[:200]!r}: {answer.text[:200]}")
        others = [f"{other} keeps a secret" for other in TENANTS if other != name]
        if any(secret in answer.text for secret in others):
            self._note(f"{name} saw another's document: {answer.text[:200]}")
        return f"{method} {answer.status_code}"

    def _note(self, what: str) -> None:
        with self._lock:
            self._wrong.append(what)


def key(given: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {given}"}


def odd_headers(draw: random.Random) -> dict[str, str]:
    return draw.choice(
        [
            {},
            {},
            {"content-type": "text/plain"},
            {"content-encoding": "gzip"},
            {"x-request-id": "a" * 999},
        ]
    )


def request(draw: random.Random) -> tuple[str, str, bytes]:
    """Return a request in which something is wrong, mostly: method, path, body."""
    text = " ".join(f"w{draw.randrange(500)}" for _ in range(draw.choice([5, 60])))
    good: dict[str, Any] = draw.choice(
        [
            {"chunks": [text, f"{text} and more"], "separator": " ", "boundaries": ["a", "b"]},
            {"text": text, "chunk_tokens": 32, "collection": "c"},
        ]
    )
    sent = json.dumps(mutated(good, draw, deepest=900)).encode()
    if draw.random() < 0.2:
        sent = sent[: draw.randrange(len(sent) + 1)]
    if draw.random() < 0.02:
        sent = draw.choice([b"", b"\xff" * 100, b"[" * 10_000, b" " * 20_000_000, b"\0"])
    names = [
        "kept",
        "a",
        "a/b",
        "..",
        "%2e%2e",
        "%00",
        "%0a",
        "%ff",
        "x" * 600,
        "",
        "?limit=x",
        "😀",
    ]
    path = f"{DOCUMENTS}/{draw.choice(names)}"
    path = draw.choice(
        [path] * 8
        + [
            "/v1/cacheblend/stats",
            "/v1/cacheblend/release",
            "/v1/cacheblend/",
            f"{DOCUMENTS}?limit=-1",
        ]
        + [f"/{DOCUMENTS}", "/v1/cacheblend/../models", f"{DOCUMENTS}?after={'x' * 9999}"]
    )
    method = draw.choice(["PUT"] * 5 + ["GET", "DELETE", "POST", "PATCH", "HEAD"])
    return method, path, sent


if __name__ == "__main__":
    sys.exit(main())
