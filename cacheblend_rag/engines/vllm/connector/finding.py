"""Finds stored chunks in the prompts of requests without a job, and makes blend jobs for them."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cacheblend_rag.engines.catalog import Catalog, ComputedRun
from cacheblend_rag.engines.catalog_places import open_place, place_of
from cacheblend_rag.engines.finder import Finder
from cacheblend_rag.engines.found_chunk import FoundChunk, Vocabulary
from cacheblend_rag.engines.identity import model_identity, weights_in_files
from cacheblend_rag.engines.model_files import load_tokenizer
from cacheblend_rag.engines.vllm.connector.metrics import BlendStats
from cacheblend_rag.engines.vllm.connector.pending import Blend, Pending
from cacheblend_rag.engines.vllm.connector.prefix import Marks, Stretch
from cacheblend_rag.engines.vllm.connector.settings import ConnectorSettings
from cacheblend_rag.engines.vllm.namespaces import NO_NAMESPACE, are_told_apart, namespace_of
from cacheblend_rag.engines.vllm.protocol.job import Compare, Precompute, StoreJob, Wish
from cacheblend_rag.engines.vllm.protocol.result import (
    BlendResult,
    EvictResult,
    PrecomputeResult,
    Result,
)
from cacheblend_rag.errors import CacheBlendError
from cacheblend_rag.kv.chunk_kv import fingerprint
from cacheblend_rag.kv.mac import mac_of
from cacheblend_rag.prefill.policy import NO_CHUNK, config_for, too_little
from cacheblend_rag.reason import Miss, Reason, ReasonCode
from cacheblend_rag.settings import BlendConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

LONGEST_REASON = 500
MISSING: Reason = Miss.NOT_STORED
"""The miss reason of a chunk that is in no tier."""
SERVERS_OWN = Wish()
"""What requests without a wish get, where the server searches all prompts."""
NEVER = Reason(ReasonCode.UNSUPPORTED_REQUEST, "the server searches no prompts (find=off)")


class Tenants:
    """The namespaces of requests.

    Where keys decide them (``serve --tenants``), the access middleware gives each request its own.
    Elsewhere all have the server's.
    """

    def __init__(self, settings: ConnectorSettings) -> None:
        self.own = settings.namespace
        self.are_told_apart = are_told_apart(tenants=settings.tenants)

    def namespace_of(self, request: Any) -> str | None:
        """Return the namespace of vLLM's Request; None if the access middleware gave it none.

        Nothing may be reused for a request without one.
        """
        return namespace_of(request) if self.are_told_apart else self.own


class Finding:
    """Searches the prompts of requests, and follows what becomes of stored chunks.

    Args:
        finder: knows the stored chunks.
        settings: of the connector: which requests are searched, and how they are blended.
    """

    def __init__(self, finder: Finder, settings: ConnectorSettings) -> None:
        self.finder, self.mode = finder, settings.find
        self.tenants = Tenants(settings)
        profile = settings.profile
        self.config = profile.blended(BlendConfig()) if profile else BlendConfig()
        self._marks = Marks()

    @classmethod
    def of(cls, vllm_config: VllmConfig, settings: ConnectorSettings) -> Finding:
        """Make one whose chunks are kept beside their KV, if that outlives the process."""
        store = settings.store
        place = place_of(store) if settings.find != "off" else None

        def opened() -> Catalog:
            assert place is not None  # noqa: S101 (else it is not called)
            model = fingerprint(identity_of(vllm_config, settings), "")
            return Catalog(open_place(place, model), mac_of(), read_only=store.read_only)

        finder = Finder(
            opened if place else None,
            vocabulary=lambda: Vocabulary.of(load_tokenizer(vllm_config.model_config.tokenizer)),
            unconfirmed_context=settings.takes_unconfirmed,
            keeps_exact=_keeps_exact(vllm_config, settings),
        )
        return cls(finder, settings)

    def pending(self, request: Request, refusal: Reason | None, stats: BlendStats) -> Pending:
        """Return the state of a new request that brings no job.

        Args:
            request: vLLM's.
            refusal: why nothing is blended here, or None.
            stats: that a search is counted in.
        """
        try:
            wish = Wish.from_params(request.kv_transfer_params)
            config = self.config.with_changes(**wish.config) if wish else self.config
        except Exception as error:  # whatever it is, it must not end vLLM
            return Pending(reason=malformed(error), counts=True)
        is_asked, wish = wish is not None, wish or SERVERS_OWN
        if wish.kind != "find" or (not is_asked and self.mode != "on"):
            return Pending(answers=False, is_last=wish.kind == "idle")
        found: Pending | Reason | None = NEVER if self.mode == "off" else refusal
        found = found or obstacle_of(request)
        if found is None:
            try:
                found = self._find(request, wish, config, stats)
            except Exception:  # as above
                logger.exception("request %s is not searched for chunks", request.request_id)
                found = NO_CHUNK
        if isinstance(found, Reason):
            found = Pending(reason=found)
        found.answers, found.report_id = is_asked, wish.report_id
        found.counts = found.reason is None or (is_asked and found.reason != NO_CHUNK)
        return found

    def _find(
        self, request: Request, wish: Wish, config: BlendConfig, stats: BlendStats
    ) -> Pending | Reason:
        """Return the state of a request in whose prompt there are chunks, else why it is plain."""
        started = time.perf_counter()
        tokens = request.prompt_token_ids or []
        namespace = self.tenants.namespace_of(request)
        if namespace is None:
            return NO_NAMESPACE
        found = self._found(namespace, tokens, wish)
        config = config_for(config, found, len(tokens))
        is_stored = any(not one.is_missing for one in found)
        reusable = sum(one.tokens for one in found) if is_stored else 0
        refused = too_little(reusable, config.min_tokens)
        seconds = time.perf_counter() - started
        stats.record_found(0 if refused else reusable, seconds)
        logger.debug(
            "request %s: %d chunks found, %d of %d tokens, in %.2f ms",
            *(request.request_id, len(found), reusable, len(tokens), seconds * 1000),
        )
        if not found:
            return NO_CHUNK
        if refused:
            why, miss = refused
            told = (
                one.placed().report(MISSING if one.is_missing else miss or MISSING) for one in found
            )
            return Pending(result=BlendResult(why, chunks=tuple(told)))
        blend = Blend(found, config)
        return Pending(blend=blend, stretches=self.stretches(request, blend))

    def _found(
        self, namespace: str, tokens: Sequence[int], asked: Wish | Compare
    ) -> tuple[FoundChunk, ...]:
        conversation, until = asked.conversation, asked.until
        return tuple(self.finder.find(namespace, tokens, conversation=conversation, until=until))

    def compared(self, namespace: str, job: Compare) -> tuple[FoundChunk, ...]:
        """Return the chunks in the prompt of a comparison."""
        return self._found(namespace, job.tokens, job)

    def stretches(
        self, request: Request, blend: Blend, *, anew: bool = False
    ) -> tuple[Stretch, ...]:
        """Return how the blocks of found chunks are set apart; see Marks."""
        tokens = request.prompt_token_ids or ()
        return self._marks.stretches(
            request.request_id, tokens, blend.chunks, blend.config, anew=anew
        )

    def note_result(self, pending: Pending, result: Result) -> None:
        """Learn from a result which chunks are stored, and which are deleted."""
        namespace = pending.namespace
        if namespace is None:
            return
        match pending.job, result:
            case StoreJob() as job, EvictResult():
                self.finder.forget(namespace, job.lead_in, job.keys, job.conversation)
            case Precompute() as job, PrecomputeResult() if self.mode != "off":
                self.finder.learn(namespace, _run(job, result))
        if isinstance(result, BlendResult) and pending.blend is not None:
            told = zip(pending.work_found, result.chunks, strict=False)
            self.finder.note_missing(one.name for one, it in told if it.reason == MISSING)


def malformed(error: Exception) -> Reason:
    """Return why what a client has sent is left aside: whatever it is, it ends no other's work."""
    said = str(error) if isinstance(error, CacheBlendError) else type(error).__name__
    return Reason(ReasonCode.MALFORMED_JOB, f"malformed job: {said[:LONGEST_REASON]}")


def _run(job: Precompute, result: PrecomputeResult) -> ComputedRun:
    """Return the chunks of a precompute job."""
    return ComputedRun(
        job.lead_in,
        job.tokens,
        job.chunks,
        job.names(),
        job.context_start,
        result.fresh,
        result.lost,
        job.conversation,
    )


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


def _keeps_exact(vllm_config: VllmConfig, settings: ConnectorSettings) -> bool:
    """Whether KV is quantized neither in the store nor in vLLM's cache."""
    has_fp8_cache = str(vllm_config.cache_config.cache_dtype).startswith("fp8")
    return settings.store.precision == "native" and not has_fp8_cache


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
