"""Prompts are fitted into the window by the lengths of their parts, and encoded once."""

from __future__ import annotations

import random
from typing import Any

import pytest

from cacheblend_rag import Chunk, SamplingParams
from cacheblend_rag.errors import PromptError
from cacheblend_rag.rag.prompt import PromptFitter, RagPrompt, Source, Turn
from tests.engines.toy_engine import ToyEngine
from tests.models import make_tokenizer, words
from tests.tokenizer_kinds import CORPUS, KINDS, tokenizer_of

QUESTION = "w250 w251 w252?"
INSTRUCTION = "Be brief."
MAX_TOKENS = 10


class Counting:
    """A tokenizer that notes the texts it encodes."""

    def __init__(self, tokenizer: Any) -> None:
        self.texts: list[str] = []
        self._tokenizer = tokenizer

    def encode(self, text: str, **options: Any) -> list[int]:
        self.texts.append(text)
        return self._tokenizer.encode(text, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def whole_prompts(self) -> int:
        """How often a text from the instruction to the question was encoded."""
        return sum(INSTRUCTION in text and QUESTION in text for text in self.texts)


class NarrowEngine(ToyEngine):
    """An engine with a window of its own."""

    def __init__(self, tokenizer: Any, window: int, **settings: Any) -> None:
        self._window = window
        super().__init__(tokenizer, **settings)

    @property
    def context_window(self) -> int:  # type: ignore[override]
        return self._window


def source(text: str, score: float) -> Source:
    return Source(Chunk(text), 0, score)


def passages(*tokens: int) -> list[Source]:
    """Passages, best first."""
    return [source(f"Passage {words(n - 1, n)}", 1 / (i + 2)) for i, n in enumerate(tokens)]


def fitted_slowly(engine, prompt, earlier, question, sources):
    """What one encoding after another finds: the slow reference."""
    room = engine.context_window - min(MAX_TOKENS, engine.context_window // 4)
    kept, shown = list(earlier), list(sources)
    while True:
        turns = [*kept, Turn.of(question, shown)]
        text = prompt.segmented(turns, engine.registry)
        if len(text.encode(engine.encoder).token_ids) <= room:
            return (len(kept), [one.chunk.text for one in shown])
        if kept:
            kept.pop(0)
        elif shown:
            shown.remove(min(shown, key=lambda one: one.score))
        else:
            return None


@pytest.fixture
def tokenizer() -> Counting:
    return Counting(make_tokenizer())


def test_where_all_fits_a_prompt_is_encoded_once_the_engine_included(tokenizer: Counting) -> None:
    engine, prompt = NarrowEngine(tokenizer, 1000), RagPrompt(tokenizer, INSTRUCTION)
    found = passages(40, 30, 50, 20)
    engine.precompute([one.chunk for one in found], progress=False)
    tokenizer.texts.clear()
    fitted = PromptFitter(engine, prompt).fit((), Turn.of(QUESTION, found), MAX_TOKENS)
    assert tokenizer.whole_prompts() == 1
    assert list(fitted.sources) == found
    tokenizer.texts.clear()
    *_, last = engine.stream(fitted.prepared, SamplingParams(max_tokens=3))
    assert tokenizer.texts == [], "the engine encodes nothing"
    assert [one.tokens for one in last.generation.report.chunks] == [40, 30, 50, 20]
    engine.generate(fitted.prepared.text, SamplingParams(max_tokens=3))
    assert tokenizer.whole_prompts() == 1, "this is how the engine would have been seen"
    engine.close()


@pytest.mark.parametrize("kind", KINDS)
def test_as_much_is_left_out_as_one_encoding_after_another_says(kind: str) -> None:
    """On every kind of tokenizer, with and without a chat template, and with earlier turns."""
    draw = random.Random(kind)
    tokenizer = Counting(tokenizer_of(kind))
    text = " ".join(CORPUS)

    def piece() -> str:
        start = draw.randrange(len(text) - 200)
        return text[start : start + draw.randrange(20, 200)].strip()

    encodings, one_by_one = [], []
    for _ in range(12):
        found = [source(f"Passage {piece()}", draw.random()) for _ in range(5)]
        turns = [
            Turn.of(piece(), (f"Passage {piece()}",), piece()) for _ in range(draw.randrange(3))
        ]
        prompt = RagPrompt(tokenizer, INSTRUCTION)
        all_of = Turn.of(QUESTION, found)
        whole = len(tokenizer.encode(prompt.render([*turns, all_of])))
        engine = NarrowEngine(tokenizer, draw.randrange(whole // 4, whole + 20))
        engine.register([one.chunk for one in found])
        tokenizer.texts.clear()
        wanted = fitted_slowly(engine, prompt, turns, QUESTION, found)
        one_by_one.append(tokenizer.whole_prompts())
        tokenizer.texts.clear()
        fit = PromptFitter(engine, prompt).fit
        if wanted is None:
            with pytest.raises(PromptError, match="kept for the answer"):
                fit(turns, all_of, MAX_TOKENS)
        else:
            fitted = fit(turns, all_of, MAX_TOKENS)
            assert (len(fitted.turns) - 1, [one.chunk.text for one in fitted.sources]) == wanted
        encodings.append(tokenizer.whole_prompts())
        engine.close()
    assert max(encodings) <= 4
    assert sum(encodings) < sum(one_by_one)


def test_a_question_without_room_is_told_with_its_length(tokenizer: Counting) -> None:
    engine, prompt = NarrowEngine(tokenizer, 40), RagPrompt(tokenizer, "")
    question = words(60, 1)
    with pytest.raises(PromptError, match=r"holds 62 tokens, .* is 40, and 10 tokens are kept for"):
        PromptFitter(engine, prompt).fit((), Turn.of(question, passages(20)), MAX_TOKENS)
    engine.close()
