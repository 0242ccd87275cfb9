"""The connector's status: whether a vLLM blends, and if not, why."""

from __future__ import annotations

from dataclasses import dataclass, field

from cacheblend_rag.engines.model_sampling import ModelSampling
from cacheblend_rag.reason import Reason, ReasonCode

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
    and shard. wire: version of the job format. replicas: engines behind one address, each with its
    own memory. shared: whether they also keep chunk KV in one folder. namespace: its hash.
    read_only: whether its store is read-only. sampling: the model's own sampling settings; None
    from an older connector. profile: the one for clients without settings of their own, as JSON;
    "" is none. guard: the share of blended answers that engines compare with full prefill unless
    they are told otherwise; 0 is none. token_bytes: of one token's KV, on all ranks together.
    keeps_exact: whether KV that is stored and reused is what it was computed as, quantized neither
    in the store nor in vLLM's cache. compilations: of kernels while jobs ran on the first rank,
    after the start.

    Raises ValueError when there is no replica.
    """

    active: bool
    refusal: Reason | None = None
    identity: str = ""
    vllm: str = ""
    cacheblend_rag: str = ""
    wire: int = 0
    replicas: int = 1
    shared: bool = False
    tensor_parallel: int = 1
    attention: str = ""
    namespace: str = ""
    read_only: bool = False
    store: StoredKV = field(default_factory=StoredKV)
    sampling: ModelSampling | None = None
    profile: str = ""
    guard: float = 0.0
    token_bytes: int = 0
    keeps_exact: bool = False
    compilations: int = 0

    @property
    def problem(self) -> Reason | None:
        """Why nothing is blended; None where it is."""
        return None if self.active else self.refusal or NO_REFUSAL

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ValueError("replicas")
