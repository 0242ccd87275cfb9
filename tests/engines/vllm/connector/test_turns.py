"""Conversations in vLLM: their turns are computed again while it idles, stored, and reused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from cacheblend_rag import BlendConfig, Conversation, ConversationKV
from tests.engines.conversations import (
    CONFIG,
    INSTRUCTION,
    PASSAGES,
    QUESTIONS,
    SAMPLING,
    ConversationContract,
    Open,
    begun,
    of_turns,
)
from tests.engines.vllm.inprocess import InProcessEngine
from tests.kv.samples import until
from tests.models import words

PATIENCE = 60.0


@pytest.fixture
def blend_config() -> BlendConfig:
    return BlendConfig(**CONFIG)


@pytest.fixture
def opened(llama: InProcessEngine) -> Iterator[Open]:
    """Open engines over one vLLM, which know the passages."""
    engines: list[InProcessEngine] = []

    def open_one(**config: object) -> InProcessEngine:
        engine = InProcessEngine(
            llama.vllm, BlendConfig(**{**CONFIG, **config}), instruction=f"{INSTRUCTION}\n\n"
        )
        engine.precompute(PASSAGES, progress=False)
        engines.append(engine)
        return engine

    yield open_one
    for engine in engines:
        engine.close()


def settle(kv: ConversationKV) -> None:
    assert until(lambda: not kv._fillings, PATIENCE)


class TestVLLMConversations(ConversationContract):
    def kept(self, engine: InProcessEngine) -> set[tuple[str, str]]:
        held = engine.worker_connector.blender.store.entries()
        return {(key.chunk_id, key.context_id) for key in held if key.context_id}

    def evicted(self, engine: InProcessEngine, is_so: Callable[[], bool]) -> None:
        assert until(is_so, PATIENCE)


# Beyond the contract


def asked(conversation: Conversation, turn: int) -> None:
    conversation.ask(QUESTIONS[turn], PASSAGES[2 * turn : 2 * turn + 2])
    settle(conversation.kv)


def test_a_turn_that_is_forgotten_before_it_is_stored_is_not_stored(opened: Open) -> None:
    engine = opened()
    conversation = begun(engine)
    conversation.ask(QUESTIONS[0], PASSAGES[:2])
    conversation.forget()
    store = engine.worker_connector.blender.store
    assert until(lambda: not any(key.context_id for key in store.entries()), PATIENCE)


def test_turns_are_found_by_the_conversations_secret_alone(opened: Open) -> None:
    engine = opened()
    conversation = begun(engine)
    for turn in range(2):
        asked(conversation, turn)
    assert conversation.last is not None
    prompt, secret = conversation.last.fitted.prepared, conversation.kv.key
    finder = engine.scheduler_connector.finding.finder

    def found(secret: str, namespace: str = "default") -> list[tuple[int, int, bool]]:
        several = finder.find(
            namespace, prompt.token_ids, conversation=secret, until=prompt.question_start
        )
        return [(one.start, one.end, one.is_turn) for one in several]

    passages = [(one.start, one.end, False) for one in prompt.placed]
    assert len(passages) == 4
    assert found("") == found("1" * 32) == passages
    turns = set(found(secret)) - set(passages)
    assert sum(end - start for start, end, is_turn in turns if is_turn) >= 24
    assert found(secret, "another") == []


def test_where_vllms_own_prefix_cache_goes_on_nothing_is_loaded(opened: Open) -> None:
    """Of a conversation without passages it has all but the last block, until it drops it."""
    engine = opened(recompute_ratio=0.3)
    conversation, block = begun(engine), engine.scheduler.cache_config.block_size
    told = []
    for question in (words(300, 55), QUESTIONS[0], QUESTIONS[1]):
        answer = conversation.ask(question)
        settle(conversation.kv)
        assert conversation.last is not None
        prompt = conversation.last.fitted.prepared
        assert answer.token_ids == engine.generate_full(prompt, SAMPLING).token_ids
        told.append(answer.report)
        if len(told) == 2:
            engine.free_blocks()
            assert engine.core.reset_prefix_cache()
    _, held, dropped = told
    assert {chunk.tier for chunk in held.chunks} == {"prefix cache"}
    assert 0 < held.recomputed_tokens <= block
    assert {chunk.tier for chunk in dropped.chunks} == {"host"}
    assert dropped.recomputed_tokens == 0
    assert len({chunk.chunk_id for chunk in dropped.chunks}) == 2, "no turn was kept twice"


def test_blended_turns_are_in_blocks_of_their_own_conversation(opened: Open) -> None:
    """Equal prompts of two conversations find nothing of each other in vLLM's prefix cache."""
    engine, prompts = opened(recompute_ratio=1.0), []  # so that both get the same answers
    for conversation in (begun(engine), begun(engine)):
        asked(conversation, 0)
        asked(conversation, 1)
        assert of_turns(conversation) > 0
        assert conversation.last is not None
        prompt = conversation.last.fitted.prepared
        prompts.append(prompt.token_ids)
        assert {chunk.tier for chunk in conversation.last.answer.report.chunks} == {"host"}
        engine.generate(prompt, SAMPLING)  # which also finds what was stored of its own turn
        again = engine.generate(prompt, SAMPLING).report
        assert {chunk.tier for chunk in again.chunks} == {"prefix cache"}
    assert prompts[0] == prompts[1]


def test_a_turns_key_is_never_that_of_a_chunk(opened: Open) -> None:
    engine = opened()
    store = engine.worker_connector.blender.store
    tokens = tuple(engine.tokenize(f"{QUESTIONS[0]} {PASSAGES[0].text}"))
    before = set(store.entries())
    plan = replace(
        engine._led.resolve(PASSAGES[0]),
        lead=(),
        context=tokens[:24],
        token_ids=tokens[24:],
        is_turn=True,
    )
    assert sum(done.computed for done in engine._fill([plan], "1" * 32)) == 1
    (new,) = set(store.entries()) - before
    assert new.chunk_id in {key.chunk_id for key in before}
    assert new.fingerprint not in {key.fingerprint for key in before}
