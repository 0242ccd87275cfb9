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
from cacheblend_rag.engines.prepare import PreparedPrompt
from cacheblend_rag.engines.vllm.protocol.job import SentSegment
from cacheblend_rag.engines.vllm.protocol.result import ConnectorStatus, Failed, KeepResult
from cacheblend_rag.engines.vllm.turn_keeper import TurnKeeper
from cacheblend_rag.errors import EngineUnavailableError
from cacheblend_rag.kv.chunk_kv import KVKey, fingerprint
from cacheblend_rag.prefill.lead_in import PlacedChunk
from cacheblend_rag.reason import Reason, ReasonCode
from cacheblend_rag.report import ChunkReport, PrefillReport
from tests.kv.samples import until

OF_CHUNKS = fingerprint({"model": "m"}, "default")
CHUNK = PlacedChunk(KVKey("c" * 32, OF_CHUNKS), 20, 50)
PROMPT, ANSWER = tuple(range(100, 170)), (1, 2, 3, 4)
STATUS = ConnectorStatus(True, token_bytes=10, keeps_exact=True)
FAILED = Failed(Reason(ReasonCode.FAILED, "blending failed"))


class Jobs:
    """A JobClient whose answers are given; ``go_on`` lets them come."""

    def __init__(self) -> None:
        self.kept: list[tuple[Sequence[int], Sequence[PlacedChunk], Sequence[SentSegment]]] = []
        self.evicted: list[KVKey] = []
        self.configs: list[BlendConfig] = []
        self.answer: Callable[[Sequence[SentSegment]], Any] = lambda kept: KeepResult(
            tuple(one.start for one in kept)
        )
        self.is_held = False

    async def keep(self, tokens: Any, parts: Any, kept: Any, config: BlendConfig) -> Any:
        self.kept.append((tokens, parts, kept))
        self.configs.append(config)
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

    def answered(
        self, *parts: PlacedChunk, hits: Sequence[PlacedChunk] = (), **options: Any
    ) -> None:
        """Keep the turn of a prompt with these parts."""
        placed = tuple(part for part in parts if not part.is_turn)
        prompt = cast(
            "PreparedPrompt",
            SimpleNamespace(
                token_ids=PROMPT,
                conversation=options.pop("conversation", self.kv),
                stored_parts=parts,
                placed=placed,
                shared_tokens=0,
                prepared_for=SimpleNamespace(fingerprint=OF_CHUNKS),
            ),
        )
        config = BlendConfig(trace=True, min_tokens=64, reuse_prefix=options.pop("reuse", True))
        request = SimpleNamespace(prepared=prompt, config=config, full=options.pop("full", False))
        chunks = [
            part.report(None, "host") if part in hits else part.report("not stored")
            for part in parts
        ]
        report = PrefillReport(None, ratio=0.3, chunks=options.pop("chunks", chunks))
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


def test_only_what_was_reused_is_reused_and_only_behind_it_nothing_is_exact(
    client: Client,
) -> None:
    client.answered(CHUNK)
    assert client.settled()
    assert client.jobs.kept[0][1] == ()
    assert [one.is_exact for turn in client.kv._turns for one in turn.segments] == [True, True]
    client.answered(CHUNK, hits=[CHUNK])
    assert client.settled()
    assert [one.is_exact for one in client.kv._turns[-1].segments] == [True, False]


@pytest.mark.parametrize("reason", ["slow", "not stored"])
def test_parts_of_turns_that_are_gone_are_kept_again_those_that_are_stored_are_not(
    client: Client, reason: Any
) -> None:
    part = PlacedChunk(KVKey("d" * 32, OF_CHUNKS, "e" * 32), 10, 60, is_turn=True, is_exact=True)
    missed = ChunkReport("d" * 32, 10, 50, False, reason)
    client.answered(part, chunks=[missed])
    assert client.settled()
    spans = [(one.start, one.end) for one in client.jobs.kept[0][2]]
    assert spans == ([(0, 10), (60, 74)] if reason == "slow" else [(0, 74)])


@pytest.mark.parametrize("options", [{"full": True}, {"reuse": False}, {"conversation": None}])
def test_other_requests_keep_nothing(client: Client, options: dict[str, Any]) -> None:
    client.answered(CHUNK, **options)
    assert client.kv._turns == []
    assert client.jobs.kept == []


@pytest.mark.parametrize("is_raised", [True, False])
def test_after_a_failure_nothing_is_kept_and_for_a_while_nothing_is_asked(
    client: Client, caplog: pytest.LogCaptureFixture, is_raised: bool
) -> None:
    def fail(kept: object) -> Failed:
        if is_raised:
            raise EngineUnavailableError("no server answers there")
        return FAILED

    client.jobs.answer = fail
    client.answered(CHUNK)
    assert client.settled()
    assert client.kv.turns == 0
    assert until(lambda: len(client.jobs.evicted) == 2), "part of it may have been stored"
    assert caplog.text.count("turns of conversations are not kept") == 1
    client.answered(CHUNK)
    assert client.settled()
    assert len(client.jobs.kept) == 1


def test_of_turns_that_wait_only_the_newest_is_kept(client: Client) -> None:
    client.jobs.is_held = True
    for _ in range(4):
        client.answered(CHUNK)
        assert until(lambda: bool(client.jobs.kept))
    client.jobs.is_held = False
    assert client.settled()
    assert len(client.jobs.kept) == 2


def test_a_turn_that_closing_ends_may_be_stored_so_it_is_not_lost(client: Client) -> None:
    client.jobs.is_held = True
    client.answered(CHUNK)
    assert until(lambda: bool(client.jobs.kept))
    client.lifetime.end()
    client.engine.is_open = False
    client.idle.close()
    assert client.settled()
    assert len(client.kv.keys()) == 2
