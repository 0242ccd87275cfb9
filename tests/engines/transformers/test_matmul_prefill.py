"""Ordinary prefill by matrix products: equal results, and what attends otherwise."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV32Config, PreTrainedModel

from cacheblend_rag import BlendConfig, Chunk, TransformersEngine
from cacheblend_rag.blend import attention, matmul_attention
from cacheblend_rag.blend.onednn import has_onednn
from cacheblend_rag.engines.transformers import matmul_prefill
from cacheblend_rag.engines.transformers.loading import load_model
from cacheblend_rag.engines.transformers.matmul_prefill import (
    MATMUL,
    use_matmul_attention,
    uses_matmul_attention,
)
from tests.models import make_model, make_tokenizer, prompt_of, words

pytestmark = pytest.mark.skipif(not has_onednn(), reason="oneDNN is used on x86 only")

CHUNKS = [Chunk(words(60, seed)) for seed in range(2)]
PROMPT = prompt_of("w5 w6", *CHUNKS, words(6, 99))
IDS = torch.arange(5, 5 + 90)[None]


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU with AVX-512 that Intel did not make."""
    for module in (attention, matmul_attention):
        monkeypatch.setattr(module, "LEAST_TOKENS", 64)
    for module in (attention, matmul_attention, matmul_prefill):
        monkeypatch.setattr(module, "onednn_is_faster", lambda: True)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each call that attends by matrix products."""
    made: list[int] = []
    attend = matmul_prefill.attend_by_matmul

    def noted(query: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        made.append(query.shape[2])
        return attend(query, *rest, **named)

    monkeypatch.setattr(matmul_prefill, "attend_by_matmul", noted)
    return made


def matmul_model() -> PreTrainedModel:
    model = make_model()
    assert use_matmul_attention(model)
    return model


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_whole_prompt_gets_the_logits_of_sdpa(dtype: torch.dtype, calls: list[int]) -> None:
    model = matmul_model().to(dtype)
    found, wanted = model(IDS).logits, make_model().to(dtype)(IDS).logits
    assert calls == [90] * model.config.num_hidden_layers
    tolerance: dict[str, float] = {} if dtype is torch.float32 else {"atol": 0.05, "rtol": 0.05}
    torch.testing.assert_close(found, wanted, **tolerance)


@torch.no_grad()
def test_it_attends_on_no_more_threads_than_other_processes_leave_cpus_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limited, within = [False], list[bool]()
    attend = matmul_prefill.attend_by_matmul

    @contextmanager
    def limit() -> Iterator[None]:
        limited[0] = True
        yield
        limited[0] = False

    def noted(*given: Any, **named: Any) -> torch.Tensor:
        within.append(limited[0])
        return attend(*given, **named)

    monkeypatch.setattr(matmul_prefill.cpu_threads, "limited", limit)
    monkeypatch.setattr(matmul_prefill, "attend_by_matmul", noted)
    model = matmul_model()
    model(IDS)
    assert within == [True] * model.config.num_hidden_layers
    assert limited == [False]


@torch.no_grad()
def test_everything_else_attends_as_before(calls: list[int]) -> None:
    model, plain = matmul_model(), make_model()
    padded = torch.ones_like(IDS)
    padded[0, :3] = 0
    for ids, options in (
        (IDS[:, :63], {}),  # short
        (IDS, {"attention_mask": padded}),
        (IDS.expand(2, -1), {}),
    ):
        torch.testing.assert_close(model(ids, **options).logits, plain(ids, **options).logits)
    assert not calls
    cache, other = model(IDS).past_key_values, plain(IDS).past_key_values
    calls.clear()
    for ids in (IDS[:, :70], IDS[:, :1]):  # behind a cache
        found = model(ids, past_key_values=cache).logits
        torch.testing.assert_close(found, plain(ids, past_key_values=other).logits)
    assert not calls


def test_gradients_flow_as_before(calls: list[int]) -> None:
    model = matmul_model()
    model.requires_grad_(True)
    model(IDS).logits.sum().backward()
    assert not calls
    assert all(weight.grad is not None for weight in model.parameters())


def test_models_that_attend_otherwise_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    eager = make_model()
    eager.set_attn_implementation("eager")
    assert not use_matmul_attention(eager)
    assert eager.config._attn_implementation == "eager"
    monkeypatch.setattr(matmul_prefill, "onednn_is_faster", lambda: False)
    model = make_model()
    assert not use_matmul_attention(model)
    assert model.config._attn_implementation == "sdpa"


def test_models_that_compare_the_name_are_left_as_they_are(calls: list[int]) -> None:
    """DeepSeek's sparse attention masks what it leaves out for "eager" and "sdpa" only."""
    torch.manual_seed(0)
    sparse = DeepseekV32Config(
        vocab_size=256, hidden_size=64, intermediate_size=128, moe_intermediate_size=32,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=32,
        kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=24,
        n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1,
        index_topk=8, index_n_heads=2, index_head_dim=16,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(sparse).eval()
    assert model.config._attn_implementation == "sdpa"
    assert not use_matmul_attention(model)
    assert model.config._attn_implementation == "sdpa"
    with torch.no_grad():
        model(IDS)
    assert not calls


def test_parts_that_attend_otherwise_stay_so() -> None:
    model = make_model()
    inner = copy.deepcopy(model.config)
    inner._attn_implementation = "eager"
    model.model.layers[1].self_attn.config = inner
    assert use_matmul_attention(model)
    assert inner._attn_implementation == "eager"
    assert uses_matmul_attention(model)


def test_models_loaded_by_name_attend_so(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path)
    assert uses_matmul_attention(load_model(tmp_path, torch.device("cpu"), None))
    model = make_model()
    TransformersEngine(model, tokenizer=make_tokenizer())
    assert not uses_matmul_attention(model), "a given model stays as it is"


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_blends_are_those_of_a_model_that_attends_by_sdpa(
    ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, answer = BlendConfig(recompute_ratio=ratio), (7, 8, 9)

    def scored(model: PreTrainedModel) -> list[Any]:
        engine = TransformersEngine(model, tokenizer=make_tokenizer())
        engine.precompute(CHUNKS, progress=False)
        blended = engine.score(PROMPT, answer, config=config)
        return [blended, engine.score(PROMPT, answer, full=True)]

    found = scored(matmul_model())
    monkeypatch.setattr(matmul_attention, "onednn_is_faster", lambda: False)
    for one, wanted in zip(found, scored(make_model()), strict=True):
        torch.testing.assert_close(one.log_probs, wanted.log_probs, atol=1e-4, rtol=1e-4)


def test_saved_configs_do_not_name_it(tmp_path: Path) -> None:
    model = matmul_model()
    model.save_pretrained(tmp_path)
    assert MATMUL not in (tmp_path / "config.json").read_text()
