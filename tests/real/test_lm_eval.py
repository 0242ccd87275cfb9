"""The lm-evaluation-harness scores a server of the embedded engine as it scores the model."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag import TransformersEngine
from cacheblend_rag.api.app import create_app
from tests.api.test_over_http import listening

QUESTIONS = [
    {"question": "The capital of France is", "choices": ["Paris", "Rome", "Lima"], "gold": 0},
    {"question": "Two and two are", "choices": ["nine", "four"], "gold": 1},
    {"question": "The opposite of hot is", "choices": ["tall", "cold", "loud"], "gold": 1},
    {"question": "A week has how many days? It has", "choices": ["seven", "fifty"], "gold": 0},
]


def tasks(folder: Path) -> list[dict[str, Any]]:
    """A task that compares the likelihood of choices, and one that reads a written answer."""
    file = folder / "questions.jsonl"
    file.write_text("".join(f"{json.dumps(one)}\n" for one in QUESTIONS))
    shared = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
    }
    choosing = {
        "task": "choosing",
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "gold",
        "metric_list": [{"metric": "acc"}],
    }
    writing = {
        "task": "writing",
        "output_type": "generate_until",
        "doc_to_target": "{{choices[gold]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8},
        "metric_list": [{"metric": "exact_match"}],
    }
    return [shared | choosing, shared | writing]


def test_a_task_has_the_models_own_score(
    smollm2_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    lm_eval = pytest.importorskip("lm_eval")

    def samples(kind: str, **options: Any) -> dict[str, Any]:
        found = lm_eval.simple_evaluate(
            model=kind, model_args=options, tasks=tasks(tmp_path), bootstrap_iters=0
        )
        assert found["results"]["choosing"]["acc,none"] >= 0.75
        return dict(found["samples"])

    own = samples("hf", pretrained=str(smollm2_folder), dtype="float32", device="cpu")
    with (
        closing(TransformersEngine("smollm2", dtype="float32")) as engine,
        listening(create_app(engine, name="smollm2")) as url,
    ):
        served = samples(
            "local-completions",
            base_url=f"{url}/v1/completions",
            model="smollm2",
            tokenizer=str(smollm2_folder),
            tokenizer_backend="huggingface",
            batch_size=4,
        )
    for mine, theirs in zip(served["choosing"], own["choosing"], strict=True):
        for (logprob, is_greedy), (expected, was_greedy) in zip(
            mine["filtered_resps"], theirs["filtered_resps"], strict=True
        ):
            assert logprob == pytest.approx(expected, abs=1e-3)
            assert is_greedy == was_greedy
    for mine, theirs in zip(served["writing"], own["writing"], strict=True):
        assert mine["filtered_resps"] == theirs["filtered_resps"]
