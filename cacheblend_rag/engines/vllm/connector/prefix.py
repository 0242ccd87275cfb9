"""Keeps blended KV apart in vLLM's prefix cache, and shares the blocks before it.

vLLM finds blocks by a hash of their tokens and of the block before. A request's ``cache_salt``
counts in its first block only, and so sets all of its blocks apart. Here a blend's hashes are its
own from the first block on that holds KV of a chunk. The blocks before keep the hashes that any
request with these tokens, and the same salt, has: their KV is that of ordinary prefill.

A mark is the hash of all that blended KV depends on: which stored KV stands where, how it is
blended, and the prompt it is blended for, if its question affects the choice of rows. A prompt that
goes on where an earlier one ended (a conversation's next turn, an agent's next step) has the
earlier one's mark for its chunks, so vLLM's prefix cache serves what was blended and answered, and
a mark of its own for those that are new.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np

from cacheblend_rag.blend.selectors import Question, make_selector
from cacheblend_rag.engines.found_chunk import FoundChunk
from cacheblend_rag.engines.vllm.protocol.job import SALT_PREFIX
from cacheblend_rag.engines.vllm.protocol.result import BlendResult, Result
from cacheblend_rag.prefill.policy import LEAST_SHARE
from cacheblend_rag.reason import Reason
from cacheblend_rag.report import ChunkReport
from cacheblend_rag.settings import BlendConfig

if TYPE_CHECKING:
    from vllm.v1.request import Request

IsCached = Callable[[bytes], bool]


def set_apart(request: Request, start: int, block_size: int, mark: str) -> int:
    """Change the hashes of a request's blocks, from the block of token ``start`` on.

    Call it before vLLM looks the request up. A block that decoding will fill has no hash yet, and
    will depend on the last one that has, which is then changed, too.

    Args:
        request: vLLM's, with the hashes of its prompt's complete blocks.
        start: position of the first token whose KV may not be shared.
        block_size: tokens a block.
        mark: what the KV depends on beside the tokens; requests with the same one share blocks.

    Returns:
        How many tokens stand in blocks before, which are shared with other requests.
    """
    hashes = request.block_hashes
    block = min(start // block_size, len(hashes) - 1)
    if block > 0:
        hashes[block:] = [hashlib.sha256(mark.encode() + hashes[block]).digest()]
    else:
        request.cache_salt = f"{request.cache_salt or ''} {mark}"
        hashes.clear()
    request.update_block_hashes()
    return max(block, 0) * block_size


def undo(request: Request, salt: str | None) -> None:
    """Give a request's blocks the hashes that they had before they were set apart.

    Args:
        request: vLLM's.
        salt: its ``cache_salt`` at that time.
    """
    request.cache_salt = salt
    request.block_hashes.clear()
    request.update_block_hashes()


def held_plainly(request: Request, is_cached: IsCached, block_size: int) -> int:
    """Return how many of a prompt's first tokens vLLM's prefix cache seems to have.

    Call it before the blocks are set apart: then their KV is that of ordinary prefill. vLLM's own
    lookup, which comes later, has the last word, as where a layer has dropped its blocks.

    Args:
        request: vLLM's.
        is_cached: whether the cache has a block of a hash.
        block_size: tokens a block.
    """
    return block_size * sum(1 for _ in takewhile(is_cached, request.block_hashes))


def is_held(chunks: Sequence[FoundChunk], tokens: int, computed: int, block_size: int) -> bool:
    """Whether vLLM's prefix cache has all that a blend would load, but for a part not worth a pass.

    Blocks that end before the first chunk have nothing of it.

    Args:
        chunks: of the prompt, in order.
        tokens: of the whole prompt.
        computed: how many of the first ones vLLM's prefix cache holds.
        block_size: up to so many tokens are in no complete block, which it cannot hold.
    """
    left = chunks[-1].end - computed
    return computed > chunks[0].start and left <= max(block_size, int(LEAST_SHARE * tokens))


def held_result(chunks: Sequence[FoundChunk], computed: int, why: Reason) -> BlendResult:
    """Return the result of a blend that vLLM's prefix cache has made needless.

    Args:
        chunks: of the prompt.
        computed: how many of its first tokens vLLM's prefix cache holds.
        why: nothing more is blended.
    """
    end = chunks[-1].end
    return BlendResult(
        chunks=tuple(held_report(chunk, computed) for chunk in chunks),
        ratio=0.0,
        compute_share=max(0, end - computed) / end,
        selector_reason=why,
        prefix_tokens=min(computed, chunks[0].start),
    )


def held_report(chunk: FoundChunk, computed: int | None = None) -> ChunkReport:
    """Report a chunk as read from the prefix cache, which holds the first ``computed`` tokens."""
    return chunk.placed().report(None).held(chunk.end if computed is None else computed)


KEPT = 4096
"""Places where chunks of blended prompts begin that are remembered; the oldest are forgotten."""
KEPT_ALIKE = 8
"""Prompts that are remembered of one place."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Chunks that were blended for one prompt, and the blocks from their first token on.

    first: index of the first chunk. start: position of its first token. mark: sets the blocks
    apart. is_own: whether the prompt they are blended for is the one that holds the stretch.
    """

    first: int
    start: int
    mark: str
    is_own: bool = True


class Marks:
    """Knows for which prompts chunks were blended lately."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, dict[str, tuple[int, int]]] = OrderedDict()

    def stretches(
        self,
        request_id: str,
        tokens: Sequence[int],
        found: Sequence[FoundChunk],
        config: BlendConfig,
        *,
        anew: bool = False,
    ) -> tuple[Stretch, ...]:
        """Return the stretches of a prompt's chunks, in order; only the last one may be its own.

        Args:
            request_id: nothing is shared with another one if the work is to be traced.
            tokens: the prompt.
            found: its chunks.
            config: how they are blended.
            anew: whether the prompt is to continue no other one.
        """
        raw = np.asarray(tokens, "<u4").tobytes()
        is_alone = config.trace or not config.reuse_prefix
        settings = json.dumps(config.to_dict(), default=list) + (request_id if is_alone else "")
        selector = make_selector(config.selector, config.selector_options)
        until = len(tokens) if isinstance(selector, Question) else found[-1].end

        def mark(first: int, count: int, end: int) -> str:
            """Return the mark of some chunks that are blended for the prompt ``tokens[:end]``."""
            told = [(astuple(one.at[0]), *one.at[1:]) for one in found[first : first + count]]
            digest = hashlib.blake2b(f"{settings}{told}".encode(), digest_size=16)
            digest.update(raw[: 4 * end])
            return SALT_PREFIX + digest.hexdigest()

        def earlier(place: str, first: int) -> tuple[int, int] | None:
            """Return how many chunks were blended together, for the longest prompt's beginning."""
            same = [
                (end, count)
                for known, (end, count) in self._known.get(place, {}).items()
                if end <= until and mark(first, count, end) == known
            ]
            return max(same, default=None)

        stretches: list[Stretch] = []
        first = 0
        while first < len(found):
            place = mark(first, 1, found[first].end)
            longest = None if anew or is_alone else earlier(place, first)
            end, count = longest or (until, len(found) - first)
            own = mark(first, count, end)
            self._remember(place, own, end, count)
            stretches.append(Stretch(first, found[first].start, own, is_own=end == until))
            first += count
        return tuple(stretches)

    def _remember(self, place: str, mark: str, end: int, count: int) -> None:
        alike = self._known.pop(place, {})
        alike.pop(mark, None)
        self._known[place] = {**dict([*alike.items()][1 - KEPT_ALIKE :]), mark: (end, count)}
        if len(self._known) > KEPT:
            self._known.popitem(last=False)


def tell_reused(request: Request, result: Result | None, first: int) -> None:
    """Have vLLM count those tokens as cached that a blend reuses.

    It takes all tokens that a connector provides for cached, those that the blend computes too. As
    vLLM does, only a request's first prefill is counted: what is blended again after a preemption
    stands where the first one had cached tokens already.

    Args:
        request: vLLM's.
        result: of the blend; None before there is one.
        first: tokens that vLLM's own prefix cache had.
    """
    stats = request.prefill_stats
    if stats is None or request.num_preemptions:  # None: the first token was sent
        return
    prompt, local = stats.num_prompt_tokens, stats.num_local_cached_tokens
    reused = reused_after(result, first) if isinstance(result, BlendResult) else 0
    stats.set(prompt, local, min(reused, prompt - local))


def reused_after(result: BlendResult, first: int) -> int:
    """Return how many tokens from ``first`` on kept their stored KV.

    Which tokens of a chunk were recomputed is not known: of a part of one, its share is counted.
    """
    reused = 0.0
    for chunk in result.chunks:
        if chunk.hit:
            behind = chunk.start + chunk.tokens - max(first, chunk.start)
            reused += (chunk.tokens - chunk.recomputed) * max(0, behind) / chunk.tokens
    return int(reused)
