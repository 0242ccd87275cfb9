"""Rows that a blend pass keeps see no later token, on every kind of model; see tests/families."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from cacheblend_rag import BlendConfig
from cacheblend_rag.blend import BlendPass, FusedKV, plan_schedule
from cacheblend_rag.blend.passes import Candidates
from cacheblend_rag.blend.rotary import rotated
from cacheblend_rag.engines.transformers.trial import open_stack
from tests.models import FAMILIES, VOCABULARY, make_model

HEAD, CHUNK, QUESTION = 5, 40, 9

pytestmark = pytest.mark.usefixtures("without_gradients")


@pytest.fixture
def without_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(params=FAMILIES, scope="module")
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(family: str) -> PreTrainedModel:
    return make_model(family)


class Case:
    """A prompt of text, three chunks and a question, and the chunks' KV computed alone."""

    def __init__(self, model: PreTrainedModel) -> None:
        if getattr(model.config, "attn_logit_softcapping", None):
            model.set_attn_implementation("eager")
        self.model, self.stack = model, open_stack(model)
        draw = torch.Generator().manual_seed(3)
        lengths = [HEAD, CHUNK, 1, CHUNK, 2, CHUNK, QUESTION]
        parts = [torch.randint(2, VOCABULARY, (n,), generator=draw) for n in lengths]
        self.ids = torch.cat(parts)
        starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
        self.spans = [(starts[i], starts[i + 1]) for i in (1, 3, 5)]
        self.alone = [ordinary_kv(model, self.ids[a:b]) for a, b in self.spans]

    def run(self, ratio: float, *, eligible_before: int, **settings) -> BlendPass:
        fused = FusedKV(self.stack.geometry, self.ids.numel())
        for unwritten in (fused.keys, fused.values):  # what nothing has written must not matter
            unwritten.fill_(torch.nan)
        cached = torch.zeros(self.ids.shape, dtype=torch.bool)
        offsets = torch.zeros_like(self.ids)
        for (start, end), (keys, values) in zip(self.spans, self.alone, strict=True):
            fused.keys[:, :, start:end] = rotated(keys, self.stack.rotation(start))
            fused.values[:, :, start:end] = values
            cached[start:end] = True
            offsets[start:end] = torch.arange(end - start)
        config = BlendConfig(recompute_ratio=ratio, **settings)
        schedule = plan_schedule(config, self.stack.geometry.layers)
        eligible = cached & (torch.arange(self.ids.numel()) < eligible_before)
        prior = torch.rand(self.ids.shape, generator=torch.Generator().manual_seed(5))
        candidates = Candidates(cached, eligible, offsets, prior)
        run = BlendPass(self.stack, self.ids, fused, candidates, schedule, row_block=37)
        run.run()
        return run


def ordinary_kv(model: PreTrainedModel, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    cache = DynamicCache()
    model(input_ids=ids[None], past_key_values=cache, use_cache=True)
    return (
        torch.stack([layer.keys[0] for layer in cache.layers]),
        torch.stack([layer.values[0] for layer in cache.layers]),
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"selector": "hkvd"},
        {"selector": "hkvd", "check_layers": (1, 2), "recompute_ratios": (0.5, 0.2)},
        {"selector": "chunk_head"},
        {"selector": "random"},
        {"selector": "prior"},
    ],
    ids=["hkvd", "hkvd-gradual", "chunk_head", "random", "prior"],
)
def test_a_kept_row_does_not_see_later_tokens(model: PreTrainedModel, settings: dict) -> None:
    """Everything after the second chunk changes; the rows kept before it must not."""
    case = Case(model)
    boundary = case.spans[1][1]
    before = case.run(0.3, eligible_before=boundary, **settings)
    rows = torch.from_numpy(before.stats.recomputed).nonzero()[:, 0]
    assert rows.numel() == (16 if "recompute_ratios" in settings else 24)
    assert int(rows.max()) < boundary
    case.ids[boundary:] = (case.ids[boundary:] + 29) % VOCABULARY
    case.alone[2] = (case.alone[2][0] * 0.5, case.alone[2][1] + 1.0)
    after = case.run(0.3, eligible_before=boundary, **settings)
    assert (before.stats.recomputed == after.stats.recomputed).all()
    for then, now in (
        (before.fused.keys, after.fused.keys),
        (before.fused.values, after.fused.values),
    ):
        torch.testing.assert_close(then[:, :, rows], now[:, :, rows], atol=1e-5, rtol=0)
        assert (then[1:, :, -1] - now[1:, :, -1]).abs().max() > 1e-3
