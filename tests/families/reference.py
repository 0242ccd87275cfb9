"""What a model's own forward says of a prompt, and of plain reuse of passages in it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from cacheblend_rag import BlendPrompt, Chunk, Generation, SamplingParams
from tests.models import make_tokenizer, prompt_of, words

CHUNK_TOKENS = 90
"""Longer than the families' windows."""


def three_chunks(seed: int = 1) -> tuple[BlendPrompt, list[Chunk]]:
    """A prompt of three chunks, each longer than the families' windows, and the chunks."""
    chunks = [Chunk(words(CHUNK_TOKENS, seed + more)) for more in (1, 2, 3)]
    parts = (part for chunk in chunks for part in (chunk, " w9 "))
    return prompt_of(words(5, seed), *parts, "w5 w6"), chunks


def asked(tokens: int) -> SamplingParams:
    """Greedy, with as many log-probabilities as are told."""
    return SamplingParams.greedy(max_tokens=tokens, ignore_eos=True, logprobs=20)


@torch.no_grad()
def own_logits(
    model: PreTrainedModel,
    prompt: BlendPrompt,
    answer: Generation,
    *,
    reusing: bool,
    edges: tuple[Sequence[int], Sequence[int]] = ((), ()),
) -> Tensor:
    """Logits that a model's own forward has at each token of an answer to a prompt.

    reusing: each chunk is computed in a cache of its own, at the positions that it has in the
    prompt, and everything else in order, after what precedes it. edges: tokens of each chunk before
    and after those that stand in the prompt.

    Returns:
        (tokens of the answer, vocabulary), in float32.
    """
    ids = make_tokenizer()(prompt.text)["input_ids"]
    count = len(answer.token_ids)
    ids = torch.tensor([*ids, *answer.token_ids[:-1]])
    spans = [(c.start, c.start + c.tokens) for c in answer.report.chunks] if reusing else []
    if not spans:
        logits = model(input_ids=ids[None], use_cache=False).logits
        return logits[0, -count:].float()
    cache: Any = DynamicCache()
    for start, end in pairwise([0, *(edge for span in spans for edge in span), len(ids)]):
        is_chunk = (start, end) in spans
        before, after = edges if is_chunk else ((), ())
        into = DynamicCache() if is_chunk else cache
        logits = model(
            input_ids=torch.tensor([[*before, *ids[start:end], *after]]),
            position_ids=torch.arange(start - len(before), end + len(after))[None],
            past_key_values=into,
            use_cache=True,
        ).logits
        if is_chunk:
            here = slice(len(before), len(before) + end - start)
            for index, layer in enumerate(into.layers):
                cache.update(layer.keys[:, :, here], layer.values[:, :, here], index)
    return logits[0, -count:].float()


def likely(answer: Generation) -> tuple[Tensor, Tensor]:
    """The most likely tokens in the place of each of an answer's, and their log-probabilities."""
    assert answer.logprobs is not None
    tops = [one.top for one in answer.logprobs]
    tokens = torch.tensor([[token for token, _, _ in top] for top in tops])
    return tokens, torch.tensor([[value for _, _, value in top] for top in tops])
