"""Notices that other weights were loaded into the model of a running vLLM.

vLLM writes them over the old ones (``reload_weights``, weight transfer, sleep level 2), and tells a
connector no more than that its cache is reset, before or after. So the weights themselves are
looked at: all of their bytes after a reset, which takes one read of them, and a sample otherwise.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from cacheblend_rag.blend.stack import AttentionCall
from cacheblend_rag.engines.identity import stored_parts
from cacheblend_rag.engines.vllm.connector.stack import VLLMStack

SAMPLES = 16
"""Bytes of each weight in a sample: the lowest of a number, which changes most."""
WORD = 8
"""Bytes of the numbers that a weight is added up in, so that none of it is copied."""


class LiveWeights:
    """The weights of a running model, compared with those that it was started with.

    tokens: of a run that stands for weights that cannot be read (rows,): a CPU's kernels keep them
    in a form of their own. Call it on all tensor-parallel ranks.
    """

    def __init__(self, stack: VLLMStack, tokens: Tensor) -> None:
        self._stack, self._tokens = stack, tokens
        self._first = self._look()

    def may_differ(self) -> bool:
        """Whether a sample differs from the last look; other bytes may differ if it does not."""
        has_moved = self._places != [weight.data_ptr() for weight in self._weights]
        return has_moved or not torch.equal(torch.cat(self._parts), self._sample)

    def loaded(self) -> str:
        """Return a hash of the weights if they are others than at the start, else ""."""
        now = self._look()
        return "" if now == self._first else now

    @torch.inference_mode()
    def _look(self) -> str:
        """Hash the weights, and note where they are and what is in a sample."""
        named = self._stack.model.named_parameters()
        weights = [weight for name, whole in named for _, weight in stored_parts(name, whole)]
        self._weights = [one for one in weights if one.numel() and not one.is_mkldnn]
        self._places = [weight.data_ptr() for weight in self._weights]
        self._parts = [_sample_of(weight) for weight in self._weights]
        self._sample = torch.cat(self._parts)
        sums = torch.stack([_sum(weight) for weight in self._weights])
        digest = hashlib.blake2b(_numbers(sums), digest_size=16)
        if len(self._weights) < len(weights):
            digest.update(_numbers(self._result().float()))
        return digest.hexdigest()

    def _result(self) -> Tensor:
        """Run all layers on some tokens."""
        stack, ids = self._stack, self._tokens[None]
        hidden = stack.embed(ids)
        inputs = stack.position_inputs(torch.arange(ids.shape[1], device=ids.device)[None])
        for layer in range(stack.geometry.layers):
            hidden = stack.run_layer(layer, hidden, inputs, _attend)
        return hidden


def _attend(call: AttentionCall) -> Tensor:
    qkv = (call.query, call.key, call.value)
    return scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True).transpose(1, 2)


def _bytes(weight: Tensor) -> Tensor:
    """Return a view of a weight's bytes, as they lie in memory, (bytes,) uint8."""
    first, size = weight.storage_offset() * weight.itemsize, weight.numel() * weight.itemsize
    whole = torch.empty(0, dtype=torch.uint8, device=weight.device)
    return whole.set_(weight.untyped_storage(), first, (size,), (1,))


def _sample_of(weight: Tensor) -> Tensor:
    """Return a view of some of a weight's bytes."""
    numbers = _bytes(weight).view(-1, weight.itemsize)
    return numbers[:: max(1, len(numbers) // SAMPLES), 0]


def _sum(weight: Tensor) -> Tensor:
    """Add up a weight's words, or bytes where its memory does not consist of whole words."""
    own = _bytes(weight)
    is_whole = not (own.storage_offset() % WORD or len(own) % WORD)
    return (own.view(torch.int64) if is_whole else own).sum()


def _numbers(values: Tensor) -> bytes:
    return values.cpu().numpy().tobytes()
