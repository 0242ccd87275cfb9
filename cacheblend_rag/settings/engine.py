"""EngineConfig: which engine serves, and the settings that are fixed when it is opened.

GuardConfig: when production answers are compared with full prefill, and what follows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.settings.base import AsTuple, Ratio, Rising, Secret, Settings
from cacheblend_rag.settings.options import (
    AUTO,
    Arguments,
    check_engine_name,
    check_namespace,
    names_of,
)
from cacheblend_rag.settings.profile import (
    BlendOption,
    LeadInConfig,
    LeadInOption,
    Profile,
    ProfileOption,
)
from cacheblend_rag.settings.request import BlendConfig
from cacheblend_rag.settings.store import StoreConfig


def _own_name(value: Any) -> Any:
    """Return PyTorch's devices and dtypes by their names."""
    is_torch = type(value).__module__ == "torch"
    return str(value).removeprefix("torch.") if is_torch else value


Namespace = Annotated[str, BeforeValidator(check_namespace)]
_TEXT = WithJsonSchema({"type": "string"})
_NAMED = BeforeValidator(_own_name)


class GuardConfig(Settings):
    """How an engine watches the quality of its blended answers, and what it does about it."""

    _noun: ClassVar[str] = "setting of a guard"

    sample_share: Annotated[float, Field(gt=0, le=1)] = 0.01
    """Share of blended answers that are compared with full prefill, in idle time."""
    limit: Annotated[float, Field(gt=0, le=3)] = 0.1
    """Divergence from full prefill that is too much, in nats per token of the answer."""
    ratios: Annotated[tuple[Ratio, ...], AsTuple, Rising] = (0.3, 0.5)
    """Least recompute ratios, tried one after another while the divergence is above the limit;
    after the last one blending stops."""

    @classmethod
    def of(cls, value: GuardConfig | Mapping[str, Any] | float | None) -> Self:
        """As for all settings; a number is the share of answers."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return super().of(value)  # type: ignore[arg-type]
        if not 0 < value <= 1:
            raise ConfigError(
                f"guard={value!r} must be a share of answers, above 0 and up to 1, or settings"
            )
        return cls(sample_share=float(value))


StoreOption = Annotated[StoreConfig, BeforeValidator(StoreConfig.of)]
"""A StoreConfig, or a mapping of its fields."""
GuardOption = Annotated[GuardConfig, BeforeValidator(GuardConfig.of)]
"""A GuardConfig, a mapping of its fields, or the share of answers to compare."""


class EngineConfig(Settings):
    """Which engine serves, and the settings that are fixed when it is opened."""

    _noun: ClassVar[str] = "option of an engine"

    engine: Annotated[str, AfterValidator(check_engine_name)] = AUTO
    """``transformers`` (embedded), ``vllm`` (in this process), the URL of a server that
    ``cacheblend-rag serve`` started, or ``auto``."""
    model: Annotated[Any, _TEXT] = ""
    """A name (``smollm2``, a GGUF file, a folder in hub format, a hub name) or a loaded
    model (embedded engine only). With a URL it names the tokenizer, and "" is the model that the
    server loaded."""
    tokenizer: Annotated[Any, WithJsonSchema({"type": "null"})] = Field(default=None, repr=False)
    """The model's own by default; must be given with a loaded model."""
    instruction: Annotated[str | Callable[[Any], str], _TEXT] = ""
    """The text of prompts before their first chunk; lead-ins compute chunks after it. A function
    gets the model's tokenizer and returns the text."""
    namespace: Namespace = "default"
    """Tenants with different namespaces share neither KV nor known chunks."""
    profile: Annotated[ProfileOption, BeforeValidator(Profile.chosen)] = None
    """Settings of ``blend`` and ``lead_in`` that are not given there: ``quality``, ``balanced``,
    ``speed`` or a TOML file, such as `tune` writes; by default what the environment's
    CACHEBLEND_PROFILE names."""
    blend: BlendOption = Field(default_factory=BlendConfig)
    """The default for requests without one."""
    lead_in: LeadInOption = Field(default_factory=LeadInConfig)
    """The text that chunks are computed after."""
    store: StoreOption = Field(default_factory=StoreConfig)
    """Where their KV is kept. A server has its own store: with a URL, only the registry in
    ``kv_path`` is used."""
    fill_on_miss: bool = False
    """Compute and store registered chunks whose KV a request missed, when no request waits. Off by
    default, since this work continues after a call has returned, on a model that its owner may be
    using, and into a store that may be shared."""
    guard: GuardOption | None = None
    """How the quality of blended answers is watched: settings, or the share of answers that are
    compared. None is not at all, or what the server was started with."""
    device: Annotated[str | None, _NAMED] = None
    """Where the model runs, such as ``cpu`` or ``cuda``; fixed for a server."""
    dtype: Annotated[str | None, _NAMED] = None
    """Precision of the model's weights, such as ``bfloat16``; fixed for a server."""
    api_key: Annotated[
        Secret | None,
        BeforeValidator(Secret.of),
        WithJsonSchema({"anyOf": [{"type": "string", "writeOnly": True}, {"type": "null"}]}),
    ] = Field(default=None, repr=False, exclude=True)
    """The key that a server requires, by default the environment's CACHEBLEND_API_KEY; it is never
    printed or serialized."""

    @model_validator(mode="before")
    @classmethod
    def _take_profile(cls, values: dict[str, Any]) -> dict[str, Any]:
        profile = Profile.chosen(values.get("profile"))
        if profile is None:
            return values
        return {
            **values,
            "profile": profile,
            "blend": profile.blended(BlendConfig.of(values.get("blend"))),
            "lead_in": profile.led_in(LeadInConfig.of(values.get("lead_in"))),
        }

    @classmethod
    def gather(cls, **options: Any) -> Self:
        """Return the settings of options, which may also be a store's settings by their own names.

        Raises:
            ConfigError: for an unknown option, and for one that is given twice.
        """
        known = names_of(cls) | names_of(StoreConfig)
        return cls(**StoreConfig.gather(Arguments(cls._noun, known).read(options)))

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, without the key.

        Raises:
            ConfigError: if a model, a tokenizer or an instruction is not a text.
        """
        for name, value in (("model", self.model), ("instruction", self.instruction)):
            if not isinstance(value, str | Path):
                raise ConfigError(f"{name} is a {type(value).__name__}: only texts are serialized")
        if self.tokenizer is not None:
            raise ConfigError("tokenizer is given: only the model's own can be loaded again")
        return self.model_dump(mode="json", exclude={"tokenizer"})
