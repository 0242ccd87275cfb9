"""open_engine: which engine a name gives, and errors of one line that name the fix."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from cacheblend_rag import BlendConfig, Document, SamplingParams, open_engine
from cacheblend_rag.engines import factory
from cacheblend_rag.errors import (
    CacheBlendError,
    ConfigError,
    EngineUnavailableError,
    MissingExtraError,
    ModelLoadError,
)
from tests.models import make_model, make_tokenizer, words
from tests.toy import TOY

ONE_TOKEN = SamplingParams(max_tokens=1)


def open_tiny(kv_path: Path | None, **options: Any):
    return open_engine(
        "transformers",
        model=make_model(),
        tokenizer=make_tokenizer(),
        config=BlendConfig(min_tokens=0),
        kv_path=kv_path,
        **options,
    )


def test_what_one_engine_forgets_another_does_not_hold(tmp_path: Path) -> None:
    shared, own = words(12, 1), words(11, 3)
    kept = Document("kept", (shared,))
    gone = Document("gone", (shared, own))
    indexing = open_tiny(tmp_path)
    indexing.precompute([kept, gone], progress=False)
    asking = open_tiny(tmp_path, read_only=True)
    prompt = f"{shared}\n\n{own} question"
    assert [c.hit for c in asking.generate(prompt, ONE_TOKEN).report.chunks] == [True, True]
    host, _ = asking.store.tiers
    keys = {asking.key(chunk) for chunk in gone.to_chunks()}
    assert {key for key, _ in host.entries()} == keys

    assert indexing.evict_document("gone") == 1  # the other chunk's KV is the kept document's
    answer = asking.generate(prompt, ONE_TOKEN)
    assert [(chunk.hit, chunk.tokens) for chunk in answer.report.chunks] == [(True, 12)]
    assert asking.key(kept.to_chunks()[0]) in keys
    assert {key for key, _ in host.entries()} == {asking.key(kept.to_chunks()[0])}
    assert asking.store.keys() == [asking.key(kept.to_chunks()[0])]

    indexing.precompute([Document("kept", (words(13, 5),))], progress=False)  # an update
    answer = asking.generate(prompt, ONE_TOKEN)
    assert answer.report.reason == "no known chunk in the prompt"
    assert answer.token_ids == asking.generate_full(prompt, ONE_TOKEN).token_ids
    assert not [*host.entries()]
    (left,) = asking.store.keys()
    assert left == indexing.key(*indexing.registry.document("kept"))


def test_a_replica_may_come_before_the_first_index(tmp_path: Path) -> None:
    replica = open_tiny(tmp_path, read_only=True)
    assert replica.generate("alpha beta", ONE_TOKEN).report.reused_tokens == 0
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"engine": "trt"}, ConfigError, "engine='trt' must be auto, transformers, vllm"),
        ({"model": "no/such-folder"}, ModelLoadError, "no/such-folder"),
        ({"engine": "http://127.0.0.1:9"}, EngineUnavailableError, "no server answers"),
    ],
)
def test_errors_are_one_line_and_name_the_fix(
    options: dict[str, Any],
    error: type[CacheBlendError],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Where no hub can be reached, asking it for the folder's name takes a minute of retries.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(error, match=said) as caught:
        open_engine(**{"model": TOY, **options})
    assert "\n" not in str(caught.value)


def test_vllm_without_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factory, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"cacheblend-rag\[vllm\]"):
        open_engine("vllm", model=TOY)


@pytest.mark.parametrize(
    ("model", "device", "vllm", "cuda", "picked"),
    [
        (TOY, None, True, True, "vllm"),
        (TOY, None, True, False, "no CUDA device"),
        (TOY, None, False, True, "vLLM is not installed"),
        (TOY, "cpu", True, True, "device='cpu' was asked for"),
        (make_model, None, True, True, "loaded already"),
    ],
)
def test_auto_takes_vllm_where_it_runs_well_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    model: Any,
    device: str | None,
    vllm: bool,
    cuda: bool,
    picked: str,
) -> None:
    found = object() if vllm else None
    monkeypatch.setattr(factory, "find_spec", lambda name: found)
    monkeypatch.setattr("torch.cuda.is_available", lambda: cuda)
    monkeypatch.setattr(factory, "open_vllm", lambda *_, **__: Opened("vllm"))
    monkeypatch.setattr(factory, "open_transformers", lambda *_, **__: Opened("transformers"))
    caplog.set_level("INFO", logger="cacheblend_rag")
    engine = open_engine(model=model if isinstance(model, str) else model(), device=device)
    assert engine.name == ("vllm" if picked == "vllm" else "transformers")
    assert f"engine='auto' is '{engine.name}'" in caplog.text
    assert picked in caplog.text


@dataclass
class Opened:
    """Stands for an engine that would take long to open."""

    name: str
    model_name: str = ""


def test_a_loaded_model_cannot_be_a_servers() -> None:
    with pytest.raises(ConfigError, match="name or a folder with a server's URL"):
        open_engine("http://127.0.0.1:9", model=make_model())
