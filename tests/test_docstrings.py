"""Public names have docstrings, which name all parameters and say what is returned.

Public is what an ``__all__`` of the three distributions lists, and of a class the public methods
and properties that it has from this project, be it by a base class. One that overrides another may
leave its docstring, or parts of it, to that one; what a framework's own method has is the
framework's to describe. What ruff sees in one function alone is left to it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any

import pytest
from pydantic import BaseModel

PACKAGES = (
    "cacheblend_rag",
    "langchain_cacheblend",
    "llama_index.llms.cacheblend",
    "llama_index.postprocessor.cacheblend",
)
SAYS_WHAT_RETURNS = re.compile(r"\b(returns?|yields?|whether)\b", re.IGNORECASE)
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def public_names() -> list[tuple[str, Any]]:
    """Return all public classes and functions, under the names that users import."""
    return [
        (f"{package}.{name}", value)
        for package in PACKAGES
        for name in import_module(package).__all__
        if inspect.isclass(value := getattr(import_module(package), name))
        or inspect.isfunction(value)
    ]


@pytest.mark.parametrize(("name", "value"), [pytest.param(*p, id=p[0]) for p in public_names()])
def test_a_public_name_is_documented(name: str, value: Any) -> None:
    assert not list(violations(value)), name


def violations(value: Any) -> Iterator[str]:
    """Yield what is wrong with the docstrings of a public class or function."""
    if not inspect.isclass(value):
        yield from of_function(value.__qualname__, [value])
        return
    own = [base for base in value.__mro__ if is_ours(base)]
    makers = [vars(base)["__init__"] for base in own if "__init__" in vars(base)]
    if is_dataclass(value):
        made_with = [field.name for field in fields(value) if field.init]
    else:  # pydantic's fields are described where they stand
        made_with = parameters(makers[0]) if makers and not issubclass(value, BaseModel) else []
    yield from missing(value.__qualname__, [*own, *makers], made_with)
    for owner in own:
        for name in [name for name in vars(owner) if not name.startswith("_")]:
            line = [vars(base)[name] for base in owner.__mro__ if name in vars(base)]
            functions = [found for one in line if (found := function_of(one))]
            if function_of(vars(owner)[name]):
                yield from of_function(f"{owner.__qualname__}.{name}", functions)


def of_function(name: str, functions: list[Callable[..., Any]]) -> Iterator[str]:
    """Yield what is wrong. functions: it, and those that it overrides."""
    foreign = {p for one in functions if not is_ours(one) for p in parameters(one)}
    yield from missing(name, functions, [p for p in parameters(functions[0]) if p not in foreign])
    texts = [one.__doc__ for one in functions if one.__doc__]
    returned = str(inspect.signature(functions[0]).return_annotation)
    says = any(map(SAYS_WHAT_RETURNS.search, texts)) or returned in ("None", "Iterator[None]")
    if parameters(functions[0]) and not foreign and not says:
        yield f"{name}: says not what it returns"


def missing(name: str, told: Iterable[Any], wanted: list[str]) -> Iterator[str]:
    text = "\n".join(one.__doc__ or "" for one in told)
    if not text.strip():
        yield f"{name}: has no docstring"
    for one in wanted if len(wanted) > 1 else ():
        if not re.search(rf"\b{one}\b", text):
            yield f"{name}: {one} is not described"


def is_ours(one: Any) -> bool:
    return any((one.__module__ or "").startswith(package) for package in PACKAGES)


def function_of(member: Any) -> Callable[..., Any] | None:
    """Return the function behind a member of a class, as it was written."""
    if isinstance(member, classmethod | staticmethod):
        member = member.__func__
    if isinstance(member, property):
        member = member.fget
    if not inspect.isfunction(member):
        return None
    written = inspect.unwrap(member)
    return None if written.__code__.co_filename.startswith("<") else written  # a dataclass' own


def parameters(function: Callable[..., Any]) -> list[str]:
    """Return the names of parameters, but for self, ``*args`` and ``**kwargs``."""
    found = inspect.signature(inspect.unwrap(function)).parameters.values()
    return [p.name for p in found if p.kind not in VARIADIC and p.name not in ("self", "cls")]
