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
SUMS = 512
"""Numbers that a weight's words are added up to; in words of their own, so that none is copied."""
WORD = 8


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
        has_moved = any(weight.data_ptr() != place for weight, place in self._places)
        return has_moved or not torch.equal(torch.cat(self._parts), self._sample)

    def loaded(self) -> str:
        """Return a hash of the weights if they are others than at the start, else ""."""
        now = self._look()
        return "" if now == self._first else now

    @torch.inference_mode()
    def _look(self) -> str:
        """Hash the weights, and note where they are and what is in a sample."""
        digest, are_read = hashlib.blake2b(digest_size=16), True
        self._places, self._parts = list[tuple[Tensor, int]](), list[Tensor]()
        for name, whole in self._stack.model.named_parameters():
            for _, weight in stored_parts(name, whole):
                if not weight.numel() or weight.is_mkldnn:
                    are_read = False
                    continue
                own = _bytes(weight)
                digest.update(_sums(own).cpu().numpy().tobytes())
                numbers = own.view(-1, weight.itemsize)
                self._parts.append(numbers[:: max(1, len(numbers) // SAMPLES), 0])
                self._places.append((weight, weight.data_ptr()))
        self._sample = torch.cat(self._parts)
        if not are_read:
            digest.update(self._result().float().cpu().numpy().tobytes())
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


def _sums(own: Tensor) -> Tensor:
    """Add up a weight's words in ``SUMS`` parts; the few that are left over stay as they are.

    A weight whose memory does not consist of whole words, a tiny one, is returned as it is.
    """
    if own.storage_offset() % WORD or len(own) % WORD:
        return own
    words = own.view(torch.int64)
    each = len(words) // SUMS
    return torch.cat((words[: each * SUMS].view(SUMS, each).sum(1), words[each * SUMS :]))
