"""A prompt that is asked to be explained: its tokens, and what it cost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cacheblend_rag import BlendConfig, Chunk, Explanation, SamplingParams, TransformersEngine
from cacheblend_rag.observe.explained import explain_prompt, token_texts
from cacheblend_rag.prefill.comparing import divergence
from tests.models import make_model, make_tokenizer, prompt_of, words
from tests.toy import TOY

CHUNKS = [Chunk(words(40, seed=seed)) for seed in (1, 2, 3)]
PROMPT = prompt_of("w9 w11", *CHUNKS, "w7 w8 w12")
CONFIG = BlendConfig(min_tokens=0, cost_model=False, recompute_ratio=0.1)


@pytest.fixture(scope="module")
def engine() -> Iterator[TransformersEngine]:
    engine = TransformersEngine(make_model(), tokenizer=make_tokenizer(), config=CONFIG)
    engine.precompute(CHUNKS, progress=False)
    yield engine
    engine.close()


def test_it_is_asked_once_with_a_trace(engine: TransformersEngine) -> None:
    asked: list[object] = []
    engine.after_answer(lambda request, answer: asked.append(request) or answer)
    found = explain_prompt(engine, PROMPT, max_tokens=3)
    assert len(asked) == 1
    assert found.report.trace is not None
    assert found.cost is None
    assert found.answer == engine.generate(PROMPT, SamplingParams.greedy(max_tokens=3)).text
    assert found.explanation == Explanation.of(found.report)


def test_what_it_cost_is_what_scores_say(engine: TransformersEngine) -> None:
    cost = explain_prompt(engine, PROMPT, max_tokens=5, compare=True).cost
    assert cost is not None
    greedy = SamplingParams.greedy(max_tokens=5)
    answer = engine.generate_full(PROMPT, greedy).token_ids
    wanted = engine.score(PROMPT, answer, full=True).log_probs.double()
    blended = engine.score(PROMPT, answer, config=CONFIG).log_probs.double()
    assert cost.tokens == len(answer) == 5
    assert cost.divergence == pytest.approx(divergence(wanted, blended), rel=1e-2, abs=1e-6)
    assert cost.divergence
    assert cost.speedup == cost.full_seconds / cost.blend_seconds


def test_of_a_prompt_that_is_not_blended_no_divergence_is_told(engine: TransformersEngine) -> None:
    found = explain_prompt(engine, prompt_of("w9 w8"), max_tokens=2, compare=True)
    assert not found.report.blended
    assert found.cost is not None
    assert found.cost.divergence is None


def test_texts_of_tokens_are_the_prompt(engine: TransformersEngine) -> None:
    prompt = engine.prepare(PROMPT)
    texts = token_texts(engine.tokenizer, prompt)
    assert len(texts) == len(prompt.token_ids)
    assert "".join(texts) == prompt.text
    assert [one.strip() for one in texts] == prompt.text.split()


def test_a_tokenizer_without_offsets_has_each_token_decoded(engine: TransformersEngine) -> None:
    class Slow:
        decode = engine.tokenizer.decode

        def __call__(self, *_: object, **__: object) -> None:
            raise NotImplementedError

    prompt = engine.prepare(PROMPT)
    assert token_texts(Slow(), prompt) == tuple(prompt.text.split())


def test_special_tokens_have_no_text_of_the_prompt() -> None:
    engine = TransformersEngine(TOY)
    prompt = engine.prepare("What is the sport of Ivan Novak?\n\nAnswer:")
    texts = token_texts(engine.tokenizer, prompt)
    engine.close()
    assert len(texts) == len(prompt.token_ids)
    assert "".join(texts).replace("<bos>", "") == prompt.text
