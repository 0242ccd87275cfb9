"""Compares one answer's prompt with full prefill at once, by what the guard does in idle time."""

from __future__ import annotations

from collections.abc import Sequence

from cacheblend_rag.engines.base import Engine
from cacheblend_rag.engines.prepare import PromptLike
from cacheblend_rag.engines.question_time import Hints
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.prefill.comparing import Compared, Comparison
from cacheblend_rag.settings import BlendConfig


def compare_with_full_prefill(
    engine: Engine,
    prompt: PromptLike,
    answer: Sequence[int],
    config: BlendConfig | None = None,
    hints: Hints = (),
) -> Comparison | None:
    """Return how far predictions after the blended prompt are from those after full prefill.

    Args:
        engine: blends.
        prompt: as for generate.
        answer: the tokens along which predictions are compared, at least one.
        config: as for generate.
        hints: as for generate.

    Returns:
        Divergences in nats per token; None if the engine cannot compare, has no memory for it, or
        would not blend the prompt.

    Raises:
        PromptError: when the prompt is empty or too long.
        ConfigError: when ``config`` does not suit the model.
    """
    if not engine.compares:
        return None
    blend = (config or engine.config).with_changes(cost_model=False, trace=False)
    sampling = SamplingParams.greedy(max_tokens=len(answer))
    request = engine._questions.request(prompt, sampling, blend, hints, steered=False)
    steps = engine._compare(request, Compared(request.prepared.token_ids, tuple(answer)))
    while True:
        try:
            next(steps)
        except StopIteration as done:
            found: Comparison | None = done.value
            return found
