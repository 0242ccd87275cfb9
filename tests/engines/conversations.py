"""ConversationContract: how every engine that keeps turns keeps them. Subclassed once an engine."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import pytest

from cacheblend_rag import (
    Chunk,
    Conversation,
    ConversationKV,
    Engine,
    Generation,
    SamplingParams,
    TurnPrompt,
)
from cacheblend_rag.report import BlendReport
from cacheblend_rag.text.encoder import EDGE_TOKENS
from tests.kv.samples import until
from tests.models import words

INSTRUCTION = words(30, 900)
PASSAGES = [Chunk(words(60, seed), f"d{seed}") for seed in range(20)]
QUESTIONS = [words(24, 100 + seed) for seed in range(20)]
SAMPLING = SamplingParams.greedy(max_tokens=16)
CONFIG: dict[str, Any] = {"min_tokens": 0, "cost_model": False}

Open = Callable[..., Any]
"""Opens an engine that knows the passages, with INSTRUCTION; arguments: changes of CONFIG."""


def begun(engine: Engine, **options: Any) -> Conversation:
    return Conversation(engine, sampling=SAMPLING, **options)


def of_turns(conversation: Conversation) -> int:
    assert conversation.last is not None
    return conversation.last.turn_tokens


class ConversationContract:
    """Every test gets ``opened``, whose engines are over one store that is empty at first."""

    def settle(self, kv: ConversationKV) -> None:
        """Wait until a conversation's last turn is stored."""
        assert until(lambda: not kv._fillings, 60)

    @abstractmethod
    def kept(self, engine: Any) -> set[tuple[str, str]]:
        """Return (chunk id, context id) of what is stored beside passages and prefix blocks."""

    def asked(self, conversation: Conversation, turn: int, *, passages: int = 2) -> Generation:
        first = passages * turn
        answer = conversation.ask(QUESTIONS[turn], PASSAGES[first : first + passages])
        self.settle(conversation.kv)
        return answer

    def test_questions_and_answers_of_earlier_turns_are_reused(self, opened: Open) -> None:
        conversation = begun(opened())
        computed = []
        for turn in range(4):
            report = self.asked(conversation, turn).report
            computed.append(report.computed_tokens)
            if turn:
                assert report.blended
                assert of_turns(conversation) >= turn * len(QUESTIONS[0].split())
        assert max(computed[1:]) <= computed[0] + 12, "however many turns there are"

    @pytest.mark.parametrize("passages", [0, 2])
    def test_recomputing_everything_answers_as_full_prefill(
        self, opened: Open, passages: int
    ) -> None:
        engine = opened(recompute_ratio=1.0)
        conversation = begun(engine)
        for turn in range(4):
            answer = self.asked(conversation, turn, passages=passages)
            assert conversation.last is not None
            prompt = conversation.last.fitted.prepared
            assert answer.token_ids == engine.generate_full(prompt, SAMPLING).token_ids
        assert len(conversation.kv.keys()) >= 4

    def test_a_conversation_without_passages_goes_on_exactly(self, opened: Open) -> None:
        engine = opened(recompute_ratio=0.3)
        conversation = begun(engine)
        for turn in range(4):
            answer = self.asked(conversation, turn, passages=0)
            assert conversation.last is not None
            full = engine.generate_full(conversation.last.fitted.prepared, SAMPLING)
            assert answer.token_ids == full.token_ids
            if turn:
                assert of_turns(conversation) >= turn * 24
                assert answer.report.selector_reason == (
                    "nothing to recompute: the reused KV is exact"
                )
                assert answer.report.computed_tokens <= 2 * len(QUESTIONS[0].split())

    def test_a_turn_whose_text_was_changed_is_reused_around_the_change(self, opened: Open) -> None:
        engine, kv = opened(recompute_ratio=0.0), ConversationKV()
        text, changed = words(80, 901), words(80, 901).split()
        engine.generate(TurnPrompt(kv, f"{text} {QUESTIONS[0]}", QUESTIONS[0]), SAMPLING)
        self.settle(kv)
        changed[40] = "w2" if changed[40] != "w2" else "w3"
        prompt = TurnPrompt(kv, f"{' '.join(changed)} {QUESTIONS[1]}", QUESTIONS[1])
        report = engine.generate(prompt, SAMPLING).report
        # All but the last tokens of the old text, which may be joined with the question.
        assert [chunk.tokens for chunk in report.chunks if chunk.hit] == [40, 39 - EDGE_TOKENS]
        assert len({chunk.chunk_id for chunk in report.chunks}) == 1
        assert report.computed_tokens == 1 + EDGE_TOKENS + 24

    def test_turns_are_reused_after_the_oldest_were_dropped(self, opened: Open) -> None:
        room = 3 * (2 * 60 + 24 + 2 + 16) + 40
        conversation = begun(opened(), prompt_tokens=room)
        for turn in range(8):
            report = self.asked(conversation, turn).report
            assert report.prompt_tokens <= room
        assert 1 <= len(conversation.turns) < 8
        earlier = len(conversation.turns) - 1
        assert of_turns(conversation) >= earlier * (24 + 12)
        assert report.computed_tokens <= 24 + 30 + 16

    def test_turns_are_reused_in_another_order(self, opened: Open) -> None:
        conversation = begun(opened())
        for turn in range(4):
            self.asked(conversation, turn)
        usual = self.asked(conversation, 4).report
        conversation.turns = tuple(conversation.turns[index] for index in (3, 0, 2, 1))
        changed = self.asked(conversation, 5).report
        assert [turn.question for turn in conversation.turns][:4] == [
            QUESTIONS[index] for index in (3, 0, 2, 1)
        ]
        assert changed.computed_tokens <= usual.computed_tokens + 12
        assert of_turns(conversation) >= 4 * (24 + 12)

    def test_it_is_resumed_by_another_engine_over_the_same_store(self, opened: Open) -> None:
        conversation = begun(opened())
        for turn in range(3):
            self.asked(conversation, turn)
        there = Conversation.from_json(conversation.to_json(), opened(), sampling=SAMPLING)
        assert there.turns == conversation.turns
        resumed, usual = self.asked(there, 3).report, self.asked(conversation, 3).report
        assert of_turns(there) >= 3 * 24
        assert _hits(resumed) == _hits(usual), "which repeats it, so less may be recomputed"
        assert resumed.computed_tokens == usual.computed_tokens

    def test_conversations_with_the_same_text_share_nothing(self, opened: Open) -> None:
        engine = opened(recompute_ratio=1.0)  # so that both get the same answers
        one, other = begun(engine), begun(engine)
        for turn in range(3):
            self.asked(one, turn)
        before = self.kept(engine)
        for turn in range(3):
            report = self.asked(other, turn).report
            if not turn:
                hits = [chunk for chunk in report.chunks if chunk.hit]
                assert len(hits) == 2, "only passages, which are no conversation's"
                assert report.prefix_tokens == 0
        assert one.turns == other.turns
        of_one, of_other = (_names(each) for each in (one, other))
        assert of_one
        assert len(of_one) == len(of_other)
        assert not of_one & of_other
        assert before == of_one
        assert self.kept(engine) == of_one | of_other

    def test_forgetting_evicts_all_of_it(self, opened: Open) -> None:
        engine = opened()
        conversation, other = begun(engine), begun(engine)
        for turn in range(3):
            self.asked(conversation, turn)
        self.asked(other, 0)
        dropped = conversation.forget()
        assert dropped > 0
        assert conversation.turns == ()
        assert self.kept(engine) == _names(other)
        self.asked(conversation, 0)
        assert of_turns(conversation) == 0

    def test_the_oldest_turns_kv_is_evicted_beyond_the_bounds(self, opened: Open) -> None:
        engine = opened()
        few = begun(engine, most_turns=2)
        for turn in range(4):
            self.asked(few, turn)
        self.evicted(engine, lambda: self.kept(engine) == _names(few))
        assert few.kv.turns == 2
        small = begun(engine, most_bytes=few.kv.nbytes)
        for turn in range(6):
            self.asked(small, turn)
            assert small.kv.nbytes <= few.kv.nbytes
        assert of_turns(small) >= 24
        assert small.kv.nbytes > few.kv.nbytes / 3
        self.evicted(engine, lambda: self.kept(engine) == _names(few) | _names(small))

    def evicted(self, engine: Any, is_so: Callable[[], bool]) -> None:
        """Wait until what a conversation gives up is evicted."""
        assert is_so()

    def test_its_secret_is_in_no_report(self, opened: Open) -> None:
        conversation = begun(opened())
        self.asked(conversation, 0)
        answer = self.asked(conversation, 1)
        secret = conversation.kv.conversation_id
        assert secret not in json.dumps(answer.report.to_dict())
        assert secret not in repr(conversation.last)
        assert secret not in repr(conversation)


def _hits(report: BlendReport) -> list[tuple[int, int]]:
    """Return (start, tokens) of what a prompt reused."""
    return [(chunk.start, chunk.tokens) for chunk in report.chunks if chunk.hit]


def _names(conversation: Conversation) -> set[tuple[str, str]]:
    """Return (chunk id, context id) of all that a conversation has stored."""
    return {(key.chunk_id, key.context_id) for key in conversation.kv.keys()}  # noqa: SIM118
