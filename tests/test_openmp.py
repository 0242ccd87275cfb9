"""OpenMP threads: those of a thread that has finished computing are gone."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cacheblend_rag import Chunk, SamplingParams, TransformersEngine, openmp
from cacheblend_rag.engines.transformers import engine as engines
from cacheblend_rag.engines.transformers import model_steps, priority_lock
from cacheblend_rag.engines.transformers.priority_lock import PriorityLock
from cacheblend_rag.kv import opening, write_queue
from cacheblend_rag.kv.store import TieredKVStore
from cacheblend_rag.openmp import end_openmp_threads
from cacheblend_rag.settings import StoreConfig
from tests.models import make_model, make_tokenizer, prompt_of, words

needs_gnu_openmp = pytest.mark.skipif(
    not openmp._libraries(), reason="PyTorch does not use GNU's OpenMP here"
)

COUNTED = """
import os
import threading
import time
import torch
from cacheblend_rag.openmp import end_openmp_threads, use_one_thread

def threads(wanted=None):
    # Threads end a little after they were joined: wait until there are so many.
    until = time.monotonic() + 60
    while True:
        found = len(os.listdir("/proc/self/task"))
        if wanted in (None, found) or time.monotonic() > until:
            return found
        time.sleep(0.01)

def compute():
    torch.ones(1 << 20).sum()

def answer():
    end_openmp_threads()  # there are none
    compute()
    counts.append(threads())
    end_openmp_threads()
    counts.append(threads(counts[0]))
    compute()
    end_openmp_threads()
    counts.append(threads(counts[0]))

torch.set_num_threads(3)
idle = threads()
counts = [idle]
answer()
print(counts)
other = threading.Thread(target=answer)
counts = [threads(idle) + 1]
other.start()
other.join()
print(counts)
def read():
    use_one_thread()
    compute()
    counts.append(threads())
    counts.append(torch.get_num_threads())

other = threading.Thread(target=read)
counts = [threads(idle) + 1]
other.start()
other.join()
print(counts, torch.get_num_threads())
compute()
if os.fork() == 0:
    end_openmp_threads()  # would wait for threads of the parent
    os._exit(0)
print(os.wait()[1])
"""


@needs_gnu_openmp
def test_a_threads_openmp_threads_are_ended_started_anew_and_done_without() -> None:
    run = subprocess.run(
        [sys.executable, "-c", COUNTED], capture_output=True, text=True, check=True, timeout=120
    )
    *found, reading, forked = run.stdout.splitlines()
    for one in found:
        before, computing, ended, again = map(int, one.strip("[]").split(","))
        assert (computing, ended, again) == (before + 2, before, before)
    before, beside, own, others = map(int, re.findall(r"\d+", reading))
    assert (beside, own, others) == (before, 1, 3)
    assert forked == "0"


def test_nothing_is_done_without_the_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    openmp._libraries.cache_clear()
    monkeypatch.setattr(openmp, "MAPS", tmp_path / "maps")
    try:
        assert openmp._libraries() == ()
        end_openmp_threads()
        openmp._libraries.cache_clear()
        (tmp_path / "maps").write_text(f"1-2 r-xp 0 08:01 3 {tmp_path}/libgomp.so.1 (deleted)\n")
        assert openmp._libraries() == ()
    finally:
        openmp._libraries.cache_clear()


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The threads that ended theirs."""
    told: list[int] = []
    for module in (engines, model_steps, priority_lock):
        monkeypatch.setattr(
            module, "end_openmp_threads", lambda: told.append(threading.get_ident())
        )
    return told


def test_a_thread_that_has_answered_ends_its_threads(ended: list[int]) -> None:
    engine = TransformersEngine(make_model("llama"), tokenizer=make_tokenizer())
    assert ended == [threading.get_ident()], "after the model was loaded and tested"
    chunk = Chunk(words(40, 2))
    engine.precompute([chunk], progress=False)
    ended.clear()
    with ThreadPoolExecutor(1) as pool:
        prompt = prompt_of(chunk, words(5, 3))
        pool.submit(engine.generate, prompt, SamplingParams(max_tokens=2)).result()
        other = pool.submit(threading.get_ident).result()
    assert set(ended) == {other}


def test_a_thread_that_another_one_waits_for_ends_its_threads(ended: list[int]) -> None:
    lock, is_taken, may_leave = PriorityLock(), threading.Event(), threading.Event()
    order: list[str] = []

    def first() -> int:
        with lock.taken():
            is_taken.set()
            assert may_leave.wait(60)
            order.append("first")
        return threading.get_ident()

    def second() -> None:
        with lock.taken():
            order.append("second")

    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(first)
        assert is_taken.wait(60)
        two = pool.submit(second)
        while lock._queued == 0:
            assert not two.done()
        may_leave.set()
        two.result()
        assert ended == [one.result()], "not the second, for which nobody waits"
    assert order == ["first", "second"]


def test_background_work_ends_its_threads_each_time(ended: list[int]) -> None:
    lock = PriorityLock()
    for _ in range(2):
        with lock.left_over(1.0) as is_mine:
            assert is_mine
    assert ended == [threading.get_ident()] * 2


def test_threads_that_move_chunks_start_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: set[str] = set()

    def noted() -> None:
        names.add(threading.current_thread().name.rstrip("_0123456789"))

    for module in (opening, write_queue):
        monkeypatch.setattr(module, "use_one_thread", noted)
    tiers = ("host://", f"disk://{tmp_path}?write=behind")
    with TieredKVStore.of(StoreConfig(tiers=tiers)) as store:
        engine = TransformersEngine(make_model("llama"), tokenizer=make_tokenizer(), store=store)
        chunk = Chunk(words(40, 2))
        engine.precompute([chunk], progress=False)
        engine.generate(prompt_of(chunk, words(5, 3)), SamplingParams(max_tokens=1))
    assert names >= {"kv-fetch-host", "kv-write-disk"}
