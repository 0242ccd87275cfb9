"""Whatever goes wrong with stored KV: the answer is ordinary prefill's, and the report says why."""

from __future__ import annotations

import errno
import logging
from pathlib import Path

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForSequenceClassification,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    RwkvConfig,
    RwkvForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from cacheblend_rag import Chunk, SamplingParams, TieredKVStore, TransformersEngine
from cacheblend_rag.errors import ConfigError, ModelLoadError
from cacheblend_rag.kv.tiers import disk
from tests.engines.transformers.conftest import EngineFactory
from tests.models import SHAPE, VOCABULARY, make_model, make_tokenizer, words

CHUNKS = [Chunk(words(30, seed)) for seed in range(2)]
TEXT = "\n".join([*(c.text for c in CHUNKS), words(6, 99)])
SHORT = SamplingParams(max_tokens=6)


def on_disk(folder: Path) -> TieredKVStore:
    return TieredKVStore.open(host_bytes=0, kv_path=folder)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("??/*.safetensors"))


def test_verifying_finds_damage_that_no_request_met(
    make_engine: EngineFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(store=on_disk(tmp_path))
    engine.precompute(CHUNKS, progress=False)
    victim = files(tmp_path)[0]
    victim.write_bytes(victim.read_bytes()[:-9])
    assert engine.precompute(CHUNKS, progress=False).skipped == 2
    report = engine.precompute(CHUNKS, progress=False, verify=True)
    assert (report.computed, report.skipped, report.refused) == (1, 1, {})

    def broken(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(disk, "read_range", broken)
    report = engine.precompute(CHUNKS, progress=False, verify=True)
    assert (report.computed, report.skipped) == (0, 0)
    assert report.refused == report.failed == {"disk tier: store error": 2}


REFUSED = {
    "layer 0 (MambaBlock) does not attend": lambda: MambaForCausalLM(
        MambaConfig(vocab_size=VOCABULARY, hidden_size=64, state_size=8, num_hidden_layers=2)
    ),
    "recurrent layers": lambda: RwkvForCausalLM(
        RwkvConfig(vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, context_length=2048)
    ),
}


def greedily(model: PreTrainedModel, ids: torch.Tensor, count: int) -> tuple[int, ...]:
    """The tokens that the model's own forward chooses, reading the whole text for each of them."""
    with torch.no_grad():
        for _ in range(count):
            best = model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)
            ids = torch.cat([ids, best], 1)
    return tuple(ids[0, -count:].tolist())


@pytest.mark.parametrize("reason", REFUSED)
def test_an_unsupported_model_is_served_by_ordinary_prefill(
    reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(1)
    model = REFUSED[reason]().eval()
    with caplog.at_level(logging.WARNING):
        engine = TransformersEngine(model, tokenizer=make_tokenizer())
    assert engine.blend_refusal is not None
    assert reason in engine.blend_refusal
    assert reason in caplog.text
    report = engine.precompute(CHUNKS, progress=False)
    assert (report.computed, dict(report.refused)) == (0, {"unsupported model": 2})
    answer = engine.generate(TEXT, SHORT)
    ids = torch.tensor([make_tokenizer()(TEXT)["input_ids"]])
    assert answer.token_ids == greedily(model, ids, 6)
    assert {c.reason for c in answer.report.chunks} == {"unsupported model"}
    assert answer.report.reason is not None
    assert reason in answer.report.reason


ENCODER_DECODERS = {
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(vocab_size=VOCABULARY, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4)
    ),
    "a classifier": lambda: LlamaForSequenceClassification(LlamaConfig(**SHAPE)),
}


@pytest.mark.parametrize("kind", ENCODER_DECODERS)
def test_a_model_that_does_not_continue_texts_is_refused_at_load(kind: str) -> None:
    with pytest.raises(ConfigError, match="does not continue texts: give a causal language model"):
        TransformersEngine(ENCODER_DECODERS[kind]().eval(), tokenizer=make_tokenizer())


def test_a_model_that_does_not_load_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError) as caught:
        TransformersEngine(tmp_path / "nothing")
    assert "\n" not in str(caught.value)
    assert "nothing" in str(caught.value)
    with pytest.raises(ConfigError, match="tokenizer must be given"):
        TransformersEngine(make_model())
    with pytest.raises(ConfigError, match="device='nowhere' is not available here"):
        TransformersEngine(tmp_path, device="nowhere")
    with pytest.raises(ConfigError, match="dtype='float3' must be"):
        TransformersEngine(tmp_path, dtype="float3")


def test_a_hub_format_folder_loads(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    engine = TransformersEngine(tmp_path)
    same = TransformersEngine(make_model(), tokenizer=make_tokenizer())
    assert engine.blend_refusal is None
    assert engine.generate(TEXT, SHORT).token_ids == same.generate(TEXT, SHORT).token_ids
    assert engine.fingerprint == same.fingerprint
    half = TransformersEngine(tmp_path, dtype="bfloat16")
    assert half.model.dtype == torch.bfloat16
    assert half.fingerprint != same.fingerprint


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    model = make_model()
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError):
        TransformersEngine(tmp_path)
