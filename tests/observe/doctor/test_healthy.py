"""The doctor names nothing on a healthy system, whatever else the machine does."""

from __future__ import annotations

from pathlib import Path

from cacheblend_rag import TieredKVStore, diagnose
from tests.observe.doctor.conftest import EngineMaker, IdleMachine, documents, prompts, text_of


def test_nothing_is_named_in_any_run(make: EngineMaker, tmp_path: Path) -> None:
    engine = make(store=TieredKVStore.open(host_bytes=0, kv_path=tmp_path))
    asked = prompts(4)
    for prompt in asked:
        engine.precompute(documents(prompt), progress=False)
    named = []
    for run in range(4):
        found = diagnose(
            engine, text_of(asked[run]), machine=IdleMachine(), runs=1, answer_tokens=8
        )
        assert found.evidence.is_blended
        assert found.evidence.in_force is not None
        assert found.evidence.in_force.loss is not None
        named.append([(one.code, dict(one.evidence)) for one in found.findings])
    assert named == [[]] * 4
