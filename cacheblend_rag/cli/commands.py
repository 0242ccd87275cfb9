"""The sub-commands by name; a command's module is imported when the command is looked up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import typer
from typer.main import get_group

PLACES = {
    "demo": "demo.demo_command",
    "index": "index.index_command",
    "ask": "ask.ask_command",
    "explain": "explain.explain_command",
    "eval": "eval.evaluate_command",
    "tune": "tune.tune_command",
    "verify": "verify.verify_command",
    "serve": "serve.serve_command",
    "doctor": "doctor.doctor_command",
    "bench": "bench.bench_app",
    "store": "store.store_app",
    "models": "models.models_app",
}
"""Each command's function, or group of commands, and its module in ``cacheblend_rag.cli``."""
SETTINGS = "PASS_ON"
"""How a module names its command's Click settings, if it has any."""


class Commands(Mapping[str, Any]):
    """Click's commands by name, in the order of the help text."""

    def __init__(self) -> None:
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            self._loaded[name] = _load(name, PLACES[name])
        return self._loaded[name]

    def __contains__(self, name: object) -> bool:
        return name in PLACES

    def __iter__(self) -> Iterator[str]:
        return iter(PLACES)

    def __len__(self) -> int:
        return len(PLACES)


def _load(name: str, place: str) -> Any:
    module_name, _, attribute = place.partition(".")
    module = import_module(f"cacheblend_rag.cli.{module_name}")
    found, alone = getattr(module, attribute), typer.Typer()
    if isinstance(found, typer.Typer):
        alone.add_typer(found, name=name)
    else:
        alone.command(name, context_settings=getattr(module, SETTINGS, None))(found)
    return get_group(alone).commands[name]
