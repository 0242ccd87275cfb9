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
        self, request: Request, found: Sequence[FoundChunk], config: BlendConfig, alone: Stretch
    ) -> tuple[tuple[Stretch, ...], int]:
        """Return how a prompt's blocks are set apart, and how many of its chunks may be held.

        Those were blended in an earlier prompt, whose marks their blocks have. Call it before any
        block is set apart.

        Args:
            request: vLLM's.
            found: chunks in its prompt.
            config: how they are blended.
            alone: how they are set apart if the prompt continues no other.
        """
        if config.trace or not config.reuse_prefix:
            return (alone,), 0
        held = 0
        stretches: tuple[Stretch, ...] = (alone,)
        earlier = self._continued(request, found, config)
        if earlier is not None:
            stretches = earlier.stretches
            if stretches[-1].mark == alone.mark:  # a repeat: what it blended itself is its own
                held = sum(one.sent.start < stretches[-1].start for one in found)
            elif later := found[len(earlier.found) :]:
                held = len(earlier.found)
                stretches = (*stretches, Stretch(later[0].sent.start, alone.mark))
            else:
                held = len(found)
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

    def begins_anew(self, request: Request, stretches: tuple[Stretch, ...], alone: Stretch) -> None:
        """Note that a prompt did not find the blocks that it continues, and makes its own.

        Call it while no block is set apart.

        Args:
            request: vLLM's.
            stretches: how its blocks were set apart until now.
            alone: how they are from now on.
        """
        key, tail = self._end(request)
        alike = self._earlier.get(key, ())
        if alike:
            self._earlier[key] = tuple(
                replace(one, stretches=(alone,))
                if (one.tail, one.stretches) == (tail, stretches)
                else one
                for one in alike
            )

    def _end(self, request: Request) -> tuple[bytes, tuple[int, ...]]:
        """Return the hash of a prompt's last complete block, b"" without one, and its tail."""
        tokens = request.prompt_token_ids or []
        blocks = len(tokens) // self._block_size
        key = bytes(request.block_hashes[blocks - 1]) if blocks else b""
        return key, tuple(tokens[blocks * self._block_size :])

    def _remember(self, request: Request, prompt: _Earlier) -> None:
        key, tail = self._end(request)
        if not key:
            return
        prompt = replace(prompt, tail=tail)
        alike = [one for one in self._earlier.pop(key, ()) if one.tail != tail]
        self._earlier[key] = (*alike[1 - KEPT_ALIKE :], prompt)
        if len(self._earlier) > KEPT:
            self._earlier.popitem(last=False)
