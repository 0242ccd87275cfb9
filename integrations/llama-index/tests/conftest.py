"""Engines on the bundled model, an index over its corpus, and a small random model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from llama_index.core import Document, MockEmbedding, Settings, VectorStoreIndex
from llama_index.core.llms import MockLLM
from llama_index.core.node_parser import SentenceSplitter
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from cacheblend_rag import BlendConfig, Engine, Generation, open_engine
from cacheblend_rag.demo import MODEL_FOLDER
from cacheblend_rag.demo.corpus import generate_collection
from cacheblend_rag.prefill import controller
from llama_index.llms.cacheblend import CacheBlendLLM, CacheBlendPrecompute

REUSE = BlendConfig(recompute_ratio=0.0, min_tokens=32, cost_model=False)
ENGINE = os.environ.get("CACHEBLEND_TEST_ENGINE", "transformers")
"""What the bundled model runs on: ``make server_tests`` says where a server is."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--modes-table", action="store_true", help="print the table of modes that docs show"
    )


@pytest.fixture(scope="session", autouse=True)
def _noise_decides_nothing() -> Iterator[None]:
    """Prefill of models so small is never held against blending, however busy the machine is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(controller, "MARGIN", 1e9)
        yield


@pytest.fixture(autouse=True)
def _offline_settings() -> Iterator[None]:
    """No test may fall back to a model of LlamaIndex's own."""
    Settings.embed_model = MockEmbedding(8)
    Settings.llm = MockLLM()
    yield
    Settings._prompt_helper = None


@pytest.fixture(scope="session")
def documents() -> list[Document]:
    """Three documents of the demo corpus, with metadata of which LLMs see a part."""
    collection, _ = generate_collection(documents=3, questions=1, seed=5)
    return [
        Document(
            text="\n\n".join(drawn.chunks),
            id_=drawn.document_id,
            metadata={"source": f"note-{index}", "size": 7},
            excluded_llm_metadata_keys=["size"],
        )
        for index, drawn in enumerate(collection)
    ]


@pytest.fixture(scope="session")
def question() -> str:
    _, questions = generate_collection(documents=3, questions=1, seed=5)
    return questions[0].question


@pytest.fixture(scope="session")
def demo_engine() -> Engine:
    """The bundled model; plain reuse, so that every token found is a token reused."""
    return open_engine(ENGINE, model="demo", config=REUSE, instruction="Notes:\n")


@pytest.fixture
def llm(demo_engine: Engine) -> CacheBlendLLM:
    return CacheBlendLLM(engine=demo_engine, max_tokens=6)


@pytest.fixture(scope="session")
def index(demo_engine: Engine, documents: list[Document]) -> VectorStoreIndex:
    """The documents, cut into chunks of some 100 tokens and precomputed with both variants."""
    precompute = CacheBlendPrecompute(
        engine=demo_engine, variants=("llm", "bare"), show_progress=False
    )
    return VectorStoreIndex.from_documents(
        documents,
        transformations=[SentenceSplitter(chunk_size=110, chunk_overlap=0), precompute],
        embed_model=MockEmbedding(8),
    )


def scripted_engine(engine: Engine, script: dict[str, str]) -> Engine:
    """Return an engine whose answers are replaced where the prompt holds a key of ``script``.

    Prefill, blending and the report are the real engine's.
    """

    def generate(self: Engine, prompt: Any, *args: Any, **kwargs: Any) -> Generation:
        return say(prompt, engine.generate(prompt, *args, **kwargs))

    async def agenerate(self: Engine, prompt: Any, *args: Any, **kwargs: Any) -> Generation:
        return say(prompt, await engine.agenerate(prompt, *args, **kwargs))

    def say(prompt: Any, generation: Generation) -> Generation:
        answers = [answer for key, answer in script.items() if key in str(prompt)]
        return replace(generation, text=answers[0]) if answers else generation

    scripted = copy(engine)
    answers = {"generate": generate, "agenerate": agenerate}
    scripted.__class__ = type("Scripted", (type(engine),), answers)
    return scripted


@pytest.fixture
def scripted(demo_engine: Engine) -> Any:
    """Return an LLM around a scripted engine: ``scripted({"part of a prompt": "answer"})``."""

    def make(script: dict[str, str], **fields: Any) -> CacheBlendLLM:
        return CacheBlendLLM(engine=scripted_engine(demo_engine, script), max_tokens=6, **fields)

    return make


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small random model that reads any text, always the same one."""
    return save_random_model(tmp_path_factory.mktemp("random"), seed=7)


@pytest.fixture(scope="session")
def other_random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("other"), seed=8)


def save_random_model(folder: Path, seed: int) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(MODEL_FOLDER)
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=32768,
            initializer_range=0.2,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        )
    )
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
