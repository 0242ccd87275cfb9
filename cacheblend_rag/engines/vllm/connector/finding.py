"""Finds stored chunks in the prompts of requests without a job, and makes blend jobs for them."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cacheblend_rag.engines.catalog import Catalog
from cacheblend_rag.engines.catalog_places import open_place, place_of
from cacheblend_rag.engines.finder import Finder, Run, Span
from cacheblend_rag.engines.found_chunk import FoundChunk, Vocabulary
from cacheblend_rag.engines.identity import model_identity, weights_in_files
from cacheblend_rag.engines.model_files import load_tokenizer
from cacheblend_rag.engines.vllm.connector.marks import Marks, Stretch
from cacheblend_rag.engines.vllm.connector.metrics import BlendStats
from cacheblend_rag.engines.vllm.connector.pending import Pending
from cacheblend_rag.engines.vllm.connector.settings import ConnectorSettings
from cacheblend_rag.engines.vllm.connector.tenants import NO_NAMESPACE, Tenants
from cacheblend_rag.engines.vllm.protocol.job import (
    PARAMETER,
    BlendJob,
    FindJob,
    SentChunk,
)
from cacheblend_rag.engines.vllm.protocol.result import (
    BlendResult,
    Declined,
    EvictResult,
    Failed,
    PrecomputeResult,
    Result,
)
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.kv.chunk_kv import chunk_id, fingerprint, namespace_id
from cacheblend_rag.kv.mac import mac_of
from cacheblend_rag.prefill.policy import NO_CHUNK, NOT_STORED, too_little
from cacheblend_rag.reason import Reason, ReasonCode
from cacheblend_rag.report import ChunkReport, MissReason
from cacheblend_rag.settings import BlendConfig
from cacheblend_rag.text.encoder import PromptEncoder

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

LONGEST_REASON = 500
MISSING: MissReason = "not stored"
"""The miss reason of a chunk that is in no tier."""
NEVER = Reason(ReasonCode.UNSUPPORTED_REQUEST, "the server searches no prompts (serve --find off)")


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
        self._gives_up = False

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
            vocabulary=lambda: _vocabulary_of(vllm_config),
            unconfirmed_context=settings.takes_unconfirmed,
        )
        return cls(finder, settings)

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
        found = tuple(self.finder.find(namespace, tokens))
        stored = [one for one in found if not one.is_missing]
        reusable = sum(one.end - one.start for one in found) if stored else 0
        refused = too_little(reusable, config.min_tokens) if found else (NO_CHUNK, None)
        seconds = time.perf_counter() - started
        stats.record_found(0 if refused else reusable, seconds)
        logger.debug(
            "request %s: %d chunks found, %d of %d tokens, in %.2f ms",
            *(request.request_id, len(found), reusable, len(tokens), seconds * 1000),
        )
        if found and not stored:
            missed = tuple(_missed(one) for one in found)
            return Pending(None, result=Declined(NOT_STORED, missed))
        if refused:
            return refused[0]
        sent = tuple(map(_sent, found))
        assert sent[0].lead_in is not None  # noqa: S101 (each has its own)
        job = BlendJob("blend", sent[0].lead_in, sent, config=config)
        return Pending(job, found=found, stretches=self.stretches(request, found, config))

    def stretches(
        self,
        request: Request,
        found: Sequence[FoundChunk],
        config: BlendConfig,
        *,
        anew: bool = False,
    ) -> tuple[Stretch, ...]:
        """Return how the blocks of found chunks are set apart; see Marks."""
        tokens = request.prompt_token_ids or ()
        return self._marks.stretches(request.request_id, tokens, found, config, anew=anew)

    def mark_of_deleted(self, pending: Pending, request: Request) -> str:
        """Return what a blend's blocks depend on beside the job that it brought: deletions."""
        job = pending.job
        if job is None or pending.namespace is None or not self.finder.deletions.happened:
            return ""
        namespace, tokens = namespace_id(pending.namespace), request.prompt_token_ids or ()
        numbers = [
            self.finder.deletions.number(namespace, chunk_id(chunk.own_tokens(tokens)))
            for chunk in job.chunks
            if not chunk.turn
        ]
        return f" {numbers}" if any(numbers) else ""

    def note_result(self, pending: Pending, result: Result) -> None:
        """Learn from the result of a job which chunks are stored, and which are deleted."""
        job, namespace = pending.job, pending.namespace
        if job is None or namespace is None:
            return
        if job.is_of_turns:
            return  # they are found by their conversation alone
        if isinstance(result, EvictResult):
            self.finder.forget(namespace, job.lead_in, job.keys)
        if self.mode == "off":
            return
        match result:
            case PrecomputeResult() if job.kind == "precompute":
                self.finder.learn(namespace, _run(job, result))
            case BlendResult() | Declined() if pending.found:
                told = zip(pending.work_found, result.chunks or (), strict=False)
                self.finder.note_missing(one.name for one, it in told if it.reason == MISSING)
            case Failed(error=why) if pending.found and why.code.startswith("unsupported_"):
                self._gives_up = True  # the worker blends nothing, ever


def _run(job: BlendJob, result: PrecomputeResult) -> Run:
    """Return the chunks of a precompute job."""
    return Run(
        job.lead_in,
        job.tokens,
        [Span(one.start, one.end, one.context_id) for one in job.chunks],
        job.chunks[0].context_start,
        result.fresh,
        result.lost,
    )


def _sent(found: FoundChunk) -> SentChunk:
    """Return a found chunk as jobs name it, with its own lead-in."""
    return SentChunk(
        found.start,
        found.end,
        found.name.context_id,
        protected=found.protected,
        before=found.before,
        after=found.after,
        lead_in=found.name.lead_in,
    )


def _missed(found: FoundChunk) -> ChunkReport:
    """Return the report of a chunk that the store lacked just now."""
    edges = len(found.before) + len(found.after)
    tokens = found.end - found.start
    own = found.name.chunk_id
    return ChunkReport(own, found.start, tokens, hit=False, reason=MISSING, edge_tokens=edges)


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
