"""Bounds on the forms of answers: what a compiler of grammars takes in seconds and without harm.

llguidance bounds most of its work by itself, but not how long it reads a long grammar, and it
allocates memory for all items that an array may have: a single large number would end the process.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from cacheblend_rag.engines.structured import StructuredOutputs, nodes_in
from cacheblend_rag.errors import ConfigError

LONGEST_FORM = 1 << 18
"""Characters of a schema or of all choices."""
LONGEST_GRAMMAR = 1 << 15
"""Characters of a regular expression, a pattern in a schema, or a grammar."""
MOST_CHOICES = 4096
MOST_PROPERTIES = 1000
"""Properties of one object."""
MOST_ITEMS = 4096
"""The largest minItems or maxItems."""
MOST_ITEMS_TOGETHER = 50_000
COUNTS = ("minItems", "maxItems")
_OTHER_GRAMMARS = re.compile(r"%\s*(?:json|llguidance)\b")
"""What embeds a schema or another grammar in a Lark grammar, in llguidance only."""


def check_bounds(form: StructuredOutputs) -> None:
    """Raise ConfigError, which names the form as the client wrote it, if it is out of bounds."""
    if form.json is not None:
        _check_length(form, str(form.json), LONGEST_FORM)
        _check_schema(form, json.loads(str(form.json)))
    if form.choice is not None:
        if len(form.choice) > MOST_CHOICES:
            raise _refused(form, f"{len(form.choice)} choices are more than {MOST_CHOICES}")
        _check_length(form, "".join(form.choice), LONGEST_FORM)
    for text in (form.regex, form.grammar):
        _check_length(form, text or "", LONGEST_GRAMMAR)
    if form.grammar is not None and (found := _OTHER_GRAMMARS.search(form.grammar)):
        raise _refused(form, f"{found[0]} in a grammar is not supported: give a schema as json")


def _check_schema(form: StructuredOutputs, schema: Any) -> None:
    together = 0.0
    for node, _ in nodes_in(schema):
        if not isinstance(node, Mapping):
            continue
        for name in COUNTS:
            count = node.get(name)
            if isinstance(count, int | float) and not isinstance(count, bool):
                if count > MOST_ITEMS:
                    raise _refused(form, f"{name}={count:g} is more than {MOST_ITEMS}: lower it")
                together += count
        properties, patterns = node.get("properties"), node.get("patternProperties")
        if isinstance(properties, Mapping) and len(properties) > MOST_PROPERTIES:
            raise _refused(form, f"an object has more than {MOST_PROPERTIES} properties: split it")
        for pattern in (node.get("pattern"), *(patterns if isinstance(patterns, Mapping) else ())):
            if isinstance(pattern, str):
                _check_length(form, pattern, LONGEST_GRAMMAR)
    if together > MOST_ITEMS_TOGETHER:
        raise _refused(
            form, f"minItems and maxItems are more than {MOST_ITEMS_TOGETHER} together: lower them"
        )


def _check_length(form: StructuredOutputs, text: str, most: int) -> None:
    if len(text) > most:
        raise _refused(form, f"{len(text)} characters are more than {most}: shorten it")


def _refused(form: StructuredOutputs, why: str) -> ConfigError:
    return ConfigError(f"{form.written_as} is refused: {why}")
