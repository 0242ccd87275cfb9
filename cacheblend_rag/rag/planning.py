"""Plans a store: the size of a model's chunk KV, which tiers hold it, and which are fast enough.

This is arithmetic on a model's config and the given sizes, bandwidths and latencies: nothing is
measured, and no weights are loaded. The time to first token is that of loading all of a prompt's
chunk KV plus the given time of computing; an engine overlaps the two and is faster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

from cacheblend_rag.engines.model_config import BYTES_OF_PRIOR, kv_shape, served_dtype, text_config
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.kv.precision import scales
from cacheblend_rag.rag.estimating import BYTES_AROUND_CHUNK
from cacheblend_rag.settings import Precision
from cacheblend_rag.settings.sizes import read_bytes, read_seconds

PRECISIONS: tuple[Precision, ...] = get_args(Precision)


@dataclass(frozen=True)
class KVShape:
    """The dimensions that determine the size of chunk KV. itemsize: bytes per value as computed."""

    layers: int
    kv_heads: int
    head_dim: int
    itemsize: int

    @classmethod
    def of(cls, model: str, dtype: str, device: str | None) -> KVShape:
        """Return the shape of a model, from its config; raises ModelLoadError without one."""
        config = text_config(model)
        return cls(*kv_shape(config), itemsize=served_dtype(config, dtype, device).itemsize)

    def chunk_bytes(self, precision: Precision, tokens: int) -> int:
        """Return the size of a stored chunk, with its prior, scales and header."""
        values = 2 * self.layers * self.kv_heads * self.head_dim * tokens
        around = tokens * BYTES_OF_PRIOR + BYTES_AROUND_CHUNK
        if precision == "native":
            return values * self.itemsize + around
        return (
            values + self.layers * scales(self.kv_heads, tokens, self.head_dim, precision) + around
        )


@dataclass(frozen=True)
class PlannedTier:
    """A tier, as the user gives it. bandwidth: bytes per second. latency: seconds per prompt."""

    name: str
    capacity_bytes: int
    bandwidth: int
    latency: float = 0.0

    @classmethod
    def parse(cls, text: str) -> PlannedTier:
        """Parse ``disk=1TiB,2GiB,0.001``: name, capacity, bytes per second, seconds of latency.

        Raises ConfigError for any other form.
        """
        name, _, rest = text.partition("=")
        told = [part.strip().removesuffix("/s") for part in rest.split(",")]
        if not name or len(told) not in (2, 3) or not all(told):
            raise ConfigError(
                f"--tier {text!r:.100} must be NAME=CAPACITY,BANDWIDTH[,LATENCY], such as "
                "disk=1TiB,2GiB/s,0.001"
            )
        capacity = read_bytes(f"--tier {name}: capacity", told[0]) or 0
        bandwidth = read_bytes(f"--tier {name}: bandwidth", told[1]) or 0
        if not bandwidth:
            raise ConfigError(f"--tier {name}: bandwidth must be above 0")
        latency = read_seconds(f"--tier {name}: latency", told[2]) if len(told) == 3 else 0.0
        return cls(name, capacity, bandwidth, latency or 0.0)


@dataclass(frozen=True)
class Workload:
    """The corpus to store and the prompts to serve.

    corpus_tokens: of all chunks. prompt_tokens: of a prompt's chunks. compute_seconds: until the
    first token, without loading. ttft_seconds: the target of the total, None without one.
    Raises ConfigError when a number is too small.
    """

    corpus_tokens: int
    chunk_tokens: int = 512
    prompt_tokens: int = 4096
    compute_seconds: float = 0.0
    ttft_seconds: float | None = None

    def __post_init__(self) -> None:
        for name in ("corpus_tokens", "chunk_tokens", "prompt_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1")

    def chunks(self, tokens: int) -> int:
        """Return how many chunks hold so many tokens."""
        return -(-tokens // self.chunk_tokens)


@dataclass(frozen=True)
class TierPlan:
    """A tier's capacity and speed in one precision.

    chunks: how many fit. share: of the corpus. seconds: to the first token. is_fast: within the
    target.
    """

    tier: str
    chunks: int
    share: float
    seconds: float
    is_fast: bool

    @property
    def suffices(self) -> bool:
        """Whether it holds the whole corpus and is fast enough."""
        return self.is_fast and self.share >= 1


@dataclass(frozen=True)
class PrecisionPlan:
    """The size of chunk KV in one precision. tier: the last given one that suffices, or None."""

    precision: str
    bytes_per_token: float
    corpus_bytes: int
    prompt_bytes: int
    tiers: tuple[TierPlan, ...]
    tier: str | None


@dataclass(frozen=True)
class CapacityPlan:
    """A plan, by precision."""

    shape: KVShape
    workload: Workload
    precisions: tuple[PrecisionPlan, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        plain: Mapping[str, Any] = asdict(self)
        return {**plain["shape"], **plain["workload"], "precisions": [*plain["precisions"]]}


def plan_store(shape: KVShape, workload: Workload, tiers: Sequence[PlannedTier]) -> CapacityPlan:
    """Return the size of chunk KV and the tiers in each precision. tiers: fastest first."""
    plans = tuple(_of_precision(name, shape, workload, tiers) for name in PRECISIONS)
    return CapacityPlan(shape, workload, plans)


def _of_precision(
    precision: Precision, shape: KVShape, workload: Workload, tiers: Sequence[PlannedTier]
) -> PrecisionPlan:
    chunk = shape.chunk_bytes(precision, workload.chunk_tokens)
    prompt = chunk * workload.chunks(workload.prompt_tokens)
    plans = tuple(_of_tier(tier, chunk, prompt, workload) for tier in tiers)
    return PrecisionPlan(
        precision,
        chunk / workload.chunk_tokens,
        chunk * workload.chunks(workload.corpus_tokens),
        prompt,
        plans,
        next((plan.tier for plan in reversed(plans) if plan.suffices), None),
    )


def _of_tier(tier: PlannedTier, chunk: int, prompt: int, workload: Workload) -> TierPlan:
    room = tier.capacity_bytes // chunk
    seconds = tier.latency + prompt / tier.bandwidth + workload.compute_seconds
    target = workload.ttft_seconds
    share = min(1.0, room / workload.chunks(workload.corpus_tokens))
    return TierPlan(tier.name, room, share, seconds, target is None or seconds <= target)
