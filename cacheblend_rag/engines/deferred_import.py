"""Defers what a library imports at its own import until one of the imported names is used."""

from __future__ import annotations

import builtins
import importlib.metadata
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from importlib.util import find_spec, resolve_name
from typing import Any

DYNAMO = "torch._dynamo"
HINTS = ("allow_in_graph", "disable")
"""Decorators of ``torch.compiler`` that import it."""
COMPARED = "flash_attn"
"""Packages whose names begin so: transformers asks which distribution they come from, not only
which version they have."""


class DeferredName:
    """Stands for a class or function of a module, which is imported when the name is used.

    It can be called, subclassed, part of a type, and the second argument of ``isinstance``, which
    imports nothing: before its module is imported, a class has no instances.
    """

    def __init__(self, module: str, name: str) -> None:
        self._module, self._name = module, name

    def _real(self) -> Any:
        return getattr(import_module(self._module), self._name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._real()(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what tools look for in every object
            raise AttributeError(name)
        return getattr(self._real(), name)

    def __instancecheck__(self, instance: object) -> bool:
        return self._module in sys.modules and isinstance(instance, self._real())

    def __subclasscheck__(self, kind: type) -> bool:
        return self._module in sys.modules and issubclass(kind, self._real())

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._real(),)

    def __or__(self, other: Any) -> Any:
        return self._real() | other

    def __ror__(self, other: Any) -> Any:
        return other | self._real()

    def __repr__(self) -> str:
        return f"<deferred {self._module}.{self._name}>"


class _DeferredModule:
    """What ``from module import name`` takes its names from."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> DeferredName:
        return DeferredName(self._name, name)


@contextmanager
def deferred(
    library: str, modules: Collection[str], prepare: Mapping[str, Callable[[Any], None]]
) -> Iterator[None]:
    """Let ``from module import name`` in a library's own modules give a DeferredName meanwhile.

    Imports by other libraries are not affected. library: a package's name. modules: full names,
    of those that are not imported yet; modules below them are deferred, too. prepare: functions
    that change modules of the library, by full name, before another one takes names from them.
    """
    own, below = builtins.__import__, tuple(f"{name}." for name in modules)

    def importing(
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Any = (),
        level: int = 0,
    ) -> Any:
        if not (fromlist and globals and _is_of(library, str(globals.get("__name__")))):
            return own(name, globals, locals, fromlist, level)
        full = name
        if level:
            full = resolve_name("." * level + name, str(globals["__package__"]))
        if full not in sys.modules and (full in modules or full.startswith(below)):
            return _DeferredModule(full)
        found = own(name, globals, locals, fromlist, level)
        if full in prepare:
            prepare[full](found)
        return found

    vars(builtins)["__import__"] = importing
    try:
        yield
    finally:
        vars(builtins)["__import__"] = own


def _is_of(library: str, module: str) -> bool:
    return module == library or module.startswith(f"{library}.")


class _DeferredDynamo:
    """Stands for ``torch._dynamo``: decorators that only concern compiling do not import it.

    Any other name does.
    """

    def disable(self, function: Any = None, recursive: bool = True, **options: Any) -> Any:
        """Return a function that is not compiled; while there is no compiler, it is only called."""
        if function is None:
            return lambda given: self.disable(given, recursive, **options)

        def real() -> Any:
            return import_module(DYNAMO).disable(function, recursive, **options)

        is_plain = callable(function) and not isinstance(function, type)
        return _disabled_later(function, real) if is_plain else real()

    def allow_in_graph(self, function: Any) -> Any:
        """Return the function."""
        return function

    def assume_constant_result(self, function: Any) -> Any:
        """Return the function."""
        return function

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module("torch._dynamo"), name)


@contextmanager
def dynamo_deferred() -> Iterator[None]:
    """Let decorators that tell PyTorch's compiler about functions not import it meanwhile.

    Functions that must not be compiled still are not. Others are compiled without these hints,
    which change no result.
    """
    import torch

    if DYNAMO in sys.modules:
        yield
        return
    stand_in, compiler, own_import = _DeferredDynamo(), torch.compiler, builtins.__import__
    own = {name: getattr(compiler, name) for name in HINTS}

    def importing(name: str, globals: Any = None, *others: Any) -> Any:
        # This module imports it when a function that must not be compiled is called.
        if name == DYNAMO and globals and globals.get("__name__") == "torch._compile":
            return torch
        return own_import(name, globals, *others)

    vars(torch)["_dynamo"] = stand_in
    vars(builtins)["__import__"] = importing
    vars(compiler).update({name: getattr(stand_in, name) for name in HINTS})
    try:
        yield
    finally:
        vars(builtins)["__import__"] = own_import
        vars(compiler).update(own)
        if vars(torch).get("_dynamo") is stand_in:
            del vars(torch)["_dynamo"]


def _disabled_later(function: Callable[..., Any], disable: Callable[[], Any]) -> Any:
    found: list[Any] = []

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if DYNAMO not in sys.modules:
            return function(*args, **kwargs)
        if not found:
            found.append(disable())
        return found[0](*args, **kwargs)

    return run


@contextmanager
def distributions_looked_up() -> Iterator[None]:
    """Let ``importlib.metadata.packages_distributions`` read no lists of files meanwhile.

    It reads those of every installed distribution, to find which package comes from which one.
    """
    own = importlib.metadata.packages_distributions
    importlib.metadata.packages_distributions = lambda: PackageDistributions(own)
    try:
        yield
    finally:
        importlib.metadata.packages_distributions = own


class PackageDistributions(Mapping[str, list[str]]):
    """The distributions of each package, looked up when they are asked for.

    A package's own name is tried first. list_all: lists the distributions of all packages; called
    once, if no distribution has the package's name.
    """

    def __init__(self, list_all: Callable[[], Mapping[str, list[str]]]) -> None:
        self._list_all = list_all
        self._all: Mapping[str, list[str]] | None = None

    def __getitem__(self, package: str) -> list[str]:
        if self._all is None:
            if find_spec(package) is None:
                raise KeyError(package)
            if not package.startswith(COMPARED) and _is_distribution(package):
                return [package]
        return self._listed()[package]

    def __iter__(self) -> Iterator[str]:
        return iter(self._listed())

    def __len__(self) -> int:
        return len(self._listed())

    def _listed(self) -> Mapping[str, list[str]]:
        if self._all is None:
            self._all = self._list_all()
        return self._all


def _is_distribution(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
