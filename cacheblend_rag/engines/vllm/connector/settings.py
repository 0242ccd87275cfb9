"""ConnectorSettings: the one place that knows what a server can settle about blending."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_args

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.settings import Settings, StoreConfig, check_namespace, names_of
from cacheblend_rag.settings.options import Arguments

if TYPE_CHECKING:
    from vllm.config import VllmConfig

AttentionMode = Literal["auto", "native", "sdpa", "flex"]
"""Of recomputed rows; see PagedKV."""

CONNECTOR = "CacheBlendConnector"
MODULE = "cacheblend_rag.engines.vllm.connector"
STEP_TOKENS = 8192


@dataclass(frozen=True)
class ConnectorSettings(Settings):
    """What the connector is told when vLLM starts.

    Args:
        store: where each worker keeps chunk KV.
        namespace: of all KV here.
        asynchronous: blend between scheduler steps, so that neighbours keep decoding; always so
            where all layers have a sliding window.
        slice_seconds: work a step, while others are decoding; None is what suits the device.
        step_tokens: of synchronous work, tokens provided in one step; a request that would exceed
            them waits for the next.
        attention: of recomputed rows: ``auto``, ``native`` (vLLM's own), ``sdpa`` or ``flex``.
        replicas: of this engine behind one address (data parallelism); who starts them says so,
            since they do not know of each other.

    Raises:
        ConfigError: when a field is out of range.
    """

    _noun: ClassVar[str] = "setting of the connector"

    store: StoreConfig = field(default_factory=StoreConfig)
    namespace: str = "default"
    asynchronous: bool = True
    slice_seconds: float | None = None
    step_tokens: int = STEP_TOKENS
    attention: AttentionMode = "auto"
    replicas: int = 1

    def __post_init__(self) -> None:
        check_attention_mode(self.attention)
        check_namespace(self.namespace)
        for name in ("slice_seconds", "step_tokens", "replicas"):
            value = getattr(self, name)
            if value is None and name == "slice_seconds":
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                raise ConfigError(f"{name}={value!r} must be a number above 0")

    @classmethod
    def of_vllm(cls, vllm_config: VllmConfig) -> Self:
        """Read them from vLLM's config.

        Raises:
            ConfigError: for a name that is none of them, or a value out of range.
        """
        transfer = vllm_config.kv_transfer_config
        return cls.from_extra_config(
            (transfer.kv_connector_extra_config if transfer else None) or {}
        )

    @classmethod
    def from_extra_config(cls, given: Mapping[str, Any]) -> Self:
        """Read ``kv_connector_extra_config``, where a store's settings stand beside the others.

        Raises:
            ConfigError: for a name that is none of them, or a value out of range.
        """
        inside = names_of(StoreConfig)
        known = names_of(cls) - {"store"} | inside
        values = Arguments(cls._noun, known).read(given)
        store = {name: values.pop(name) for name in inside & values.keys()}
        return cls(store=StoreConfig(**store), **values)

    def to_extra_config(self) -> dict[str, Any]:
        """Return plain JSON values; ``from_extra_config`` reads them."""
        own = asdict(self)
        del own["store"]
        return {**self.store.to_dict(), **own}

    def to_transfer_config(self) -> dict[str, Any]:
        """Return what vLLM's KVTransferConfig is made of."""
        return {
            "kv_connector": CONNECTOR,
            "kv_connector_module_path": MODULE,
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": self.to_extra_config(),
        }


def check_attention_mode(name: Any) -> None:
    """Raise ConfigError unless ``name`` is an AttentionMode."""
    modes = get_args(AttentionMode)
    if name not in modes:
        raise ConfigError(f"attention={name!r} must be one of {', '.join(modes)}")
