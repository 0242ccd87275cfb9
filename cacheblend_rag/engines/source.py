"""Provides a component's engine: a given one, or one opened on first use."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from threading import Lock
from typing import Any, Self
from weakref import WeakValueDictionary

from cacheblend_rag.engines.base import Engine
from cacheblend_rag.engines.factory import open_engine
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.settings import ENGINES, EngineConfig, names_of
from cacheblend_rag.settings.options import check_engine_name

OF_REQUESTS = frozenset({"engine", "profile", "blend", "api_key"})
"""Fields of EngineConfig that may be combined with a given engine."""
NOT_SHARED = frozenset({"blend", "profile", "fill_on_miss", "guard"})
"""Fields that sources with one engine may differ in; of a profile, the lead-in counts."""
SETTLED = names_of(EngineConfig) - OF_REQUESTS

_opened: WeakValueDictionary[tuple[object, ...], Engine] = WeakValueDictionary()
_opening = Lock()


class EngineSource:
    """A given engine, or one that is opened once, on first use.

    Sources with equal settings share one engine in a process; settings of requests do not count,
    and one that fills on miss does so for all. An engine that was opened here stays out of copies
    and pickles, which open it by their own settings.
    """

    def __init__(self, engine: Engine | None = None) -> None:
        """Make a source; engine: an open one, if there is one."""
        self._engine = engine
        self.was_given = engine is not None

    @classmethod
    def of(cls, engine: object, *, example: str) -> Self:
        """Return the source for the value of an option ``engine=``; nothing is opened.

        Args:
            engine: an open engine, the name of a kind of engine, or a server's URL.
            example: an expression for an open engine, for the error.

        Raises:
            ConfigError: when it is none of these.
        """
        if isinstance(engine, Engine):
            return cls(engine)
        if not isinstance(engine, str):
            raise ConfigError(
                f"engine is a {type(engine).__name__}: give an open engine, such as {example}, "
                f"or {', '.join(ENGINES)} or a server's URL"
            )
        check_engine_name(engine, ENGINES)
        return cls()

    @property
    def is_open(self) -> bool:
        """Whether the engine is open, so that nothing must be loaded."""
        return self._engine is not None

    @property
    def engine(self) -> Engine | None:
        """The engine, None if it is not open yet."""
        return self._engine

    def open(self, settings: Callable[[], EngineConfig]) -> Engine:
        """Return the engine.

        Args:
            settings: called once, if there is no engine yet.

        Raises:
            CacheBlendError: as ``open_engine``.
        """
        if self._engine is not None:
            return self._engine
        with _opening:
            self._engine = self._engine or _open(settings())
            return self._engine

    async def aopen(self, settings: Callable[[], EngineConfig]) -> Engine:
        """Return the engine as ``open`` does; loading happens off the event loop."""
        if self._engine is not None:
            return self._engine
        return await asyncio.to_thread(self.open, settings)

    def check_settled(self, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        """Refuse options that would have no effect on a given engine.

        Args:
            given: options by EngineConfig's names.
            defaults: their defaults; None always is one.

        Raises:
            ConfigError: when an engine was given together with settings that it has fixed.
        """
        if self._engine is None or not self.was_given:
            return
        known = {**defaults, "model": self._engine.model_name}
        idle = sorted(n for n in SETTLED & given.keys() if given[n] not in (None, known.get(n)))
        if idle:
            raise ConfigError(
                f"{', '.join(idle)}: fixed by the engine given as engine=: leave it out"
            )

    def check_portable(self) -> None:
        """Refuse pickling with an engine that another process could not open again.

        Raises:
            ConfigError: when the engine was given.
        """
        if self.was_given:
            raise ConfigError(
                "an open engine cannot be pickled: give model= and kv_path= instead of engine="
            )

    def __copy__(self) -> Self:
        return self if self.was_given else type(self)()

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
