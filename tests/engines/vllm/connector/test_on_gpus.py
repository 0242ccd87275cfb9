"""What would go wrong on a GPU only, each shown on a CPU."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextlib import closing
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.v1.attention.backends.utils import split_decodes_prefills_and_extends

from cacheblend_rag import BlendConfig, Document
from cacheblend_rag.blend import BlendPass, FusedKV, plan_schedule
from cacheblend_rag.blend.passes import Attention, Candidates
from cacheblend_rag.blend.row_attention import RowAttention
from cacheblend_rag.blend.rows import Rows
from cacheblend_rag.blend.stack import probe_layer, replaced
from cacheblend_rag.blend.steps import run_to_end
from cacheblend_rag.engines.vllm.connector import blender as blending
from cacheblend_rag.engines.vllm.connector import job_runner
from cacheblend_rag.engines.vllm.connector.blender import limit_rows
from cacheblend_rag.engines.vllm.connector.metadata import Allotted
from cacheblend_rag.engines.vllm.connector.pace import Pace
from cacheblend_rag.engines.vllm.connector.paged import Metadata, PagedAttention
from cacheblend_rag.engines.vllm.connector.paged_cache import PagedCache, share_workspace
from cacheblend_rag.errors import UnsupportedModelError
from cacheblend_rag.reason import ReasonCode
from tests.engines.vllm.exactness import SHORT, check_exact, difference
from tests.engines.vllm.fp8_attention import QuantizedQueryBackend, fp8_backend
from tests.engines.vllm.inprocess import InProcessEngine
from tests.engines.vllm.shared import KERNEL_BLOCK, STEP_TOKENS
from tests.families.reference import DOCUMENTS, OTHER_BLOCKS, retrieved
from tests.memory import PeakBytes
from tests.models import words

CONFIG = BlendConfig(min_tokens=0, selector="hkvd")
TOKENS = 150
CUDA = torch.device("cuda")


@pytest.fixture
def blender(llama: InProcessEngine) -> Any:
    return llama.worker_connector.blender


def test_a_query_that_vllm_quantizes_with_an_fp8_cache(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        fp8_backend(QuantizedQueryBackend),
        closing(
            InProcessEngine.open(model_folder("llama"), CONFIG, kv_cache_dtype="fp8")
        ) as engine,
    ):
        assert engine.status.active, engine.status.refusal
        assert engine.precompute(DOCUMENTS, progress=False).computed == 4
        blender = engine.worker_connector.blender
        assert {a.kv_cache.itemsize for a in blender.stack.attention} == {1}
        check_exact(engine)
        monkeypatch.setattr(PagedCache, "is_fast_for_scattered_rows", False)
        assert math.isfinite(difference(engine, retrieved(seed=11), 0.3))
        assert engine.generate(retrieved(seed=3), SHORT).report.blended


def test_blocks_of_rows_are_exact_in_smaller_blocks_of_kernels_than_vllm_hands_out(
    short_steps: InProcessEngine,
) -> None:
    stack = short_steps.worker_connector.blender.stack
    assert stack.row_block == STEP_TOKENS < len(short_steps.tokenize(retrieved().text))
    cache = short_steps.worker_connector.blender.cache
    assert (cache.block_size, cache.kernel_block_size) == (128, KERNEL_BLOCK)
    assert cache.attention[0].kv_cache.shape[2] == KERNEL_BLOCK
    assert cache.builders[0].kv_cache_spec.block_size == KERNEL_BLOCK
    short_steps.precompute(DOCUMENTS, progress=False)
    check_exact(short_steps, rounding=OTHER_BLOCKS)


class OneBuffer:
    """A builder as FlashAttention's is with full graphs: metadata are views of one set of buffers.

    Whatever it builds is overwritten when it builds again. most: sequences it has room for.
    """

    def __init__(self, inner: Any, most: int = 1_000) -> None:
        self.inner, self.most = inner, most
        self.buffers: dict[str, torch.Tensor] = {}
        self.sequences: list[int] = []

    def build(self, common_prefix_len: int, common: Any, fast_build: bool = False) -> Any:
        assert common.num_reqs <= self.most
        self.sequences.append(common.num_reqs)
        made = self.inner.build(common_prefix_len, common, fast_build)
        assert is_dataclass(made)
        tensors = {f.name: getattr(made, f.name) for f in fields(made)}
        tensors = {
            name: t
            for name, t in tensors.items()
            if isinstance(t, torch.Tensor) and name != "scheduler_metadata"  # it knows its address
        }
        return replace(made, **{name: self._held(name, t) for name, t in tensors.items()})

    def _held(self, name: str, made: torch.Tensor) -> torch.Tensor:
        room = self.buffers.setdefault(name, torch.zeros(1 << 20, dtype=made.dtype))
        room.zero_()
        held = room[: made.numel()].view(made.shape)
        held.copy_(made)
        return held


@torch.inference_mode()
def fused_keys(blender: Any, attention: Attention) -> torch.Tensor:
    """The KV of a pass over unevenly scattered rows, in blocks that differ in their runs."""
    stack = blender.stack
    ids = torch.arange(TOKENS) % 250 + 2
    cached = torch.zeros(TOKENS, dtype=torch.bool)
    for start, end in ((3, 20), (22, 24), (26, 28), (40, 90), (95, 97), (99, 101), (120, 140)):
        cached[start:end] = True
    fused = FusedKV(stack.geometry, TOKENS)
    draw = torch.Generator().manual_seed(4)
    fused.keys.normal_(generator=draw)
    fused.values.normal_(generator=draw)
    schedule = plan_schedule(BlendConfig(selector="none"), stack.geometry.layers)
    known = Candidates(cached, cached, torch.zeros(TOKENS, dtype=torch.long))
    run = BlendPass(stack, ids, fused, known, schedule, last=0, attention=attention)
    with replaced(stack, "row_block", 20):
        run_to_end(run.steps())
    return fused.keys


def test_metadata_that_a_builder_overwrites_are_never_used_again(blender: Any) -> None:
    shared = OneBuffer(blender.cache.builders[0])
    cache = replace(blender.cache, builders=[shared] * 4)
    found = fused_keys(blender, PagedAttention(cache, TOKENS, exact=TOKENS))
    assert len(set(shared.sequences)) > 1, "blocks differ in their runs"
    torch.testing.assert_close(found, fused_keys(blender, RowAttention()), atol=1e-4, rtol=0)
    rows, shared.sequences = Rows.at(np.arange(9), torch.device("cpu")), []
    of_two = [Metadata(cache, cache.table(range(1, 3), 9)) for _ in range(2)]
    with torch.inference_mode():
        for turn in (0, 0, 1, 0):
            assert len([*of_two[turn].of(0, rows)]) == 1
    assert len(shared.sequences) == 3, "built again after another request's"


@pytest.mark.parametrize("exact", [0, 25, TOKENS])
def test_on_accelerators_scattered_rows_attend_natively_only_if_they_must_and_a_run_at_a_time(
    blender: Any, monkeypatch: pytest.MonkeyPatch, exact: int
) -> None:
    small = OneBuffer(blender.cache.builders[0], most=1)
    cache = replace(blender.cache, builders=[small] * 4)
    with monkeypatch.context() as patched:
        patched.setattr(PagedCache, "device", CUDA)
        rules = {name: getattr(cache, name) for name in ("is_fast_for_scattered_rows", "most_runs")}
    assert rules == {"is_fast_for_scattered_rows": False, "most_runs": 1}
    for name, value in rules.items():
        monkeypatch.setattr(PagedCache, name, value)
    dense = fused_keys(blender, RowAttention())
    found = fused_keys(blender, PagedAttention(cache, TOKENS, exact))
    torch.testing.assert_close(found, dense, atol=1e-4, rtol=0)
    assert bool(small.sequences) == bool(exact)


class OnDevice(torch.Tensor):
    """A tensor that nothing may be read from: on a GPU the host would wait for all before it."""

    READS = frozenset({"cpu", "item", "tolist", "numpy", "__int__", "__bool__", "__index__", "max"})

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        assert getattr(function, "__name__", "") not in cls.READS, "read from the device"
        return super().__torch_function__(function, types, args, kwargs)


def test_metadata_are_built_of_what_the_host_knows(blender: Any) -> None:
    """Builders of GPU backends ask the device for what they are not told, and wait for it."""
    rows = Rows.at(np.r_[3:9, 20, 40:90, 100:TOKENS], torch.device("cpu"))
    table = blender.cache.table(range(1, 12), TOKENS)
    ((_, common),) = Metadata(blender.cache, table).batches(rows)
    lengths = [9, 21, 90, TOKENS]
    assert common.seq_lens.tolist() == lengths
    assert common.seq_lens_cpu_upper_bound is not None
    assert common.seq_lens_cpu_upper_bound.tolist() == lengths
    assert common.seq_lens_cpu_upper_bound.device.type == "cpu"
    assert common.max_seq_len == TOKENS
    on_device = {
        name: getattr(common, name).as_subclass(OnDevice)
        for name in ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping")
    }
    with pytest.raises(AssertionError, match="read from the device"):
        on_device["seq_lens"].cpu()
    blind = common.replace(**on_device)
    assert split_decodes_prefills_and_extends(blind) == (0, 4, 0, 0, len(rows), 0)


def test_a_layer_that_is_driven_sees_nothing_of_the_step_under_way(
    llama: InProcessEngine, blender: Any
) -> None:
    seen: list[Any] = []
    stack = blender.stack
    hook = stack.layers[1].register_forward_pre_hook(lambda *_: seen.append(get_forward_context()))
    config = llama.core.vllm_config
    under_way = torch.tensor([True])
    with torch.inference_mode(), set_forward_context(None, config, is_padding=under_way):
        outer = get_forward_context()
        outer.batch_descriptor, outer.dp_metadata = object(), object()  # type: ignore[assignment]
        outer.all_moe_layers = ["of another layer"]
        inputs = stack.position_inputs(torch.arange(9)[None])
        probe_layer(stack, 1, stack.embed(torch.arange(9)[None]), inputs)
        assert get_forward_context() is outer
    hook.remove()
    inner = seen[-1]
    assert (inner.is_padding, inner.batch_descriptor, inner.dp_metadata) == (None, None, None)
    assert (inner.attn_metadata, inner.slot_mapping, inner.all_moe_layers) == (None, {}, None)


# Memory


class WithWorkspace:
    """A builder as FlashInfer's: it allocates a workspace when it first needs one."""

    def __init__(self, free: int = 1 << 20) -> None:
        self.free, self.made, self.workspace = free, 0, None

    def _get_workspace_buffer(self) -> torch.Tensor:
        if self.workspace is None:
            if self.free < NEEDED:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 394.00 MiB.")
            self.made += 1
            self.set_workspace_buffer(torch.zeros(NEEDED, dtype=torch.uint8))
        assert self.workspace is not None
        return self.workspace

    def set_workspace_buffer(self, workspace_buffer: Any) -> None:
        self.workspace = workspace_buffer


NEEDED = 4096


def test_builders_share_one_workspace_that_is_allocated_at_start() -> None:
    builders = [WithWorkspace() for _ in range(3)]
    share_workspace(builders)
    assert [builder.made for builder in builders] == [1, 0, 0]
    assert len({id(builder.workspace) for builder in builders}) == 1
    workspace = builders[0].workspace
    assert [builder._get_workspace_buffer() is workspace for builder in builders] == [True] * 3
    share_workspace([object(), object()])  # of a backend that has none


def test_without_room_for_a_workspace_nothing_is_blended_and_the_reason_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(UnsupportedModelError, match="gpu-memory-utilization") as raised:
        share_workspace([WithWorkspace(free=0)])
    assert raised.value.reason.code == ReasonCode.NO_ROOM

    def fail(_: Any) -> torch.Tensor:
        raise RuntimeError("of another kind")

    monkeypatch.setattr(WithWorkspace, "_get_workspace_buffer", fail)
    with pytest.raises(RuntimeError, match="of another kind"):
        share_workspace([WithWorkspace()])


@torch.inference_mode()
def peak_of(engine: InProcessEngine, prompt: str) -> tuple[int, int]:
    """The most bytes that a blend's pass held, and how many tokens its prompt has."""
    blender = engine.worker_connector.blender
    tokens = engine.prepare(prompt).token_ids
    chunks = tuple(engine.scheduler_connector.finding.finder.find("default", tokens))
    until = chunks[-1].end
    last = blender.trial.blocks - 1
    blocks = tuple(range(last + (-until // blender.cache.block_size), last))
    job = Allotted("", CONFIG, chunks, tokens, 0, until, (blocks,))
    with PeakBytes() as memory:
        for _ in blender.jobs.work(job, blender.jobs.source(job)):
            pass
    return memory.peak, len(tokens)


def test_a_pass_takes_no_more_memory_than_is_asked_for_beforehand(llama: InProcessEngine) -> None:
    llama.precompute(DOCUMENTS, progress=False)
    stack = llama.worker_connector.blender.stack
    more = " ".join(document.chunks[0] for document in DOCUMENTS)
    for count in (1, 6):
        peak, tokens = peak_of(llama, " ".join([retrieved().text, *[more] * count]))
        bound = stack.pass_bytes(tokens, checks=True)
        # Most of it is what rows and attention take at most, now that two layers of KV are held.
        assert 0.15 * bound < peak <= bound


@pytest.mark.parametrize(("share", "rows"), [(3.0, 8192), (1.5, 4096), (0.0, 1024)])
def test_where_memory_is_small_a_pass_takes_fewer_rows_at_once(
    blender: Any, monkeypatch: pytest.MonkeyPatch, share: float, rows: int
) -> None:
    with replaced(blender.stack, "row_block", 8192):
        free = int(share * blender.stack.pass_bytes(8192, checks=True))
        monkeypatch.setattr(blending, "free_bytes", lambda _: free)
        limit_rows(blender.stack)
        assert blender.stack.row_block == rows


def test_too_little_memory_is_a_miss_with_a_reason(
    llama: InProcessEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama.precompute(DOCUMENTS, progress=False)
    monkeypatch.setattr(job_runner, "free_bytes", lambda _: 1 << 20)
    config = CONFIG.with_changes(recompute_ratio=0.5)
    answer = llama.generate(retrieved(), SHORT, config=config)
    assert not answer.report.blended
    said = r"needs \d MiB of device memory beside vLLM's, there is 1 MiB: serve with a smaller"
    assert re.search(said, str(answer.report.reason))
    assert {chunk.reason for chunk in answer.report.chunks} == {"no room"}
    assert answer.token_ids == llama.generate_full(retrieved(), SHORT).token_ids
    refused = llama.precompute([Document("c", (words(300, 77),))], progress=False).refused
    assert sum(refused.values()) == 1
    assert "MiB of device memory" in next(iter(refused))


# Time


class Device:
    """A device that is as slow as its clock says: each step takes a second of it."""

    def __init__(self) -> None:
        self.queued = self.done = 0

    def make_event(self) -> Any:
        device = self

        class Event:
            def record(self) -> None:
                device.queued += 1
                self.number = device.queued

            def synchronize(self) -> None:
                device.done = max(device.done, self.number)

        return Event()


def test_the_host_stays_one_step_ahead_of_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    monkeypatch.setattr("time.perf_counter", lambda: float(device.done))
    pace = Pace(device.make_event)
    ahead = []
    while not pace.is_over(5.0):
        ahead.append(device.queued - device.done)
    assert set(ahead) == {1}
    assert device.queued == 6, "five steps' worth, and the one that was queued meanwhile"
