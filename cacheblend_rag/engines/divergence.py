"""Compares one answer with full prefill, at once: what the guard does in idle time."""

from __future__ import annotations

from collections.abc import Sequence

from cacheblend_rag.engines.base import Engine
from cacheblend_rag.engines.guard import as_served
from cacheblend_rag.engines.guard_reference import reference_of
from cacheblend_rag.engines.prepare import PreparedPrompt
from cacheblend_rag.prefill.comparing import Compared, Comparison
from cacheblend_rag.settings import BlendConfig


def divergence_of(
    engine: Engine,
    prompt: PreparedPrompt,
    answer: Sequence[int],
    config: BlendConfig,
    ratio: float,
) -> Comparison | None:
    """Return how far predictions along an answer are from those after full prefill.

    The reference is the prompt with the text of its documents that its chunks were computed after.
    answer: its first tokens, at least one. ratio: to recompute, if the config leaves it open.
    Returns None if the engine cannot compare, if nothing of the prompt is blended, or if the
    reference does not fit the context window. Raises errors as a request does.
    """
    room = engine.context_window - len(answer)
    reference = reference_of(prompt, engine._led, room)
    if not engine.compares or not answer or reference is None:
        return None
    request = engine._questions.request(prompt, None, as_served(config, ratio), steered=False)
    is_prompt = reference == prompt.token_ids
    compared = Compared(prompt.token_ids, answer, None if is_prompt else reference)
    steps = engine._compare(request, compared)
    while True:
        try:
            next(steps)
        except StopIteration as done:
            found: Comparison | None = done.value
            return found
