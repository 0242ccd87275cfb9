"""The connector's results of jobs, and their conversion to plain JSON and back.

An answer comes from an untrusted server, so its fields are checked: a value of the wrong type makes
it a failure with a reason.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, TypeAlias, get_args, get_origin

from cacheblend_rag.engines.vllm.protocol.job import PARAMETER
from cacheblend_rag.engines.vllm.protocol.status import NO_CONNECTOR, ConnectorStatus
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.plain import field_types, read_plain
from cacheblend_rag.reason import Reason, ReasonCode
from cacheblend_rag.report import ChunkReport
from cacheblend_rag.trace import Trace

MOST_SECONDS = 1e6
MOST_NAMES = 32
"""Most phases, or tiers, that a result names."""
LONGEST_NAME = 64
INTERNAL = "internal"
"""Marks fields of results that are for the connector's scheduler side, not for clients."""


@dataclass(frozen=True)
class BlendResult:
    """The result of a blend; the fields are those of BlendReport and FusedPrompt.

    seconds: of the pass, by phase. starts: when phases began, in seconds since vLLM received the
    request. load_by_tier: the seconds of ``load``, by the tier that was waited for. trace: of the
    choices, if the job requests it. work_seconds: spent by the worker on the job.
    prefix_tokens: those before the first chunk that were read from vLLM's prefix cache.
    """

    chunks: tuple[ChunkReport, ...]
    selector: str = "none"
    ratio: float = 1.0
    compute_share: float = 1.0
    seconds: Mapping[str, float] = field(default_factory=dict)
    selector_reason: Reason | None = None
    work_seconds: float | None = None
    ratio_reason: Reason | None = None
    starts: Mapping[str, float] = field(default_factory=dict)
    trace: Trace | None = None
    prefix_tokens: int = 0
    load_by_tier: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class PrecomputeResult:
    """The result of precomputing: chunks computed, skipped (stored already) and refused.

    failed: how many of the refused may be stored another time. fresh, lost: which of the job's
    chunks were computed and stored, and which are not stored; only the connector uses them.
    """

    computed: int
    skipped: int = 0
    computed_tokens: int = 0
    refused: Mapping[Reason, int] = field(default_factory=dict)
    work_seconds: float | None = None
    failed: Mapping[Reason, int] = field(default_factory=dict)
    fresh: tuple[int, ...] = field(default=(), metadata={INTERNAL: True})
    lost: tuple[int, ...] = field(default=(), metadata={INTERNAL: True})


@dataclass(frozen=True)
class LookupResult:
    """The result of lookup. found: which of the job's keys are stored, as indices, in order.

    unknown: those that are not found while a tier fails.
    """

    found: tuple[int, ...]
    work_seconds: float | None = None
    unknown: tuple[int, ...] = ()


@dataclass(frozen=True)
class VerifyResult:
    """The result of verify: how many chunks were checked.

    unreadable: reasons of stored but unusable KV, by ``chunk id/context id``.
    """

    verified: int
    unreadable: Mapping[str, Reason] = field(default_factory=dict)
    work_seconds: float | None = None


@dataclass(frozen=True)
class EvictResult:
    """The result of evict: how many chunks were dropped; pending, noted: as in Evicted."""

    evicted: int
    work_seconds: float | None = None
    pending: tuple[str, ...] = ()
    noted: bool = True


@dataclass(frozen=True)
class CompareResult:
    """The result of compare: divergences in nats per token, as in Comparison."""

    divergence: float
    prefill_divergence: float = 0.0
    work_seconds: float | None = None


@dataclass(frozen=True)
class KeepResult:
    """The result of keep.

    kept: where the segments begin whose KV is stored, in order. refused: how many are not, by
    reason. compute_share: work of the pass, as a share of full prefill's; 0 if all were stored.
    """

    kept: tuple[int, ...]
    refused: Mapping[Reason, int] = field(default_factory=dict)
    compute_share: float = 0.0
    work_seconds: float | None = None


@dataclass(frozen=True)
class ReleaseResult:
    """The result of release: how many bytes were freed, on all ranks."""

    released: int
    work_seconds: float | None = None


@dataclass(frozen=True)
class PrefetchResult:
    """The result of prefetch: loading has begun; failures show when the chunks are used."""

    work_seconds: float | None = None


@dataclass(frozen=True)
class Declined:
    """The job was not begun; ordinary prefill answers.

    reason: why. chunks: the prompt's chunks, all missed, if they were looked up. prefix_tokens:
    those before the first chunk that vLLM's prefix cache holds. compute_share: work of what
    follows, as a share of the whole prompt's. seconds, starts: of asking the store, as of
    BlendResult. All are None if no worker had the job.
    """

    reason: Reason
    chunks: tuple[ChunkReport, ...] | None = None
    work_seconds: float | None = None
    prefix_tokens: int | None = None
    compute_share: float | None = None
    seconds: Mapping[str, float] | None = None
    starts: Mapping[str, float] | None = None


@dataclass(frozen=True)
class Failed:
    """The job failed; ordinary prefill answers. error: why."""

    error: Reason
    work_seconds: float | None = None


@dataclass(frozen=True)
class Late:
    """The request ended before its job: the result must be fetched later."""

    late: bool = True


Result: TypeAlias = (
    BlendResult
    | PrecomputeResult
    | CompareResult
    | KeepResult
    | LookupResult
    | VerifyResult
    | EvictResult
    | ReleaseResult
    | PrefetchResult
    | Declined
    | Failed
    | Late
    | ConnectorStatus
)

CANCELLED = Failed(Reason(ReasonCode.CANCELLED, "cancelled"))
NO_REPORT = Declined(Reason(ReasonCode.NO_ANSWER, "no such report"))
"""The answer to a ``report`` job with an unknown id."""
PREFIX_CACHE = "prefix cache"
"""The tier, in reports, of KV that vLLM's own prefix cache holds."""
TOLD_BY: Mapping[str, type[Any]] = {
    "late": Late,
    "active": ConnectorStatus,
    "error": Failed,
    "reason": Declined,
    "chunks": BlendResult,
    "computed": PrecomputeResult,
    "divergence": CompareResult,
    "kept": KeepResult,
    "found": LookupResult,
    "verified": VerifyResult,
    "evicted": EvictResult,
    "released": ReleaseResult,
}
"""The field that identifies each kind of result; the first match counts."""


def params_of(result: Result) -> dict[str, Any]:
    """Return plain JSON values for ``kv_transfer_params``."""
    hints = field_types(type(result))  # type: ignore[arg-type]  # a class is hashable
    told = {
        one.name: getattr(result, one.name)
        for one in fields(result)
        if INTERNAL not in one.metadata
    }
    plain = {name: _plain(value, hints[name]) for name, value in told.items() if value is not None}
    return {PARAMETER: plain}


def _plain(value: Any, hint: Any) -> Any:
    """Return a field's value as JSON: a reason, also a counted one, as [code, sentence]."""
    if isinstance(value, Reason):
        return [value.code.value, str(value)]
    if get_origin(hint) is Mapping:
        key, inner = get_args(hint)
        if key is Reason:
            return [[*_plain(reason, key), count] for reason, count in value.items()]
        return {name: _plain(one, inner) for name, one in value.items()}
    if is_dataclass(value):
        return {one.name: _plain(getattr(value, one.name), None) for one in fields(value)}
    if not isinstance(value, tuple):
        return value
    # vLLM's scheduler waits for this, and a trace has many thousand numbers.
    is_numbers = bool(value) and isinstance(value[0], int | float)
    return list(value) if is_numbers else [_plain(one, None) for one in value]


def result_of(params: Mapping[str, Any] | None) -> Result | None:
    """Read the result of a request; None without a connector's answer.

    An invalid result becomes a Failed with a reason.
    """
    sent = params.get(PARAMETER) if isinstance(params, Mapping) else None
    if not isinstance(sent, Mapping):
        return None
    kind = next((kind for name, kind in TOLD_BY.items() if name in sent), PrefetchResult)
    try:
        read: Result = read_plain(kind, sent)
        if isinstance(read, BlendResult | Declined):
            _check_times(read)
        if isinstance(read, EvictResult):
            _check_names("pending", read.pending)
    except (TypeError, ValueError, OverflowError, ConfigError) as error:
        why = f"the connector's answer cannot be read: {error!s:.100}"
        return Failed(Reason(ReasonCode.NO_ANSWER, why))
    return read


def _check_names(field: str, names: Collection[str]) -> None:
    if len(names) > MOST_NAMES or any(
        len(name) > LONGEST_NAME or not name.isprintable() for name in names
    ):
        raise ValueError(f"{field} holds too many or too long names, or unprintable ones")


def _check_times(told: BlendResult | Declined) -> None:
    """Raise ValueError unless the times of a result are possible."""
    by_tier = told.load_by_tier if isinstance(told, BlendResult) else {}
    for name, of in (("seconds", told.seconds), ("starts", told.starts), ("load_by_tier", by_tier)):
        _check_names(name, of or {})
        if any(not 0 <= value <= MOST_SECONDS for value in (of or {}).values()):
            raise ValueError(f"{name} must be between 0 and {MOST_SECONDS:,.0f} seconds")
    waited, whole = math.fsum(by_tier.values()), (told.seconds or {}).get("load", 0.0)
    if by_tier and not math.isclose(waited, whole, rel_tol=1e-6, abs_tol=1e-6):
        raise ValueError("load_by_tier does not add up to load")


def status_of(params: Mapping[str, Any] | None) -> ConnectorStatus:
    """Read the answer to a ``status`` job; any other answer is the reason for not blending."""
    match result_of(params):
        case ConnectorStatus() as status:
            return status
        case None:
            return ConnectorStatus(False, NO_CONNECTOR)
        case Failed(error=why) | Declined(reason=why) if why:
            return ConnectorStatus(False, why)
        case _:
            return ConnectorStatus(False, Reason(ReasonCode.NO_ANSWER, "no status came"))
