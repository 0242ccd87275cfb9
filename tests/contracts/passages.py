"""Engines for the frameworks' contracts, passages to index, and what reports say was reused.

The model is a small random one, or what the server at CACHEBLEND_TEST_ENGINE has loaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from cacheblend_rag import BlendConfig, Engine, open_engine
from tests.models import make_model, make_tokenizer, words

SERVER = os.environ.get("CACHEBLEND_TEST_ENGINE")
TEMPLATE = (
    "{% for m in messages %}[ {{ m.role }} ] {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}[ assistant ] {% endif %}"
)
REUSE: Mapping[str, Any] = {"recompute_ratio": 0.0}
RECOMPUTE_ALL: Mapping[str, Any] = {"recompute_ratio": 1.0}
PREFILL: Mapping[str, Any] = {"min_tokens": 1 << 20}
"""Nothing is blended."""
LEAST = 0.95
"""Share of the passages' tokens that is reused."""
MODEL = make_model()
MODEL.lm_head.weight.data[:2] = 0  # it says words, no special tokens


def tokenizer_of(template: str | None = TEMPLATE) -> Any:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def opened(
    blend: Mapping[str, Any] = REUSE, template: str | None = TEMPLATE, **options: Any
) -> Engine:
    """Open an engine with known chunks of its own."""
    config = BlendConfig(**{"min_tokens": 0, "cost_model": False, **blend})
    if SERVER:
        return open_engine(SERVER, config=config, **options)
    given = {"model": MODEL, "tokenizer": tokenizer_of(template), "config": config, **options}
    return open_engine("transformers", **given)


def text_of(name: str, count: int = 120) -> str:
    """A document's text, another one for each name."""
    return words(count, sum(map(ord, name)))


def reused(reports: Iterable[Mapping[str, Any]]) -> int:
    """Count the tokens of the different chunks whose KV was reused in some prompt."""
    chunks = [chunk for report in reports for chunk in report["chunks"] if chunk["hit"]]
    return sum({chunk["chunk_id"]: chunk["tokens"] for chunk in chunks}.values())


def tokens(engine: Engine, texts: Iterable[str]) -> int:
    return sum(len(engine.tokenize(text)) for text in set(texts))
