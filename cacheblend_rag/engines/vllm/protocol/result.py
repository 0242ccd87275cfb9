"""The connector's results of jobs and its status, and their conversion to plain JSON and back.

An answer comes from an untrusted server, so its fields are checked: a value of the wrong type makes
it a failure with a reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Self, TypeAlias, get_args

from pydantic import (
    AfterValidator,
    Field,
    FiniteFloat,
    GetPydanticSchema,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import core_schema

from cacheblend_rag.engines.sampling import ResolvedSampling
from cacheblend_rag.engines.vllm.protocol.job import PARAMETER, problem_of
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.reason import Reason, ReasonCode
from cacheblend_rag.report import BlendReport, ChunkReport, PrefillReport

MOST_SECONDS = 1e6
MOST_NAMES = 32
"""Most phases, or tiers, that a result names."""
LONGEST_NAME = 64
NOT_TOLD = {"fresh", "lost", "was_run"}
"""Fields of results that are not for clients."""


def _printable(name: str) -> str:
    if not name.isprintable():
        raise ValueError("must be printable")
    return name


def _counts_schema(_: Any, handler: Any) -> core_schema.CoreSchema:
    """Counts of reasons travel as [code, sentence, count]."""
    return core_schema.no_info_after_validator_function(
        lambda rows: {Reason(ReasonCode(code), said): count for code, said, count in rows},
        handler.generate_schema(list[tuple[str, str, int]]),
        serialization=core_schema.plain_serializer_function_ser_schema(
            lambda counts: [[one.code.value, str(one), count] for one, count in counts.items()]
        ),
    )


Counts = Annotated[Mapping[Reason, int], GetPydanticSchema(_counts_schema)]
Name = Annotated[str, Field(max_length=LONGEST_NAME), AfterValidator(_printable)]
Seconds = Annotated[
    dict[Name, Annotated[float, Field(ge=0, le=MOST_SECONDS)]], Field(max_length=MOST_NAMES)
]
"""Seconds by phase, or by tier."""
NO_CONNECTOR = Reason(
    ReasonCode.NO_CONNECTOR,
    "the server runs vLLM without the CacheBlend connector: start it with `cacheblend-rag serve`",
)

NO_REFUSAL = Reason(ReasonCode.NO_ANSWER, "the connector does not say why it blends nothing")


@dataclass(frozen=True)
class StoredKV:
    """The number and bytes of chunks in one worker's store; None while a tier cannot be asked."""

    chunks: int | None = 0
    bytes: int | None = 0


@dataclass(frozen=True)
class ConnectorStatus:
    """The status of a connector.

    active: whether it blends; refusal: why not. identity: a hash of the model's weights, precision
    and shard. replicas: engines behind one address, each with its own memory. shared: whether they
    also keep chunk KV in one folder. namespace: its hash. read_only: whether its store is read-
    only. sampling: the model's own sampling settings; None from an older connector. profile: the
    one for clients without settings of their own, as JSON; "" is none. guard: the share of blended
    answers that engines compare with full prefill unless they are told otherwise; 0 is none.
    token_bytes: of one token's KV, on all ranks together.
    """

    active: bool
    refusal: Reason | None = None
    identity: str = ""
    vllm: str = ""
    cacheblend_rag: str = ""
    replicas: Annotated[int, Field(ge=1)] = 1
    shared: bool = False
    tensor_parallel: int = 1
    namespace: str = ""
    read_only: bool = False
    store: StoredKV = field(default_factory=StoredKV)
    sampling: ResolvedSampling | None = None
    profile: str = ""
    guard: FiniteFloat = 0.0
    token_bytes: int = 0

    @property
    def problem(self) -> Reason | None:
        """Why nothing is blended; None where it is."""
        return None if self.active else self.refusal or NO_REFUSAL


@dataclass(frozen=True)
class BlendResult(PrefillReport):
    """What the connector did with a prompt.

    reason: why it began no pass, so that ordinary prefill answers; None if it did. seconds: of the
    pass, by phase, or of asking the store. starts: in seconds since vLLM received the request.
    prefix_tokens: those before the first chunk that were read from vLLM's prefix cache.
    work_seconds: spent by the worker on it. The others are as in PrefillReport.
    """

    chunks: tuple[ChunkReport, ...] = ()
    ratio: FiniteFloat = 1.0
    compute_share: FiniteFloat = 1.0
    seconds: Seconds = field(default_factory=dict)
    starts: Seconds = field(default_factory=dict)
    load_by_tier: Seconds = field(default_factory=dict)
    work_seconds: FiniteFloat | None = None

    @classmethod
    def of(cls, report: PrefillReport, **changes: Any) -> Self:
        """Return a report's fields as a result, but for some changes."""
        told = {each.name: getattr(report, each.name) for each in fields(PrefillReport)}
        return cls(**{**told, "chunks": tuple(report.chunks), **changes})


@dataclass(frozen=True)
class PrecomputeResult:
    """The result of precomputing: chunks computed, skipped (stored already) and refused.

    failed: how many of the refused may be stored another time. fresh, lost: which of the job's
    chunks were computed and stored, and which are not stored; only the connector uses them.
    """

    computed: int
    skipped: int = 0
    computed_tokens: int = 0
    refused: Counts = field(default_factory=dict)
    failed: Counts = field(default_factory=dict)
    fresh: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()


@dataclass(frozen=True)
class LookupResult:
    """The result of lookup. found: which of the job's keys are stored, as indices, in order.

    unknown: those that are not found while a tier fails.
    """

    found: tuple[int, ...]
    unknown: tuple[int, ...] = ()

    @classmethod
    def of(cls, stored: Sequence[bool | None]) -> Self:
        """Return the result for keys that are stored, are not, or cannot be told (None)."""
        found, unknown = (
            tuple(index for index, there in enumerate(stored) if there is kind)
            for kind in (True, None)
        )
        return cls(found, unknown=unknown)


@dataclass(frozen=True)
class VerifyResult:
    """The result of verify: how many chunks were checked.

    unreadable: reasons of stored but unusable KV, by ``chunk id/context id``.
    """

    verified: int
    unreadable: Mapping[str, Reason] = field(default_factory=dict)


@dataclass(frozen=True)
class EvictResult:
    """The result of evict: how many chunks were dropped; pending, noted: as in Evicted."""

    evicted: int
    pending: Annotated[tuple[Name, ...], Field(max_length=MOST_NAMES)] = ()
    noted: bool = True


@dataclass(frozen=True)
class CompareResult:
    """The result of compare: divergences in nats per token, as in Comparison."""

    divergence: FiniteFloat
    prefill_divergence: FiniteFloat = 0.0


@dataclass(frozen=True)
class ReleaseResult:
    """The result of release: how many bytes were freed, on all ranks."""

    released: int


@dataclass(frozen=True)
class PrefetchResult:
    """The result of prefetch: loading has begun; failures show when the chunks are used."""


@dataclass(frozen=True)
class Failed:
    """The job was refused or failed; ordinary prefill answers. error: why."""

    error: Reason
    work_seconds: FiniteFloat | None = None


@dataclass(frozen=True)
class Late:
    """The request ended before its job: the result must be fetched later."""

    late: bool = True


Result: TypeAlias = (
    Late
    | ConnectorStatus
    | Failed
    | BlendResult
    | PrecomputeResult
    | CompareResult
    | LookupResult
    | VerifyResult
    | EvictResult
    | ReleaseResult
    | PrefetchResult
)

CANCELLED = Failed(Reason(ReasonCode.CANCELLED, "cancelled"))
RANK_FAILED = Failed(Reason(ReasonCode.FAILED, "blending failed on another rank"))
NO_REPORT = Failed(Reason(ReasonCode.NO_ANSWER, "no such report"))
"""The answer to a ``report`` job with an unknown id."""
TOLD_BY: Mapping[str, type[Any]] = {
    **{fields(kind)[0].name: kind for kind in get_args(Result) if fields(kind)},
    "chunks": BlendResult,
}
"""A field that identifies each kind of result; the first match counts."""
_ADAPTERS: Mapping[Any, TypeAdapter[Any]] = {kind: TypeAdapter(kind) for kind in get_args(Result)}


def params_of(result: Result) -> dict[str, Any]:
    """Return plain JSON values for ``kv_transfer_params``."""
    brief = isinstance(result, BlendResult) and not result.chunks  # then the reason alone
    plain = _ADAPTERS[type(result)].dump_python(
        result, mode="json", exclude=NOT_TOLD, exclude_defaults=brief
    )
    return {PARAMETER: {name: value for name, value in plain.items() if value is not None}}


def result_of(params: Mapping[str, Any] | None) -> Result | None:
    """Read the result of a request; None without a connector's answer.

    An invalid result becomes a Failed with a reason.
    """
    sent = params.get(PARAMETER) if isinstance(params, Mapping) else None
    if not isinstance(sent, Mapping):
        return None
    kind = next((kind for name, kind in TOLD_BY.items() if name in sent), PrefetchResult)
    try:
        read: Result = _ADAPTERS[kind].validate_python(dict(sent))
        if isinstance(read, BlendResult):
            _check_load(read)
        return read
    except ValidationError as error:
        said = problem_of(error)
    except (ConfigError, ValueError) as error:
        said = str(error)
    why = f"the connector's answer cannot be read: {said:.100}"
    return Failed(Reason(ReasonCode.NO_ANSWER, why))


def _check_load(told: BlendResult) -> None:
    waited, whole = math.fsum(told.load_by_tier.values()), told.seconds.get("load", 0.0)
    if told.load_by_tier and not math.isclose(waited, whole, rel_tol=1e-6, abs_tol=1e-6):
        raise ValueError("load_by_tier does not add up to load")


def result_of_report(report: BlendReport) -> BlendResult:
    """Return what an engine did with a prompt, by its report, as a connector tells it."""
    seconds = {
        phase: value
        for phase, value in vars(report.seconds).items()
        if isinstance(value, float) and phase not in {"find", "tokenize", "first_token", "decode"}
    }
    return BlendResult(
        reason=None if report.blended else report.reason or NO_REFUSAL,
        chunks=report.chunks,
        selector=report.selector,
        ratio=report.recompute_ratio,
        compute_share=report.compute_share,
        seconds=seconds,
        selector_reason=report.selector_reason,
        ratio_reason=report.ratio_reason,
        starts={
            phase: value
            for phase, value in vars(report.starts).items()
            if value and phase in seconds
        },
        trace=report.trace,
        prefix_tokens=report.prefix_tokens,
        early_kv_bytes=report.early_kv_bytes,
        load_by_tier=dict(report.seconds.load_by_tier),
    )


def joined(one: Result, other: Result) -> Result:
    """Return the result of two workers that did the same job: stored is what both have stored."""
    match one, other:
        case Failed(error=why), Failed() if why == RANK_FAILED.error:
            return other
        case (Failed(), _) | (_, Failed()):
            return one if isinstance(one, Failed) else other
        case LookupResult(), LookupResult():
            known = [{*each.found, *each.unknown} for each in (one, other)]
            unknown = {*one.unknown, *other.unknown}
            there = known[0] & known[1]
            return LookupResult(
                tuple(sorted(there - unknown)), unknown=tuple(sorted(there & unknown))
            )
        case VerifyResult(), VerifyResult():
            return replace(one, unreadable={**one.unreadable, **other.unreadable})
        case EvictResult(), EvictResult():
            pending = tuple(dict.fromkeys((*one.pending, *other.pending)))
            most = max(one.evicted, other.evicted)
            return EvictResult(most, pending=pending, noted=one.noted and other.noted)
        case ReleaseResult(), ReleaseResult():
            return ReleaseResult(one.released + other.released)
        case PrecomputeResult(), PrecomputeResult():
            lost = {*one.lost, *other.lost}
            fresh = {*one.fresh, *other.fresh} - lost
            told = min(one, other, key=lambda each: (each.computed + each.skipped, -each.computed))
            return replace(told, fresh=tuple(sorted(fresh)), lost=tuple(sorted(lost)))
        case _:
            return one
