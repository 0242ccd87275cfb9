"""Every selector chooses as many tokens as it is told, by its rule, and the report says so."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import Any

import pytest

from cacheblend_rag import (
    BlendConfig,
    BlendPrompt,
    Chunk,
    ConfigError,
    Document,
    Engine,
    Explanation,
    Generation,
    ReasonCode,
    SamplingParams,
    open_engine,
)
from tests.models import make_model, make_tokenizer, prompt_of, words

MODEL, TOKENIZER = make_model(), make_tokenizer()
RANKING = ("random", "chunk_head", "hkvd", "prior", "question_mid")
SELECTORS = (*RANKING, "none", "all")
BEFORE_LAYER_0 = ("random", "chunk_head", "prior", "question_mid")
SHORT = SamplingParams.greedy(max_tokens=4)
DOCUMENTS = [Document(name, (words(40, at), words(30, at + 9))) for at, name in enumerate("abc")]
CHUNKS = [document.to_chunks()[1] for document in DOCUMENTS]
"""Computed after the text before them in their documents, which no prompt holds."""
TOKENS = 30 * len(CHUNKS)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    config = BlendConfig(
        min_tokens=0, cost_model=False, reuse_prefix=False, protect_context=0.0, trace=True
    )
    engine = open_engine("transformers", model=MODEL, tokenizer=TOKENIZER, config=config)
    engine.precompute(DOCUMENTS, progress=False)
    yield engine
    engine.close()


def asking(question: str = "w9 w10") -> BlendPrompt:
    return prompt_of("w5 w6", *CHUNKS, question)


def ask(engine: Engine, selector: str, question: str = "w9 w10", **blend: Any) -> Generation:
    config = engine.config.with_changes(selector=selector, **blend)
    return engine.generate(asking(question), SHORT, config=config)


def choices(answer: Generation) -> list[list[int]]:
    """The positions chosen at each choice."""
    assert answer.report.trace is not None
    return [
        [at for at, taken in zip(one.positions, one.chosen, strict=True) if taken]
        for one in answer.report.trace.selections
    ]


def chosen(answer: Generation) -> list[int]:
    (positions,) = choices(answer)
    return positions


@pytest.mark.parametrize("ratio", [0.1, 0.25, 0.5])
@pytest.mark.parametrize("selector", RANKING)
def test_as_many_tokens_are_recomputed_as_the_ratio_says(
    engine: Engine, selector: str, ratio: float
) -> None:
    answer = ask(engine, selector, recompute_ratio=ratio)
    report, count = answer.report, ceil(ratio * TOKENS)
    assert (report.selector, report.selector_reason) == (selector, None)
    assert (report.recompute_ratio, report.recomputed_tokens) == (ratio, count)
    assert report.reused_tokens == TOKENS - count
    positions = chosen(answer)
    assert len(positions) == count
    for chunk in report.chunks:
        inside = range(chunk.start, chunk.start + chunk.tokens)
        assert chunk.recomputed == sum(at in inside for at in positions)


@pytest.mark.parametrize("selector", RANKING)
def test_the_same_prompt_has_the_same_tokens_recomputed(engine: Engine, selector: str) -> None:
    first, second = (ask(engine, selector, recompute_ratio=0.25) for _ in range(2))
    assert chosen(first) == chosen(second)
    assert first.token_ids == second.token_ids


@pytest.mark.parametrize("selector", RANKING)
def test_only_a_selector_that_asks_the_question_depends_on_it(
    engine: Engine, selector: str
) -> None:
    questions = [words(6, seed) for seed in (70, 71, 72)]
    answers = [ask(engine, selector, question, recompute_ratio=0.25) for question in questions]
    different = {tuple(chosen(answer)) for answer in answers}
    assert len(different) == (3 if selector == "question_mid" else 1)


@pytest.mark.parametrize("selector", ["none", *RANKING])
def test_nothing_is_recomputed_where_nothing_is_asked_for(engine: Engine, selector: str) -> None:
    answer = ask(engine, selector, recompute_ratio=0.0)
    report = answer.report
    assert (report.selector, report.reused_tokens) == (selector, TOKENS)
    assert (report.blended, report.recomputed_tokens) == (True, 0)
    assert choices(answer) == []
    assert answer.token_ids == ask(engine, "none").token_ids


@pytest.mark.parametrize(
    "blend",
    [{"selector": "all"}, *({"selector": name, "recompute_ratio": 1.0} for name in RANKING)],
    ids=lambda blend: blend["selector"],
)
def test_recomputing_everything_is_full_prefill(engine: Engine, blend: dict[str, Any]) -> None:
    answer = ask(engine, **blend)
    assert (answer.report.reused_tokens, answer.report.recomputed_tokens) == (0, TOKENS)
    full = engine.generate_full(asking(), SHORT).token_ids
    assert answer.token_ids == full != ask(engine, "none").token_ids


@pytest.mark.parametrize(("options", "each"), [({}, 8), ({"tokens": 3}, 3)])
def test_chunk_head_takes_the_first_tokens_of_each_chunk(
    engine: Engine, options: dict[str, Any], each: int
) -> None:
    answer = ask(engine, "chunk_head", recompute_ratio=24 / TOKENS, selector_options=options)
    starts = [chunk.start for chunk in answer.report.chunks]
    assert chosen(answer) == [start + at for start in starts for at in range(each)]


def test_random_depends_on_its_seed(engine: Engine) -> None:
    answers = [
        ask(engine, "random", recompute_ratio=0.25, selector_options={"seed": seed})
        for seed in (1, 2)
    ]
    assert chosen(answers[0]) != chosen(answers[1])


@pytest.mark.parametrize("deviation", ["v", "k"])
def test_hkvd_takes_what_deviates_most(engine: Engine, deviation: str) -> None:
    told = {"deviation": deviation}
    answer = ask(engine, "hkvd", recompute_ratio=0.25, selector_options=told)
    assert answer.report.trace is not None
    (one,) = answer.report.trace.selections
    measured = one.value_deviations if deviation == "v" else one.key_deviations
    best = sorted(zip(measured, one.positions, strict=True), reverse=True)
    assert chosen(answer) == sorted(at for _, at in best[: sum(one.chosen)])


def test_each_check_layer_drops_tokens_down_to_its_own_ratio(engine: Engine) -> None:
    told = {"check_layers": [1, 2, 3], "recompute_ratio": [0.5, 0.3, 0.1]}
    answer = ask(engine, "hkvd", **told)
    first, second, third = map(set, choices(answer))
    assert (len(first), len(second), len(third)) == (45, 27, 9)
    assert first > second > third
    assert answer.report.trace is not None
    assert [one.layer for one in answer.report.trace.selections] == [1, 2, 3]
    assert answer.report.recomputed_tokens == len(third)


@pytest.mark.parametrize("selector", BEFORE_LAYER_0)
def test_others_choose_before_layer_0(engine: Engine, selector: str) -> None:
    answer = ask(engine, selector, recompute_ratio=0.25, check_layers=[2])
    assert answer.report.trace is not None
    assert [one.layer for one in answer.report.trace.selections] == [None]


def test_a_prior_ranks_tokens_by_what_their_document_changed(engine: Engine) -> None:
    """As keys deviate where a passage stands as it does alone: at the beginning of a prompt."""
    told = {"prior": {}, "hkvd": {"deviation": "k"}}
    for chunk in CHUNKS:
        prompt = prompt_of(chunk, "w9 w10")
        by_rule = [
            engine.generate(
                prompt,
                SHORT,
                config=engine.config.with_changes(
                    selector=name, selector_options=options, recompute_ratio=0.25
                ),
            )
            for name, options in told.items()
        ]
        assert chosen(by_rule[0]) == chosen(by_rule[1])


def test_without_a_prior_chunk_head_stands_in_and_is_named(engine: Engine) -> None:
    """Chunks of no document have none."""
    bare = [Chunk(words(30, seed)) for seed in (60, 61)]
    engine.precompute(bare, progress=False)
    answers = [
        engine.generate(
            prompt_of("w5 w6", *bare, "w9 w10"),
            SHORT,
            config=engine.config.with_changes(selector=name, recompute_ratio=0.25),
        )
        for name in ("prior", "chunk_head")
    ]
    assert {answer.report.selector for answer in answers} == {"chunk_head"}
    (said,) = [one.report.selector_reason for one in answers if one.report.selector_reason]
    assert said.code == ReasonCode.NO_PRIOR
    assert chosen(answers[0]) == chosen(answers[1])


@pytest.mark.parametrize("selector", RANKING)
def test_protected_tokens_are_never_recomputed(engine: Engine, selector: str) -> None:
    """Nothing of a chunk whose document is absent, if all of its context is protected."""
    report = ask(engine, selector, recompute_ratio=0.5, protect_context=1.0).report
    assert (report.recomputed_tokens, report.reused_tokens) == (0, TOKENS)
    assert report.selector_reason is not None
    assert report.selector_reason.code == ReasonCode.CONTEXT_KEPT


@pytest.mark.parametrize("selector", RANKING)
def test_an_explanation_marks_the_chosen_tokens_by_rank(engine: Engine, selector: str) -> None:
    answer = ask(engine, selector, recompute_ratio=0.25)
    explained = Explanation.of(answer.report)
    marked = [token for chunk in explained.chunks for token in chunk.marked]
    assert sorted(token.position for token in marked) == chosen(answer)
    assert {token.fate for token in marked} == {"recomputed"}
    ranks = [token.rank for token in marked]
    assert sorted(rank or 0 for rank in ranks) == list(range(1, len(marked) + 1))
    untraced = ask(engine, selector, recompute_ratio=0.25, trace=False).report
    assert untraced.trace is None
    assert not any(chunk.marked for chunk in Explanation.of(untraced).chunks)


@pytest.mark.parametrize(
    ("blend", "said"),
    [
        ({"selector": "best"}, "selector='best' must be one of"),
        ({"selector": ""}, "selector"),
        ({"recompute_ratio": 1.5}, "recompute_ratio"),
        ({"recompute_ratio": -0.1}, "recompute_ratio"),
        ({"recompute_ratio": float("nan")}, "recompute_ratio"),
        ({"recompute_ratio": "much"}, "recompute_ratio"),
        ({"selector": "hkvd", "selector_options": {"k": 1}}, "hkvd has no 'k'"),
        ({"selector": "hkvd", "selector_options": {"deviation": "x"}}, "deviation='x'"),
        ({"selector": "chunk_head", "selector_options": {"tokens": 0}}, "tokens=0"),
        ({"selector": "hkvd", "check_layers": [4]}, "check_layers"),
        ({"selector": "hkvd", "check_layers": [2, 1]}, "check_layers"),
        ({"check_layers": [0]}, "layer 0 is exact and ranks nothing"),
        ({"check_layers": [1, 2], "recompute_ratio": [0.1, 0.2]}, "only drop"),
        ({"check_layers": [1, 2], "recompute_ratio": [0.1]}, "one ratio for each"),
        ({"selector": "question_mid", "selector_options": {"layers": [99]}}, "layer"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line_by_name(
    engine: Engine, blend: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        engine.generate(asking(), SHORT, config=engine.config.with_changes(**blend))
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
