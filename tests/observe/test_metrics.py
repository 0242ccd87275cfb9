"""An engine's Prometheus metrics: what they show is what reports, the store and the guard say."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from threading import Event
from typing import Any
from weakref import ref

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from cacheblend_rag import (
    BlendConfig,
    Chunk,
    ConfigError,
    Engine,
    EngineMetrics,
    Generation,
    GuardConfig,
    MissingExtraError,
    SamplingParams,
    TieredKVStore,
    TransformersEngine,
)
from cacheblend_rag.kv.tiers.policy import COUNTED
from cacheblend_rag.observe.metrics import TIER_COUNTERS, TIER_GAUGES
from cacheblend_rag.report import PREFILL_PHASES, BlendReport, count_chunks
from tests.engines.toy_engine import ToyEngine
from tests.kv.samples import until
from tests.models import make_tokenizer, words
from tests.toy import TOY

SHORT = SamplingParams(max_tokens=3)
CHUNKS = [Chunk(words(30, seed)) for seed in range(4)]
Shown = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


def shown(text: str) -> Shown:
    """The samples of an exposition, as Prometheus reads it."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(samples: Shown, name: str, **labels: str) -> float:
    return samples[f"cacheblend_{name}", frozenset(labels.items())]


def by_label(samples: Shown, name: str, label: str) -> dict[str, float]:
    return {
        dict(labels)[label]: value
        for (metric, labels), value in samples.items()
        if metric == f"cacheblend_{name}"
    }


@pytest.fixture
def toy() -> Iterator[ToyEngine]:
    engine = ToyEngine(make_tokenizer(), config=BlendConfig(min_tokens=0, recompute_ratio=0.2))
    yield engine
    engine.close()


def asked(engine: Engine) -> list[Generation]:
    """Answers of each kind: blended, with a miss, without chunks, too short, by full prefill."""
    engine.precompute(CHUNKS[:3], progress=False)
    engine.register(CHUNKS[3:])
    stored, missing = " ".join(c.text for c in CHUNKS[:3]), CHUNKS[3].text
    few = engine.config.with_changes(min_tokens=1000)
    return [
        engine.generate(f"w1 {stored} w9", SHORT),
        engine.generate(f"w1 {missing} {stored} w8", SHORT),
        engine.generate("w7 w6 w5", SHORT),
        engine.generate(f"w1 {stored} w5", SHORT, config=few),
        engine.generate_full(f"w1 {stored} w4", SHORT),
    ]


def counts_match(samples: Shown, reports: Sequence[BlendReport]) -> None:
    chunks = [chunk for report in reports for chunk in report.chunks]
    hits, misses = count_chunks(chunks)
    assert by_label(samples, "chunk_hits_total", "tier") == hits
    assert by_label(samples, "chunk_misses_total", "reason") == misses
    assert hits
    assert misses
    tokens = {
        kind: value(samples, f"{kind}_tokens_total")
        for kind in ("reused", "prefix", "recomputed", "computed")
    }
    assert sum(tokens.values()) == sum(report.prompt_tokens for report in reports)
    assert tokens == {
        "reused": sum(report.reused_tokens - report.prefix_tokens for report in reports),
        "prefix": sum(report.prefix_tokens for report in reports),
        "recomputed": sum(report.recomputed_tokens for report in reports),
        "computed": sum(report.computed_tokens for report in reports),
    }
    assert value(samples, "requests_total") == len(reports)
    assert value(samples, "blended_requests_total") == sum(report.blended for report in reports)
    assert by_label(samples, "fallbacks_total", "reason") == {"too_short": 1}


def histograms_match(samples: Shown, reports: Sequence[BlendReport]) -> None:
    name = "time_to_first_token_seconds"
    assert value(samples, f"{name}_count") == len(reports)
    assert value(samples, f"{name}_sum") == pytest.approx(
        sum(report.seconds.time_to_first_token for report in reports)
    )
    for phase in PREFILL_PHASES:
        took = [
            getattr(report.seconds, phase)
            for report in reports
            if getattr(report.starts, phase) is not None
        ]
        if not took:
            assert phase not in by_label(samples, "phase_seconds_count", "phase")
            continue
        assert value(samples, "phase_seconds_count", phase=phase) == len(took)
        assert value(samples, "phase_seconds_sum", phase=phase) == pytest.approx(sum(took))
    waits = [report.seconds.load_by_tier for report in reports]
    for tier, seconds in by_label(samples, "load_seconds_sum", "tier").items():
        assert seconds == pytest.approx(sum(wait.get(tier, 0.0) for wait in waits))
    ratios = [report.recompute_ratio for report in reports if report.blended]
    assert value(samples, "recompute_ratio_count") == len(ratios)
    assert value(samples, "recompute_ratio_sum") == pytest.approx(sum(ratios))


def test_the_embedded_engines_phases_tiers_and_store_are_shown(tmp_path: Path) -> None:
    store = TieredKVStore.open(host_bytes=0, kv_path=tmp_path)
    config = BlendConfig(min_tokens=0, selector="hkvd", recompute_ratio=0.3, cost_model=False)
    engine = TransformersEngine(TOY, config=config, store=store)
    metrics = EngineMetrics(engine, CollectorRegistry())
    reports = [answer.report for answer in asked(engine)]
    samples = shown(metrics.text())
    counts_match(samples, reports)
    histograms_match(samples, reports)
    phases = by_label(samples, "phase_seconds_count", "phase")
    assert set(phases) == set(PREFILL_PHASES)
    assert (phases["find"], phases["early_layers"]) == (5, 2)
    assert set(by_label(samples, "load_seconds_count", "tier")) == {"disk"}
    stats = store.stats()
    assert set(stats) == set(by_label(samples, "tier_entries", "tier"))
    for tier, figures in stats.items():
        for name in TIER_GAUGES:
            if figures[name] is not None:
                assert value(samples, f"tier_{name}", tier=tier) == figures[name]
        for name in TIER_COUNTERS:
            assert value(samples, f"tier_{name}_total", tier=tier) == figures[name]
    assert value(samples, "tier_entries", tier="disk") >= 3
    engine.close()
    assert "cacheblend_tier_entries" not in metrics.text()
    assert "cacheblend_requests_total 5.0" in metrics.text()


def test_every_figure_of_a_tier_has_a_metric() -> None:
    assert {*TIER_COUNTERS, *TIER_GAUGES} == {*COUNTED, "entries", "bytes", "capacity_bytes"}


def test_the_guards_state_is_shown(toy: ToyEngine) -> None:
    toy.guard = GuardConfig(sample_share=1.0)
    metrics = EngineMetrics(toy)
    asked(toy)
    assert until(lambda: toy.guard_report().compared == 2, 60)
    report, samples = toy.guard_report(), shown(metrics.text())
    assert value(samples, "guard_samples_total") == 2
    assert value(samples, "guard_divergence_total") == pytest.approx(2 * report.divergence)
    assert value(samples, "guard_ratio") == report.ratio
    assert value(samples, "guard_stopped") == float(report.stopped)
    assert value(samples, "guard_raised_total") == report.raised


def test_a_cancelled_answer_counts_as_a_request_and_not_as_a_fallback(toy: ToyEngine) -> None:
    cancel = Event()
    cancel.set()
    metrics = EngineMetrics(toy)
    toy.generate("w1 w2", SHORT, cancel=cancel)
    samples = shown(metrics.text())
    assert value(samples, "requests_total") == 1
    assert by_label(samples, "fallbacks_total", "reason") == {}
    assert value(samples, "time_to_first_token_seconds_count") == 0
    assert not by_label(samples, "tier_entries", "tier"), "it has no store"
    assert not any(name.startswith("cacheblend_guard") for name, _ in samples), "it has no guard"


def test_a_registry_has_one_engine(toy: ToyEngine) -> None:
    registry = CollectorRegistry()
    EngineMetrics(toy, registry)
    with pytest.raises(ConfigError, match="give each engine a registry of its own"):
        EngineMetrics(toy, registry)


def test_the_extra_is_named_where_it_is_missing(
    toy: ToyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MissingExtraError, match=r"cacheblend-rag\[metrics\]"):
        EngineMetrics(toy)


def test_metrics_do_not_keep_an_engine_alive() -> None:
    engine: Any = ToyEngine(make_tokenizer(), config=BlendConfig(min_tokens=0))
    metrics, gone = EngineMetrics(engine), ref(engine)
    engine.generate("w1 w2", SHORT)
    engine.close()
    del engine
    gc.collect()
    assert gone() is None
    assert "cacheblend_requests_total 1.0" in metrics.text()
