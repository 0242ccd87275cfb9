"""No memory for a blend inside vLLM: it is given up and freed, and vLLM's own prefill answers."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any

import pytest
import torch

from cacheblend_rag import BlendConfig, Document, SamplingParams, memory
from cacheblend_rag.blend import RingKV
from cacheblend_rag.engines.vllm.connector import job_runner as jobs_module
from cacheblend_rag.engines.vllm.connector.job_runner import JobRunner
from cacheblend_rag.prefill.precompute import compute_document
from cacheblend_rag.prefill.prompt_pass import PromptPass
from tests.engines.vllm.inprocess import InProcessEngine
from tests.families.reference import DOCUMENTS, retrieved
from tests.models import words
from tests.refusing import RefusingDevice, on_device

CONFIG = BlendConfig(min_tokens=0, selector="hkvd", recompute_ratio=0.3)
SHORT = SamplingParams(max_tokens=4)
STEPS = PromptPass.steps
FAULTS = 12
"""Places in a pass where memory is refused, spread over all of it."""


@pytest.fixture
def engine(llama: InProcessEngine) -> InProcessEngine:
    assert llama.precompute(DOCUMENTS, progress=False).computed == 4
    return llama


def asked(number: int) -> dict[str, Any]:
    """How to ask something of a work of its own, which vLLM's prefix cache does not hold yet."""
    config = CONFIG.with_changes(recompute_ratio=0.3 + number / 1000, reuse_prefix=False)
    return {"prompt": retrieved(seed=number), "sampling": SHORT, "config": config}


def refuse(monkeypatch: pytest.MonkeyPatch, device: RefusingDevice) -> None:
    monkeypatch.setattr(PromptPass, "steps", on_device(device, STEPS))


def test_wherever_a_pass_finds_no_memory_vllm_answers(
    engine: InProcessEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = RefusingDevice()
    refuse(monkeypatch, counted)
    assert engine.generate(**asked(0)).report.blended
    made: list[weakref.ref[Any]] = []
    make = RingKV.__init__

    def watched(fused: RingKV, *arguments: Any) -> None:
        make(fused, *arguments)
        made.extend(map(weakref.ref, (fused, fused.keys, fused.values)))

    monkeypatch.setattr(RingKV, "__init__", watched)
    monkeypatch.setattr(memory.gc, "collect", lambda: 0)  # nothing is freed but by being let go of
    left: list[int] = []
    empty = JobRunner.no_room

    def at_end(jobs: JobRunner, *arguments: Any) -> Any:
        left.append(sum(one() is not None for one in made))
        return empty(jobs, *arguments)

    monkeypatch.setattr(JobRunner, "no_room", at_end)
    for seed, part in enumerate(range(FAULTS), start=1):
        device = RefusingDevice(1 + part * (counted.allocations - 20) // FAULTS)
        refuse(monkeypatch, device)
        gc.disable()
        try:
            answer = engine.generate(**asked(seed))
        finally:
            gc.enable()
        assert device.refused == 1, device.nth
        assert str(answer.report.reason).startswith("no room: CUDA out of memory"), device.nth
        assert {chunk.reason for chunk in answer.report.chunks} == {"no room"}
        assert (answer.report.reused_tokens, answer.report.blended) == (0, False)
        assert answer.token_ids == engine.generate_full(retrieved(seed=seed), SHORT).token_ids, (
            device.nth
        )
    assert left == [0] * FAULTS, "nothing of the passes was left"
    monkeypatch.setattr(PromptPass, "steps", STEPS)
    assert engine.generate(**asked(FAULTS + 1)).report.blended
    blender = engine.worker_connector.blender
    assert blender.at_work == {}


def test_an_accelerators_own_error_for_it_does_not_end_vllm(
    engine: InProcessEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise torch.AcceleratorError("CUDA error: out of memory")
        yield

    monkeypatch.setattr(PromptPass, "steps", full)
    answer = engine.generate(**asked(50))
    assert answer.report.reason == "no room: CUDA error: out of memory"
    assert answer.token_ids == engine.generate_full(retrieved(seed=50), SHORT).token_ids


def test_a_document_without_memory_is_refused(
    engine: InProcessEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    document = Document("large", (words(40, 300), words(30, 301)), separator=" ")
    with monkeypatch.context() as patch:
        steps = on_device(RefusingDevice(30), compute_document)
        patch.setattr(jobs_module, "compute_document", steps)
        with caplog.at_level(logging.WARNING, "cacheblend_rag"):
            report = engine.sibling(lead_in="document").precompute([document], progress=False)
    (line,) = [r.getMessage() for r in caplog.records if "no room" in r.getMessage()]
    assert line.startswith("a precompute job is abandoned: no room (")
    assert report.computed == 0
    [(reason, chunks)] = report.refused.items()
    assert reason.startswith("no room: ")
    assert chunks == 2
    assert engine.sibling(lead_in="document").precompute([document], progress=False).computed == 2
