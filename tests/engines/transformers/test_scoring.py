"""Scores of a given answer are those of the whole text, and take no part in what is recomputed."""

from __future__ import annotations

import pytest
import torch

from cacheblend_rag import BlendConfig, BlendPrompt, Chunk, SamplingParams, TransformersEngine
from cacheblend_rag.engines.transformers.prefill import Prefill
from cacheblend_rag.errors import ConfigError, PromptError
from tests.models import VOCABULARY, make_model, make_tokenizer, prompt_of, words

ANSWER = tuple(range(40, 52))
CHUNKS = [Chunk(words(40, seed=seed)) for seed in (1, 2, 3)]
ALL = BlendConfig(recompute_ratio=1.0, min_tokens=0, cost_model=False)
SOME = BlendConfig(recompute_ratio=0.3, min_tokens=0, cost_model=False)


def make_engine(family: str) -> TransformersEngine:
    return TransformersEngine(make_model(family), tokenizer=make_tokenizer())


def prompt() -> BlendPrompt:
    return prompt_of("lead", *CHUNKS, "question")


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_scores_are_those_of_the_whole_text(family: str) -> None:
    engine = make_engine(family)
    engine.precompute(CHUNKS, progress=False)
    ids = [*engine.prepare(prompt()).token_ids, *ANSWER]
    with torch.no_grad():
        logits = engine.model(torch.tensor([ids])).logits[0, -len(ANSWER) - 1 : -1]
    wanted = logits.float().log_softmax(-1)
    full = engine.score(prompt(), ANSWER, full=True)
    blended = engine.score(prompt(), ANSWER, config=ALL)
    assert full.log_probs.shape == (len(ANSWER), VOCABULARY)
    assert not full.report.blended
    assert blended.report.blended
    torch.testing.assert_close(full.log_probs, wanted, atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(blended.log_probs, wanted, atol=2e-4, rtol=2e-4)
    first = engine.score(prompt(), ANSWER[:1], config=ALL)
    torch.testing.assert_close(first.log_probs, wanted[:1], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_an_answer_and_scores_share_a_prefill(family: str) -> None:
    engine = make_engine(family)
    engine.precompute(CHUNKS, progress=False)
    greedy = SamplingParams.greedy(max_tokens=8, ignore_eos=True)
    for way in ({"full": True}, {"config": SOME}):
        told, (own, other) = engine.generate_and_score(
            prompt(), greedy, lambda answer: [answer.token_ids, ANSWER], **way
        )
        assert own.log_probs.argmax(-1).tolist() == list(told.token_ids)
        alone = engine.score(prompt(), ANSWER, **way)
        torch.testing.assert_close(other.log_probs, alone.log_probs)


def test_bad_input_is_one_line_before_any_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine("llama")
    monkeypatch.setattr(Prefill, "run", lambda *_: pytest.fail("prefilled"))
    with pytest.raises(ConfigError, match="continuation is empty: give at least one token"):
        engine.score("one two", ())
    with pytest.raises(PromptError, match="context window"):
        engine.score("one two", (3,) * engine.context_window)
