"""Fidelity of known distributions, and of blends of small random models."""

from __future__ import annotations

import math

import pytest
import torch

from cacheblend_rag import BlendConfig, Chunk, SamplingParams, TransformersEngine
from cacheblend_rag.engines.answer import Generation
from cacheblend_rag.engines.transformers.prefill import ContinuationScore
from cacheblend_rag.quality.fidelity import (
    answer_and_compare,
    compare,
    divergences,
    reference,
)
from cacheblend_rag.report import BlendReport, PhaseSeconds
from tests.models import make_model, make_tokenizer, prompt_of, words

CHUNKS = [Chunk(words(40, seed=seed)) for seed in (1, 2, 3)]
PROMPT = prompt_of("w9", *CHUNKS, "w7 w8")
GREEDY = SamplingParams.greedy(max_tokens=6)
REPORT = BlendReport("rote", False, None, 1, 0, 0, 1, 1.0, "none", "none", 1.0, PhaseSeconds())


def blend(selector: str, ratio: float) -> BlendConfig:
    return BlendConfig(selector=selector, recompute_ratio=ratio, min_tokens=0, cost_model=False)


@pytest.fixture(scope="module")
def engine() -> TransformersEngine:
    engine = TransformersEngine(make_model("llama"), tokenizer=make_tokenizer())
    engine.precompute(CHUNKS, progress=False)
    return engine


class RoteEngine:
    """Predicts the same distribution at every step: one for full prefill, another for blends."""

    def __init__(self, full, blended, answer, finish):
        self.full, self.blended = torch.tensor(full).log(), torch.tensor(blended).log()
        self.answer, self.finish = answer, finish
        self.prefills = 0

    def tokenize(self, text):
        return tuple(int(part) for part in text.split())

    def generate_and_score(
        self, prompt, sampling, continuations, *, config=None, hints=(), full=False
    ):
        self.prefills += 1
        one = self.full if full else self.blended
        told = Generation("", self.answer, self.finish, 1, REPORT)
        asked = continuations(told)
        return told, tuple(ContinuationScore(one.repeat(len(c), 1), REPORT) for c in asked)

    def score_each(self, prompt, continuations, **options):
        return self.generate_and_score(prompt, None, lambda _: continuations, **options)[1]


def test_divergence_of_known_distributions() -> None:
    wanted = torch.tensor([[0.5, 0.25, 0.25, 0.0], [1.0, 0.0, 0.0, 0.0]]).log()
    found = torch.tensor([[0.25, 0.25, 0.5, 0.0], [0.5, 0.5, 0.0, 0.0]]).log()
    exact = [0.5 * math.log(2) - 0.25 * math.log(2), math.log(2)]
    assert divergences(wanted, found).tolist() == pytest.approx(exact)
    assert divergences(wanted, wanted).tolist() == [0.0, 0.0]
    assert divergences(torch.tensor([[0.0, -1e9]]), torch.tensor([[-5.0, -0.1]])).tolist() == [5.0]


def test_figures_of_known_distributions() -> None:
    engine = RoteEngine([0.6, 0.3, 0.1], [0.3, 0.6, 0.1], answer=(0, 0), finish="length")
    found = reference(engine, "prompt", ["1", "2 1", "1 1"], tokens=2)
    assert (found.answer, found.gold) == ((0, 0), (1,))
    assert found.of_itself.gold_logprob == pytest.approx(math.log(0.3))
    told = compare(found, engine, "prompt", BlendConfig())
    assert told.kl_first == told.kl == pytest.approx(0.3 * math.log(2))
    assert (told.top1, told.same_answer, told.gold_tokens) == (0.0, False, 1)
    assert told.gold_logprob == pytest.approx(math.log(0.6))
    pair = reference(engine, "prompt", ["2 2"])
    mean = compare(pair, engine, "prompt", BlendConfig()).gold_logprob_mean
    assert mean == pytest.approx(math.log(0.1))


def test_the_end_token_is_part_of_the_answer() -> None:
    ended = RoteEngine([0.1, 0.2, 0.7], [0.1, 0.2, 0.7], answer=(1,), finish="stop")
    assert reference(ended, "prompt").answer == (1, 2)
    at_once = RoteEngine([0.1, 0.2, 0.7], [0.1, 0.2, 0.7], answer=(), finish="stop")
    assert reference(at_once, "prompt").answer == (2,)
    longer = RoteEngine([0.1, 0.2, 0.7], [0.1, 0.2, 0.7], answer=(1, 1, 1), finish="stop")
    assert reference(longer, "prompt", tokens=2).answer == (1, 1)


def test_an_answer_and_its_comparison_take_one_prefill() -> None:
    engine = RoteEngine([0.6, 0.3, 0.1], [0.3, 0.6, 0.1], answer=(0, 0), finish="length")
    found = reference(engine, "prompt", ["1"])
    engine.prefills = 0
    told, fidelity = answer_and_compare(found, engine, "prompt", GREEDY, BlendConfig())
    assert (engine.prefills, told.token_ids) == (1, (0, 0))
    assert fidelity == compare(found, engine, "prompt", BlendConfig())


def test_a_blend_that_recomputes_all_is_full_prefill(engine: TransformersEngine) -> None:
    found = reference(engine, PROMPT, ["w30 w31"], tokens=6)
    told = compare(found, engine, PROMPT, blend("all", 1.0))
    assert told.kl_first < 1e-6
    assert told.kl < 1e-6
    assert (told.top1, told.same_answer) == (1.0, True)
    assert told.gold_logprob == pytest.approx(found.gold_logprob, abs=1e-3)
    assert (len(found.answer), len(found.gold)) == (6, 2)


def test_plain_reuse_and_a_prompt_without_passages_differ(engine: TransformersEngine) -> None:
    found = reference(engine, PROMPT, tokens=6)
    reuse = compare(found, engine, PROMPT, blend("none", 0.0))
    bare = compare(found, engine, prompt_of("w9", "w7 w8"), full=True)
    assert reuse.kl > 1e-5
    assert bare.kl > 1e-5
    assert reuse.gold_logprob is None


def test_a_setting_gives_its_own_answer_where_all_tokens_agree(engine: TransformersEngine) -> None:
    found = reference(engine, PROMPT, tokens=6)
    for config in (blend("none", 0.0), blend("random", 0.9), blend("all", 1.0)):
        told = compare(found, engine, PROMPT, config)
        answer = engine.generate(PROMPT, GREEDY, config=config).token_ids
        assert told.same_answer == (answer == found.generation.token_ids)
