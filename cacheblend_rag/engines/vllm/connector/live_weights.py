"""Notices that other weights were loaded into the model of a running vLLM.

vLLM writes them over the old ones (``reload_weights``, weight transfer, sleep level 2), and tells a
connector no more than that its cache is reset, before or after. So the weights themselves are
looked at: some bytes of each, as the identity of a model's files is of some numbers of each.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from cacheblend_rag.engines.identity import SAMPLES_PER_WEIGHT, stored_parts


class LiveWeights:
    """The weights of a running model, compared with those that it was started with.

    Those that a CPU's kernels keep in a form of their own cannot be looked at.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._first = self.look()

    def differ(self) -> bool:
        """Whether they differ from those of the last look."""
        has_moved = self._places != [weight.data_ptr() for weight in self._weights()]
        return has_moved or not torch.equal(torch.cat(self._parts), self._sample)

    def loaded(self) -> str:
        """Return a hash of the weights if they are others than at the start, else ""."""
        now = self.look()
        return "" if now == self._first else now

    @torch.inference_mode()
    def look(self) -> str:
        """Note where the weights are and what is in a sample; returns a hash of it."""
        weights = self._weights()
        self._places = [weight.data_ptr() for weight in weights]
        self._parts = [_sample_of(weight) for weight in weights]
        self._sample = torch.cat(self._parts)
        return hashlib.blake2b(self._sample.cpu().numpy().tobytes(), digest_size=16).hexdigest()

    def _weights(self) -> list[Tensor]:
        named = self._model.named_parameters()
        found = (weight for name, whole in named for _, weight in stored_parts(name, whole))
        return [weight for weight in found if weight.numel() and not weight.is_mkldnn]


def _sample_of(weight: Tensor) -> Tensor:
    """Return a view of some of a weight's bytes: the lowest of a number, which changes most."""
    first, size = weight.storage_offset() * weight.itemsize, weight.numel() * weight.itemsize
    whole = torch.empty(0, dtype=torch.uint8, device=weight.device)
    numbers = whole.set_(weight.untyped_storage(), first, (size,), (1,)).view(-1, weight.itemsize)
    return numbers[:: max(1, len(numbers) // SAMPLES_PER_WEIGHT), 0]
