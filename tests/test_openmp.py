"""OpenMP threads: those that move chunks, or wait for a model, have none."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cacheblend_rag import Chunk, SamplingParams, TransformersEngine, openmp
from cacheblend_rag.kv import opening
from cacheblend_rag.kv.store import TieredKVStore
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
from cacheblend_rag.openmp import use_one_thread

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

def read():
    use_one_thread()
    compute()
    counts.append(threads())
    counts.append(torch.get_num_threads())

torch.set_num_threads(3)
other = threading.Thread(target=read)
counts = [threads() + 1]
other.start()
other.join()
print(counts, torch.get_num_threads())
"""


@needs_gnu_openmp
def test_a_thread_does_without_openmp_threads() -> None:
    run = subprocess.run(
        [sys.executable, "-c", COUNTED], capture_output=True, text=True, check=True, timeout=120
    )
    before, beside, own, others = map(int, re.findall(r"\d+", run.stdout))
    assert (beside, own, others) == (before, 1, 3)


WAITED = """
import os
import torch
from cacheblend_rag.engines.transformers.loop import ModelLoop

def compute():
    torch.ones(1 << 20).sum()
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(3)
first = compute()
print(first, ModelLoop().call(compute))
"""


@needs_gnu_openmp
def test_who_waits_for_a_model_leaves_its_thread_the_openmp_threads() -> None:
    run = subprocess.run(
        [sys.executable, "-c", WAITED], capture_output=True, text=True, check=True, timeout=120
    )
    callers, models = map(int, run.stdout.split())
    assert models == callers + 1, "the model's thread, and as many OpenMP threads as the caller had"


def test_threads_that_move_chunks_start_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: set[str] = set()

    def noted() -> None:
        names.add(threading.current_thread().name.rstrip("_0123456789"))

    monkeypatch.setattr(opening, "use_one_thread", noted)
    tiers = ("host://", f"disk://{tmp_path}")
    with TieredKVStore.of(StoreConfig(tiers=tiers)) as store:
        engine = TransformersEngine(make_model("llama"), tokenizer=make_tokenizer(), store=store)
        chunk = Chunk(words(40, 2))
        engine.precompute([chunk], progress=False)
        engine.generate(prompt_of(chunk, words(5, 3)), SamplingParams(max_tokens=1))
    assert "kv-fetch-host" in names
