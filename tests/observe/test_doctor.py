"""Each planted fault is the first finding of the doctor, on a real engine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag import (
    BlendConfig,
    Diagnosis,
    Document,
    Finding,
    TieredKVStore,
    TransformersEngine,
    diagnose,
)
from cacheblend_rag.kv import DiskTier
from cacheblend_rag.kv.tiers.redis import RedisTier
from cacheblend_rag.observe import machine
from cacheblend_rag.prefill.prompt_pass import PromptPass
from tests.local_servers import free_port
from tests.neighbours import neighbours
from tests.observe.toy_prompts import documents, prompts, text_of
from tests.refusing import RefusingDevice, on_device
from tests.toy import DEFAULT_FRAME, OTHER_HEAD, TOY

EngineMaker = Callable[..., TransformersEngine]
HEAD = DEFAULT_FRAME.head
(PROMPT,) = prompts()
TEXT, DOCUMENTS = text_of(PROMPT), documents(PROMPT)


@pytest.fixture(autouse=True)
def _no_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else the machine does, nothing is known of it."""
    monkeypatch.setattr(machine.CpuSeconds, "now", lambda: None)


@pytest.fixture
def make() -> Iterator[EngineMaker]:
    """Build an engine over the toy that knows the prompt's documents; closed in the end."""
    with ExitStack() as opened:

        def build(
            documents: Sequence[Document] = DOCUMENTS, *, is_stored: bool = True, **options: Any
        ) -> TransformersEngine:
            own = {name: options.pop(name) for name in BlendConfig.model_fields if name in options}
            engine = TransformersEngine(
                TOY, config=BlendConfig(**own), **{"instruction": HEAD, **options}
            )
            opened.callback(engine.close)
            engine.precompute(documents, progress=False, register_only=not is_stored)
            return engine

        yield build


def examined(engine: Any, prompt: str = TEXT, **options: Any) -> Diagnosis:
    return diagnose(engine, prompt, runs=1, answer_tokens=8, **options)


def first(diagnosis: Diagnosis) -> Finding:
    assert diagnosis.has_fault
    found = diagnosis.findings[0]
    assert found.change.setting
    assert found.change.proposed != found.change.present
    return found


def test_ratio_too_low(make: EngineMaker) -> None:
    engine = make(recompute_ratio=0.01, lead_in="instruction")
    found = first(examined(engine))
    assert found.code == "ratio_too_low"
    assert found.symptom == "quality"
    assert found.evidence["loss_at_proposed"] < 0.6 * found.evidence["loss_nats_per_token"]
    assert found.change.setting == "recompute_ratio"
    assert float(found.change.proposed) > float(found.change.present) == 0.01


class SlowDisk(DiskTier):
    def _read(self, *arguments: Any, **options: Any) -> Any:
        time.sleep(0.2)
        return super()._read(*arguments, **options)


def test_tier_slow(make: EngineMaker, tmp_path: Path) -> None:
    engine = make(store=TieredKVStore([SlowDisk(tmp_path)]), cost_model=False)
    found = first(examined(engine))
    assert found.code == "tier_slow"
    assert found.evidence["waited_seconds_disk"] > 0.5 * found.evidence["first_token_seconds"]
    assert found.evidence["bytes"] > 1 << 20
    assert "'disk'" in found.change.present


def test_tier_fails(make: EngineMaker) -> None:
    store = TieredKVStore([RedisTier(host="127.0.0.1", port=free_port())])
    engine = make(store=store, is_stored=False)
    found = first(examined(engine))
    assert found.code == "tier_fails"
    assert found.evidence["chunks_missed"] == len(PROMPT.retrieved)
    assert found.evidence["redis_errors"] + found.evidence["redis_skipped"] > 0
    assert "'redis'" in found.sentence


def test_other_instruction(make: EngineMaker) -> None:
    engine = make(lead_in="instruction")
    found = first(examined(engine, TEXT.replace(HEAD, OTHER_HEAD)))
    assert found.code == "other_instruction"
    assert found.evidence["loss_nats_per_token"] >= 0
    assert HEAD[:20] in found.change.present
    assert OTHER_HEAD[:20] in found.change.proposed


def test_kv_that_another_instruction_computed(make: EngineMaker) -> None:
    store = TieredKVStore.open()
    make(store=store, instruction=OTHER_HEAD)
    found = first(examined(make(store=store, is_stored=False)))
    assert found.code == "other_model"
    assert found.evidence["chunks_missed"] == len(PROMPT.retrieved)


def test_no_room(make: EngineMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()
    refusing = on_device(RefusingDevice(most=1 << 20), PromptPass.steps)
    monkeypatch.setattr(PromptPass, "steps", refusing)
    monkeypatch.setattr(machine, "available_bytes", lambda device: 1 << 20)
    found = first(examined(engine))
    assert found.code == "no_room"
    assert found.symptom == "memory"
    assert found.evidence["needed_bytes"] > found.evidence["available_bytes"] == 1 << 20
    assert "out of memory" in str(found.evidence["allocator"])
    assert found.change.setting == "host_bytes"  # what chunk KV takes there is more than enough


def test_machine_busy(make: EngineMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()
    monkeypatch.undo()
    with neighbours(len(os.sched_getaffinity(0))):
        diagnosis = examined(engine)
    found = first(diagnosis)
    assert found.code == "machine_busy"
    assert found.evidence["other_cpu_share"] > 0.25
    assert len(diagnosis.findings) == 1


def test_nothing_is_named_on_a_healthy_system(make: EngineMaker, tmp_path: Path) -> None:
    asked = prompts(4)
    known = [document for prompt in asked for document in documents(prompt)]
    engine = make(known, store=TieredKVStore.open(host_bytes=0, kv_path=tmp_path))
    for prompt in asked:
        found = examined(engine, text_of(prompt))
        assert found.evidence.is_blended
        assert found.evidence.in_force is not None
        assert found.evidence.in_force.loss is not None
        assert [(one.code, dict(one.evidence)) for one in found.findings] == []
