"""Runs the bundled embedding model, all-MiniLM-L6-v2, with transformers alone.

Its vectors equal those of sentence-transformers, whose import would take a command seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import normalize

MAX_TOKENS = 256
BATCH_TEXTS = 32


class BundledEmbedder:
    """Embeds texts by mean pooling of the last layer's hidden states, normalized.

    folder: the model in sentence-transformers' format.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModel, AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return one unit vector per text, (texts, dimensions); batches have similar lengths."""
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        vectors = torch.empty(len(texts), self._model.config.hidden_size)
        for start in range(0, len(order), BATCH_TEXTS):
            batch = order[start : start + BATCH_TEXTS]
            vectors[batch] = self._embed_batch([texts[index] for index in batch])
        found: NDArray[np.float32] = vectors.numpy()
        return found

    def _embed_batch(self, texts: list[str]) -> torch.Tensor:
        tokens = self._tokenizer(
            texts, padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt"
        )
        hidden = self._model(**tokens).last_hidden_state
        shown = tokens["attention_mask"].unsqueeze(-1)
        return normalize((hidden * shown).sum(1) / shown.sum(1))
