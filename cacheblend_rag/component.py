"""The base of components of other frameworks, and their engines: given ones, or opened ones."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from copy import copy
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar, Self
from weakref import WeakValueDictionary

from pydantic import BaseModel, Field, PrivateAttr, SecretStr, model_validator

from cacheblend_rag.engines.base import Engine
from cacheblend_rag.engines.factory import open_engine
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.settings import (
    ENGINES,
    BlendConfig,
    EngineConfig,
    GuardConfig,
    LeadInConfig,
    Profile,
    StoreConfig,
    names_of,
)
from cacheblend_rag.settings.base import CheckedOptions, Secret
from cacheblend_rag.settings.engine import GuardOption, StoreOption
from cacheblend_rag.settings.options import check_engine_name
from cacheblend_rag.settings.profile import BlendOption, LeadInOption

OF_REQUESTS = frozenset({"engine", "profile", "blend", "api_key"})
"""Fields of EngineConfig that may be combined with a given engine."""
NOT_SHARED = frozenset({"blend", "profile", "fill_on_miss", "guard"})
"""Fields that sources with one engine may differ in; of a profile, the lead-in counts."""
SETTLED = names_of(EngineConfig) - OF_REQUESTS
OPENED_BY = ("engine", "engine_source", *sorted(SETTLED - NOT_SHARED))
"""Options that components which may share an engine have in common."""

_opened: WeakValueDictionary[tuple[object, ...], Engine] = WeakValueDictionary()
_opening = Lock()


class _Kept:
    engine: Engine | None = None


_kept: WeakValueDictionary[tuple[object, ...], _Kept] = WeakValueDictionary()
"""By options of components, which hold it: the engine that one of them opened last."""


class EngineSource:
    """A given engine, or one that is opened once, on first use.

    Sources with equal settings share one engine in a process; settings of requests do not count,
    and one that fills on miss does so for all. It lives as long as one of their components, also of
    those that have not asked yet. An engine that was opened here stays out of copies and pickles,
    which open it by their own settings.

    Attributes:
        engine: None if it is not open yet.
    """

    def __init__(self, engine: Engine | None = None) -> None:
        """Make a source; engine: an open one, if there is one."""
        self.engine = engine
        self.was_given = engine is not None
        self._kept = _Kept()

    @classmethod
    def of(cls, engine: object, model: object, *, example: str) -> Self:
        """Return the source for the values of options ``engine=`` and ``model=``.

        Nothing is opened.

        Args:
            engine: an open engine, the name of a kind of engine, or a server's URL.
            model: a name, a folder or a loaded model; a server needs none.
            example: an expression for an open engine, for the error.

        Raises:
            ConfigError: when one is none of these.
        """
        if isinstance(engine, Engine):
            return cls(engine)
        if not isinstance(engine, str):
            raise ConfigError(
                f"engine is a {type(engine).__name__}: give an open engine, such as {example}, "
                f"or {', '.join(ENGINES)} or a server's URL"
            )
        check_engine_name(engine)
        if model in (None, "") and "://" not in engine:
            raise ConfigError(f"model={model!r}: name a model, or give engine= an engine or a URL")
        if not isinstance(model, str | Path | None) and not hasattr(model, "name_or_path"):
            raise ConfigError(
                f"model is a {type(model).__name__}: give a name, a folder or a loaded model, or "
                f"engine= an open engine, such as {example}"
            )
        return cls()

    def keep_for(self, component: EngineComponent) -> None:
        """Keep the engine open while any component with the same options exists."""
        options = (vars(component).get(name) for name in OPENED_BY)
        plain = str | Path | BaseModel | None  # no loaded model, whose text is long
        told = (repr(one) if isinstance(one, plain) else id(one) for one in options)
        self._kept = _kept.setdefault((os.getpid(), *told), self._kept)

    def open(self, settings: Callable[[], EngineConfig]) -> Engine:
        """Return the engine.

        Args:
            settings: called once, if there is no engine yet.

        Raises:
            CacheBlendError: as ``open_engine``.
        """
        if self.engine is None:
            with _opening:
                self.engine = self._kept.engine = self.engine or _open(settings())
        return self.engine

    async def aopen(self, settings: Callable[[], EngineConfig]) -> Engine:
        """Return the engine as ``open`` does; loading happens off the event loop."""
        if self.engine is not None:
            return self.engine
        return await asyncio.to_thread(self.open, settings)

    def check_settled(self, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        """Raise ConfigError for options that a given engine has settled.

        given: by EngineConfig's names. defaults: of these options; None always is one.
        """
        if self.engine is None or not self.was_given:
            return
        known = {**defaults, "model": self.engine.model_name}
        idle = sorted(n for n in SETTLED & given.keys() if given[n] not in (None, known.get(n)))
        if idle:
            raise ConfigError(
                f"{', '.join(idle)}: fixed by the engine given as engine=: leave it out"
            )

    def check_portable(self) -> None:
        """Raise ConfigError for a given engine: another process could not open it again."""
        if self.was_given:
            raise ConfigError(
                "an open engine cannot be pickled: give model= and kv_path= instead of engine="
            )

    def __copy__(self) -> Self:
        if self.was_given:
            return self
        copied = type(self)()
        copied._kept = self._kept
        return copied

    def __deepcopy__(self, memo: object) -> Self:
        return self.__copy__()

    def __reduce__(self) -> tuple[Any, ...]:
        self.check_portable()
        return type(self), ()


def _open(config: EngineConfig) -> Engine:
    """Return the open engine of equal settings in this process, or open one."""
    key = os.getpid(), *(value for name, value in config if name not in NOT_SHARED)
    engine = _opened.get(key)
    if engine is None or not engine.is_open:
        engine = _opened[key] = open_engine(config)
    if config.fill_on_miss:  # also where who opened it did not ask for that
        engine.fill_on_miss = True
    if config.guard not in (None, engine.guard):
        engine.guard = config.guard
    return engine


class EngineComponent(CheckedOptions):
    """Holds an engine's settings, and opens the engine on first use.

    A subclass gives the kind of engine, the model and the instruction names of its own
    (``_own_options``) and sets ``_source``. A store's settings are given as a whole, ``store=``,
    or by their own names.
    """

    _inside: ClassVar[Mapping[str, type[Any]]] = {
        "blend_config": BlendConfig,
        "lead_in": LeadInConfig,
        "guard": GuardConfig,
    }

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
        return self._source.engine is not None

    def open(self) -> Engine:
        """Return the engine, opened on first use.

        Raises:
            CacheBlendError: when it cannot be opened, in one line.
        """
        return self._source.open(self._engine_config)

    async def aopen(self) -> Engine:
        """Return the engine as ``open`` does; loading happens off the event loop."""
        return await self._source.aopen(self._engine_config)

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
