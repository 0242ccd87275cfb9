"""Fidelity of known distributions, and of the answers of small random models."""

from __future__ import annotations

import math

import pytest
import torch

from cacheblend_rag import BlendConfig, Chunk, SamplingParams, TransformersEngine
from cacheblend_rag.engines.answer import Generation
from cacheblend_rag.engines.transformers.prefill import ContinuationScore
from cacheblend_rag.quality.fidelity import answer_and_compare, divergences, reference
from cacheblend_rag.report import BlendReport, PhaseSeconds
from tests.models import make_model, make_tokenizer, prompt_of, words

GREEDY = SamplingParams.greedy(max_tokens=6)
REPORT = BlendReport("rote", False, None, 1, 0, 0, 1, 1.0, "none", "none", 1.0, PhaseSeconds())


class RoteEngine:
    """Predicts the same distribution at every step: one for full prefill, another for blends."""

    def __init__(self, full, blended, answer, finish):
        self.full, self.blended = torch.tensor(full).log(), torch.tensor(blended).log()
        self.answer, self.finish, self.model = answer, finish, make_model()

    def tokenize(self, text):
        return tuple(int(part) for part in text.split())

    def generate_and_score(self, prompt, sampling, continuations, *, config=None, full=False):
        one = self.full if full else self.blended
        told = Generation("", self.answer, self.finish, 1, REPORT)
        asked = continuations(told)
        return told, tuple(ContinuationScore(one.repeat(len(c), 1), REPORT) for c in asked)


def test_divergence_of_known_distributions() -> None:
    wanted = torch.tensor([[0.5, 0.25, 0.25, 0.0], [1.0, 0.0, 0.0, 0.0]]).log()
    found = torch.tensor([[0.25, 0.25, 0.5, 0.0], [0.5, 0.5, 0.0, 0.0]]).log()
    exact = [0.5 * math.log(2) - 0.25 * math.log(2), math.log(2)]
    assert divergences(wanted, found).tolist() == pytest.approx(exact)
    assert divergences(wanted, wanted).tolist() == [0.0, 0.0]
    assert divergences(torch.tensor([[0.0, -1e9]]), torch.tensor([[-5.0, -0.1]])).tolist() == [5.0]


def test_figures_of_known_distributions() -> None:
    engine = RoteEngine([0.6, 0.3, 0.1], [0.3, 0.6, 0.1], answer=(0, 0), finish="length")
    found = reference(engine, "prompt", ["1", "2 1", "1 1"], GREEDY)
    assert (found.answer, found.gold) == ((0, 0), (1,))
    assert found.of_itself.gold_logprob == pytest.approx(math.log(0.3))
    told, fidelity = answer_and_compare(found, engine, "prompt", GREEDY, BlendConfig())
    assert told.token_ids == (0, 0)
    assert fidelity.kl == pytest.approx(0.3 * math.log(2))
    assert (fidelity.top1, fidelity.same_answer) == (0.0, False)
    assert (fidelity.gold_logprob, fidelity.exact) == (pytest.approx(math.log(0.6)), False)


def test_the_end_token_is_part_of_the_answer() -> None:
    for answer, finish, whole in (
        ((1,), "stop", (1, 2)),
        ((), "stop", (2,)),
        ((1, 1), "length", (1, 1)),
    ):
        engine = RoteEngine([0.1, 0.2, 0.7], [0.1, 0.2, 0.7], answer=answer, finish=finish)
        assert reference(engine, "prompt", [], GREEDY).answer == whole


def test_a_rule_gives_its_own_answer_where_all_tokens_agree() -> None:
    chunks = [Chunk(words(40, seed=seed)) for seed in (1, 2, 3)]
    prompt = prompt_of("w9", *chunks, "w7 w8")
    engine = TransformersEngine(make_model("llama"), tokenizer=make_tokenizer())
    engine.precompute(chunks, progress=False)
    found = reference(engine, prompt, [], GREEDY)
    for selector, ratio in (("none", 0.0), ("random", 0.9), ("all", 1.0)):
        config = BlendConfig(
            selector=selector, recompute_ratio=ratio, min_tokens=0, cost_model=False
        )
        told, fidelity = answer_and_compare(found, engine, prompt, GREEDY, config)
        assert fidelity.same_answer == (told.token_ids == found.generation.token_ids)
        assert told.token_ids == engine.generate(prompt, GREEDY, config=config).token_ids
