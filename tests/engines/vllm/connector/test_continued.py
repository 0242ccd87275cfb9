"""What is remembered of blended prompts, so that longer ones go on in their blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cacheblend_rag import BlendConfig
from cacheblend_rag.engines.vllm.connector.continued import Continued, Stretch
from cacheblend_rag.engines.vllm.connector.found_chunk import FoundChunk
from cacheblend_rag.engines.vllm.connector.token_file import Name
from cacheblend_rag.engines.vllm.protocol.job import SentChunk, SentLeadIn

SIZE = 4
CONFIG = BlendConfig()
LEAD_IN = SentLeadIn("none", "", 0)


class Asked:
    """A request as vLLM has it: a hash for each complete block, of all tokens up to its end."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.prompt_token_ids = list(tokens)
        ends = range(SIZE, len(tokens) + 1, SIZE)
        self.block_hashes = [bytes(tokens[:end]) for end in ends]


def chunk(start: int, name: str = "a", generation: int = 1, absent: int = 0) -> FoundChunk:
    sent = SentChunk(start, start + 6, before=tuple(range(1000, 1000 + absent)), lead_in=LEAD_IN)
    return FoundChunk(sent, Name("n", name, "", LEAD_IN), generation)


def alone(first: FoundChunk, *_: FoundChunk, mark: str) -> Stretch:
    return Stretch(first.sent.start, mark)


def test_a_longer_prompt_goes_on_where_the_same_chunks_stand() -> None:
    continued = Continued(SIZE)

    def held(tokens: int, *found: FoundChunk, mark: str = "") -> int:
        asked: Any = Asked(range(tokens))
        return continued.stretches(asked, found, CONFIG, alone(*found, mark=mark))[1]

    assert held(14, chunk(5), mark="first") == 0
    assert held(20, chunk(5, generation=2)) == 0, "it was stored anew"
    assert held(20, chunk(5, "b")) == 0
    assert held(20, chunk(5, absent=1)) == 0
    assert held(30, chunk(5), chunk(20, "b"), mark="second") == 1
    assert held(40, chunk(5), chunk(20, "b")) == 2


def test_tokens_that_a_prompt_lacks_are_not_remembered() -> None:
    """Of a part of a long chunk, the tokens beside it would take much more than all the rest."""

    def remembered(absent: int) -> int:
        continued = Continued(SIZE)
        asked: Any = Asked(range(14))
        found = chunk(5, absent=absent)
        continued.stretches(asked, [found], CONFIG, alone(found, mark="mark"))
        return len(repr(continued._earlier))

    assert remembered(100_000) < remembered(0) + 100


def test_a_repeat_holds_what_the_earlier_prompt_had() -> None:
    continued, first, second = Continued(SIZE), chunk(5), chunk(20, "b")
    asked: Any = Asked(range(14))
    longer: Any = Asked(range(30))
    continued.stretches(asked, [first], CONFIG, alone(first, mark="first"))
    own = alone(first, mark="second")
    both = (Stretch(5, "first"), Stretch(20, "second"))
    for _ in range(2):
        assert continued.stretches(longer, [first, second], CONFIG, own) == (both, 1)


def test_who_continues_a_prompt_that_began_anew_gets_its_own_marks() -> None:
    continued, first, second = Continued(SIZE), chunk(5), chunk(20, "b")
    asked: Any = Asked(range(14))
    longer: Any = Asked(range(31))
    longest: Any = Asked(range(44))
    continued.stretches(asked, [first], CONFIG, alone(first, mark="first"))
    own = alone(first, mark="second")
    stretches, _ = continued.stretches(longer, [first, second], CONFIG, own)
    continued.begins_anew(longer, (Stretch(5, "another"),), Stretch(5, "wrong"))
    continued.begins_anew(longer, stretches, own)
    told = continued.stretches(longest, [first, second], CONFIG, alone(first, mark="third"))
    assert told == ((own,), 2)
    told = continued.stretches(asked, [first], CONFIG, alone(first, mark="first"))
    assert told == ((Stretch(5, "first"),), 0)
