"""``--set NAME=VALUE``: settings of engines, stores, blending, lead-ins and answers, by name."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.settings.options import Arguments, names_of

if TYPE_CHECKING:
    from cacheblend_rag.settings import EngineConfig, Settings

KindT = TypeVar("KindT", bound="Settings")
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "-s",
        metavar="NAME=VALUE",
        help="Any other setting, such as device=cuda: see the page Settings. Repeatable.",
    ),
]
EXAMPLES = {"--set": "host_bytes=8GiB", "--only": "older_than=12h"}
NOT_GIVEN_HERE = frozenset({"api_key", "tokenizer"})
"""A key belongs in the environment, where no list of processes shows it."""


def named(
    given: Iterable[str] | None, *kinds: type[Settings], option: str = "--set"
) -> dict[str, Any]:
    """Return the values of an option by name; their names must be fields of one of ``kinds``.

    A value is JSON, or a text without quotes; ``none`` is None, and a list needs no brackets.

    Raises:
        ConfigError: for a setting without a value, an unknown one and one that is given twice.
    """
    schemas: dict[str, Any] = {}
    for kind in kinds:
        schemas |= kind.model_json_schema()["properties"]
    known = Arguments(
        kinds[0]._noun if len(kinds) == 1 else "setting", frozenset(schemas) - NOT_GIVEN_HERE
    )
    found: dict[str, Any] = {}
    for text in given or ():
        name, is_setting, value = text.partition("=")
        if not is_setting:
            raise ConfigError(f"{option} {text!r} must be NAME=VALUE, such as {EXAMPLES[option]}")
        ((own, _),) = known.read({name: value}).items()
        if own == "tiers" and own in found:
            value = f"{found[own]},{value}"
        elif own in found:
            raise ConfigError(f"{option} {own} is given twice: give it once")
        found[own] = _value(value, schemas[own])
    return found


def engine_options(
    given: Iterable[str] | None, *more: type[Settings], **fixed: Any
) -> dict[str, Any]:
    """Return an engine's settings by name, those of blending and of lead-ins as a dict each.

    more: further settings that may be given. fixed: those that a command's own options give, None
    if not.

    Raises:
        ConfigError: for an unknown setting, and for one of ``fixed`` in ``given``.
    """
    from cacheblend_rag.settings import BlendConfig, EngineConfig, LeadInConfig, StoreConfig

    found = named(given, EngineConfig, StoreConfig, BlendConfig, LeadInConfig, *more)
    for name, value in fixed.items():
        if name in found:
            raise ConfigError(
                f"--set {name}: this command has an option of its own for it, an argument, or no "
                "choice"
            )
        if value is not None:
            found[name] = value
    return _nested(found)


def _nested(options: dict[str, Any]) -> dict[str, Any]:
    """Return options with those of blending and of lead-ins as a dict each."""
    from cacheblend_rag.settings import BlendConfig, LeadInConfig

    for outer, kind in (("blend", BlendConfig), ("lead_in", LeadInConfig)):
        inside = taken(options, kind)
        if inside and outer in options:
            raise ConfigError(f"--set {outer}: give its settings by their own names alone")
        if inside:
            options[outer] = inside
    return options


def taken(options: dict[str, Any], kind: type[Settings]) -> dict[str, Any]:
    """Take the fields of ``kind`` out of ``options``, and return them."""
    return {name: options.pop(name) for name in names_of(kind) & options.keys()}


def engine_config(given: Iterable[str] | None, **fixed: Any) -> EngineConfig:
    """Return the EngineConfig of ``--set`` values; fixed: as for ``engine_options``.

    Raises:
        ConfigError: for an unknown or invalid setting, and for one of ``fixed`` in ``given``.
    """
    from cacheblend_rag.settings import EngineConfig

    return EngineConfig.gather(**engine_options(given, **fixed))


def gathered(options: Mapping[str, Any]) -> EngineConfig:
    """Return an engine's settings of those by their own names; raises ConfigError."""
    from cacheblend_rag.settings import EngineConfig

    return EngineConfig.gather(**_nested(dict(options)))


def split(given: Iterable[str] | None, kind: type[KindT]) -> tuple[KindT, list[str]]:
    """Return the settings of one kind that ``--set`` gives, and what else it gives.

    Raises:
        ConfigError: for an invalid setting.
    """
    own: dict[bool, list[str]] = {True: [], False: []}
    for text in given or ():
        own[text.partition("=")[0] in names_of(kind)].append(text)
    return kind(**named(own[True], kind)), own[False]


def _value(text: str, schema: dict[str, Any]) -> Any:
    kinds = {one.get("type") for one in schema.get("anyOf", [schema])}
    if text == "none" and "null" in kinds:
        return None
    if kinds <= {"string", "null"}:
        return text
    texts = (text, f"[{text}]") if "array" in kinds else (text,)
    if kinds <= {"array", "null"} and not text.startswith("["):
        texts = texts[::-1]  # a list of one number
    for json_text in texts:
        try:
            return json.loads(json_text)
        except (ValueError, RecursionError):
            continue
    return text
