"""The base of components of other frameworks that open an engine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from copy import copy
from functools import cache
from typing import Annotated, Any, ClassVar, Self, cast, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    InstanceOf,
    PlainSerializer,
    PrivateAttr,
    SecretStr,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    create_model,
)

from cacheblend_rag.engines.base import Engine
from cacheblend_rag.engines.source import EngineSource
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.settings import (
    BlendConfig,
    EngineConfig,
    GuardConfig,
    LeadInConfig,
    Profile,
    Settings,
    StoreConfig,
    names_of,
)
from cacheblend_rag.settings.base import Secret
from cacheblend_rag.settings.options import Arguments, describe_errors


def _plain(config: Settings) -> dict[str, Any]:
    return config.to_dict()


def _blend_config(given: Any) -> Any:
    return BlendConfig.of(given) if isinstance(given, Mapping) else given


def _lead_in(given: Any) -> Any:
    return LeadInConfig.of(given) if isinstance(given, Mapping | str) else given


def _guard(given: Any) -> Any:
    return GuardConfig.of(given) if isinstance(given, Mapping | float | int) else given


BlendOption = Annotated[
    InstanceOf[BlendConfig], BeforeValidator(_blend_config), PlainSerializer(_plain)
]
"""A BlendConfig, or a dict of its fields."""
LeadInOption = Annotated[
    InstanceOf[LeadInConfig], BeforeValidator(_lead_in), PlainSerializer(_plain)
]
"""A LeadInConfig, a dict of its fields, or its kind."""


GuardOption = Annotated[InstanceOf[GuardConfig], BeforeValidator(_guard), PlainSerializer(_plain)]
"""A GuardConfig, a dict of its fields, or the share of answers to compare."""


class CheckedOptions(BaseModel):
    """Options whose errors are one line without values.

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
        return _arguments(cls).read(options)


class EngineComponent(CheckedOptions):
    """The settings of an engine, and the engine, opened on first use.

    A subclass gives the kind of engine, the model and the instruction names of its own
    (``_own_options``) and sets ``_source``. The class that ``storing`` returns has a store's
    settings as fields; ``store=`` sets them all at once.
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
    def storing(cls, shown: Collection[str]) -> type[Self]:
        """Return this class with the fields of StoreConfig, validated as a store validates them.

        Args:
            shown: the names of fields that are serialized and shown. The others may hold private
                values, or mean nothing elsewhere.
        """
        fields = {name: _store_field(name, name in shown) for name in StoreConfig.model_fields}
        return create_model(f"{cls.__name__}WithStore", __base__=cls, **cast("Any", fields))

    @classmethod
    def _read(cls, options: dict[str, Any]) -> dict[str, Any]:
        return _with_profile(StoreConfig.spread(super()._read(options)))

    @property
    def store(self) -> StoreConfig:
        """The settings of the store of an engine that is opened here."""
        return StoreConfig(**{name: getattr(self, name) for name in names_of(StoreConfig)})

    @property
    def is_open(self) -> bool:
        """Whether the engine is open already, so that nothing is left to load."""
        return self._source.is_open

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


@cache
def _arguments(options: type[CheckedOptions]) -> Arguments:
    """Return the names that a class takes, by field and by alias."""
    named = {name for field, info in options.model_fields.items() for name in (field, info.alias)}
    known = {name for name in named if name}
    if issubclass(options, EngineComponent):
        known.add("store")
    return Arguments.holding(f"option of {options.__name__}", known, options._inside)


def _with_profile(options: dict[str, Any]) -> dict[str, Any]:
    """Return options with the settings of the profile that they, or the environment, name.

    An open engine has its own.
    """
    is_open = any(isinstance(value, Engine) for value in options.values())
    named = options.get("blend_profile")
    profile = named and Profile.of(named) if is_open else Profile.chosen(named)
    if not profile:
        return options
    return {
        **options,
        "blend_profile": str(named) if named else None,
        "blend_config": profile.blended(BlendConfig.of(options.get("blend_config"))),
        "lead_in": profile.led_in(LeadInConfig.of(options.get("lead_in"))),
    }


def _store_field(name: str, shown: bool) -> tuple[Any, Any]:
    """Return a field of StoreConfig as one of a component, for ``create_model``."""
    own = StoreConfig.model_fields[name]
    is_number = not {int, float}.isdisjoint(get_args(own.annotation))
    bounded = Annotated[own.annotation, Field(ge=0)] if is_number else own.annotation
    field = Field(default=own.default, description=own.description, exclude=not shown, repr=shown)
    return Annotated[bounded, WrapValidator(_reader(name))], field


def _reader(name: str) -> Callable[[Any, ValidatorFunctionWrapHandler], Any]:
    """Return a validator that reads a field as StoreConfig does, and raises pydantic's errors."""

    def read(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        try:
            return getattr(StoreConfig(**{name: value}), name)
        except ConfigError:
            validate(value)
            raise

    return read
