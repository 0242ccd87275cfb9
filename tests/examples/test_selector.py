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
    del SELECTORS["phrases"]


@pytest.mark.parametrize("reach", [0, 1, 3])
def test_a_token_scores_the_mean_of_its_neighbours(reach: int) -> None:
    asked = torch.rand(9, generator=torch.Generator().manual_seed(1))
    evidence = Evidence(torch.arange(9), question_attention=asked)
    found = make_selector("phrases", {"reach": reach}).score(evidence)
    wanted = [float(asked[max(0, i - reach) : i + reach + 1].mean()) for i in range(9)]
    assert found.tolist() == pytest.approx(wanted)


def test_it_chooses_as_many_tokens_as_the_ratio_says() -> None:
    config = BlendConfig(
        min_tokens=0, cost_model=False, trace=True, selector="phrases", recompute_ratio=0.25
    )
    engine = open_engine(
        "transformers", model=make_model(), tokenizer=make_tokenizer(), config=config
    )
    documents = [Document(name, (words(40, seed),)) for seed, name in enumerate("ab")]
    engine.precompute(documents, progress=False)
    chunks = [document.to_chunks()[0] for document in documents]
    report = engine.generate(prompt_of("w5 w6", *chunks, "w9 w10")).report
    assert (report.selector, report.recomputed_tokens, report.reused_tokens) == ("phrases", 20, 60)
    explained = Explanation.of(report).chunks
    assert sum(len(chunk.marked) for chunk in explained) == 20
    with pytest.raises(ConfigError, match="reach=-1"):
        engine.generate(
            prompt_of(*chunks, "w9"), config=config.with_changes(selector_options={"reach": -1})
        )
    engine.close()
