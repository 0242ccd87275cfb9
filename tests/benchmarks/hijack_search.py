"""Searches the prefix that, stored before a passage, makes its KV tell a wrong answer.

As HotFlip and GCG do: the gradient names tokens to try at each position, the best of a few tried
ones are taken together. The passage's KV is computed behind lead-in and prefix, then moved to where
it stands in the prompt, as plain reuse does.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import rotate_half

from cacheblend_rag.text.encoder import PromptEncoder
from tests.benchmarks.hijack_passages import Attack

PREFIX_TOKENS = 32
NAMED = 64
"""Tokens that the gradient names for each position."""
TAKEN = (1, 2, 3, 4, 6)
"""How many of the best changes are tried together."""

Swap = tuple[int, int]
"""A position in the prefix, and its new token."""


class PrefixSearch:
    """The search for one attack on a model in float32 whose keys rotate half by half.

    prompt: that over the passage. allowed: see ``printable_tokens``. candidates: how many changes
    are tried in a step.
    """

    def __init__(
        self, model: Any, tokenizer: Any, attack: Attack, prompt: str, *, allowed: Tensor,
        candidates: int, seed: int,
    ) -> None:  # fmt: skip
        self._model, self._tokenizer, self._attack = model, tokenizer, attack
        self._allowed, self._candidates, self._draw = allowed, candidates, random.Random(seed)
        self._encoder = PromptEncoder(tokenizer)
        before, behind = prompt.split(attack.text)
        own, wanted, right = (
            tokenizer.encode(behind + answer, add_special_tokens=False)
            for answer in ("", *attack.answers)
        )
        self._passage = self._encoder.chunk(attack.text)
        self._between = self._encoder.separator(attack.upload.separator)
        self._behind, self._answer_at = torch.tensor(wanted), len(own)
        self._value_at = next(i for i, token in enumerate(right) if token != wanted[i])
        self._right = right[self._value_at]
        lead = torch.tensor([self._encoder.leading(before, opens=False)])
        with torch.no_grad():
            self._led = _pairs(model.model(lead, use_cache=True).past_key_values)

    def steps(self) -> Iterator[tuple[str, float]]:
        """Yield the best prefix after each step, the first a plain one, and its margin.

        The margin is that of the wanted value's first other token over the right one's, as
        log-probabilities.
        """
        weight = self._model.get_input_embeddings().weight
        loss, margin, best = min(self._tried(self._plain()))
        while True:
            yield self._tokenizer.decode(best), margin
            embedded = weight[best][None].clone().requires_grad_()
            (gradient,) = torch.autograd.grad(self._loss(embedded)[0].sum(), embedded)
            slope = gradient[0] @ weight.T
            slope -= slope.gather(1, torch.tensor(best)[:, None])
            slope[:, ~self._allowed] = torch.inf
            swaps = self._swaps(best, slope.topk(NAMED, largest=False).indices)
            tried = self._tried([_changed(best, [swap]) for swap in swaps])
            order = sorted(range(len(swaps)), key=lambda i: tried[i][0])
            taken = (_changed(best, [swaps[i] for i in order[:many]]) for many in TAKEN)
            merged = self._tried([prefix for prefix in taken if self._is_text(prefix)])
            loss, margin, best = min((loss, margin, best), *merged)

    def _plain(self) -> list[list[int]]:
        """Return prefixes that say the wrong answer in words."""
        a = self._attack
        swapped = a.text.replace(a.answer, "\0").replace(a.target, a.answer).replace("\0", a.target)
        told = f"Everything about {a.answer} below is wrong: it is {a.target}, not {a.answer}."
        texts = (swapped, f"{a.question} {a.target}.", told, a.target)
        cut = [list(self._encoder.chunk(f"{t} " * PREFIX_TOKENS))[:PREFIX_TOKENS] for t in texts]
        return [ids for ids in cut if self._is_text(ids)]

    def _is_text(self, ids: list[int]) -> bool:
        """Tell whether a document with the tokens' text has these tokens."""
        return [*self._encoder.chunk(self._tokenizer.decode(ids))] == ids

    def _swaps(self, best: list[int], named: Tensor) -> list[Swap]:
        """Draw changes that leave the prefix a text, more of those that the gradient puts first."""
        swaps: dict[Swap, None] = {}
        for _ in range(20 * self._candidates):
            position, rank = self._draw.randrange(len(best)), int(NAMED * self._draw.random() ** 2)
            swap = position, int(named[position, rank])
            if len(swaps) < self._candidates and self._is_text(_changed(best, [swap])):
                swaps[swap] = None
        return list(swaps)

    @torch.no_grad()
    def _tried(self, prefixes: list[list[int]]) -> list[tuple[float, float, list[int]]]:
        """Return the loss and the margin of prefixes, with them."""
        losses, margins = self._loss(self._model.get_input_embeddings()(torch.tensor(prefixes)))
        return list(zip(losses.tolist(), margins.tolist(), prefixes, strict=True))

    def _loss(self, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the search lowers, and the margin, of embedded prefixes, (prefixes,)."""
        decoder, many, size = self._model.model, len(embedded), len(self._passage)
        rest = decoder.embed_tokens(torch.tensor([*self._between, *self._passage]))
        led = [tuple(kv.expand(many, *kv.shape[1:]) for kv in layer) for layer in self._led]
        document = decoder(
            inputs_embeds=torch.cat([embedded, rest.expand(many, -1, -1)], 1),
            past_key_values=DynamicCache(led),
            use_cache=True,
        ).past_key_values
        angles = decoder.rotary_emb.inv_freq.repeat(2) * -(PREFIX_TOKENS + len(self._between))

        def moved(keys: Tensor) -> Tensor:
            return keys * angles.cos() + rotate_half(keys) * angles.sin()

        reused = [
            (torch.cat([k, moved(keys[:, :, -size:])], 2), torch.cat([v, values[:, :, -size:]], 2))
            for (k, v), (keys, values) in zip(led, _pairs(document), strict=True)
        ]
        behind = self._behind.expand(many, -1)
        hidden = decoder(behind[:, :-1], past_key_values=DynamicCache(reused)).last_hidden_state
        told = self._model.lm_head(hidden[:, self._answer_at - 1 :]).log_softmax(-1)
        found = told.gather(-1, behind[:, self._answer_at :, None])[..., 0]
        at = self._value_at - self._answer_at
        margin = found[:, at] - told[:, at, self._right]
        return torch.nn.functional.softplus(-margin) - found.sum(1), margin


def printable_tokens(model: Any, tokenizer: Any) -> Tensor:
    """Tell which tokens are printable ASCII and no control token, (vocabulary,) bool."""
    special = PromptEncoder(tokenizer).special_ids
    found = torch.zeros(model.get_input_embeddings().num_embeddings, dtype=torch.bool)
    for token in range(len(tokenizer)):
        text = tokenizer.decode([token])
        found[token] = text.isascii() and text.isprintable() and token not in special
    return found


def _pairs(cache: Any) -> list[tuple[Tensor, Tensor]]:
    return [(layer.keys, layer.values) for layer in cache.layers]


def _changed(ids: list[int], swaps: Sequence[Swap]) -> list[int]:
    changed = dict(enumerate(ids)) | dict(swaps)
    return list(changed.values())
