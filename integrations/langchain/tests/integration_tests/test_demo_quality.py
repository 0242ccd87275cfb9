"""Answers on the demo corpus through LangChain against the evaluation's own, rule for rule.

CACHEBLEND_QUESTIONS raises the number of questions a setting.
"""

from __future__ import annotations

import os

import pytest
from cacheblend_rag import BlendConfig, SamplingParams, TransformersEngine
from cacheblend_rag.quality.dataset import EvalQuestion, lead_text
from cacheblend_rag.quality.evaluator import Evaluator
from cacheblend_rag.quality.frame import PromptFrame
from cacheblend_rag.quality.metrics import exact_match
from cacheblend_rag.quality.rules import Rule
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda
from toy import INSTRUCTION, LEARNED_SETTINGS, TOY
from toy.questions import toy_dataset

from langchain_cacheblend import CacheBlendTransformer, ChatCacheBlend, create_cacheblend_chain

QUESTIONS = int(os.environ.get("CACHEBLEND_QUESTIONS", "4"))
SEED = 9_271_828
RULE = Rule("document", "hkvd", 0.15)
CONFIG = BlendConfig(recompute_ratio=0.15, min_tokens=0)
PROMPT = ChatPromptTemplate.from_messages(
    [("system", INSTRUCTION), ("human", "{context}\n\nQuestion: {input}\nAnswer:")]
)


def evaluated(questions: tuple[EvalQuestion, ...]) -> tuple[float, float]:
    """Shares of right answers by full prefill and by the rule, as the command ``eval`` counts."""
    engine = TransformersEngine(TOY, config=CONFIG, instruction=lead_text(INSTRUCTION))
    sampling = SamplingParams(max_tokens=16, stop=("\n",))
    evaluator = Evaluator(
        {"document": engine}, PromptFrame(lead_text(INSTRUCTION)), CONFIG, sampling
    )
    full, blended = evaluator.run(questions, [RULE]).rows
    engine.close()
    return full.exact_match, blended.exact_match


def through_langchain(questions: tuple[EvalQuestion, ...]) -> float:
    llm = ChatCacheBlend(
        model=TOY, blend_config=CONFIG, instruction=PROMPT, max_tokens=16, stop=["\n"]
    )
    transformer = CacheBlendTransformer(engine=llm.engine)
    retrieved: list[Document] = []
    chain = create_cacheblend_chain(RunnableLambda(lambda _: retrieved), llm, prompt=PROMPT)
    right = 0.0
    for question in questions:
        transformer.transform_documents(
            [
                Document(page_content=text, metadata={"source": document.document_id})
                for document in question.documents
                for text in document.chunks
            ]
        )
        retrieved[:] = [
            Document(page_content=passage.text, metadata={"source": passage.document_id})
            for passage in question.passages
        ]
        outcome = chain.invoke(question.question)
        assert [chunk["hit"] for chunk in outcome["report"]["chunks"]] == [True] * len(retrieved)
        right += exact_match(outcome["answer"], question.answers)
        transformer.evict(document.document_id for document in question.documents)
    return right / len(questions)


@pytest.mark.parametrize("setting", LEARNED_SETTINGS)
def test_answers_are_as_good_as_the_evaluations(setting: str) -> None:
    questions = toy_dataset([setting], QUESTIONS, SEED).questions
    full, blended = evaluated(questions)
    ours = through_langchain(questions)
    print(
        f"\n{setting}: {len(questions)} questions, right by full prefill {full:.3f}, "
        f"by eval {blended:.3f}, through LangChain {ours:.3f}"
    )
    assert abs(ours - blended) <= 0.01
