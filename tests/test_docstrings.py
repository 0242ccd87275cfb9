"""Docstrings of public names are in Google style and whole.

Public is what an ``__all__`` of the three distributions lists, and of a class the public methods
and properties that it has from this project, be it by a base class. Of these:

- Each has a docstring. One that overrides another may leave it, or sections of it, to that one.
- All parameters stand under Args. A function of at most one parameter may say in its summary what
  it is; so may a class of at most one field. A class' parameters (fields, of a dataclass) stand in
  its docstring or in that of its ``__init__``; pydantic's fields may be described where they stand.
- What a function returns is said: under Returns or Yields, or by the summary ("Return ...",
  "Whether ...").
- Errors that its body raises by name stand under Raises, and no error is told of in prose.
- Parameters that a framework's own method has are the framework's to describe.

What ruff sees in one function alone is left to it, on all names: a section that lacks a parameter
(D417), describes one that there is not (DOC102), or a value that is not returned (DOC202, DOC403).
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from importlib import import_module
from itertools import pairwise
from textwrap import dedent
from typing import Any

import pytest
from pydantic import BaseModel

PACKAGES = (
    "cacheblend_rag",
    "langchain_cacheblend",
    "llama_index.llms.cacheblend",
    "llama_index.postprocessor.cacheblend",
)
HEADER = re.compile(r"(Args|Returns|Yields|Raises|Attributes|Example):$")
ENTRY = re.compile(r" {4}(\*{0,2}\w+(?:, \w+)*): \S")
SAYS_WHAT_RETURNS = re.compile(r"\b(returns?|yields?|whether)\b", re.IGNORECASE)
ERROR_IN_PROSE = re.compile(r"\braises? (?:a |an )?\w*Error\b", re.IGNORECASE)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


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
    assert not violations(value), name


def violations(value: Any) -> list[str]:
    """Return what is wrong with the docstrings of a public class or function."""
    if not inspect.isclass(value):
        name = value.__qualname__
        return [*function_violations(name, [value], []), *silent_of_value(name, [value])]
    return [*class_violations(value), *method_violations(value)]


def method_violations(cls: type[Any]) -> Iterator[str]:
    for owner in filter(is_ours, cls.__mro__):
        for name, member in vars(owner).items():
            function = function_of(member)
            if function is None or name.startswith("_"):
                continue
            line = [
                vars(base)[name] for base in filter(is_ours, owner.__mro__) if name in vars(base)
            ]
            foreign = [
                vars(base)[name]
                for base in owner.__mro__
                if name in vars(base) and not is_ours(base)
            ]
            overridden = [found for one in line if (found := function_of(one))]
            qualified = f"{owner.__qualname__}.{name}"
            yield from function_violations(qualified, overridden, foreign)
            if not isinstance(member, property) and not foreign:
                yield from silent_of_value(qualified, overridden)


def function_violations(
    name: str, functions: list[Callable[..., Any]], foreign: list[Any]
) -> Iterator[str]:
    """Yield what is wrong. functions: it, and those of ours that it overrides; foreign: others."""
    function = functions[0]
    texts = [inspect.cleandoc(one.__doc__) for one in [*functions, *foreign] if one.__doc__]
    if not texts:
        yield f"{name}: has no docstring"
        return
    of_framework = {param for one in foreign for param in parameters(function_of(one))}
    wanted = [param for param in parameters(function) if param not in of_framework]
    args = entries("Args", texts)
    if len(wanted) > 1 or args:
        yield from missing(name, "Args", wanted, args)
    yield from missing(name, "Raises", raised(function), entries("Raises", texts))
    yield from in_prose(name, texts)


def silent_of_value(name: str, functions: list[Callable[..., Any]]) -> Iterator[str]:
    texts = [one.__doc__ for one in functions if one.__doc__]
    if texts and returns(functions[0]) and not any(map(SAYS_WHAT_RETURNS.search, texts)):
        yield f"{name}: says not what it returns"


def class_violations(cls: type[Any]) -> Iterator[str]:
    name = cls.__qualname__
    if not vars(cls).get("__doc__"):
        yield f"{name}: has no docstring"
        return
    texts = [text for base in makers_of(cls) for text in class_docstrings(base)]
    args, wanted = entries("Args", texts), constructor_parameters(cls)
    needed = [param for param in wanted if param not in described_fields(cls)]
    if len(wanted) > 1 or args:
        yield from missing(name, "Args", needed, args)
    if stale := args - {*wanted, *fields_of_pydantic(cls)}:
        yield f"{name}: {', '.join(sorted(stale))} under Args is no parameter"
    makers = [function_of(vars(cls).get(maker)) for maker in ("__init__", "__post_init__")]
    for maker in filter(None, makers):
        yield from missing(name, "Raises", raised(maker), entries("Raises", texts))
    yield from in_prose(name, texts)


def missing(name: str, section: str, wanted: Iterable[str], found: set[str]) -> Iterator[str]:
    for one in wanted:
        if one not in found:
            yield f"{name}: {one} is not under {section}"


def in_prose(name: str, texts: list[str]) -> Iterator[str]:
    for text in texts[:1]:
        if told := ERROR_IN_PROSE.search(text):
            yield f"{name}: {told[0]!r} stands in prose"


def entries(section: str, texts: Iterable[str]) -> set[str]:
    """Return the names that have an entry in a section of docstrings."""
    found: set[str] = set()
    for text in texts:
        current = None
        for line in text.splitlines():
            if line and not line.startswith(" "):
                header = HEADER.match(line)
                current = header[1] if header else None
            elif current == section and (entry := ENTRY.match(line)):
                found.update(entry[1].replace("*", "").split(", "))
    return found


def is_ours(cls: type[Any]) -> bool:
    return any(cls.__module__.startswith(package) for package in (*PACKAGES, __name__))


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


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(inspect.unwrap(function))


def parameters(function: Callable[..., Any] | None) -> list[str]:
    """Return the names of parameters, but for self, ``*args`` and ``**kwargs``."""
    if function is None:
        return []
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    found = signature_of(function).parameters.values()
    return [p.name for p in found if p.kind not in several and p.name not in ("self", "cls")]


def returns(function: Callable[..., Any]) -> bool:
    return str(signature_of(function).return_annotation) not in ("None", "Iterator[None]")


def constructor_parameters(cls: type[Any]) -> list[str]:
    """Return what a class is made with, without what a framework's base class describes."""
    own = [base for base in cls.__mro__ if is_ours(base)]
    if issubclass(cls, BaseModel):
        given = [name for base in own for name in fields_of_pydantic(base)]
    elif is_dataclass(cls):
        return [field.name for field in fields(cls) if field.init]
    else:
        given = []
    makers = [vars(base)["__init__"] for base in own if "__init__" in vars(base)]
    foreign = [base for base in cls.__mro__ if not is_ours(base) and "__init__" in vars(base)]
    known = {name for base in foreign for name in parameters(function_of(vars(base)["__init__"]))}
    named = [name for name in parameters(makers[0]) if name not in known] if makers else []
    return list(dict.fromkeys([*given, *named]))


def fields_of_pydantic(cls: type[Any]) -> list[str]:
    """Return the fields that a pydantic class adds to those of its base classes."""
    if not issubclass(cls, BaseModel):
        return []
    return [name for name in cls.model_fields if name in vars(cls).get("__annotations__", {})]


def described_fields(cls: type[Any]) -> set[str]:
    """Return the fields of a pydantic class that are described where they stand."""
    if not issubclass(cls, BaseModel):
        return set()
    found = {name for name, field in cls.model_fields.items() if field.description}
    for base in filter(is_ours, cls.__mro__):
        for field, below in pairwise(body_of(base)):
            if isinstance(field, ast.AnnAssign) and is_text(below):
                found.add(ast.unparse(field.target))
    return found


def body_of(cls: type[Any]) -> list[ast.stmt]:
    """Return a class' statements; nothing of one that was made, not written."""
    try:
        source = inspect.getsource(cls)
    except OSError:
        return []
    (tree,) = ast.parse(dedent(source)).body
    return tree.body if isinstance(tree, ast.ClassDef) else []


def is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str)


def makers_of(cls: type[Any]) -> list[type[Any]]:
    """Return the class and its base classes of ours, up to the one whose ``__init__`` it has."""
    own = [base for base in cls.__mro__ if is_ours(base)]
    makers = [place for place, base in enumerate(own) if "__init__" in vars(base)]
    return own if issubclass(cls, BaseModel) or not makers else own[: makers[0] + 1]


def class_docstrings(cls: type[Any]) -> list[str]:
    init = function_of(vars(cls).get("__init__"))
    return [inspect.cleandoc(one.__doc__ or "") for one in (cls, init) if one]


def raised(function: Callable[..., Any]) -> list[str]:
    """Return the names of the errors that a function's own body raises."""
    (tree,) = ast.parse(dedent(inspect.getsource(function))).body
    found: dict[str, None] = {}
    for node in own_nodes(tree):
        if isinstance(node, ast.Raise) and node.exc is not None:
            error = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            name = ast.unparse(error)
            if name[0].isupper():  # not an error that was caught, or built, before
                found[name] = None
    return list(found)


def own_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield what is in a function, but not in functions inside."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, FUNCTIONS):
            yield node
            yield from own_nodes(node)
