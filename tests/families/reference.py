"""Prompts, and what a model's own forward says of them, and of plain reuse of passages in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from cacheblend_rag import (
    BlendConfig,
    BlendPrompt,
    Chunk,
    Document,
    Engine,
    Generation,
    SamplingParams,
)
from tests.models import make_tokenizer, prompt_of, words

CHUNK_TOKENS = 90
"""Longer than the families' windows."""
PROMPTS = range(1, 41, 5)
"""Seeds of the prompts that errors in 16 bits are averaged over: one alone is a matter of luck."""
DOCUMENTS = (
    Document("a", (words(60, 1), words(150, 2)), separator=" w77 "),
    Document("b", (words(203, 3), words(91, 4)), separator=" w77 "),
)
OTHER_BLOCKS = 5e-6
"""Rounding where rows are computed in other blocks than vLLM's: on some processors (those with AVX2
only) a matrix product rounds a row by how many rows there are."""


def three_chunks(seed: int = 1) -> tuple[BlendPrompt, list[Chunk]]:
    """A prompt of three chunks, each longer than the families' windows, and the chunks."""
    chunks = [Chunk(words(CHUNK_TOKENS, seed + more)) for more in (1, 2, 3)]
    parts = (part for chunk in chunks for part in (chunk, " w9 "))
    return prompt_of(words(5, seed), *parts, "w5 w6"), chunks


def retrieved(count: int = 3, seed: int = 9, opening: int = 50) -> BlendPrompt:
    """A prompt over chunks out of order: one document whole, the other without its beginning.

    seed: of the question; vLLM knows a prompt it has seen already. opening: seed of the words
    before the chunks; with another, vLLM's prefix cache has nothing of the prompt.
    """
    first, second = (document.to_chunks() for document in DOCUMENTS)
    chosen = (second[1], *first)[:count]
    parts: list[Any] = [words(9, opening)]
    for chunk in chosen:
        parts += [chunk, " w7 "]
    return prompt_of(*parts, words(23, seed))


def in_16_bits(
    engine: Engine, wide: PreTrainedModel, config: BlendConfig, tokens: int, *, reusing: bool
) -> Iterator[tuple[BlendPrompt, Generation, Tensor]]:
    """Yield prompts, an engine's answers of so many tokens, and the logits of the wide model."""
    for seed in PROMPTS if reusing else PROMPTS[:3]:
        prompt, chunks = three_chunks(seed)
        engine.precompute(chunks, progress=False)
        answer = engine.generate(prompt, asked(tokens), config=config)
        yield prompt, answer, own_logits(wide, prompt, answer, reusing=reusing)


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


def off(answer: Generation, logits: Tensor) -> float:
    """How far an answer's log-probabilities are from these logits', as a share of the largest."""
    tokens, found = likely(answer)
    apart = (found - logits.log_softmax(-1).gather(1, tokens)).abs().max()
    return float(apart / logits.abs().max())


def error(answer: Generation, logits: Tensor, by: Tensor | None = None) -> float:
    """Root mean square of a difference to ``logits``, as a share of their spread.

    What all tokens of a place share does not count. by: other logits, in the answer's place.
    """
    tokens, found = likely(answer)
    wanted = logits.gather(1, tokens)
    apart = (found if by is None else by.gather(1, tokens)) - wanted
    return float(_spread(apart) / _spread(wanted))


def _spread(values: Tensor) -> Tensor:
    return (values - values.mean(-1, keepdim=True)).norm()


def together(errors: list[float]) -> float:
    """Root mean square."""
    return float(torch.tensor(errors).square().mean().sqrt())
