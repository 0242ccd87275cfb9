"""What a conversation's client has vLLM keep, and what it makes of the answers; without a vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cacheblend_rag import BlendConfig, ConversationKV
from cacheblend_rag.engines.background import BackgroundLoop
from cacheblend_rag.engines.idle import IdleQueue
from cacheblend_rag.engines.lifetime import Lifetime
from cacheblend_rag.engines.vllm.protocol.job import SentSegment
from cacheblend_rag.engines.vllm.protocol.result import ConnectorStatus, Failed, KeepResult
from cacheblend_rag.engines.vllm.turn_keeper import TurnKeeper
from cacheblend_rag.errors import EngineUnavailableError
from cacheblend_rag.kv.chunk_kv import KVKey, fingerprint
from cacheblend_rag.prefill.lead_in import PlacedChunk
from cacheblend_rag.reason import Reason, ReasonCode
from cacheblend_rag.report import PrefillReport
from tests.kv.samples import until

OF_CHUNKS = fingerprint({"model": "m"}, "default")
CHUNK = PlacedChunk(KVKey("c" * 32, OF_CHUNKS), 20, 50)
PROMPT, ANSWER = tuple(range(100, 170)), (1, 2, 3, 4)
STATUS = ConnectorStatus(True, token_bytes=10, keeps_exact=True)
FAILED = Failed(Reason(ReasonCode.FAILED, "blending failed"))


class Jobs:
    """A JobClient whose answers are given; ``go_on`` lets them come."""

    def __init__(self) -> None:
        self.kept = list[Sequence[SentSegment]]()
        self.evicted: list[KVKey] = []
        self.answer: Callable[[Sequence[SentSegment]], Any] = lambda kept: KeepResult(
            tuple(one.start for one in kept)
        )
        self.is_held = False

    async def keep(self, tokens: Any, parts: Any, kept: Any, config: BlendConfig) -> Any:
        self.kept.append(kept)
        while self.is_held:
            await asyncio.sleep(0.005)
        return self.answer(kept)

    async def evict(self, keys: Sequence[KVKey], *, turns: bool) -> int:
        self.evicted += keys
        return len(keys)


class Client:
    """A keeper over given jobs, and one conversation."""

    def __init__(self) -> None:
        self.jobs, self.background, self.lifetime = Jobs(), BackgroundLoop("test"), Lifetime()
        self.engine = SimpleNamespace(is_open=True, _is_idle=lambda: False)
        self.idle = IdleQueue(cast("Any", self.engine))
        self.keeper = TurnKeeper(cast("Any", self.jobs), self.background, self.idle, self.lifetime)
        self.kv = ConversationKV()

    def answered(self) -> None:
        """Keep the turn of a prompt with a chunk."""
        prompt = SimpleNamespace(
            token_ids=PROMPT,
            conversation=self.kv,
            stored_parts=(CHUNK,),
            placed=(CHUNK,),
            shared_tokens=0,
            prepared_for=SimpleNamespace(fingerprint=OF_CHUNKS),
        )
        request = SimpleNamespace(prepared=prompt, config=BlendConfig(min_tokens=64), full=False)
        report = PrefillReport(None, ratio=0.3, chunks=[CHUNK.report("not stored")])
        self.keeper.keep(cast("Any", request), ANSWER, report, STATUS)

    def settled(self) -> bool:
        return until(lambda: not any(turn.is_pending for turn in self.kv._turns), 20)


@pytest.fixture
def client() -> Iterator[Client]:
    client = Client()
    yield client
    client.lifetime.end()
    client.engine.is_open = False
    client.idle.close()
    client.background.close()


@pytest.mark.parametrize("is_raised", [True, False])
def test_after_a_failure_nothing_is_kept_and_for_a_while_nothing_is_asked(
    client: Client, caplog: pytest.LogCaptureFixture, is_raised: bool
) -> None:
    def fail(kept: object) -> Failed:
        if is_raised:
            raise EngineUnavailableError("no server answers there")
        return FAILED

    client.jobs.answer = fail
    client.answered()
    assert client.settled()
    assert client.kv.turns == 0
    assert until(lambda: len(client.jobs.evicted) == 2), "part of it may have been stored"
    assert caplog.text.count("turns of conversations are not kept") == 1
    client.answered()
    assert client.settled()
    assert len(client.jobs.kept) == 1


def test_of_turns_that_wait_only_the_newest_is_kept(client: Client) -> None:
    client.jobs.is_held = True
    for _ in range(4):
        client.answered()
        assert until(lambda: bool(client.jobs.kept))
    client.jobs.is_held = False
    assert client.settled()
    assert len(client.jobs.kept) == 2


def test_a_turn_that_closing_ends_may_be_stored_so_it_is_not_lost(client: Client) -> None:
    client.jobs.is_held = True
    client.answered()
    assert until(lambda: bool(client.jobs.kept))
    client.lifetime.end()
    client.engine.is_open = False
    client.idle.close()
    assert client.settled()
    assert len(client.kv.keys()) == 2
