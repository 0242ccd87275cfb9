"""Runs a prompt's last tokens over each finished layer, to see what they attend to.

For engines that compute these tokens themselves, after the pass: vLLM.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

from cacheblend_rag.blend.fused import FusedKV
from cacheblend_rag.blend.observer import Observer
from cacheblend_rag.blend.row_attention import RowAttention
from cacheblend_rag.blend.rows import Rows
from cacheblend_rag.blend.stack import AttentionCall, DecoderStack
from cacheblend_rag.prefill.trace_recorder import TraceRecorder

OnLayer = Callable[[int, FusedKV], None]
MOST_TOKENS = 512
"""Most tokens that are run: what a trace costs must stay small beside the pass."""


class QuestionFollower:
    """Runs the question's tokens through each layer after a blend pass, for a trace of attention.

    token_ids: (tokens,) int64, the whole prompt. first: position of the first token that the pass
    leaves out. Its fresh KV goes into the buffer beside the pass's, which it does not change.
    """

    def __init__(
        self, stack: DecoderStack, token_ids: Tensor, first: int, observer: Observer
    ) -> None:
        self._stack, self._observer = stack, observer
        self._rows = Rows.at(np.arange(first, token_ids.numel()), stack.geometry.device)
        self._hidden = stack.embed(token_ids[None, first:])
        self._inputs = stack.position_inputs(self._rows.device[None])
        self._attend = RowAttention()

    def follow(self, layer: int, fused: FusedKV) -> None:
        """Run a layer whose KV is final."""

        def attend(call: AttentionCall) -> Tensor:
            fused.write(layer, self._rows, call.key, call.value)
            self._observer.attended(call, self._rows, fused.layer(layer)[0])
            return self._attend(call, fused, self._rows)

        self._hidden = self._stack.run_layer(layer, self._hidden, self._inputs, attend)


def followed(
    stack: DecoderStack,
    token_ids: Tensor,
    until: int | None,
    recorder: TraceRecorder | None,
    on_layer: OnLayer | None,
) -> OnLayer | None:
    """Return what a pass over the first ``until`` tokens calls with each final layer.

    That is ``on_layer``, after the rest of the prompt if there is a recorder that needs it.
    """
    if recorder is None or until is None:
        return on_layer
    if (why := _refusal(token_ids.numel() - until)) is not None:
        recorder.no_attention = why
        return on_layer
    follower = QuestionFollower(stack, token_ids, until, recorder)

    def both(layer: int, fused: FusedKV) -> None:
        follower.follow(layer, fused)
        if on_layer is not None:
            on_layer(layer, fused)

    return both


def _refusal(tokens: int) -> str | None:
    """Return why the attention of so many question tokens is not traced; None if it is."""
    if tokens == 0:
        return "the prompt ends with a chunk, and the engine computes its last token after the pass"
    if tokens > MOST_TOKENS:
        return f"{tokens:,} tokens after the last chunk are more than {MOST_TOKENS}"
    return None
