from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from typer import Typer
from typer.testing import CliRunner

from cacheblend_rag.cli import output
from cacheblend_rag.cli.main import app
from cacheblend_rag.kv import timings
from cacheblend_rag.prefill import policy
from tests.cli.documents import write_notes
from tests.servers import redis  # noqa: F401 - a fixture
from tests.toy import TOY


@dataclass
class Outcome:
    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> dict[str, Any]:
        """The one JSON object that stdout must be."""
        return json.loads(self.stdout)


@contextmanager
def single_thread():
    """Models this small are slowed down by more, above all when tests run side by side."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def one_thread():
    with single_thread():
        yield


@pytest.fixture(autouse=True)
def no_lines_of_progress(monkeypatch):
    """A busy machine takes longer than others: what is on stderr does not depend on that."""
    monkeypatch.setattr(output, "LINE_SECONDS", 3600.0)


def outcome_of(app: Typer, *arguments: object) -> Outcome:
    """What a command line prints in this process, and its exit code."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Outcome(result.exit_code, result.stdout, result.stderr)


@pytest.fixture
def cli():
    return partial(outcome_of, app)


@pytest.fixture
def slow_blends(monkeypatch):
    """What may give a prompt to ordinary prefill because that is sooner does so with every one."""
    monkeypatch.setattr(timings, "LEAST", 1)
    monkeypatch.setattr(policy, "MARGIN", 0.0)


@pytest.fixture
def drawn_with(monkeypatch):
    """Let every model have sampling settings of its own; returns what answers are drawn with."""
    from cacheblend_rag import TransformersEngine
    from cacheblend_rag.engines.after_answer import AfterAnswer
    from cacheblend_rag.engines.sampling import ResolvedSampling

    own = ResolvedSampling(temperature=5.0, top_p=0.9, top_k=50, repetition_penalty=3.0)
    run, drawn = AfterAnswer.run, []

    def watched(hooks, request, answer):
        drawn.append(request.sampling)
        return run(hooks, request, answer)

    monkeypatch.setattr(TransformersEngine, "model_sampling", property(lambda engine: own))
    monkeypatch.setattr(AfterAnswer, "run", watched)
    return drawn


@pytest.fixture(scope="session")
def indexed(tmp_path_factory):
    """A collection of eight notes of the demo's corpus, and four questions about them."""
    folder = tmp_path_factory.mktemp("indexed")
    asked = write_notes(folder / "notes", count=8, questions=4)
    into = ["--into", folder / "collection", "--model", TOY, "--set", "chunk_size=128"]
    arguments = ["index", folder / "notes", *into]
    with single_thread():
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return folder / "collection", asked


@pytest.fixture(scope="session")
def small_model(tmp_path_factory):
    """A folder with an untrained two-layer model and the demo's tokenizer."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("small-model")
    tokenizer = AutoTokenizer.from_pretrained(TOY)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
