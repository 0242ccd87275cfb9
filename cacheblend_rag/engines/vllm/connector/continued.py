"""Prompts that go on where a blended one ended: a conversation's next turn, an agent's next step.

Their blocks get the same marks as the earlier prompt's, so that vLLM's prefix cache serves what was
blended and answered; only chunks that are new are blended.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cacheblend_rag.engines.vllm.connector.found_chunk import FoundAt, FoundChunk
from cacheblend_rag.settings import BlendConfig

if TYPE_CHECKING:
    from vllm.v1.request import Request

KEPT = 4096
"""Prompts that are remembered; the oldest are forgotten first."""
KEPT_ALIKE = 8
"""Prompts remembered by the hash of one block: they differ only in the tokens behind it."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Blocks of a prompt from token ``start`` on are set apart by ``mark``."""

    start: int
    mark: str


@dataclass(frozen=True, slots=True)
class _Earlier:
    """A blended prompt. tail: its tokens after the last complete block."""

    tail: tuple[int, ...]
    stretches: tuple[Stretch, ...]
    found: tuple[FoundAt, ...]
    config: BlendConfig

    def begins(self, found: Sequence[FoundChunk]) -> bool:
        """Whether the first chunks of a longer prompt are this one's."""
        return tuple(one.at for one in found[: len(self.found)]) == self.found


class Continued:
    """Remembers blended prompts by vLLM's own hashes of their blocks, as ordinary requests have.

    block_size: tokens a block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._earlier: OrderedDict[bytes, tuple[_Earlier, ...]] = OrderedDict()

    def stretches(
        self, request: Request, found: Sequence[FoundChunk], config: BlendConfig, mark: str
    ) -> tuple[tuple[Stretch, ...], int]:
        """Return how a prompt's blocks are set apart, and how many of its chunks were blended.

        Call it before any block is set apart.

        Args:
            request: vLLM's.
            found: chunks in its prompt.
            config: how they are blended.
            mark: what their KV depends on, if the prompt continues no other.
        """
        own = (Stretch(found[0].sent.start, mark),)
        if config.trace or not config.reuse_prefix:
            return own, 0
        held, stretches = 0, own
        earlier = self._continued(request, found, config)
        if earlier is not None:
            held = len(earlier.found)
            later = found[held:]
            added = (Stretch(later[0].sent.start, mark),) if later else ()
            stretches = (*earlier.stretches, *added)
        self._remember(request, _Earlier((), stretches, tuple(one.at for one in found), config))
        return stretches, held

    def _continued(
        self, request: Request, found: Sequence[FoundChunk], config: BlendConfig
    ) -> _Earlier | None:
        """Return the longest blended prompt that a prompt begins with."""
        hashes, size = request.block_hashes, self._block_size
        tokens = request.prompt_token_ids or []
        for block in range(len(hashes) - 1, found[0].sent.start // size - 1, -1):
            for one in reversed(self._earlier.get(bytes(hashes[block]), ())):
                end = (block + 1) * size
                if tuple(tokens[end : end + len(one.tail)]) != one.tail or one.config != config:
                    continue
                if one.begins(found):
                    return one
        return None

    def _remember(self, request: Request, prompt: _Earlier) -> None:
        hashes, tokens = request.block_hashes, request.prompt_token_ids or []
        if not hashes:
            return
        key, tail = bytes(hashes[-1]), tuple(tokens[len(hashes) * self._block_size :])
        prompt = replace(prompt, tail=tail)
        alike = [one for one in self._earlier.pop(key, ()) if one.tail != tail]
        self._earlier[key] = (*alike[1 - KEPT_ALIKE :], prompt)
        if len(self._earlier) > KEPT:
            self._earlier.popitem(last=False)
