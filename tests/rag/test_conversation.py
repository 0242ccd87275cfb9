"""A conversation keeps the KV of its turns, and reuses it in later ones."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheblend_rag import (
    BlendConfig,
    Chunk,
    ConfigError,
    Conversation,
    ConversationKV,
    PromptError,
    SamplingParams,
    TieredKVStore,
    TransformersEngine,
    TurnPrompt,
)
from cacheblend_rag.engines.answer import Generation
from cacheblend_rag.text.encoder import EDGE_TOKENS
from tests.engines.toy_engine import ToyEngine
from tests.models import make_model, make_tokenizer, words

INSTRUCTION = words(30, 900)
PASSAGES = [Chunk(words(60, seed), f"d{seed}") for seed in range(20)]
QUESTIONS = [words(24, 100 + seed) for seed in range(20)]
SAMPLING = SamplingParams.greedy(max_tokens=16)

Open = Callable[..., TransformersEngine]


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model("llama")


@pytest.fixture
def opened(model: Any) -> Iterator[Open]:
    """Open engines around one model, which know the passages."""
    engines: list[TransformersEngine] = []

    def open_one(
        store: TieredKVStore | None = None, *, namespace: str = "default", **config: Any
    ) -> TransformersEngine:
        settings = {"min_tokens": 0, "cost_model": False, **config}
        engine = TransformersEngine(
            model,
            tokenizer=make_tokenizer(),
            config=BlendConfig(**settings),
            store=store,
            instruction=f"{INSTRUCTION}\n\n",
            namespace=namespace,
        )
        engine.register(PASSAGES)
        if not engine.read_only:
            engine.precompute(PASSAGES, progress=False)
        engines.append(engine)
        return engine

    yield open_one
    for engine in engines:
        engine.close()


def begun(engine: TransformersEngine, **options: Any) -> Conversation:
    return Conversation(engine, sampling=SAMPLING, **options)


def asked(conversation: Conversation, turn: int, *, passages: int = 2) -> Generation:
    first = passages * turn
    return conversation.ask(QUESTIONS[turn], PASSAGES[first : first + passages])


def kept(engine: TransformersEngine) -> set[Any]:
    """Return the keys of the store that are neither passages' nor prefix blocks'."""
    engine.prefixes.drain()
    known = {engine.key(chunk) for chunk in PASSAGES}
    return {key for key in engine.store.keys() if key not in known and key.context_id}  # noqa: SIM118


def of_turns(conversation: Conversation) -> int:
    assert conversation.last is not None
    return conversation.last.turn_tokens


def test_questions_and_answers_of_earlier_turns_are_reused(opened: Open) -> None:
    conversation = begun(opened())
    computed = []
    for turn in range(4):
        report = asked(conversation, turn).report
        computed.append(report.computed_tokens)
        if turn:
            assert report.blended
            assert of_turns(conversation) >= turn * len(QUESTIONS[0].split())
    assert max(computed[1:]) <= computed[0] + 12, "however many turns there are"


def test_without_keeping_them_they_are_computed_in_every_turn(opened: Open) -> None:
    engine = opened()
    here, there = (
        begun(engine),
        begun(engine, config=engine.config.with_changes(reuse_prefix=False)),
    )
    for turn in range(3):
        one, other = asked(here, turn).report, asked(there, turn).report
    assert of_turns(there) == 0
    assert other.computed_tokens > one.computed_tokens + 2 * len(QUESTIONS[0].split())
    assert one.prompt_tokens == other.prompt_tokens


@pytest.mark.parametrize("passages", [0, 2])
def test_recomputing_everything_is_ordinary_prefill(opened: Open, passages: int) -> None:
    engine = opened(recompute_ratio=1.0)
    conversation = begun(engine)
    for turn in range(4):
        answer = asked(conversation, turn, passages=passages)
        assert conversation.last is not None
        prompt = conversation.last.fitted.prepared
        assert answer.token_ids == engine.generate_full(prompt, SAMPLING).token_ids
        torch.testing.assert_close(
            engine.score(prompt, answer.token_ids).log_probs,
            engine.score(prompt, answer.token_ids, full=True).log_probs,
            rtol=0,
            atol=2e-4,
        )
    assert of_turns(conversation) > 0 or passages


def test_a_conversation_without_passages_goes_on_exactly(opened: Open) -> None:
    engine = opened(recompute_ratio=0.3)
    conversation = begun(engine)
    for turn in range(4):
        answer = asked(conversation, turn, passages=0)
        assert conversation.last is not None
        prompt = conversation.last.fitted.prepared
        full = engine.generate_full(prompt, SAMPLING)
        assert answer.token_ids == full.token_ids
        assert answer.report.recomputed_tokens == 0
        if turn:
            assert answer.report.selector_reason == "nothing to recompute: the reused KV is exact"
            assert answer.report.computed_tokens <= len(QUESTIONS[0].split()) + 16
            torch.testing.assert_close(
                engine.score(prompt, full.token_ids).log_probs,
                engine.score(prompt, full.token_ids, full=True).log_probs,
                rtol=0,
                atol=2e-4,
            )


def test_exact_turns_are_reused_however_few_tokens_they_have(opened: Open) -> None:
    conversation = begun(opened(min_tokens=256))
    for turn in range(3):
        assert asked(conversation, turn, passages=0).report.prompt_tokens < 256
    assert of_turns(conversation) >= 2 * (24 + 12)


def test_a_turn_whose_text_was_changed_is_reused_around_the_change(opened: Open) -> None:
    engine, kv = opened(recompute_ratio=0.0), ConversationKV()
    text, changed = words(80, 901), words(80, 901).split()
    engine.generate(TurnPrompt(kv, f"{text} {QUESTIONS[0]}", QUESTIONS[0]), SAMPLING)
    changed[40] = "w2" if changed[40] != "w2" else "w3"
    prompt = TurnPrompt(kv, f"{' '.join(changed)} {QUESTIONS[1]}", QUESTIONS[1])
    report = engine.generate(prompt, SAMPLING).report
    # All but the last tokens of the old text, which may be joined with the question.
    assert [chunk.tokens for chunk in report.chunks if chunk.hit] == [40, 39 - EDGE_TOKENS]
    assert len({chunk.chunk_id for chunk in report.chunks}) == 1
    assert report.computed_tokens == 1 + EDGE_TOKENS + 24


@pytest.mark.parametrize("passages", [0, 2])
def test_turns_are_reused_after_the_oldest_were_dropped(opened: Open, passages: int) -> None:
    room = 3 * (passages * 60 + 24 + 2 + 16) + 40
    conversation = begun(opened(), prompt_tokens=room)
    for turn in range(8):
        report = asked(conversation, turn, passages=passages).report
        assert report.prompt_tokens <= room
    assert 1 <= len(conversation.turns) < 8
    earlier = len(conversation.turns) - 1
    assert of_turns(conversation) >= earlier * (24 + 12)
    assert report.computed_tokens <= 24 + 30 + 16


def test_turns_are_reused_in_another_order(opened: Open) -> None:
    engine = opened()
    conversation = begun(engine)
    for turn in range(4):
        asked(conversation, turn)
    usual = asked(conversation, 4).report
    conversation.reorder([3, 0, 2, 1])
    changed = asked(conversation, 5).report
    assert [turn.question for turn in conversation.turns][:4] == [
        QUESTIONS[index] for index in (3, 0, 2, 1)
    ]
    assert changed.computed_tokens <= usual.computed_tokens + 12
    assert of_turns(conversation) >= 4 * (24 + 12)


def test_texts_that_are_no_chunks_are_kept_with_their_turn(opened: Open) -> None:
    conversation = begun(opened())
    conversation.ask(QUESTIONS[0], [words(100, 77)])
    report = asked(conversation, 1).report
    assert of_turns(conversation) >= 100 + 24
    assert report.computed_tokens < 100


def test_a_question_that_is_asked_again_is_computed_again(opened: Open) -> None:
    engine = opened()
    conversation = begun(engine)
    conversation.ask(QUESTIONS[0])
    report = conversation.ask(QUESTIONS[0]).report
    start = report.prompt_tokens - len(QUESTIONS[0].split()) - 1
    assert all(chunk.start + chunk.tokens <= start for chunk in report.chunks)


def test_it_goes_on_after_a_restart_and_on_another_replica(opened: Open, tmp_path: Path) -> None:
    engine = opened(TieredKVStore.open(kv_path=tmp_path / "kv"))
    conversation = begun(engine)
    for turn in range(3):
        asked(conversation, turn)
    conversation.save(tmp_path / "talk.json")
    assert stat.S_IMODE((tmp_path / "talk.json").stat().st_mode) == 0o600
    replica = opened(TieredKVStore.open(kv_path=tmp_path / "kv", host_bytes=0))
    there = Conversation.load(tmp_path / "talk.json", replica, sampling=SAMPLING)
    assert there.turns == conversation.turns
    resumed, usual = asked(there, 3).report, asked(conversation, 3).report
    assert of_turns(there) == of_turns(conversation) > 0
    assert resumed.computed_tokens == usual.computed_tokens
    assert {chunk.tier for chunk in resumed.chunks if chunk.hit} == {"disk"}


@pytest.mark.parametrize("passages", [0, 2])
def test_conversations_with_the_same_text_share_nothing(opened: Open, passages: int) -> None:
    engine = opened()
    one, other = begun(engine), begun(engine)
    for turn in range(3):
        asked(one, turn, passages=passages)
    before = kept(engine)
    for turn in range(3):
        report = asked(other, turn, passages=passages).report
        if not turn:
            hits = [chunk for chunk in report.chunks if chunk.hit]
            assert len(hits) == passages, "only passages, which are no conversation's"
            assert report.prefix_tokens == 0
    assert one.turns == other.turns
    after = kept(engine)
    of_one, of_other = (set(each.kv.keys()) for each in (one, other))
    assert of_one
    assert len(of_one) == len(of_other)
    assert not of_one & of_other
    assert before == of_one
    assert after == of_one | of_other


def test_a_saved_conversation_is_of_no_use_to_another_tenant(opened: Open) -> None:
    store = TieredKVStore.open()
    conversation = begun(opened(store, namespace="one"))
    asked(conversation, 0)
    stolen = Conversation.from_json(
        conversation.to_json(), opened(store, namespace="two"), sampling=SAMPLING
    )
    asked(stolen, 1)
    assert of_turns(stolen) == 0


def test_forgetting_evicts_all_of_it(opened: Open) -> None:
    engine = opened()
    conversation, other = begun(engine), begun(engine)
    for turn in range(3):
        asked(conversation, turn)
    asked(other, 0)
    dropped = conversation.forget()
    assert dropped > 0
    assert conversation.turns == ()
    assert kept(engine) == set(other.kv.keys())
    asked(conversation, 0)
    assert of_turns(conversation) == 0


def test_the_oldest_turns_kv_is_evicted_beyond_the_bounds(opened: Open) -> None:
    engine = opened()
    few = begun(engine, most_turns=2)
    for turn in range(4):
        asked(few, turn)
    engine.prefixes.drain()
    assert few.kv.turns == 2
    assert kept(engine) == set(few.kv.keys())
    small = begun(engine, most_bytes=few.kv.nbytes)
    for turn in range(6):
        asked(small, turn)
        engine.prefixes.drain()
        assert small.kv.nbytes <= few.kv.nbytes
    assert of_turns(small) >= 24
    assert small.kv.nbytes > few.kv.nbytes / 2
    none = begun(engine, most_turns=0)
    asked(none, 0)
    asked(none, 1)
    assert of_turns(none) == 0
    assert kept(engine) == {*few.kv.keys(), *small.kv.keys()}


def test_evicted_kv_is_computed_and_kept_again(opened: Open) -> None:
    engine = opened()
    conversation = begun(engine)
    for turn in range(2):
        asked(conversation, turn)
    engine.prefixes.drain()
    for key in conversation.kv.keys():  # noqa: SIM118
        engine.store.evict(key)
    asked(conversation, 2)
    assert of_turns(conversation) == 0
    asked(conversation, 3)
    assert of_turns(conversation) >= 3 * 24


def test_documents_are_evicted_though_turns_hold_them(opened: Open) -> None:
    engine = opened()
    conversation = begun(engine)
    asked(conversation, 0)
    engine.prefixes.drain()
    assert engine.evict_document("d0") == 1
    assert engine.evict_unregistered() == 0, "turns are no chunks"
    report = asked(conversation, 1).report
    assert of_turns(conversation) > 0
    assert all(chunk.document_id != "d0" for chunk in report.chunks if chunk.hit)


def test_a_read_only_store_is_not_written_to(opened: Open, tmp_path: Path) -> None:
    opened(TieredKVStore.open(kv_path=tmp_path, host_bytes=0)).close()
    engine = opened(TieredKVStore.open(kv_path=tmp_path, host_bytes=0, read_only=True))
    conversation = begun(engine)
    for turn in range(2):
        asked(conversation, turn)
    assert of_turns(conversation) == 0
    assert conversation.kv.turns == 0


def test_an_engine_that_keeps_no_turns_reads_them_again() -> None:
    engine = ToyEngine(make_tokenizer())
    engine.precompute(PASSAGES, progress=False)
    conversation = Conversation(engine, sampling=SAMPLING)
    for turn in range(3):
        answer = asked(conversation, turn)
    assert answer.report.blended
    assert len(conversation.turns) == 3
    assert of_turns(conversation) == 0
    assert conversation.forget() == 0


@pytest.mark.parametrize(
    "broken",
    [
        {"format": 2},
        {"kv": None},
        {"kv": {}},
        {"turns": [{"question": 1, "answer": "", "passages": []}]},
        {"turns": [{"question": "q"}]},
    ],
)
def test_a_malformed_file_is_refused(opened: Open, tmp_path: Path, broken: dict[str, Any]) -> None:
    engine = opened()
    plain = json.loads(begun(engine).to_json())
    path = tmp_path / "talk.json"
    path.write_text(json.dumps({**plain, **broken}))
    with pytest.raises(ConfigError, match="not a saved conversation"):
        Conversation.load(path, engine)
    with pytest.raises(ConfigError, match="cannot be read"):
        Conversation.load(tmp_path / "none.json", engine)


def test_its_secret_is_in_no_report(opened: Open) -> None:
    conversation = begun(opened())
    asked(conversation, 0)
    answer = asked(conversation, 1)
    secret = conversation.kv.conversation_id
    assert secret not in json.dumps(answer.report.to_dict())
    assert secret not in repr(conversation.last)
    assert secret not in repr(conversation)


def test_an_empty_question_is_refused(opened: Open) -> None:
    with pytest.raises(PromptError, match="empty"):
        begun(opened()).ask("  ")
