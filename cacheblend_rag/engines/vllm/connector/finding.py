"""Finds stored chunks in the prompts of requests without a job, and makes blend jobs for them."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheblend_rag.blend.selectors import make_selector
from cacheblend_rag.engines.identity import model_identity, weights_in_files
from cacheblend_rag.engines.model_files import load_tokenizer
from cacheblend_rag.engines.vllm.connector.continued import Continued, Stretch
from cacheblend_rag.engines.vllm.connector.finder import Finder
from cacheblend_rag.engines.vllm.connector.found_chunk import FoundChunk, Vocabulary
from cacheblend_rag.engines.vllm.connector.metrics import BlendStats
from cacheblend_rag.engines.vllm.connector.pending import Pending
from cacheblend_rag.engines.vllm.connector.settings import ConnectorSettings
from cacheblend_rag.engines.vllm.connector.tenants import NO_NAMESPACE, Tenants
from cacheblend_rag.engines.vllm.connector.token_file import FILE_NAME
from cacheblend_rag.engines.vllm.protocol.job import PARAMETER, SALT_PREFIX, BlendJob, FindJob
from cacheblend_rag.engines.vllm.protocol.result import (
    BlendResult,
    Declined,
    EvictResult,
    Failed,
    PrecomputeResult,
    Result,
    VerifyResult,
)
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.kv.chunk_kv import chunk_id, fingerprint, namespace_id
from cacheblend_rag.prefill.policy import NO_CHUNK, too_little
from cacheblend_rag.reason import Reason, ReasonCode
from cacheblend_rag.settings import BlendConfig, StoreConfig
from cacheblend_rag.settings.tier_url import OBJECT_SCHEMES, REDIS_SCHEMES, TierUrl
from cacheblend_rag.text.encoder import PromptEncoder

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

LONGEST_REASON = 500
MISSING = "not stored"
"""The miss reason of a chunk that is in no tier."""
NEVER = Reason(ReasonCode.UNSUPPORTED_REQUEST, "the server searches no prompts (serve --find off)")


class Finding:
    """Searches the prompts of requests, and follows what becomes of stored chunks.

    Args:
        finder: knows the stored chunks.
        settings: of the connector: which requests are searched, and how they are blended.
        block_size: tokens a block of vLLM's cache.
    """

    def __init__(self, finder: Finder, settings: ConnectorSettings, block_size: int) -> None:
        self.finder, self.mode = finder, settings.find
        self.tenants = Tenants(settings)
        profile = settings.profile
        self.config = profile.blended(BlendConfig()) if profile else BlendConfig()
        self.continued = Continued(block_size)
        self._gives_up = False

    @classmethod
    def of(cls, vllm_config: VllmConfig, settings: ConnectorSettings) -> Finding:
        """Make one whose chunks are kept beside their KV, if that outlives the process."""
        store = settings.store
        finder = Finder(
            place_of(store) if settings.find != "off" else None,
            lambda: fingerprint(identity_of(vllm_config, settings), ""),
            read_only=store.read_only,
            vocabulary=lambda: _vocabulary_of(vllm_config),
            unconfirmed_context=settings.takes_unconfirmed,
        )
        return cls(finder, settings, vllm_config.cache_config.block_size)

    def pending(
        self, request: Request, refusal: Reason | None, stats: BlendStats
    ) -> Pending | None:
        """Return the state of a new request without a job of its own; None if it brings one.

        Args:
            request: vLLM's.
            refusal: why nothing is blended here, or None.
            stats: that a search is counted in.
        """
        params = request.kv_transfer_params
        try:
            wish = FindJob.from_params(params)
            if wish is None and isinstance(params, Mapping) and PARAMETER in params:
                return None
            config = self.config if wish is None else self._config(wish)
        except Exception as error:  # whatever it is, it must not end vLLM
            said = str(error) if isinstance(error, ConfigError) else type(error).__name__
            why = f"malformed job: {said[:LONGEST_REASON]}"
            return Pending(None, Reason(ReasonCode.MALFORMED_JOB, why))
        if wish is None and (self.mode != "on" or self._gives_up):
            return Pending(None, blends=False)
        if wish is not None and not wish.wanted:
            return Pending(None, blends=False)
        found: Pending | Reason | None = NEVER if self.mode == "off" else refusal
        found = found or obstacle_of(request)
        if found is None:
            try:
                found = self._find(request, config, stats)
            except Exception:  # as above
                logger.exception("request %s is not searched for chunks", request.request_id)
                found = NO_CHUNK
        if isinstance(found, Pending):
            found.answers = wish is not None
            return found
        return Pending(None, found if wish is not None else None, blends=False)

    def _config(self, wish: FindJob) -> BlendConfig:
        return self.config.with_changes(**wish.config) if wish.config else self.config

    def _find(self, request: Request, config: BlendConfig, stats: BlendStats) -> Pending | Reason:
        """Return the state of a request in whose prompt there are chunks, else why it is plain."""
        started = time.perf_counter()
        tokens = request.prompt_token_ids or []
        namespace = self.tenants.namespace_of(request)
        if namespace is None:
            return NO_NAMESPACE
        found = self.finder.find(namespace, tokens)
        reusable = sum(one.sent.end - one.sent.start for one in found)
        refused = too_little(reusable, config.min_tokens) if found else (NO_CHUNK, None)
        seconds = time.perf_counter() - started
        stats.record_found(0 if refused else reusable, seconds)
        logger.debug(
            "request %s: %d stored chunks found, %d of %d tokens, in %.2f ms",
            *(request.request_id, len(found), reusable, len(tokens), seconds * 1000),
        )
        if refused:
            return refused[0]
        sent = tuple(one.sent for one in found)
        lead_in = sent[0].lead_in
        assert lead_in is not None  # noqa: S101 (the finder gives each chunk its own)
        alone = Stretch(sent[0].start, _mark(request, found, config))
        stretches, held = self.continued.stretches(request, found, config, alone)
        return Pending(
            BlendJob("blend", lead_in, sent, config=config),
            mark=stretches[-1].mark,
            found=tuple((one.name, one.generation) for one in found),
            stretches=stretches,
            held=held,
            alone=alone,
        )

    def mark_of_deleted(self, pending: Pending, request: Request) -> str:
        """Return what a blend's blocks depend on, beside its own job: deletions of its chunks."""
        if pending.job is None or not pending.mark or pending.namespace is None:
            return ""
        deletions, namespace = self.finder.deletions, namespace_id(pending.namespace)
        return deletions.mark(namespace, pending.job, request.prompt_token_ids or ())

    def note_result(self, pending: Pending, result: Result) -> None:
        """Learn from the result of a job which chunks are stored, and which are no longer."""
        job = pending.job
        namespace = pending.namespace
        if job is None or namespace is None:
            return
        if isinstance(result, EvictResult) and not job.turns:
            self.finder.forget(namespace, job.lead_in, job.keys)
        if self.mode == "off":
            return
        match result:
            case PrecomputeResult() if job.kind == "precompute":
                self.finder.learn(namespace, job, result)
            case VerifyResult() if result.unreadable:
                keys = [key for key in job.keys if f"{key[0]}/{key[1]}" in result.unreadable]
                self.finder.forget(namespace, job.lead_in, keys)
            case BlendResult() | Declined() if pending.found:
                told = zip(pending.found, result.chunks or (), strict=False)
                self.finder.forget_lost([one for one, chunk in told if chunk.reason == MISSING])
            case Failed(error=why) if pending.found and why.code.startswith("unsupported_"):
                self._gives_up = True  # the worker blends nothing, ever


def place_of(store: StoreConfig) -> Path | TierUrl | None:
    """Return what keeps the tokens of stored chunks, None if that is the process' memory.

    A tier in Redis, or else in an object store, comes before a folder: it is what all replicas
    share.
    """
    for schemes in (REDIS_SCHEMES, OBJECT_SCHEMES):
        for url in store.urls:
            if url.scheme in schemes and url.outlives:
                return url
    return Path(store.kv_path) / FILE_NAME if store.kv_path and store.outlives else None


def obstacle_of(request: Request) -> Reason | None:
    """Return why a prompt is not blended, or None."""
    sampling = request.sampling_params
    obstacles = {
        "LoRA requests": request.lora_request is not None,
        "requests without sampling": sampling is None,
        "prompts that are not text only": bool(request.mm_features)
        or request.prompt_embeds is not None
        or not request.prompt_token_ids,
        "prompts whose own log-probabilities are asked for": request.skip_reading_prefix_cache
        or (sampling is not None and sampling.prompt_logprobs is not None),
        "sessions whose input goes on": request.resumable,
    }
    for name, is_there in obstacles.items():
        if is_there:
            return Reason(ReasonCode.UNSUPPORTED_REQUEST, f"{name} are not blended")
    return None


def _mark(request: Request, found: Sequence[FoundChunk], config: BlendConfig) -> str:
    """Return what the KV of a blend depends on, beside tokens and the client's own salt.

    The question is part of it if it affects the choice of rows. Chunks that were stored anew make
    another mark, so that what was blended of forgotten ones is not found again.
    """
    parts: dict[str, Any] = {
        "config": config.to_dict(),
        "chunks": [(astuple(name), *others) for name, *others in (one.at for one in found)],
    }
    if make_selector(config.selector, config.selector_options).needs_question:
        parts["prompt"] = chunk_id(request.prompt_token_ids or ())
    if config.trace or not config.reuse_prefix:
        parts["request"] = request.request_id  # shared with nobody
    text = json.dumps(parts, sort_keys=True, default=list)
    return SALT_PREFIX + hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _vocabulary_of(vllm_config: VllmConfig) -> Vocabulary:
    """Load the model's tokenizer for the finder; raises ModelLoadError if there is none."""
    tokenizer = load_tokenizer(vllm_config.model_config.tokenizer)

    def is_blank(tokens: Sequence[int]) -> bool:
        return not tokens or str(tokenizer.decode(list(tokens))).isspace()

    return Vocabulary(is_blank, PromptEncoder(tokenizer).opening)


def identity_of(
    vllm_config: VllmConfig,
    settings: ConnectorSettings,
    keys: Sequence[int] = (),
    *,
    rank: int = 0,
) -> dict[str, Any]:
    """Return everything that a rank's KV depends on; keys: see ``key_traits``.

    Raises ModelLoadError when the model's weights are in no files on this machine.
    """
    model = vllm_config.model_config
    return model_identity(
        weights_in_files(model.model, model.dtype, model.revision),
        model.hf_config,
        model.dtype,
        keys=keys,
        rank=rank,
        ranks=vllm_config.parallel_config.tensor_parallel_size,
        precision=settings.store.precision,
    )
