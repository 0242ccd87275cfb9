"""The reference page of all settings."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import TypeAdapter

from cacheblend_rag.cli.serve import ServerSettings
from cacheblend_rag.engines.vllm.connector.settings import ConnectorSettings
from cacheblend_rag.quality.questions import QuestionSettings
from cacheblend_rag.settings import (
    BlendConfig,
    EngineConfig,
    GuardConfig,
    LeadInConfig,
    Profile,
    Settings,
    StoreConfig,
)
from cacheblend_rag.settings.base import size

MODELS: Mapping[type[Settings], str] = {
    EngineConfig: "An engine",
    StoreConfig: "A store",
    LeadInConfig: "A lead-in",
    BlendConfig: "A request",
    Profile: "A profile",
    GuardConfig: "A guard",
    ServerSettings: "A server",
    ConnectorSettings: "A vLLM server",
    QuestionSettings: "Questions",
}
HEAD = """# Settings

After this page you can look up every setting, its type and its default.

`--set NAME=VALUE` gives a command any of them by its name. Sizes and times may be texts with a
unit: `8GiB`, `12h`. Settings are frozen: `with_changes(...)` returns a validated copy.
"""
_TYPES = {"string": "text", "null": "none", "object": "named values"}


def settings_schema() -> dict[str, Any]:
    """Return the JSON schema of each model, by its name."""
    asked = [(model, "validation", TypeAdapter(model)) for model in MODELS]
    _, schema = TypeAdapter.json_schemas(asked)
    return schema["$defs"]


def settings_page() -> str:
    """Return the settings as a page of Markdown, one table per model."""
    models = settings_schema()
    parts = (
        _section(f"{of}: `{kind.__name__}`", models[kind.__name__]) for kind, of in MODELS.items()
    )
    return "\n".join([HEAD, *parts])


def _section(title: str, model: Mapping[str, Any]) -> str:
    rows = [
        f"| `{name}` | {_type(field)} | {_default(name, field)} | {_line(field['description'])} |"
        for name, field in model["properties"].items()
    ]
    head = ["| setting | type | default | |", "| --- | --- | --- | --- |"]
    return "\n".join([f"## {title}", "", _line(model["description"]), "", *head, *rows, ""])


def _line(text: str) -> str:
    return " ".join(text.replace("``", "`").replace("|", "\\|").split())


def _type(field: Mapping[str, Any]) -> str:
    """Return the type of a field of a JSON schema in words."""
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(_type(one) for one in field["anyOf"]))
    if "$ref" in field:
        return f"`{field['$ref'].rpartition('/')[2]}`"
    if choices := field.get("enum") or ([field["const"]] if "const" in field else []):
        return " or ".join(f"`{choice}`" for choice in choices)
    if field["type"] == "array":
        name, *bounds = _type(field.get("items") or field["prefixItems"][0]).split(" ", 1)
        return " ".join([f"list of {name}s", *bounds])
    name = _TYPES.get(field["type"], field["type"])
    return " ".join([name, *_bounds(field)])


def _bounds(field: Mapping[str, Any]) -> Iterator[str]:
    words = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "to"}
    return (f"{word} {field[name]}" for name, word in words.items() if name in field)


def _default(name: str, field: Mapping[str, Any]) -> str:
    if "default" not in field:
        return "its own" if "$ref" in field else "none"
    default = field["default"]
    if default is None:
        return "none"
    return size(default) if name.endswith("_bytes") else f"`{json.dumps(default)}`"
