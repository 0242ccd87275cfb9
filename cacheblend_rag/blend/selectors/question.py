"""Ranks tokens by the question's attention to them, from a probe pass over the cached KV."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor
from torch.nn.functional import avg_pool1d

from cacheblend_rag.blend.selectors.base import Evidence, Selector, given
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.settings.base import AsTuple, Count, Ratio, Rising


class Question(Selector):
    """Attention mass of the question, by default in middle layers, where its probe pass ends.

    A selector that needs the question's attention for another rule derives from this one. Related:
    QCFuse (arXiv 2606.05875), which scores by three middle layers chosen by measurement; ``layers``
    names such layers of a model. ``closing`` and ``reach`` are this project's own.
    """

    span: Annotated[tuple[Ratio, Ratio], AsTuple, Rising] = (0.4, 0.75)
    """Layers whose attention counts, as fractions of the model's depth: from the first, inclusive,
    to the second, exclusive."""
    layers: Annotated[Annotated[tuple[Count, ...], Field(min_length=1), Rising] | None, AsTuple] = (
        None
    )
    """Indices of the layers whose attention counts, in place of ``span``."""
    heads: Literal["sum", "max"] = "sum"
    """``sum`` adds up heads; ``max`` takes the largest, after the question's tokens."""
    closing: Count = 8
    """How many of the prompt's last tokens count extra: their mean attention is added to the mean
    over all question tokens. The answer begins there, so they attend to what it needs. 0: none."""
    reach: Count = 1
    """Smoothing: a token's score is the mean attention over itself and this many neighbours on each
    side, because facts span several tokens. 0 does not smooth."""

    def observed(self, layers: int) -> tuple[int, ...]:
        """Return the layers whose attention counts, of a model of ``layers`` layers; at least one.

        Raises ConfigError when one is not below ``layers``.
        """
        if self.layers is not None:
            if self.layers[-1] >= layers:
                raise ConfigError(f"layers={self.layers} must be below the model's {layers} layers")
            return self.layers
        first, end = (math.floor(share * layers + 1e-9) for share in self.span)
        first = min(first, layers - 1)
        return tuple(range(first, max(end, first + 1)))

    def score(self, evidence: Evidence) -> Tensor:
        attention = given(evidence.question_attention, "question_attention")
        if not attention.numel():
            return attention
        width = 2 * self.reach + 1
        return avg_pool1d(attention[None], width, 1, self.reach, count_include_pad=False)[0]
