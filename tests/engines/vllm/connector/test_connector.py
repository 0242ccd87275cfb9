"""The connector: what it refuses, how much it promises, what it reports and counts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY
from transformers import AutoModelForCausalLM

from cacheblend_rag import BlendConfig, Generation
from cacheblend_rag.engines.vllm.connector.metrics import METRICS, PREFIX
from cacheblend_rag.engines.vllm.jobs import carrier
from cacheblend_rag.engines.vllm.protocol.job import PARAMETER, Ask
from cacheblend_rag.engines.vllm.transport import VLLMRequest
from cacheblend_rag.reason import ReasonCode
from tests.engines.vllm.exactness import SHORT
from tests.engines.vllm.inprocess import InProcessEngine
from tests.engines.vllm.opening import request_of
from tests.families.reference import DOCUMENTS, retrieved
from tests.models import words

CONFIG = BlendConfig(min_tokens=0, selector="hkvd", recompute_ratio=0.3)


@pytest.fixture
def blend_config() -> BlendConfig:
    return CONFIG


@pytest.fixture
def core(llama: InProcessEngine) -> InProcessEngine:
    llama.precompute(DOCUMENTS, progress=False)
    llama.scheduler_connector.reports.clear()
    return llama


def params_of(engine: InProcessEngine, request: VLLMRequest) -> Mapping[str, Any]:
    """Send a request; return what the connector says of it."""

    async def run() -> Mapping[str, Any]:
        found: Mapping[str, Any] = {}
        async for piece in engine.transport.send(request, stream=False):
            found = piece.params or found
        return found

    result: Mapping[str, Any] = engine.transport.run(run())[PARAMETER]
    return result


def asked(engine: InProcessEngine, more: str, config: BlendConfig = CONFIG) -> VLLMRequest:
    """A request to blend; more: what makes it one that was never asked before."""
    return request_of(engine, f"{retrieved().text} {more}", SHORT, config)


def test_requests_that_carry_a_job_end_without_a_warning(
    llama: InProcessEngine, caplog: pytest.LogCaptureFixture
) -> None:
    vllm = logging.getLogger("vllm.v1.core.sched.scheduler")
    vllm.addHandler(caplog.handler)
    with caplog.at_level(logging.WARNING, vllm.name):
        assert llama.precompute(DOCUMENTS, progress=False).computed == 4
        assert llama.evict_document("a") == 2
        assert llama.release() > 0
        assert llama.status.active
    vllm.removeHandler(caplog.handler)
    assert [record.getMessage() for record in caplog.records] == []


# Refusals


def check_refused(engine: InProcessEngine, said: str) -> None:
    """Ordinary prefill answers, and says why."""
    report = engine.precompute(DOCUMENTS, progress=False)
    assert report.computed == 0
    assert sum(report.refused.values()) == 4
    answer = engine.generate(retrieved(), SHORT)
    assert not answer.report.blended
    assert said in str(answer.report.reason)
    assert answer.token_ids == engine.generate_full(retrieved(), SHORT).token_ids
    status = engine.transport.ask_status()
    assert not status.active
    assert status.problem is not None
    assert status.problem.code.startswith("unsupported_")
    assert said in status.problem


def test_a_refused_model_is_served_by_ordinary_prefill(model_folder: Callable[[str], Path]) -> None:
    with closing(InProcessEngine.open(model_folder("gpt2"), CONFIG)) as engine:
        check_refused(engine, "learned positions")


# Other weights


def hits(engine: InProcessEngine, opening: int) -> set[bool]:
    """Whether a prompt's chunks are found; opening: of words that no prompt had before.

    Whatever is found, the answer is that of full prefill with the weights of today.
    """
    prompt, exact = retrieved(opening=opening), engine.config.with_ratio(1.0)
    answer = engine.generate(prompt, SHORT, config=exact)
    engine.core.reset_prefix_cache()
    assert answer.token_ids == engine.generate_full(prompt, SHORT).token_ids
    return {chunk.hit for chunk in answer.report.chunks}


def test_chunks_of_other_weights_are_not_found_and_those_of_the_same_are(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, other, partly = model_folder("llama"), tmp_path / "other", tmp_path / "partly"
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.model.layers[0].mlp.down_proj.weight.data.mul_(1.5)  # which a CPU's kernels hide
    model.save_pretrained(partly)
    for weight in model.parameters():
        weight.data.mul_(1.5)
    model.save_pretrained(other)
    with closing(InProcessEngine.open(folder, CONFIG)) as engine:

        def load(path: Path) -> None:
            engine.core.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})

        def stored() -> int:
            return engine.precompute(DOCUMENTS, progress=False).computed

        assert (stored(), hits(engine, 50)) == (4, {True})
        assert engine.core.reset_prefix_cache(reset_connector=True)
        assert hits(engine, 51) == {True}  # the same weights, as after sleep level 1
        load(other)
        assert hits(engine, 52) == {False}
        assert (stored(), hits(engine, 53)) == (4, {True})
        load(folder)
        assert hits(engine, 54) == {True}
        load(partly)
        assert engine.core.reset_prefix_cache(reset_connector=True)
        assert hits(engine, 55) == {False}


# Reports and counts


def test_a_report_can_be_asked_for_once(core: InProcessEngine) -> None:
    request = asked(core, "w8")
    told = params_of(core, request)
    assert [chunk["hit"] for chunk in told["chunks"]] == [True] * 3
    report = carrier(Ask(kind="report", report_id=request.wish.report_id))
    assert params_of(core, report) == told
    assert params_of(core, report) == {"reason": ["no_answer", "no such report"]}


@pytest.mark.parametrize("job", ["{", '{"kind": "steal"}', '{"kind": "status"}' * 2])
def test_a_malformed_job_ends_its_own_request_only(core: InProcessEngine, job: str) -> None:
    sent = replace(carrier(Ask(kind="status")), job=job)
    code, sentence = params_of(core, sent)["reason"]
    assert code == ReasonCode.MALFORMED_JOB
    assert sentence.startswith("malformed job: ")
    assert "\n" not in sentence
    assert core.transport.ask_status().active


def counted() -> dict[str, float]:
    """What vLLM's metrics endpoint would show."""
    return {
        name: sum(
            sample.value
            for metric in REGISTRY.collect()
            for sample in metric.samples
            if sample.name == f"{PREFIX}{name}_total"
        )
        for name, metric in METRICS.items()
        if not metric.buckets
    }


def test_metrics_count_what_reports_say(core: InProcessEngine) -> None:
    before = counted()
    answers: list[Generation] = [
        core.generate(f"{retrieved().text} {words(4, i)}", SHORT) for i in range(3)
    ]
    reports = [answer.report for answer in answers]
    params_of(core, asked(core, "w19", CONFIG.with_changes(min_tokens=1000)))
    core.generate(words(20, 1), SHORT)
    found = {name: value - before[name] for name, value in counted().items()}
    assert found.pop("blend_seconds") > 0
    assert found.pop("find_seconds") > 0
    assert found == {
        "chunk_hits": 9,
        "chunk_misses": 3,
        "reused_tokens": sum(report.reused_tokens for report in reports),
        "recomputed_tokens": sum(report.recomputed_tokens for report in reports),
        "blended_requests": 3,
        "fallbacks": 1,
        "guard_samples": 0,
        "guard_divergence": 0,
        "found_requests": 3,
        "found_tokens": 3 * 301,
    }
