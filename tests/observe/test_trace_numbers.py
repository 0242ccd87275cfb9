"""A trace's numbers are those of transformers' own forward passes, on a random model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from cacheblend_rag import BlendConfig, Chunk, Explanation, SamplingParams, TransformersEngine
from cacheblend_rag.report import BlendReport
from cacheblend_rag.trace import Trace
from tests.models import make_model, make_tokenizer, prompt_of, words

CHUNKS = [Chunk(words(40, seed=seed)) for seed in (1, 2, 3)]
PROMPT = prompt_of("w9 w11", *CHUNKS, "w7 w8 w12")
ONE = SamplingParams.greedy(max_tokens=1)
SETTINGS = {"min_tokens": 0, "cost_model": False, "reuse_prefix": False, "trace": True}


@pytest.fixture(scope="module")
def engine() -> Iterator[TransformersEngine]:
    engine = TransformersEngine(make_model(), tokenizer=make_tokenizer(), lead_in="none")
    engine.precompute(CHUNKS, progress=False)
    yield engine
    engine.close()


def asked(engine: TransformersEngine, **settings: object) -> tuple[BlendReport, Trace]:
    config = BlendConfig(**{**SETTINGS, **settings})  # type: ignore[arg-type]
    report = engine.generate(PROMPT, ONE, config=config).report
    assert report.trace is not None
    return report, report.trace


def kv(ids: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of each layer, each (kv_heads, tokens, head_dim), by the model itself."""
    with torch.no_grad():
        found = make_model()(ids[None], position_ids=positions[None], use_cache=True)
    return [(one.keys[0], one.values[0]) for one in found.past_key_values.layers]


def changes(engine: TransformersEngine, report: BlendReport) -> dict[str, Tensor]:
    """(layers, tokens): squared differences of full prefill's KV from that of each chunk alone."""
    ids = torch.tensor(engine.prepare(PROMPT).token_ids)
    whole = kv(ids, torch.arange(len(ids)))
    found = {name: torch.zeros(len(whole), len(ids)) for name in ("keys", "values")}
    for chunk in report.chunks:
        here = torch.arange(chunk.start, chunk.start + chunk.tokens)
        alone = kv(ids[here], here)
        for layer, (fresh, stored) in enumerate(zip(whole, alone, strict=True)):
            for name, now, then in zip(("keys", "values"), fresh, stored, strict=True):
                found[name][layer, here] = (now[:, here] - then).square().sum((0, 2))
    return found


def test_deviations_are_those_of_full_prefill_from_chunks_alone(engine: TransformersEngine) -> None:
    report, trace = asked(engine, recompute_ratio=1.0)
    wanted, layers = changes(engine, report), 4
    tokens = [at for one in report.chunks for at in range(one.start, one.start + one.tokens)]
    assert [one.layer for one in trace.layers] == list(range(len(wanted["keys"])))[:layers]
    for one in trace.layers:
        for name in ("keys", "values"):
            every, found = wanted[name][one.layer, tokens], getattr(one, name)
            assert found.mean == pytest.approx(float(every.mean()), rel=1e-3, abs=1e-7)
            assert found.median == pytest.approx(float(every.quantile(0.5)), rel=1e-3, abs=1e-7)
            assert found.most == pytest.approx(float(every.max()), rel=1e-3, abs=1e-7)
    sample = trace.tokens
    assert sample is not None
    assert (sample.layer, list(sample.positions)) == (1, tokens)
    every = wanted["values"][sample.layer, tokens].tolist()
    assert list(sample.value_deviations) == pytest.approx(every, rel=1e-3, abs=1e-7)


def test_a_check_layer_sees_full_prefills_deviations_and_so_does_the_histogram(
    engine: TransformersEngine,
) -> None:
    report, trace = asked(engine, selector="hkvd", check_layers=(1,), recompute_ratio=0.2)
    values = changes(engine, report)["values"]
    (choice,) = trace.selections
    assert list(choice.value_deviations) == pytest.approx(
        values[1, list(choice.positions)].tolist(), rel=1e-3
    )
    best = values[1].argsort(descending=True)[: sum(choice.chosen)].sort().values.tolist()
    told = Explanation.of(report)
    marked = [token for chunk in told.chunks for token in chunk.marked]
    assert [token.position for token in marked] == best
    assert [token.rank for token in sorted(marked, key=lambda one: -(one.score or 0))] == list(
        range(1, len(best) + 1)
    )
    found = told.histogram
    assert found is not None
    assert (found.layer, found.zeros) == (1, 0)
    assert sum(one.recomputed for one in found.bins) == len(best)
    inside = values[1, list(choice.positions)]
    for one in found.bins:
        counted = int(((inside >= one.low) & (inside < one.high)).sum())
        assert one.recomputed + one.others == pytest.approx(counted, abs=1)
