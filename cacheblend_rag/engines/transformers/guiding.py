"""Holds answers to a form: rules out, before each draw, the tokens that would leave it.

The form is compiled by llguidance, once for all requests that ask for it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from functools import lru_cache
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cacheblend_rag.engines.structured import StructuredOutputs, nodes_in
from cacheblend_rag.errors import ConfigError, MissingExtraError, first_line

STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""How JSON is written: as in most texts, since small models leave strings empty without blanks."""
NO_TEXT = "NoExtension"
"""What llguidance calls a form that allows nothing to follow, and no end."""
IMPOSSIBLE = "no text has this form: does a reference lead to itself?"
COMPILED = 64
"""Forms that are kept compiled."""


class Guide:
    """One answer's way through its form. Not to be shared between answers.

    matcher: an LLMatcher at the beginning of the form.
    """

    def __init__(self, form: StructuredOutputs, matcher: Any) -> None:
        self._form, self._matcher = form, matcher

    def allowed(self, logits: Tensor) -> Tensor:
        """Return logits, (1, vocabulary), with minus infinity for each token that may not follow.

        Raises ConfigError when the form is too complex to follow.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        may = np.zeros(logits.shape[-1], bool)
        found = np.unpackbits(bits, bitorder="little", count=min(8 * len(bits), len(may)))
        may[: len(found)] = found
        return logits.masked_fill(~torch.from_numpy(may).to(logits.device), -torch.inf)

    def take(self, token_id: int) -> None:
        """Go on by a token that was drawn."""
        self._matcher.consume_token(token_id)
        self._check()

    @property
    def is_over(self) -> bool:
        """Whether the answer is complete and nothing may follow."""
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        _check(self._form, self._matcher)


class Guides:
    """Compiles forms for one tokenizer; may be used by several threads at once.

    tokenizer: a fast one. width: how many logits a token is drawn from. ends: tokens that end an
    answer.
    """

    def __init__(self, tokenizer: Any, width: int, ends: Collection[int]) -> None:
        self._tokenizer, self._width, self._ends = tokenizer, width, sorted(ends)
        self._vocabulary: Any = None
        self._lock = Lock()
        self._compiled = lru_cache(COMPILED)(self._compile)

    def guide(self, form: StructuredOutputs) -> Guide:
        """Return the guide of a new answer.

        Raises:
            MissingExtraError: without llguidance.
            ConfigError: when the form is wrong or not supported, or the tokenizer cannot be read.
        """
        return Guide(form, self._compiled(form).deep_copy())

    def _compile(self, form: StructuredOutputs) -> Any:
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ImportError as error:
            raise MissingExtraError("structured_outputs", "structured") from error
        _check_bounds(form)
        try:
            grammar = _grammar(form, LLMatcher)
        except ValueError as error:
            raise form.refused(first_line(error)) from error
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(self._read_vocabulary(), grammar, log_level=0, limits=limits)
        _check(form, matcher)
        begun = matcher.deep_copy()
        begun.compute_bitmask()  # a form that nothing can begin is refused before a prefill
        _check(form, begun)
        return matcher

    def _read_vocabulary(self) -> Any:
        from llguidance.hf import from_tokenizer

        with self._lock:
            if self._vocabulary is None:
                try:
                    self._vocabulary = from_tokenizer(
                        self._tokenizer, n_vocab=self._width, eos_token=self._ends or None
                    )
                except Exception as error:
                    raise ConfigError(
                        "structured_outputs needs a tokenizer that llguidance can read, not this "
                        f"{type(self._tokenizer).__name__}: {first_line(error)}"
                    ) from error
            return self._vocabulary


def _check(form: StructuredOutputs, matcher: Any) -> None:
    """Raise ConfigError if a matcher has failed."""
    if matcher.is_error():
        why = matcher.get_error()
        raise form.refused(IMPOSSIBLE if why.startswith(NO_TEXT) else why)


def _grammar(form: StructuredOutputs, compiler: Any) -> str:
    """Return a form as a grammar of llguidance; raises ValueError."""
    if form.regex is not None:
        return str(compiler.grammar_from_regex(form.regex))
    if form.grammar is not None:
        return str(compiler.grammar_from_lark(form.grammar))
    if form.choice is not None:
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in form.choice)
        return str(compiler.grammar_from_lark(f"start: {texts}"))
    return str(compiler.grammar_from_json_schema(json.dumps(form.schema), overrides=STYLE))


# Bounds: what a compiler of grammars takes in seconds and without harm. llguidance bounds most of
# its work by itself, but not how long it reads a long grammar, and it allocates memory for all
# items that an array may have: a single large number would end the process.

LONGEST_FORM = 1 << 18
"""Characters of a schema or of all choices."""
LONGEST_GRAMMAR = 1 << 15
"""Characters of a regular expression, a pattern in a schema, or a grammar."""
MOST_CHOICES = 4096
MOST_PROPERTIES = 1000
"""Properties of one object."""
LARGEST_COUNT = 4096
"""The largest minItems or maxItems."""
MOST_ITEMS_TOGETHER = 50_000
COUNTS = ("minItems", "maxItems")
_OTHER_GRAMMARS = re.compile(r"%\s*(?:json|llguidance)\b")
"""What embeds a schema or another grammar in a Lark grammar, in llguidance only."""


def _check_bounds(form: StructuredOutputs) -> None:
    """Raise ConfigError, which names the form as the client wrote it, if it is out of bounds."""
    if form.json is not None:
        _check_length(form, str(form.json), LONGEST_FORM)
        _check_schema_bounds(form, json.loads(str(form.json)))
    if form.choice is not None:
        if len(form.choice) > MOST_CHOICES:
            raise form.refused(f"{len(form.choice)} choices are more than {MOST_CHOICES}")
        _check_length(form, "".join(form.choice), LONGEST_FORM)
    for text in (form.regex, form.grammar):
        _check_length(form, text or "", LONGEST_GRAMMAR)
    if form.grammar is not None and (found := _OTHER_GRAMMARS.search(form.grammar)):
        raise form.refused(f"{found[0]} in a grammar is not supported: give a schema as json")


def _check_schema_bounds(form: StructuredOutputs, schema: Any) -> None:
    together = 0.0
    for node, _ in nodes_in(schema):
        if not isinstance(node, Mapping):
            continue
        for name in COUNTS:
            count = node.get(name)
            if isinstance(count, int | float) and not isinstance(count, bool):
                if count > LARGEST_COUNT:
                    why = f"{name}={count:g} is more than {LARGEST_COUNT}: lower it"
                    raise form.refused(why)
                together += count
        properties, patterns = node.get("properties"), node.get("patternProperties")
        if isinstance(properties, Mapping) and len(properties) > MOST_PROPERTIES:
            why = f"an object has more than {MOST_PROPERTIES} properties: split it"
            raise form.refused(why)
        for pattern in (node.get("pattern"), *(patterns if isinstance(patterns, Mapping) else ())):
            if isinstance(pattern, str):
                _check_length(form, pattern, LONGEST_GRAMMAR)
    if together > MOST_ITEMS_TOGETHER:
        raise form.refused(
            f"minItems and maxItems are more than {MOST_ITEMS_TOGETHER} together: lower them"
        )


def _check_length(form: StructuredOutputs, text: str, most: int) -> None:
    if len(text) > most:
        raise form.refused(f"{len(text)} characters are more than {most}: shorten it")
