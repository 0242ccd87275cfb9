"""Names that settings choose among; checks of options and engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from typing import Any, Literal
from urllib.parse import urlsplit

from cacheblend_rag.errors import ConfigError

LeadInKind = Literal["none", "bos", "instruction", "document"]
Precision = Literal["native", "fp8", "int4"]

DEFAULT_RATIO = 0.08
AUTO, EMBEDDED, VLLM = "auto", "transformers", "vllm"
PROFILES = ("quality", "balanced", "speed")
"""The packaged profiles."""
ENGINES = (AUTO, EMBEDDED, VLLM)
"""Engines that have a name; a server is given by its URL."""
ALIASES: Mapping[str, str] = {
    "model_name": "model",
    "base_url": "engine",
    "api_base": "engine",
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "stop_sequences": "stop",
}
"""Other libraries' names of these arguments."""


def names_of(settings: type[Any]) -> frozenset[str]:
    """Return the names of the fields of some settings, be they a pydantic model or a dataclass."""
    if is_dataclass(settings):
        return frozenset(one.name for one in fields(settings))
    return frozenset(settings.model_fields)


@dataclass(frozen=True)
class Arguments:
    """The argument names of a function or class; ALIASES of known names are accepted, too.

    Args:
        kind: the kind of each, such as "option of Model".
        known: the names.
        settings: the arguments that are settings, if they are known, each with its class.
    """

    kind: str
    known: frozenset[str]
    settings: Mapping[str, type[Any]] = field(default_factory=dict)

    def read(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments by their own names. Errors contain no values.

        Raises:
            ConfigError: for a name that is not known, and for two names of one argument.
        """
        for name in given:
            if self._own(name) not in self.known:
                raise ConfigError(self._refusal(name))
        return self.renamed(given)

    def told(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments as ``read`` does, without those that are None."""
        return {name: value for name, value in self.read(given).items() if value is not None}

    def renamed(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments by their own names, and unknown ones unchanged.

        An alias that is None is left out, since other libraries pass None for unset arguments.

        Raises:
            ConfigError: for two names of one argument.
        """
        names: dict[str, str] = {}
        for name, value in given.items():
            own = self._own(name)
            if own != name and value is None:
                continue
            if own in names:
                raise ConfigError(f"{names[own]} and {name} name one {self.kind}: give {own} alone")
            names[own] = name
        return {own: given[name] for own, name in names.items()}

    def _own(self, name: str) -> str:
        own = ALIASES.get(name, name)
        return own if name not in self.known and own in self.known else name

    def _refusal(self, name: str) -> str:
        noun, of, owner = self.kind.partition(" of ")
        unknown = f"unknown {noun} {name!r}{of}{owner}"
        for outer, of_settings in self.settings.items():
            if outer in self.known and name in names_of(of_settings):
                return f"{unknown}: give it as {outer}={{{name!r}: ...}}"
        names = [*self.known, *(alias for alias in ALIASES if self._own(alias) in self.known)]
        if close := get_close_matches(name.lower(), sorted(names), n=1):
            return f"{unknown} (did you mean {self._own(close[0])!r}?)"
        return f"{unknown}; known: {', '.join(sorted(self.known))}"


def check_engine_name(engine: str) -> str:
    """Return ``engine``. Raises ConfigError unless it is one of ENGINES or a server's URL.

    The URL must hold no secret; the server is not contacted.
    """
    if engine in ENGINES:
        return engine
    if "://" in engine:
        check_server_url(engine)
    elif any(mark in engine for mark in ":/@?"):
        check_server_url(f"http://{engine}")
        raise ConfigError(f"engine={engine!r} lacks a scheme: give http://{engine}")
    else:
        raise ConfigError(f"engine={engine!r} must be {', '.join(ENGINES)} or a server's URL")
    return engine


def check_server_url(url: str) -> None:
    """Raise ConfigError unless ``url`` is a server's, without a secret in it."""
    parts = urlsplit(url)
    if parts.username or parts.password:
        raise ConfigError("the server's URL holds a password: give its key as api_key=")
    if parts.query or parts.fragment:
        raise ConfigError("the server's URL holds a query: give its key as api_key=")
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ConfigError(f"url={url!r} must be like http://host:8000")


def check_namespace(namespace: object) -> str:
    """Return a namespace. Raises ConfigError unless it is a text that can be hashed and stored.

    Half of a character (a lone surrogate) cannot; it occurs, for example, if a command line is not
    UTF-8.
    """
    if not isinstance(namespace, str):
        raise ConfigError(f"namespace={namespace!r:.100} must be a name")
    try:
        namespace.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"namespace={namespace!r:.100} holds a lone surrogate: give text in UTF-8"
        ) from error
    return namespace
