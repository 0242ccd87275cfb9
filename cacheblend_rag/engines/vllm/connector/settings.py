"""ConnectorSettings: the settings of blending that are fixed when a vLLM server starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field

from cacheblend_rag.engines.vllm.middleware.keys import has_storers
from cacheblend_rag.settings import StoreConfig, names_of
from cacheblend_rag.settings.base import Positive, Ratio, Settings
from cacheblend_rag.settings.engine import Namespace
from cacheblend_rag.settings.options import Arguments
from cacheblend_rag.settings.profile import Profile, ProfileOption

if TYPE_CHECKING:
    from vllm.config import VllmConfig

FindMode = Literal["on", "asked", "off"]
"""In which requests chunks are searched for."""

CONNECTOR = "CacheBlendConnector"
MODULE = "cacheblend_rag.engines.vllm.connector"


def _profile(value: Any) -> Profile | None:
    return None if value is None else Profile.of(value)


class ConnectorSettings(Settings):
    """The settings of the connector, fixed when vLLM starts."""

    _noun: ClassVar[str] = "setting of the connector"

    store: Annotated[StoreConfig, BeforeValidator(StoreConfig.of)] = Field(
        default_factory=StoreConfig
    )
    """Where each worker keeps chunk KV."""
    namespace: Namespace = "default"
    """The namespace of all KV of this server."""
    tenants: bool = False
    """Whether clients' keys decide the namespace of each request (``serve --tenants``); requests
    that came past the access middleware then reuse nothing."""
    slice_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Seconds of work per step while other requests are decoding; None chooses by the device."""
    profile: Annotated[ProfileOption, BeforeValidator(_profile)] = None
    """What clients use where they give no settings of their own."""
    guard: Ratio = 0.0
    """Share of blended answers that clients' engines have compared with full prefill while vLLM is
    idle, unless they bring settings of their own; 0 is none."""
    find: FindMode = "on"
    """Whether stored chunks are found in the prompts of requests that bring no job: ``on`` in all,
    ``asked`` in those whose ``kv_transfer_params`` have a job of kind ``find``, ``off`` in none."""
    unconfirmed_context: bool | None = None
    """Whether KV computed in a document answers for a passage although nothing but the passage is
    in the prompt, as LeadInConfig says; by default yes, unless keys tell those who ask from those
    who store (``--tenants``, or CACHEBLEND_STORE_KEY in the environment)."""
    replicas: Positive = 1
    """Number of engines behind one address (data parallelism); it must be given, since they do not
    know of each other."""

    @property
    def takes_unconfirmed(self) -> bool:
        """``unconfirmed_context``, or its default."""
        if self.unconfirmed_context is not None:
            return self.unconfirmed_context
        return not (self.tenants or has_storers())

    @classmethod
    def of_vllm(cls, vllm_config: VllmConfig) -> Self:
        """Read them from vLLM's config."""
        transfer = vllm_config.kv_transfer_config
        return cls.from_extra_config(
            (transfer.kv_connector_extra_config if transfer else None) or {}
        )

    @classmethod
    def from_extra_config(cls, given: Mapping[str, Any]) -> Self:
        """Read ``kv_connector_extra_config``, where a store's settings stand beside the others."""
        known = names_of(cls) - {"store"} | names_of(StoreConfig)
        return cls(**StoreConfig.gather(Arguments(cls._noun, known).read(given)))

    def to_extra_config(self) -> dict[str, Any]:
        """Return plain JSON values; ``from_extra_config`` reads them."""
        plain = self.to_dict()
        return {**plain.pop("store"), **plain}

    def to_transfer_config(self) -> dict[str, Any]:
        """Return the arguments of vLLM's KVTransferConfig."""
        return {
            "kv_connector": CONNECTOR,
            "kv_connector_module_path": MODULE,
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": self.to_extra_config(),
        }
