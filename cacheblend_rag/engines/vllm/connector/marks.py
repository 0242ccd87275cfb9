"""Which mark sets the blocks of found chunks apart: one for all chunks blended for the same prompt.

A mark is the hash of all that their KV depends on: which stored KV stands where, how it is blended,
and the prompt it is blended for, if its question affects the choice of rows. A prompt that goes on
where an earlier one ended (a conversation's next turn, an agent's next step) has the earlier one's
mark for its chunks, so vLLM's prefix cache serves what was blended and answered, and a mark of its
own for those that are new.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np

from cacheblend_rag.blend.selectors import Question, make_selector
from cacheblend_rag.engines.found_chunk import FoundChunk
from cacheblend_rag.engines.vllm.protocol.job import SALT_PREFIX
from cacheblend_rag.settings import BlendConfig

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
