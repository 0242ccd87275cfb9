"""The example of a selector ranks tokens as it says, in an engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from cacheblend_rag import BlendConfig, ConfigError, Document, Explanation, open_engine
from cacheblend_rag.blend.selectors import SELECTORS, Evidence, make_selector
from tests.models import make_model, make_tokenizer, prompt_of, words


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    import examples.selector  # noqa: F401

    yield
    del SELECTORS["beginnings"]


def test_a_token_far_from_its_chunks_beginning_scores_less() -> None:
    evidence = Evidence(torch.tensor([0, 8, 16, 0]), question_attention=torch.ones(4))
    found = make_selector("beginnings", {"halved_after": 8}).score(evidence)
    assert found.tolist() == [1.0, 0.5, 0.25, 1.0]


def test_it_chooses_as_many_tokens_as_the_ratio_says() -> None:
    config = BlendConfig(
        min_tokens=0, cost_model=False, trace=True, selector="beginnings", recompute_ratio=0.25
    )
    engine = open_engine(
        "transformers", model=make_model(), tokenizer=make_tokenizer(), config=config
    )
    documents = [Document(name, (words(40, seed),)) for seed, name in enumerate("ab")]
    engine.precompute(documents, progress=False)
    chunks = [document.to_chunks()[0] for document in documents]
    report = engine.generate(prompt_of("w5 w6", *chunks, "w9 w10")).report
    assert (report.selector, report.recomputed_tokens, report.reused_tokens) == (
        "beginnings",
        20,
        60,
    )
    explained = Explanation.of(report).chunks
    assert sum(len(chunk.marked) for chunk in explained) == 20
    with pytest.raises(ConfigError, match="halved_after=0"):
        engine.generate(
            prompt_of(*chunks, "w9"),
            config=config.with_changes(selector_options={"halved_after": 0}),
        )
    engine.close()
