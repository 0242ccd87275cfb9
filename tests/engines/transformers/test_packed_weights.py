"""Weights packed for oneDNN: equal results, and which are packed."""

from __future__ import annotations

import copy
import platform

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import PreTrainedModel

from cacheblend_rag import BlendConfig, Chunk, TransformersEngine
from cacheblend_rag.blend import onednn
from cacheblend_rag.engines.transformers import packed_weights
from cacheblend_rag.engines.transformers.adapters import base_weights_hash
from cacheblend_rag.engines.transformers.loading import load_model
from cacheblend_rag.engines.transformers.model_state import ModelState
from cacheblend_rag.engines.transformers.packed_weights import (
    OneDNNLinear,
    pack_weights,
    packed_count,
    unpack_weights,
)
from tests.models import make_model, make_tokenizer, prompt_of, words

CHUNKS = [Chunk(words(30, seed)) for seed in range(2)]
PROMPT = prompt_of("w5 w6", *CHUNKS, words(6, 99))
CPU = torch.device("cpu")
LORA = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)

pytestmark = pytest.mark.skipif(
    platform.machine() not in {"x86_64", "AMD64"} or not torch.backends.mkldnn.is_available(),
    reason="weights are packed on x86 only",
)


class Quantized(nn.Parameter):
    """A parameter of another class, as quantizers have them."""


def packed_model() -> PreTrainedModel:
    model = make_model()
    assert pack_weights(model, least=0) > 0
    return model


def packed(linear: nn.Linear) -> nn.Linear:
    copied = copy.deepcopy(linear)
    assert pack_weights(copied, least=0) == 1
    return copied


@torch.no_grad()
def test_a_packed_model_gives_the_logits_of_the_dense_one() -> None:
    ids = torch.arange(5, 45)[None]
    torch.testing.assert_close(packed_model()(ids).logits, make_model()(ids).logits)


@torch.no_grad()
@pytest.mark.parametrize("shape", [(7, 96), (1, 1, 96), (0, 96), (2, 3, 96)])
@pytest.mark.parametrize("bias", [True, False])
def test_any_rows_with_and_without_a_bias(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(96, 40, bias=bias).requires_grad_(False)
    dense = torch.randn(shape)
    for rows in (dense, dense.mT.contiguous().mT):  # the second one with other strides
        torch.testing.assert_close(packed(linear)(rows), linear(rows))


def test_only_large_weights_of_one_plain_layer_are_packed() -> None:
    class Own(nn.Linear):
        pass

    tied, embedding = nn.Linear(8, 8), nn.Embedding(8, 8)
    tied.weight = embedding.weight
    bare, hooked, quantized = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
    del bare.weight  # as quantizers that unpack weights at the first forward leave a layer
    vars(hooked)["forward"] = hooked.forward  # as hooks that replace it do
    quantized.weight = Quantized(quantized.weight)
    others = [nn.Linear(8, 8, dtype=dtype) for dtype in (torch.float16, torch.bfloat16)]
    kept = [tied, embedding, Own(8, 8), nn.Linear(4, 8), bare, hooked, quantized, *others]
    large = nn.Linear(8, 8)
    assert pack_weights(nn.ModuleList([*kept, large]), 64) == 1
    assert isinstance(large, OneDNNLinear)
    assert packed_count(nn.ModuleList(kept)) == 0


def test_a_weight_shared_with_the_embedding_stays_dense_but_is_multiplied_through_onednn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    embedding, tied = nn.Embedding(40, 96), nn.Linear(96, 40, bias=False)
    tied.weight = embedding.weight
    calls: list[torch.Size] = []

    def counted(rows: torch.Tensor, *others: torch.Tensor | None) -> torch.Tensor:
        calls.append(rows.shape)
        return onednn.onednn_linear(rows, *others)

    monkeypatch.setattr(packed_weights, "onednn_linear", counted)
    assert pack_weights(nn.ModuleList([embedding, tied]), least=0) == 0
    assert tied.weight is embedding.weight
    rows = torch.randn(2, 1, 96)
    wanted = nn.functional.linear(rows, embedding.weight)
    with torch.no_grad():
        torch.testing.assert_close(tied(rows), wanted)
    assert calls == [rows.shape]
    torch.testing.assert_close(tied(rows), wanted)
    tied(rows).sum().backward()
    assert embedding.weight.grad is not None
    with torch.no_grad():
        tied.weight = Quantized(embedding.weight.detach())
        torch.testing.assert_close(tied(rows), wanted)
    assert len(calls) == 1
    unpack_weights(nn.ModuleList([embedding, tied]))
    assert type(tied) is nn.Linear


@pytest.mark.parametrize(("has_avx512", "wanted"), [(True, 2), (False, 1)])
def test_with_avx_512_smaller_weights_are_packed(
    has_avx512: bool, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_weights, "has_slow_mkl", lambda: True)
    monkeypatch.setattr(packed_weights, "onednn_is_faster", lambda: has_avx512)
    sizes = (packed_weights.LEAST_ELEMENTS_AVX512, packed_weights.LEAST_ELEMENTS)
    model = nn.ModuleList([nn.Linear(64, size // 64) for size in (sizes[0] // 2, *sizes)])
    assert pack_weights(model) == wanted


def test_nothing_is_packed_where_mkl_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_weights, "has_slow_mkl", lambda: False)
    linear = nn.Linear(64, packed_weights.LEAST_ELEMENTS // 64)
    model = nn.ModuleList([linear])
    assert pack_weights(model) == packed_count(model) == 0
    assert type(linear) is nn.Linear


def test_gradients_reach_the_input_and_other_dtypes_are_refused_as_by_a_dense_layer() -> None:
    linear = nn.Linear(96, 40).requires_grad_(False)
    found = []
    for layer in (linear, packed(linear)):
        rows = torch.ones(3, 96, requires_grad=True)
        layer(rows).sum().backward()
        found.append(rows.grad)
        with pytest.raises(RuntimeError, match="dtype"):
            layer(torch.ones(3, 96, dtype=torch.float16))
    torch.testing.assert_close(*found)


@torch.no_grad()
def test_unpacked_a_model_is_what_it_was() -> None:
    model = packed_model()
    unpack_weights(model)
    assert packed_count(model) == 0
    torch.testing.assert_close(model.state_dict(), make_model().state_dict(), rtol=0, atol=0)
    assert not any(isinstance(module, OneDNNLinear) for module in model.modules())


def test_a_model_that_is_changed_while_an_engine_has_it_is_dense_again() -> None:
    model = packed_model()
    engine = TransformersEngine(model, tokenizer=make_tokenizer())
    engine.score(PROMPT, (7, 8, 9))
    assert packed_count(model) > 0
    lora = get_peft_model(model, LORA).eval()
    engine.score(PROMPT, (7, 8, 9))
    assert packed_count(model) == 0
    lora.merge_adapter()
    assert pack_weights(model, least=0) == 0  # adapters may be merged, or taken out again


def test_nothing_is_packed_without_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.backends.mkldnn.flags(enabled=False):
        assert pack_weights(make_model(), least=0) == 0
    monkeypatch.setattr(onednn, "OPERATORS", ("_an_operator_of_no_version",))
    assert pack_weights(make_model(), least=0) == 0


def test_a_packed_models_weights_have_the_same_hash() -> None:
    wanted = base_weights_hash(make_model(), torch.float32)
    assert base_weights_hash(packed_model(), torch.float32) == wanted


@torch.no_grad()
def test_a_dense_weight_put_in_place_of_a_packed_one_is_noticed_and_used() -> None:
    model = packed_model()
    before = ModelState.of(model)
    assert ModelState.of(model).has_weights_of(before)
    layer = next(part for part in model.modules() if isinstance(part, OneDNNLinear))
    layer.weight = nn.Parameter(2 * layer.weight.to_dense())
    assert not ModelState.of(model).has_weights_of(before)
    rows = torch.randn(3, layer.in_features)
    torch.testing.assert_close(layer(rows), nn.functional.linear(rows, layer.weight))


@pytest.mark.parametrize("ratio", [1.0, 0.3])
def test_the_engine_blends_a_packed_model_as_a_dense_one(ratio: float) -> None:
    found = []
    for model in (packed_model(), make_model()):
        config = BlendConfig(min_tokens=0, selector="random", recompute_ratio=ratio)
        engine = TransformersEngine(model, tokenizer=make_tokenizer(), config=config)
        engine.precompute(CHUNKS, progress=False)
        score = engine.score(PROMPT, (7, 8, 9))
        assert score.report.blended
        found.append(score.log_probs)
    torch.testing.assert_close(*found)


def test_adapters_can_be_put_around_packed_layers() -> None:
    ids, found = torch.arange(5, 45)[None], []
    for model in (packed_model(), make_model()):
        torch.manual_seed(3)
        with torch.no_grad():
            found.append(get_peft_model(model, LORA).eval()(ids).logits)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(
    ("has_slow_mkl", "has_avx512", "each"),
    [(True, True, 7), (True, False, 5), (False, True, 0)],  # without AVX-512 not keys and values
)
def test_models_loaded_by_name_are_packed_and_given_ones_are_not(
    has_slow_mkl: bool, has_avx512: bool, each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_weights, "has_slow_mkl", lambda: has_slow_mkl)
    monkeypatch.setattr(packed_weights, "onednn_is_faster", lambda: has_avx512)
    loaded = load_model("smollm2", CPU, None)
    assert packed_count(loaded) == each * loaded.config.num_hidden_layers
    given = make_model()
    TransformersEngine(given, tokenizer=make_tokenizer())
    assert packed_count(given) == 0
