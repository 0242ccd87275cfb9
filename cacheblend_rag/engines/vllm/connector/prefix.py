"""Keeps blended KV apart in vLLM's prefix cache, and shares the blocks before it.

vLLM finds blocks by a hash of their tokens and of the block before. A request's ``cache_salt``
counts in its first block only, and so sets all of its blocks apart. Here a blend's hashes are its
own from the first block on that holds KV of a chunk. The blocks before keep the hashes that any
request with these tokens, and the same salt, has: their KV is that of ordinary prefill.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

from cacheblend_rag.engines.found_chunk import FoundChunk
from cacheblend_rag.engines.vllm.protocol.result import BlendResult
from cacheblend_rag.prefill.policy import LEAST_SHARE
from cacheblend_rag.reason import Reason
from cacheblend_rag.report import ChunkReport

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
