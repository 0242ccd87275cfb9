"""Estimates what an `index` run would take, without weights and without writing anything.

Chunks and tokens are exact: the files are read and split. Bytes follow from the model's config.
Seconds are extrapolated from two of the model's layers with random weights, and from embedding some
of the chunks; loading the models is not included.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from cacheblend_rag.engines.model_config import kv_bytes_per_token, served_dtype, text_config
from cacheblend_rag.engines.tokenizer import load_tokenizer
from cacheblend_rag.errors import StoreError
from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.prefill.lead_in import LeadIn
from cacheblend_rag.prefill.precompute import document_plans
from cacheblend_rag.rag.collection import CollectionSettings
from cacheblend_rag.rag.index_report import IndexReport
from cacheblend_rag.rag.readers import EXTRA, make_splitter
from cacheblend_rag.rag.retrieval import Embedder
from cacheblend_rag.settings import EMBEDDED, LeadInConfig
from cacheblend_rag.text.chunk import Document
from cacheblend_rag.text.encoder import PromptEncoder

logger = logging.getLogger(__name__)

GIB = 1 << 30
BYTES_AROUND_CHUNK = 2048
"""An upper bound of a stored chunk's header, in bytes."""
TIMED_LAYERS = 2
TIMED_TOKENS = 512
TIMED_VOCABULARY = 64
TIMED_CHUNKS = 16
TIMED_RUNS = 3


@dataclass(frozen=True)
class IndexEstimate:
    """The work for new and changed files, and the KV stored already.

    tokens: of chunks. kv_bytes: of their KV, at most. stored_kv_bytes: in the collection now.
    seconds: None if unknown.
    """

    files: int
    unchanged: int
    unknown: int
    skipped: list[dict[str, str]]
    chunks: int
    tokens: int
    kv_bytes: int
    stored_kv_bytes: int
    seconds: float | None

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)

    def check(self, max_gib: float | None) -> None:
        """Raise StoreError when the KV would exceed ``max_gib``; None is no limit."""
        if max_gib is not None and self.stored_kv_bytes + self.kv_bytes > max_gib * GIB:
            raise StoreError(
                f"--max-gib {max_gib:g}: {self.files} files need {self.kv_bytes / GIB:.3f} GiB of "
                f"KV beside the {self.stored_kv_bytes / GIB:.3f} GiB that are stored; nothing was "
                "computed: give more, or index fewer files"
            )


class Estimator:
    """Adds up the work for documents. Raises ModelLoadError, MissingExtraError."""

    def __init__(self, settings: CollectionSettings, device: str | None) -> None:
        config = LeadInConfig()
        encoder = PromptEncoder(
            load_tokenizer(settings.model), split_special_tokens=config.split_special_tokens
        )
        self._settings, self._device = settings, device
        self._model = text_config(settings.model)
        self._dtype = served_dtype(self._model, settings.dtype, device)
        self.split = make_splitter(encoder.chunk, settings.chunk_size, settings.chunk_overlap)
        self._lead_in = LeadIn(
            encoder,
            config,
            instruction=settings.lead_in,
            identity={},
            namespace=settings.namespace,
        )
        self._files = self._computed = 0
        self._tokens: dict[KVKey, int] = {}
        self._sample: list[str] = []

    def add(self, document: Document) -> None:
        """Count one more file."""
        chunks = document.to_chunks()
        led = [self._lead_in.resolve(chunk) for chunk in chunks]
        self._files += 1
        self._computed += sum(len(work.tokens) for work in document_plans(led))
        self._tokens |= {chunk.key: len(chunk.token_ids) for chunk in led}
        self._sample += [chunk.text for chunk in chunks[: TIMED_CHUNKS - len(self._sample)]]

    def estimate(self, store: Path | None, report: IndexReport) -> IndexEstimate:
        """Return the totals.

        store: the folder of KV that stays. report: counts of skipped files.
        """
        tokens, chunks = sum(self._tokens.values()), len(self._tokens)
        return IndexEstimate(
            files=self._files,
            unchanged=report.unchanged,
            unknown=report.unknown,
            skipped=report.skipped,
            chunks=chunks,
            tokens=tokens,
            kv_bytes=tokens * kv_bytes_per_token(self._model, self._dtype)
            + chunks * BYTES_AROUND_CHUNK,
            stored_kv_bytes=0 if store is None else _stored_bytes(store),
            seconds=self._seconds(),
        )

    def _seconds(self) -> float | None:
        if self._settings.engine != EMBEDDED:  # vLLM's speed is not this library's
            return None
        if not self._sample:
            return 0.0
        from cacheblend_rag.engines.transformers.loading import pick_device

        try:
            layer = _layer_seconds(self._model, self._dtype, pick_device(self._device))
        except Exception:  # a config may be of any form
            logger.info("no layer of this model can be timed alone", exc_info=True)
            return None
        embedder = Embedder(self._settings.embedding_model, EXTRA)
        embedding = _median_seconds(lambda: embedder.embed(self._sample)) / len(self._sample)
        layers = int(self._model.num_hidden_layers)
        return self._computed * layers * layer + len(self._tokens) * embedding


def _stored_bytes(store: Path) -> int:
    """Return the bytes of the chunk KV in a folder, without opening it as a store."""
    return sum(path.stat().st_size for path in store.glob("?/?/*.safetensors"))


def _layer_seconds(config: Any, dtype: torch.dtype, device: torch.device) -> float:
    """Time one layer of a model, with random weights: seconds per token."""
    from transformers import AutoModel

    small = copy.deepcopy(config)
    small.num_hidden_layers, small.vocab_size = TIMED_LAYERS, TIMED_VOCABULARY
    if getattr(small, "layer_types", None):
        small.layer_types = small.layer_types[:TIMED_LAYERS]
    small.pad_token_id = None
    layers = AutoModel.from_config(small, dtype=dtype).to(device).eval()
    ids = torch.arange(TIMED_TOKENS, device=device)[None] % TIMED_VOCABULARY

    def compute() -> None:
        with torch.no_grad():
            layers(input_ids=ids, use_cache=False).last_hidden_state[0, 0, 0].item()

    return _median_seconds(compute) / TIMED_LAYERS / TIMED_TOKENS


def _median_seconds(work: Callable[[], object]) -> float:
    """Return the median time of some work, after a warm-up."""
    work()
    seconds = []
    for _ in range(TIMED_RUNS):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return median(seconds)
