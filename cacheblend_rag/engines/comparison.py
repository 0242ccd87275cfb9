"""Compares one answer with full prefill, at once: what the guard does in idle time."""

from __future__ import annotations

from collections.abc import Sequence

from cacheblend_rag.blend.steps import run_to_end
from cacheblend_rag.engines.base import Engine
from cacheblend_rag.engines.guard_reference import reference_of
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
    *,
    with_documents: bool = False,
) -> Comparison | None:
    """Return how far predictions after the blended prompt are from those after full prefill.

    Args:
        engine: blends.
        prompt: as for generate.
        answer: the tokens along which predictions are compared.
        config: as for generate.
        hints: as for generate.
        with_documents: full prefill is that of the prompt with the text of its documents that its
            chunks were computed after, as the guard has it, instead of the prompt as it is.

    Returns:
        Divergences in nats per token; None if the engine cannot compare, has no memory for it, or
        would not blend the prompt, if there is no answer, or if the text to compare with does not
        fit the context window.

    Raises:
        PromptError: when the prompt is empty or too long.
        ConfigError: when ``config`` does not suit the model.
    """
    if not engine.compares or not answer:
        return None
    blend = (config or engine.config).with_changes(cost_model=False, trace=False)
    sampling = SamplingParams.greedy(max_tokens=len(answer))
    request = engine._questions.request(prompt, sampling, blend, hints, steered=False)
    prepared, reference = request.prepared, None
    if with_documents:
        reference = reference_of(prepared, engine._led, engine.context_window - len(answer))
        if reference is None:
            return None
        if reference == prepared.token_ids:
            reference = None  # full prefill of the prompt itself
    compared = Compared(prepared.token_ids, tuple(answer), reference)
    return run_to_end(engine._compare(request, compared))
