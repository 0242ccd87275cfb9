"""Two toys of other architectures, so that a rule that fits the bundled one alone is seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from cacheblend_rag import BlendConfig, Chunk, Conversation, SamplingParams, open_engine
from cacheblend_rag.engines.tokenizer import load_tokenizer
from cacheblend_rag.quality.engines import opened_engines
from cacheblend_rag.quality.evaluator import Evaluator, evaluate_settings
from cacheblend_rag.quality.frame import PromptFrame
from cacheblend_rag.quality.rules import FULL, Rule
from tests.toy import generate_prompts
from tests.toy.questions import toy_dataset

TOYS = Path(__file__).parent / "toys"
SETTINGS = ("adjacent", "fragments", "shuffled", "revised", "turns")
WHOLE = ("adjacent", "revised", "turns")
QUESTIONS = 12
ONE = 1 / QUESTIONS
REUSE = {kind: Rule.reuse(kind) for kind in ("instruction", "document")}

# Shares of right answers by full prefill, below what the weights reach; see training.json.
RIGHT = {"qknorm": 0.75, "sliding": 0.5}


@pytest.mark.parametrize("toy", sorted(path.name for path in TOYS.iterdir()))
def test_the_default_is_as_right_as_full_prefill_and_as_reuse_where_documents_are_missing(
    toy: str,
) -> None:
    model = str(TOYS / toy)
    data = toy_dataset(SETTINGS, QUESTIONS, 4)
    frame = PromptFrame.of(load_tokenizer(model), data.instruction)
    rules = [*REUSE.values(), Rule.default()]
    with opened_engines("transformers", model, list(REUSE), instruction=frame.opening) as engines:
        evaluator = Evaluator(
            engines,
            frame,
            BlendConfig(min_tokens=0),
            SamplingParams.greedy(max_tokens=8, stop=frame.stop),
        )
        plans = dict.fromkeys(SETTINGS, rules)
        found = dict(evaluate_settings(data, plans, evaluator))
    right = {
        setting: {
            (row.selector, row.lead_in, row.default): row.exact_match for row in evaluation.rows
        }
        for setting, evaluation in found.items()
    }
    default = (Rule.default().selector, "document", True)
    for setting, told in right.items():
        full, reuse = told[FULL.selector, FULL.lead_in, False], told["none", "document", False]
        wanted = full if setting in WHOLE else reuse
        assert told[default] >= wanted - ONE - 1e-9, setting
        if setting in WHOLE:
            assert full >= RIGHT[toy], setting
    assert right["adjacent"]["none", "instruction", False] < RIGHT[toy]


def test_follow_up_questions_of_a_kept_conversation_find_whom_they_mean() -> None:
    """The passages' KV knows nothing of each other, so the rows must be chosen by the question.

    Full prefill answers all 12, plain reuse 2.
    """
    engine = open_engine("transformers", model=str(TOYS / "qknorm"))
    config = BlendConfig(min_tokens=0, cost_model=False, recompute_ratio=0.16)
    sampling, right = SamplingParams.greedy(max_tokens=8), 0
    for prompt in generate_prompts("turns", QUESTIONS, seed=5):
        passages = [Chunk(text) for text in prompt.chunk_texts]
        engine.precompute(passages, progress=False)
        conversation = Conversation(engine, sampling=sampling, config=config)
        ((first, _),) = prompt.question.earlier
        conversation.ask(first, passages)
        answer = conversation.ask(prompt.question.question)
        assert answer.report.selector == config.selector
        right += answer.text.strip().startswith(prompt.question.answer)
    assert right >= 11
