"""A conversation keeps the KV of its turns, and reuses it in later ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag import (
    BlendConfig,
    ConfigError,
    Conversation,
    TieredKVStore,
    TransformersEngine,
)
from cacheblend_rag.engines.answer import Generation
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
from tests.models import make_model, make_tokenizer


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model("llama")


@pytest.fixture
def opened(model: Any) -> Iterator[Open]:
    """Open engines around one model, which know the passages."""
    engines: list[TransformersEngine] = []
    shared = TieredKVStore.open()

    def open_one(
        store: TieredKVStore | None = None, *, namespace: str = "default", **config: Any
    ) -> TransformersEngine:
        settings = {**CONFIG, **config}
        engine = TransformersEngine(
            model,
            tokenizer=make_tokenizer(),
            config=BlendConfig(**settings),
            store=shared if store is None else store,
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


def asked(conversation: Conversation, turn: int, *, passages: int = 2) -> Generation:
    first = passages * turn
    return conversation.ask(QUESTIONS[turn], PASSAGES[first : first + passages])


def kept(engine: TransformersEngine) -> set[Any]:
    """Return the keys of the store that are neither passages' nor prefix blocks'."""
    engine.prefixes.drain()
    known = {engine.key(chunk) for chunk in PASSAGES}
    return {key for key in engine.store.keys() if key not in known and key.context_id}  # noqa: SIM118


class TestTransformersConversations(ConversationContract):
    def kept(self, engine: TransformersEngine) -> set[tuple[str, str]]:
        return {(key.chunk_id, key.context_id) for key in kept(engine)}


# Beyond the contract


def test_a_question_that_is_asked_again_is_computed_again(opened: Open) -> None:
    engine = opened()
    conversation = begun(engine)
    conversation.ask(QUESTIONS[0])
    report = conversation.ask(QUESTIONS[0]).report
    start = report.prompt_tokens - len(QUESTIONS[0].split()) - 1
    assert all(chunk.start + chunk.tokens <= start for chunk in report.chunks)


def test_a_saved_conversation_is_of_no_use_to_another_tenant(opened: Open) -> None:
    store = TieredKVStore.open()
    conversation = begun(opened(store, namespace="one"))
    asked(conversation, 0)
    stolen = Conversation.from_json(
        conversation.to_json(), opened(store, namespace="two"), sampling=SAMPLING
    )
    asked(stolen, 1)
    assert of_turns(stolen) == 0


def test_turns_are_no_chunks_that_nobody_registered(opened: Open) -> None:
    engine = opened()
    conversation = begun(engine)
    asked(conversation, 0)
    conversation.to_json()  # which waits until the turn is stored
    assert engine.evict_unregistered() == 0
    asked(conversation, 1)
    assert of_turns(conversation) > 0


def test_a_read_only_store_is_not_written_to(opened: Open, tmp_path: Path) -> None:
    opened(TieredKVStore.open(kv_path=tmp_path, host_bytes=0)).close()
    engine = opened(TieredKVStore.open(kv_path=tmp_path, host_bytes=0, read_only=True))
    conversation = begun(engine)
    for turn in range(2):
        asked(conversation, turn)
    assert of_turns(conversation) == 0
    assert conversation.kv.turns == 0


@pytest.mark.parametrize(
    "broken",
    [
        {"kv": None},
        {"kv": {}},
        {"turns": [{"question": 1, "answer": "", "sources": []}]},
        {"turns": [{"question": "q", "sources": [{"chunk": "q"}]}]},
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
