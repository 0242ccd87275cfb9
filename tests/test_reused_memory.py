"""Memory of large CPU tensors: who gets it next, and who never does."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from cacheblend_rag.blend.fused import FusedKV
from cacheblend_rag.blend.stack import Geometry
from cacheblend_rag.memory import ReusedMemory, give_back_unused, prompt_memory

LEAST, MOST = 1000, 8000


@pytest.fixture
def memory() -> ReusedMemory:
    return ReusedMemory(LEAST, MOST)


@pytest.fixture
def _nothing_kept() -> Iterator[None]:
    prompt_memory.free()
    yield
    prompt_memory.free()


def start_of(memory: ReusedMemory, nbytes: int) -> int:
    """The address of a tensor that is gone at once."""
    return memory.empty(nbytes).data_ptr()


def test_the_next_tensor_gets_it_if_it_fits(memory: ReusedMemory) -> None:
    first = memory.empty(5000)
    assert (first.dtype, first.shape, first.data_ptr() % 64) == (torch.uint8, (5000,), 0)
    place = first.data_ptr()
    del first
    assert [start_of(memory, nbytes) for nbytes in (5000, LEAST, 4000, 5000)] == [place] * 4
    larger = memory.empty(MOST)
    place = larger.data_ptr()
    del larger
    assert start_of(memory, 5000) == place, "the larger one is kept"


def test_what_is_in_use_is_nobody_elses(memory: ReusedMemory) -> None:
    kept: list[Tensor] = []
    for number in range(4):
        whole = memory.empty(4000).view(torch.float32)
        whole.fill_(number)
        kept.append(whole[7:9])  # a view alone keeps it
        del whole
    assert [part.tolist() for part in kept] == [[number] * 2 for number in range(4)]


def test_small_and_very_large_tensors_are_the_allocators(memory: ReusedMemory) -> None:
    place = start_of(memory, 4000)
    small, large = memory.empty(LEAST - 1), memory.empty(MOST + 1)
    assert [small.numel(), large.numel()] == [LEAST - 1, MOST + 1]
    assert start_of(memory, 4000) == place


@pytest.mark.usefixtures("_nothing_kept")
def test_a_prompts_kv_is_where_that_of_the_last_one_was() -> None:
    geometry = Geometry(
        layers=4, heads=2, kv_heads=2, head_dim=64, dtype=torch.bfloat16, device=torch.device("cpu")
    )

    def kv(tokens: int) -> FusedKV:
        return FusedKV(geometry, tokens, reserve=8)

    first = kv(9000)
    assert first.keys.shape == first.values.shape == (4, 2, 9008, 64)
    assert first.keys.dtype == torch.bfloat16
    first.keys.zero_()
    first.values.fill_(1)
    assert not first.keys.any()
    place, layer = first.keys.data_ptr(), first.layer(3)[0]
    del first
    assert kv(9000).keys.data_ptr() != place, "a layer of the last one is in use"
    del layer
    place = kv(9000).keys.data_ptr()
    assert kv(8500).keys.data_ptr() == place
    assert prompt_memory._block is not None
    give_back_unused()
    assert prompt_memory._block is None


def test_a_forked_process_waits_for_no_thread_of_its_parent() -> None:
    program = """
import os
from cacheblend_rag.memory import prompt_memory
first = prompt_memory.empty(20 << 20)
prompt_memory._lock.acquire()  # as by a thread that the child does not have
if not (pid := os.fork()):
    os._exit(prompt_memory.empty(20 << 20).data_ptr() == first.data_ptr())
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


PAGE_FAULTS = """
import resource
import torch
from cacheblend_rag.memory import raise_malloc_threshold

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.zeros(8 << 20, dtype=torch.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
raise_malloc_threshold()
faults()
print(faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators do not map anew")
def test_freed_blocks_cost_no_page_faults_when_they_are_allocated_again() -> None:
    run = subprocess.run(
        [sys.executable, "-c", PAGE_FAULTS], capture_output=True, text=True, check=True
    )
    assert int(run.stdout) < 20, "not a page of 8 MiB is mapped anew"
