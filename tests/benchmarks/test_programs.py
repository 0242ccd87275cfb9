"""The programs measure what they say; the models are tiny."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from cacheblend_rag.quality.questions import load_dataset
from cacheblend_rag.quality.scores import holds_answer
from tests.benchmarks import shapes
from tests.benchmarks.command import run
from tests.toy import TOY

TINY = shapes.ModelShape(
    "tiny", "llama", 4, 128, 2, 1, 64, 512, 4096, {"rope_type": "default", "rope_theta": 1e4}
)
Bench = Callable[..., dict[str, Any]]


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str]) -> Bench:
    """Runs ``python -m tests.benchmarks.NAME ... --json`` in this process."""

    def told(name: str, *given: object) -> dict[str, Any]:
        measure = import_module(f"tests.benchmarks.{name}").measure
        run(measure, [*map(str, given), "--json"])
        return dict(json.loads(capsys.readouterr().out))

    return told


def test_documents_are_cut_in_three_settings(bench: Bench, tmp_path: Path) -> None:
    told = [" ".join(f"The {n} stood {place} days." for place in range(20)) for n in range(6)]
    golds = [f"{text} It is gold{n}." for n, text in enumerate(told)]
    asked = [
        {
            "question": f"Which {n}?",
            "answer": f"gold{n}",
            "paragraphs": [
                {"paragraph_text": golds[n], "is_supporting": True},
                {"paragraph_text": told[n + 1]},
            ],
        }
        for n in range(3)
    ]
    (tmp_path / "source.json").write_text(json.dumps(asked))
    options = ("--chunk-tokens", 40, "--prompt-tokens", 500, "--model", TOY)
    files = ("--source", tmp_path / "source.json", "--out", tmp_path / "cut.json")
    assert bench("cutting", *files, *options) == {"adjacent": 3, "fragments": 3, "shuffled": 3}
    data = load_dataset(tmp_path / "cut.json")
    for one, part, mixed in zip(*map(data.of_setting, data.settings), strict=True):
        chunks = [chunk for document in one.documents for chunk in document.to_chunks()]
        assert list(one.passages) == chunks != list(mixed.passages)
        assert {*mixed.passages} == {*chunks}
        assert one.documents == part.documents == mixed.documents
        assert [chunk for chunk in chunks if chunk in part.passages] == list(part.passages)
        assert all(chunk.context for chunk in part.passages)
        assert any(holds_answer(chunk.text, part.answers) for chunk in part.passages)
        assert all(chunk.text.endswith(".") for chunk in chunks)


def test_the_same_passages_are_an_exact_prefix_from_the_third_question_on(bench: Bench) -> None:
    found = bench("same_passages", "--model", TOY, "--questions", 2, "--words", 60, "--wait", 5)
    assert found["exact"] == 2
    assert min(found[f"{way}_seconds"] for way in ("full", "blended", "exact")) > 0


def test_random_weights_repeat_with_their_seed() -> None:
    first, again = (TINY.build_model(dtype=torch.float32, device="cpu") for _ in range(2))
    other = TINY.build_model(dtype=torch.float32, device="cpu", seed=1)
    weights = [m.model.layers[2].mlp.up_proj.weight for m in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert first.lm_head.weight is first.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("smollm2-135m", 134.5),
        ("smollm2-360m", 361.8),
        ("qwen2.5-0.5b", 494.0),
        ("llama-3.2-1b", 1235.8),
        ("mistral-7b", 7241.7),
        ("llama-3.1-8b", 8030.3),
    ],
)
def test_named_shapes_have_the_published_number_of_weights(name: str, millions: float) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shapes.named_shape(name).config())
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.06)
