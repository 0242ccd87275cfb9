"""Streams that break off and are continued by another server: every text and token once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from cacheblend_rag.engines.sampling import ResolvedSampling
from cacheblend_rag.engines.structured import StructuredOutputs
from cacheblend_rag.engines.vllm.resuming import resumed_stream
from cacheblend_rag.engines.vllm.transport import (
    Piece,
    StreamBrokenError,
    Transport,
    VLLMRequest,
)
from cacheblend_rag.errors import EngineUnavailableError

ANSWER = "Größe 漢字 🙂, naïve. One two three four five six seven."
PROMPT = tuple(b"P: ")
GREEDY = ResolvedSampling(max_tokens=200)


def decode(ids: Sequence[int]) -> str:
    """One token is one byte; characters may be cut."""
    return bytes(ids).decode(errors="replace")


class Dying(Transport):
    """Servers that write ANSWER, a byte a token, as vLLM does, and die after so many tokens each.

    cuts: tokens after which each dies; the last server does not. merged: tokens in a piece. hold:
    characters that are held back, as for stop strings. other: what the servers after the first
    write instead.
    """

    name, model_name, context_window = "dying", "m", 1000

    def __init__(
        self, *cuts: int, merged: int = 1, hold: int = 0, other: str = ANSWER, resumes: int = 9
    ) -> None:
        super().__init__()
        self.cuts, self.merged, self.hold, self.other = list(cuts), merged, hold, other
        self.max_resumes = resumes
        self.asked: list[VLLMRequest] = []

    async def send(self, request: VLLMRequest, *, stream: bool) -> AsyncIterator[Piece]:
        assert stream
        written = (ANSWER if not self.asked else self.other).encode()
        self.asked.append(request)
        cut = self.cuts.pop(0) if self.cuts else None
        so_far = request.token_ids[len(PROMPT) :]
        assert request.token_ids[: len(PROMPT)] == PROMPT
        ids = written[len(so_far) :][: request.sampling.max_tokens]
        said = ""
        for end in range(self.merged, len(ids) + self.merged, self.merged):
            if cut is not None and end > cut:
                raise StreamBrokenError("engine='http://here': the server's answer broke off")
            done = end >= len(ids)
            whole = ids[:end].decode(errors="ignore")
            text = whole if done else whole[: max(len(whole) - self.hold, 0)]
            yield Piece(
                text[len(said) :], tuple(ids[end - self.merged : end]), "stop" if done else None
            )
            said = max(said, text, key=len)

    def load_tokenizer(self) -> Any:
        raise NotImplementedError

    def generation_values(self) -> Any:
        raise NotImplementedError

    async def _stop(self) -> None:
        return


def read(servers: Dying, sampling: ResolvedSampling = GREEDY) -> tuple[str, bytes, list[Piece]]:
    async def main() -> list[Piece]:
        request = VLLMRequest(PROMPT, sampling, affinity="a")
        return [piece async for piece in resumed_stream(servers, request, decode)]

    pieces = asyncio.run(main())
    ids = bytes(token for piece in pieces for token in piece.token_ids)
    return "".join(piece.text for piece in pieces), ids, pieces


@pytest.mark.parametrize("merged", [1, 3])
@pytest.mark.parametrize("hold", [0, 4])
def test_a_greedy_answer_is_whole_wherever_it_broke_off(merged: int, hold: int) -> None:
    for cut in range(len(ANSWER.encode())):
        servers = Dying(cut, merged=merged, hold=hold)
        text, ids, pieces = read(servers)
        assert (text, ids) == (ANSWER, ANSWER.encode())
        assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["stop"]
        first, second = servers.asked
        assert second == replace(first, token_ids=second.token_ids, sampling=second.sampling), (
            "job, salt, id and affinity are the same"
        )
        assert second.sampling.max_tokens + len(second.token_ids) == 200 + len(PROMPT)
        began = cut >= merged
        assert (servers.counts.resumed, servers.counts.retried) == (began, not began)
        # What is generated again is at most what was held back, a character and a piece.
        assert len(second.token_ids) - len(PROMPT) >= cut - 4 * hold - 3 - merged


def test_it_may_break_off_again_and_again_but_not_for_ever() -> None:
    servers = Dying(5, 9, 0, 3, resumes=4)
    assert read(servers)[0] == ANSWER
    assert servers.counts.resumed == 4
    with pytest.raises(StreamBrokenError):
        read(broken := Dying(5, 9, 0, 3, resumes=3))
    assert (broken.counts.resumed, broken.counts.broken) == (3, 1)


def test_the_last_token_is_left_to_be_generated() -> None:
    """A server that dies between an answer's last token and its end."""
    short = replace(GREEDY, max_tokens=6)

    class Endless(Dying):
        async def send(self, request: VLLMRequest, *, stream: bool) -> AsyncIterator[Piece]:
            async for piece in super().send(request, stream=stream):
                first = len(self.asked) == 1
                yield replace(piece, finish_reason=None) if first else piece
            if len(self.asked) == 1:
                raise StreamBrokenError("engine='http://here': the server's answer broke off")

    servers = Endless()
    text, ids, _ = read(servers, short)
    assert (text, ids) == (ANSWER.encode()[:6].decode(errors="ignore"), ANSWER.encode()[:6])
    assert servers.asked[1].sampling.max_tokens >= 1


@pytest.mark.parametrize("seed", [None, 7])
def test_a_sampled_answer_ends_with_what_to_do(seed: int | None) -> None:
    sampled = replace(GREEDY, temperature=0.7, seed=seed)
    servers = Dying(5)
    with pytest.raises(EngineUnavailableError, match="ask again, or with temperature=0") as caught:
        read(servers, sampled)
    assert "after token 5" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert (servers.counts.resumed, servers.counts.broken) == (0, 1)
    assert read(unbegun := Dying(0), sampled)[0] == ANSWER
    assert (unbegun.counts.retried, unbegun.counts.resumed) == (1, 0)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"structured_outputs": StructuredOutputs(regex="a")}, "an answer with structured_outputs"),
        ({"presence_penalty": 0.5}, "an answer with penalties"),
        ({"frequency_penalty": 0.5}, "an answer with penalties"),
    ],
)
def test_an_answer_that_depends_on_its_own_beginning_is_not_resumed(
    asked: dict[str, Any], said: str
) -> None:
    with pytest.raises(EngineUnavailableError, match=f"after token 5 of {said}"):
        read(Dying(5), replace(GREEDY, **asked))


@pytest.mark.parametrize("other", [ANSWER.replace("naïve", "maybe"), ANSWER[:13]])
def test_a_server_that_repeats_another_text_is_not_believed(other: str) -> None:
    with pytest.raises(EngineUnavailableError, match="writes another one: ask again") as caught:
        read(Dying(26, hold=4, other=other))
    assert "\n" not in str(caught.value)
