"""Compares the model's predictions over a given answer after a blend and after full prefill.

One pass over every version of the prompt, run in steps like those of requests, so that it can be
done in idle time, on every engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cacheblend_rag.blend import BlendPass, FusedKV
from cacheblend_rag.blend.passes import Candidates
from cacheblend_rag.blend.schedule import REUSE_ONLY
from cacheblend_rag.blend.stack import DecoderStack
from cacheblend_rag.blend.steps import Steps
from cacheblend_rag.prefill.prompt_pass import FusedPrompt, PromptPass
from cacheblend_rag.report import PrefillReport

Logits = Callable[[Tensor], Tensor]
"""Returns the logits (rows, vocabulary) of final hidden states (1, rows, hidden)."""


@dataclass(frozen=True)
class Comparison:
    """How far predictions are from those after a full prefill of the reference, in nats per token.

    blend, prefill: Kullback-Leibler divergences from the reference's predictions to those after
    the blended prompt, and after full prefill of the prompt; the latter is 0 if that is the
    reference.
    """

    blend: float
    prefill: float = 0.0


@dataclass(frozen=True)
class Compared:
    """What is compared: token ids. answer: the first tokens of what followed the prompt, at least
    one. reference: the text that the prompt's chunks were computed in, ending with the same
    question; None if that is the prompt.
    """

    prompt: Sequence[int]
    answer: Sequence[int]
    reference: Sequence[int] | None = None

    @property
    def longest(self) -> int:
        """Tokens of the longest prefill, with all of the answer but its last token."""
        return max(len(self.prompt), len(self.reference or ())) + len(self.answer) - 1


def compare(
    stack: DecoderStack, logits: Logits, compared: Compared, blended: PromptPass
) -> Steps[Comparison | PrefillReport]:
    """Run all passes; blended: the prompt's, whose buffer has room for the answer."""
    count = len(compared.answer)
    done = yield from blended.steps()
    if not isinstance(done, FusedPrompt):
        return done
    done.fused.tokens = len(compared.prompt) + count - 1
    served = yield from _predicted(stack, logits, compared.prompt, compared.answer, done.fused)
    del done
    plain = yield from _predicted(stack, logits, compared.prompt, compared.answer)
    if compared.reference is None:
        return Comparison(divergence(plain, served))
    reference = yield from _predicted(stack, logits, compared.reference, compared.answer)
    return Comparison(divergence(reference, served), divergence(reference, plain))


def divergence(wanted: Tensor, found: Tensor) -> float:
    """Return the mean Kullback-Leibler divergence of rows of log probabilities, in nats."""
    return max(0.0, float((wanted.exp() * (wanted - found)).sum(-1).mean()))


def _predicted(
    stack: DecoderStack,
    logits: Logits,
    prompt: Sequence[int],
    answer: Sequence[int],
    fused: FusedKV | None = None,
) -> Steps[Tensor]:
    """Return log probabilities (answer tokens, vocabulary) after the prompt, float32.

    fused: holds the prompt's KV; without it, it is computed. The prompt's last token is computed
    in any case, since it predicts the answer's first.
    """
    ids = torch.tensor([*prompt, *answer[:-1]], device=stack.geometry.device)
    candidates = Candidates.none(ids.numel())
    if fused is not None:
        candidates.cached[: len(prompt) - 1] = True
    run = BlendPass(
        stack,
        ids,
        FusedKV(stack.geometry, ids.numel()) if fused is None else fused,
        candidates,
        REUSE_ONLY,
        last=len(answer),
    )
    yield from run.steps()
    return logits(run.hidden).float().log_softmax(-1)
