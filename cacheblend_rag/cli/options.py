"""Options shared by several commands, and parsers of their values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheblend_rag.errors import ConfigError, ModelLoadError, PromptError, StoreError
from cacheblend_rag.models import LOCAL_MODELS, check, is_local
from cacheblend_rag.rag.checks import DTYPES
from cacheblend_rag.rag.collection import FILE_NAME, KV_NAME

if TYPE_CHECKING:
    from cacheblend_rag.engines.sampling import SamplingParams
    from cacheblend_rag.settings import StoreConfig


def finite(value: float | None) -> float | None:
    """Refuse NaN, which typer's ranges accept; return any other number."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a number")
    return value


def above_zero(value: float | None) -> float | None:
    """Return a number above 0, refuse others."""
    if value is not None and not (value > 0 and math.isfinite(value)):
        raise typer.BadParameter(f"{value} must be a number above 0")
    return value


ModelOption = Annotated[
    str,
    typer.Option("--model", help=f"{LOCAL_MODELS}."),
]
DeviceOption = Annotated[
    str | None, typer.Option("--device", help="cpu, cuda, mps, ...; the best one by default.")
]
EngineOption = Annotated[
    str | None,
    typer.Option(
        "--engine",
        help="'transformers', 'vllm' or the URL of a `serve`; CACHEBLEND_API_KEY is its key.",
    ),
]
DtypeOption = Annotated[
    str | None, typer.Option("--dtype", help=f"{', '.join(DTYPES)}; the model's by default.")
]
ProfileOption = Annotated[
    str | None,
    typer.Option(
        "--profile",
        envvar="CACHEBLEND_PROFILE",
        help="quality, balanced, speed or a TOML file, such as `tune` writes.",
    ),
]
JsonOption = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON object on stdout and nothing else there."),
]

StoreOption = Annotated[
    list[str] | None,
    typer.Option(
        "--store",
        metavar="NAME=VALUE",
        help="A setting of the KV store, such as host_bytes=8GiB or tiers=redis://host:6379/0; "
        "to be given several times.",
    ),
]
KV_PATH_VARIABLE = "CACHEBLEND_KV_PATH"
"""Names the folder of chunk KV where no ``--kv-path`` does."""


MaxTokensOption = Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")]
TemperatureOption = Annotated[
    float | None,
    typer.Option(
        min=0,
        callback=finite,
        help="0 takes the most likely token. By default this and the options of sampling below "
        "are the model's own (its generation_config).",
    ),
]
TopPOption = Annotated[
    float | None,
    typer.Option(
        "--top-p",
        max=1,
        callback=above_zero,
        help="Draw from the most likely tokens that have this share together; 1 is off.",
    ),
]
SeedOption = Annotated[
    int | None,
    typer.Option(
        min=0, max=(1 << 63) - 1, help="Draw the same tokens again; another seed each time if none."
    ),
]


def refuse(context: typer.Context, names: Iterable[str], why: str) -> None:
    """Raise ConfigError for one of these parameters that is given on the command line."""
    flags = {one.name: one.opts[0] for one in context.command.params}
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            flag = flags[name] if flags[name].startswith("-") else name.upper()
            raise ConfigError(f"{flag}: {why}")


def sampling_settings(max_tokens: int, *, greedy: bool = False, **given: Any) -> SamplingParams:
    """Return the sampling parameters for answers.

    greedy: for the option ``--compare``, which excludes the sampling options. given: values of the
    options above by field name, None if not given.

    Raises ConfigError for a sampling option beside ``--compare``.
    """
    from cacheblend_rag.engines.sampling import SamplingParams

    if not greedy:
        return SamplingParams(max_tokens=max_tokens, **given)
    for name, value in given.items():
        if value is not None:
            option = name.replace("_", "-")
            raise ConfigError(f"--compare compares greedy answers: leave out --{option}")
    return SamplingParams.greedy(max_tokens)


def store_settings(given: Sequence[str] | None, **flags: Any) -> StoreConfig:
    """Read settings of a store; flags: from separate options, None if they are not given.

    Raises ConfigError for a setting that is unknown, invalid or given twice.
    """
    from cacheblend_rag.settings import StoreConfig

    settings = {name: value for name, value in flags.items() if value is not None}
    for text in given or ():
        name, is_setting, value = text.partition("=")
        if not is_setting:
            raise ConfigError(f"--store {text!r} must be NAME=VALUE, such as host_bytes=8GiB")
        if name == "tiers":
            value = ",".join([*settings.get(name, "").split(","), value]).lstrip(",")
        elif name in settings:
            raise ConfigError(f"--store {name} is given twice: give it once")
        settings[name] = None if value == "none" else value
    return StoreConfig.of(settings)


def collection_store(given: Sequence[str] | None) -> StoreConfig:
    """Read settings of a collection's store, which has its own folder; raises ConfigError."""
    settings = store_settings(given)
    if settings.kv_path is not None:
        raise ConfigError("--store kv_path: a collection keeps its KV in its own folder")
    return settings


def local_model(name: str) -> str:
    """Return the name of a model on this machine; raises ModelLoadError if it is not there."""
    if not is_local(name):
        raise ModelLoadError(f"model={name!r}: there is no such folder; give {LOCAL_MODELS}")
    check(name)
    return name


def store_folder(path: Path) -> Path:
    """Let a folder through unless it is a collection's; raises StoreError, naming its store."""
    if (path / FILE_NAME).exists():
        raise StoreError(f"{path} is a collection: its store is --kv-path {path / KV_NAME}")
    return path


def numbers(text: str, option: str) -> tuple[float, ...]:
    """Read comma-separated numbers given to ``option``; raises typer.BadParameter."""
    try:
        return tuple(float(part) for part in names(text))
    except ValueError as error:
        raise typer.BadParameter(
            f"{text!r} must hold numbers, comma-separated", param_hint=option
        ) from error


def layers(text: str, option: str) -> tuple[int, ...]:
    """Read comma-separated layer indices given to ``option``; raises typer.BadParameter."""
    found = numbers(text, option)
    if any(number != int(number) for number in found):
        raise typer.BadParameter(f"{text!r} must hold layer indices", param_hint=option)
    return tuple(int(number) for number in found)


def names(text: str) -> tuple[str, ...]:
    """Split comma-separated names, without blanks around them."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def read_text(path: Path, option: str) -> str:
    """Return the text of an option's file; raises PromptError if it cannot be read."""
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it holds other bytes"
        raise PromptError(f"{option} {path} cannot be read as UTF-8 text: {why}") from error
