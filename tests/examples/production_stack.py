"""Checks values for vLLM's production stack: ``python -m tests.examples.production_stack FILE``.

FILE is the chart's ``helm/values.schema.json``, which is not part of this project. Without one,
NEEDED is used: the names and types that our values need, written down from that file as of
August 2026. Unknown names are told, too, which the chart itself lets through.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator

VALUES = Path(__file__).parents[2] / "examples" / "distributed" / "production-stack.yaml"


def an_object(**fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "additionalProperties": False}


TEXT, WHOLE, FLAG = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
AMOUNT = {"type": ["integer", "number", "string"]}
LIST, TEXTS = {"type": "array"}, {"type": "array", "items": TEXT}
ROUTINGS = ["roundrobin", "session", "prefixaware", "kvaware", "disaggregated_prefill"]

NEEDED = an_object(
    servingEngineSpec=an_object(
        enableEngine=FLAG,
        modelSpec={
            "type": "array",
            "items": an_object(
                name=TEXT,
                repository=TEXT,
                tag=TEXT,
                modelURL=TEXT,
                replicaCount=WHOLE,
                requestCPU=WHOLE,
                requestMemory=TEXT,
                requestGPU=AMOUNT,
                initContainer=an_object(
                    name=TEXT, image=TEXT, command=TEXTS, args=TEXTS, extraVolumeMounts=LIST
                ),
                extraVolumes=LIST,
                extraVolumeMounts=LIST,
                env=LIST,
                vllmConfig=an_object(
                    enablePrefixCaching=FLAG,
                    maxModelLen=WHOLE,
                    gpuMemoryUtilization=AMOUNT,
                    extraArgs=TEXTS,
                ),
            ),
        },
    ),
    routerSpec=an_object(
        enableRouter=FLAG,
        replicaCount=WHOLE,
        routingLogic={"type": "string", "enum": ROUTINGS},
        sessionKey=TEXT,
        extraArgs=LIST,
    ),
)


def values() -> Any:
    """What the example's file holds."""
    return yaml.safe_load(VALUES.read_text())


def violations(given: Any, schema: Mapping[str, Any]) -> list[str]:
    """Where values break a schema, in one line each."""
    found = Draft202012Validator(schema).iter_errors(given)
    return [f"{error.json_path}: {error.message}" for error in found]


def unknown(given: Any, schema: Mapping[str, Any], path: str = "$") -> list[str]:
    """Names in values that a schema does not have, which charts let through."""
    if isinstance(given, list):
        parts = (unknown(one, schema.get("items", {}), f"{path}[]") for one in given)
        return [name for part in parts for name in part]
    known = schema.get("properties")
    if not isinstance(given, dict) or known is None:
        return []
    strange = [f"{path}.{name}" for name in given if name not in known]
    inner = (
        unknown(value, known[name], f"{path}.{name}")
        for name, value in given.items()
        if name in known
    )
    return strange + [name for part in inner for name in part]


if __name__ == "__main__":
    chart = json.loads(Path(sys.argv[1]).read_text()) if sys.argv[1:] else NEEDED
    wrong = violations(values(), chart) + unknown(values(), chart)
    print("\n".join(wrong) or f"{VALUES.name} fits")  # noqa: T201
    sys.exit(bool(wrong))
