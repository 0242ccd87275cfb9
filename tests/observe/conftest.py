"""Engines over the toy model, and prompts of its corpus."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from cacheblend_rag import (
    BlendConfig,
    Document,
    TieredKVStore,
    TransformersEngine,
    load_tokenizer,
)
from tests.toy import DEFAULT_FRAME, TOY, DemoPrompt, generate_prompts

HEAD = DEFAULT_FRAME.head
EngineMaker = Callable[..., TransformersEngine]


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def demo_model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(TOY, dtype=torch.float32).eval()


@pytest.fixture
def make(demo_model: PreTrainedModel) -> Any:
    """Build an engine over the bundled model; closes all of them in the end."""
    made: list[TransformersEngine] = []

    def build(
        *, store: TieredKVStore | None = None, instruction: str = HEAD, **settings: Any
    ) -> TransformersEngine:
        rest = {name: settings.pop(name) for name in ("lead_in", "registry") if name in settings}
        engine = TransformersEngine(
            demo_model,
            tokenizer=load_tokenizer(TOY),
            config=BlendConfig(**settings),
            store=store,
            instruction=instruction,
            **rest,
        )
        made.append(engine)
        return engine

    yield build
    for engine in made:
        engine.close()


def prompts(count: int = 1, *, chunks: int | None = None) -> list[DemoPrompt]:
    """Return prompts of whole documents in order, of more than 1,000 tokens.

    chunks: only so many of the first chunks.
    """
    drawn = generate_prompts("adjacent", count, 5)
    return [replace(one, retrieved=one.retrieved[:chunks]) for one in drawn]


def documents(prompt: DemoPrompt) -> list[Document]:
    return [Document(one.document_id, one.chunks) for one in prompt.documents]


def text_of(prompt: DemoPrompt, change: Callable[[str], str] = lambda chunk: chunk) -> str:
    """Return a prompt's text; change: what becomes of its chunks."""
    return "".join(change(text) if kind == "chunk" else text for kind, text in prompt.segments())
