"""vLLM's own prefill is timed, and turned to where it is faster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag import BlendConfig, BlendPrompt, Chunk, SamplingParams, TieredKVStore
from cacheblend_rag.blend.cost import LayerCost, prefill_cost
from cacheblend_rag.engines.vllm.connector.pace import PrefillTimer
from cacheblend_rag.kv import DiskTier, codec
from cacheblend_rag.kv.timings import LEAST
from cacheblend_rag.prefill import policy
from cacheblend_rag.prefill.policy import Rates
from tests.engines.contract import check_prefilled_instead
from tests.engines.vllm.inprocess import InProcessEngine
from tests.models import prompt_of, words

COSTS = (LayerCost(1e6, 2e5, 10.0), LayerCost(1e6, 2e5, 10.0, window=300))
CHUNKS = [Chunk(words(200, 3)), Chunk(words(150, 4))]
SHORT = SamplingParams(max_tokens=6, ignore_eos=True)
CONFIG = BlendConfig(min_tokens=0, selector="random", recompute_ratio=0.2)


class Recorded(Rates):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[str, float, float]] = []

    def record(self, name: str, units: float, seconds: float) -> None:
        self.told.append((name, units, seconds))


class Device:
    """Its work takes the seconds that are told, and is done when that is told, too."""

    def __init__(self) -> None:
        self.seconds, self.is_done = 0.0, False

    def mark(self) -> Any:
        device = self

        class OneMark:
            def record(self) -> None:
                self.at = device.seconds

            def query(self) -> bool:
                return device.is_done

            def elapsed_time(self, end: Any) -> float:
                assert device.is_done, "a device is not waited for"
                return float(end.at - self.at) * 1000

        return OneMark()


def test_a_step_with_jobs_is_not_timed_and_no_device_is_waited_for() -> None:
    device, rates = Device(), Recorded()
    timer = PrefillTimer(COSTS, rates, device.mark)
    for has_jobs in (True, False):
        timer.begin(((100, 400), (50, 51)))
        device.seconds += 2.0
        if has_jobs:
            timer.leave_out()
        timer.end()
    assert rates.told == []
    device.is_done = True
    timer.begin(())
    work = prefill_cost(COSTS, 400) - prefill_cost(COSTS, 100)
    work += prefill_cost(COSTS, 51) - prefill_cost(COSTS, 50)
    assert rates.told == [("prefill", pytest.approx(work), pytest.approx(2.0))]
    timer.end()
    assert len(rates.told) == 1, "a step without a prompt tells nothing"


@pytest.fixture
def engine(
    short_steps: InProcessEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[InProcessEngine]:
    # So small a chunk would be read at once, and the passes of so small a model are slow.
    monkeypatch.setattr(DiskTier, "whole_bytes", 0)
    monkeypatch.setattr(codec, "HEAD_BYTES", 1024)
    monkeypatch.setattr(policy, "MARGIN", 1000.0)
    jobs = short_steps.worker_connector.blender.jobs
    with TieredKVStore.open(host_bytes=0, kv_path=tmp_path) as store:
        monkeypatch.setattr(jobs, "store", store)
        short_steps.precompute(CHUNKS, progress=False)
        yield short_steps
        monkeypatch.undo()


def asked(seed: int) -> BlendPrompt:
    return prompt_of(words(5, seed), *CHUNKS, words(9, 5))


def test_a_tier_that_is_slower_than_prefill_is_not_waited_for(engine: InProcessEngine) -> None:
    jobs = engine.worker_connector.blender.jobs
    speeds = jobs.store.speeds
    plain = engine.generate_full(asked(30), SHORT)
    assert jobs.rates.of("prefill") is not None
    for seed in range(LEAST):
        engine.generate_full(asked(50 + seed), SHORT)
        first = engine.generate(asked(60 + seed), SHORT).report
        assert first.blended
        assert first.ratio_reason is None
    for _ in range(30):  # a share of a second more than was measured
        speeds.record("disk", 1000, 5000.0)
    slow = engine.generate(asked(30), SHORT)
    check_prefilled_instead(slow, plain, ["disk", "disk"])
    for _ in range(80):
        speeds.record("disk", 1 << 30, 1e-6)
    assert engine.generate(asked(32), SHORT).report.blended
