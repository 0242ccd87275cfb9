"""Each planted fault is the first finding of the doctor, on a real engine."""

from __future__ import annotations

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
from cacheblend_rag.prefill.prompt_pass import PromptPass
from tests.local_servers import free_port
from tests.observe.toy_prompts import documents, prompts, text_of
from tests.refusing import RefusingDevice, on_device
from tests.toy import DEFAULT_FRAME, OTHER_HEAD, TOY

EngineMaker = Callable[..., TransformersEngine]
HEAD = DEFAULT_FRAME.head
(PROMPT,) = prompts()
TEXT, DOCUMENTS = text_of(PROMPT), documents(PROMPT)


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
    assert found.evidence["waited_seconds"] > 0.5 * found.evidence["first_token_seconds"]
    assert "'disk'" in found.change.present


def test_a_tier_that_fails(make: EngineMaker) -> None:
    store = TieredKVStore([RedisTier(host="127.0.0.1", port=free_port())])
    found = first(examined(make(store=store, is_stored=False)))
    assert found.code == "not_reused"
    assert "store_error" in found.evidence
    assert "start it" in found.change.proposed


def test_kv_that_another_instruction_computed(make: EngineMaker) -> None:
    store = TieredKVStore.open()
    make(store=store, instruction=OTHER_HEAD)
    found = first(examined(make(store=store, is_stored=False)))
    assert found.code == "not_reused"
    assert "other_model" in found.evidence


def test_no_room(make: EngineMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()
    refusing = on_device(RefusingDevice(most=1 << 20), PromptPass.steps)
    monkeypatch.setattr(PromptPass, "steps", refusing)
    found = first(examined(engine))
    assert found.code == "no_room"
    assert found.symptom == "memory"
    assert "out of memory" in str(found.evidence["allocator"])
    assert found.evidence["kept_mib"] > 0
    assert found.change.setting == "host_bytes"


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
