"""What is remembered of blended prompts, so that longer ones go on in their blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cacheblend_rag import BlendConfig
from cacheblend_rag.engines.vllm.connector.continued import Continued
from cacheblend_rag.engines.vllm.connector.found_chunk import FoundChunk
from cacheblend_rag.engines.vllm.connector.token_file import Name
from cacheblend_rag.engines.vllm.protocol import SentChunk, SentLeadIn

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
    return FoundChunk(sent, Name("n", name, "", LEAD_IN), generation, is_known=True)


def test_a_longer_prompt_goes_on_where_the_same_chunks_stand() -> None:
    continued = Continued(SIZE)

    def held(tokens: int, *found: FoundChunk, mark: str = "") -> int:
        asked: Any = Asked(range(tokens))
        return continued.stretches(asked, found, CONFIG, mark)[1]

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
        continued.stretches(asked, [chunk(5, absent=absent)], CONFIG, "mark")
        return len(repr(continued._earlier))

    assert remembered(100_000) < remembered(0) + 100
