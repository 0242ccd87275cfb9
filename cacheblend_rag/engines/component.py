"""The base of components of other frameworks that open an engine."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any, ClassVar, Self

from pydantic import BaseModel, Field, PrivateAttr, SecretStr, ValidationError, model_validator

from cacheblend_rag.engines.base import Engine
from cacheblend_rag.engines.source import EngineSource
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.settings import (
    BlendConfig,
    EngineConfig,
    GuardConfig,
    LeadInConfig,
    Profile,
    StoreConfig,
    names_of,
)
from cacheblend_rag.settings.base import Secret
from cacheblend_rag.settings.engine import BlendOption, GuardOption, LeadInOption, StoreOption
from cacheblend_rag.settings.options import Arguments, describe_errors


class CheckedOptions(BaseModel):
    """Options whose errors are one line.

    Raises:
        ConfigError: for an option that is invalid or unknown.
    """

    _inside: ClassVar[Mapping[str, type[Any]]] = {
        "blend_config": BlendConfig,
        "lead_in": LeadInConfig,
        "guard": GuardConfig,
    }
    """Options that are settings themselves; their fields are not options of their own."""

    def __init__(self, **options: Any) -> None:
        try:
            super().__init__(**self._read(options))
        except ValidationError as error:
            raise ConfigError(describe_errors(error.errors(include_input=False))) from None

    @classmethod
    def _read(cls, options: dict[str, Any]) -> dict[str, Any]:
        """Return options by their own names; raises ConfigError for unknown ones."""
        return Arguments.holding(f"option of {cls.__name__}", cls._names(), cls._inside).read(
            options
        )

    @classmethod
    def _names(cls) -> frozenset[str]:
        """Return the names that options are given by."""
        fields = cls.model_fields
        return frozenset(fields).union(one.alias for one in fields.values() if one.alias)


class EngineComponent(CheckedOptions):
    """The settings of an engine, and the engine, opened on first use.

    A subclass gives the kind of engine, the model and the instruction names of its own
    (``_own_options``) and sets ``_source``. A store's settings are given as a whole, ``store=``,
    or by their own names.
    """

    namespace: str = Field(
        default="default", description="Tenants with different namespaces never share KV."
    )
    blend_profile: str | None = Field(
        default=None,
        description="Settings of blend_config and lead_in that are not given there: 'quality', "
        "'balanced', 'speed' or a TOML file; by default CACHEBLEND_PROFILE's.",
        exclude=True,
    )
    blend_config: BlendOption | None = Field(
        default=None,
        description="How stored KV is fused: a BlendConfig or its fields; the engine's by default.",
    )
    lead_in: LeadInOption | None = Field(
        default=None,
        description="The text that chunks are computed after: a LeadInConfig, its fields or kind.",
    )
    store: StoreOption = Field(
        default=StoreConfig(),
        description="Where KV is kept: a StoreConfig or its fields.",
        exclude=True,
        repr=False,
    )
    dtype: str | None = Field(default=None, description="Precision of the model's weights.")
    fill_on_miss: bool = Field(
        default=False,
        description="Compute known chunks whose KV was missed, while no request waits.",
        exclude=True,
    )
    guard: GuardOption | None = Field(
        default=None,
        description="How the quality of blended answers is watched: a GuardConfig, its fields, or "
        "the share of answers that are compared.",
        exclude=True,
    )
    device: str | None = Field(default=None, description="Where the model runs.", exclude=True)
    api_key: SecretStr | None = Field(default=None, description="A server's key.", exclude=True)

    _source: EngineSource = PrivateAttr(default_factory=EngineSource)

    @classmethod
    def _names(cls) -> frozenset[str]:
        return super()._names() | names_of(StoreConfig)

    @classmethod
    def _read(cls, options: dict[str, Any]) -> dict[str, Any]:
        return StoreConfig.gather(super()._read(options))

    @model_validator(mode="before")
    @classmethod
    def _take_profile(cls, options: dict[str, Any]) -> dict[str, Any]:
        """Lay settings over those of the profile that the options, or the environment, name.

        An open engine has its own lead-in, and takes no profile from the environment.
        """
        named = options.get("blend_profile")
        is_open = any(isinstance(value, Engine) for value in options.values())
        profile = Profile.chosen(named) if named or not is_open else None
        if profile is None:
            return options
        taken: dict[str, Any] = {"blend_profile": str(named) if named else None}
        taken["blend_config"] = profile.blended(BlendConfig.of(options.get("blend_config")))
        if not is_open:
            taken["lead_in"] = profile.led_in(LeadInConfig.of(options.get("lead_in")))
        return {**options, **taken}

    @property
    def is_open(self) -> bool:
        """Whether the engine is open already, so that nothing is left to load."""
        return self._source.is_open

    @property
    def blending(self) -> BlendConfig:
        """How KV is fused in calls that do not say; a given engine's own config by default."""
        given = self._source.engine if self._source.was_given else None
        return self.blend_config or (given.config if given else BlendConfig())

    def _own_options(self) -> dict[str, Any]:
        """Return the options of EngineConfig for which a framework has its own fields."""
        raise NotImplementedError

    def _engine_config(self) -> EngineConfig:
        """Return the settings that the engine is opened with."""
        return EngineConfig(
            namespace=self.namespace,
            profile=Profile.chosen(self.blend_profile),
            blend=BlendConfig.of(self.blend_config),
            lead_in=LeadInConfig.of(self.lead_in),
            store=self.store,
            fill_on_miss=self.fill_on_miss,
            guard=self.guard,
            device=self.device,
            dtype=self.dtype,
            api_key=Secret.of(self.api_key.get_secret_value() if self.api_key else None),
            **self._own_options(),
        )

    def __copy__(self) -> Self:
        copied = super().__copy__()
        copied._source = copy(self._source)
        return copied

    def __getstate__(self) -> dict[Any, Any]:
        """Refuse to pickle objects that another process could not open, and leave out the key."""
        self._source.check_portable()
        state = super().__getstate__()
        return {**state, "__dict__": {**state["__dict__"], "api_key": None}}
