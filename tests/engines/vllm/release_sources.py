"""A vLLM release's sources, read by ``ast``, and whether they have what a contract lists."""

from __future__ import annotations

import ast
import re
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path

Members = Mapping[str, Sequence[str]]
"""Methods with the parameters that are passed to them, or that they are given; fields have none."""


@dataclass(frozen=True)
class Name:
    """A class, function or variable.

    parameters: that a function, or a class when it is made, is passed by name. later: that follow
    them in newer releases; a function with such is passed what it takes, in order. members: of a
    class. since: of those that older releases lack, and of the name itself under "", the release
    that brought them; the package does without.
    """

    parameters: Sequence[str] = ()
    later: Sequence[str] = field(default=(), kw_only=True)
    members: Members = field(default_factory=dict)
    since: Mapping[str, str] = field(default_factory=dict, kw_only=True)


def fields(*names: str) -> dict[str, Sequence[str]]:
    """Return members that are not called by this package, or without arguments."""
    return dict.fromkeys(names, ())


# Reading sources


@dataclass(frozen=True)
class Sources:
    """The files of a vLLM release. read: returns a file's text by its path, None for no file."""

    read: Callable[[str], str | None]

    @cached_property
    def module(self) -> Callable[[str], ast.Module | None]:
        """Parse a module by its name; None where there is none."""

        @cache
        def parsed(name: str) -> ast.Module | None:
            path = name.replace(".", "/")
            for file in (f"{path}.py", f"{path}/__init__.py"):
                if (text := self.read(file)) is not None:
                    return ast.parse(text)
            return None

        return parsed

    def find(self, module: str, name: str) -> tuple[str, ast.stmt] | None:
        """Return what a module means by a name, and the module that says it."""
        tree = self.module(module)
        for node in _statements(tree.body if tree else []):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                if node.name == name:
                    return module, node
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if any(isinstance(each, ast.Name) and each.id == name for each in targets):
                    return module, node
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        found = self.find(_absolute(self, module, node), alias.name)
                        if found is not None:
                            return found
        return None

    def members(self, module: str, node: ast.ClassDef) -> dict[str, ast.stmt]:
        """Return what a class has, inherited things included, by name."""
        found: dict[str, ast.stmt] = {}
        for base in reversed(node.bases):
            base = base.value if isinstance(base, ast.Subscript) else base
            there = self.find(module, base.id) if isinstance(base, ast.Name) else None
            if there and isinstance(there[1], ast.ClassDef) and there[1] is not node:
                found |= self.members(there[0], there[1])
        for part in _statements(node.body):
            found |= dict.fromkeys(_defined(part), part)
        return found


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements, those inside of ``if`` and ``try`` too."""
    for node in body:
        yield node
        for part in ("body", "orelse", "handlers", "finalbody"):
            if isinstance(node, ast.If | ast.Try):
                for inner in getattr(node, part, []):
                    inside = inner.body if isinstance(inner, ast.ExceptHandler) else [inner]
                    yield from _statements(inside)


def _defined(node: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement in a class's body gives the class or its instances."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield node.name
        for inner in ast.walk(node):
            if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
                yield from [inner.attr] if ast.unparse(inner.value) == "self" else []
    elif isinstance(node, ast.Assign):
        yield from (each.id for each in node.targets if isinstance(each, ast.Name))
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id


def _absolute(sources: Sources, module: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    is_package = sources.read(f"{module.replace('.', '/')}/__init__.py") is not None
    parts = module.split(".")
    kept = parts[: len(parts) - node.level + is_package]
    return ".".join([*kept, *([node.module] if node.module else [])])


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[list[str], bool]:
    """Return a function's parameters without ``self``, and whether it takes any other by name."""
    given = function.args
    names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return [name for name in names if name not in {"self", "cls"}], given.kwarg is not None


# Checking


def broken(sources: Sources, contract: Mapping[str, Mapping[str, Name]]) -> list[str]:
    """Return what of the contract a release does not keep, a line each."""
    found: list[str] = []
    for module, names in contract.items():
        if sources.module(module) is None:
            found.append(f"{module}: no such module")
            continue
        for name, wanted in names.items():
            there = sources.find(module, name)
            if there is None and "" in wanted.since:
                continue
            if there is None:
                found.append(f"{module}.{name}: no such name")
            else:
                found += [f"{module}.{name}{what}" for what in _differs(sources, *there, wanted)]
    return found


def _differs(sources: Sources, module: str, node: ast.stmt, wanted: Name) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield from _without(node, wanted.parameters, "")
        known, _ = parameters(node)
        passed = [*wanted.parameters, *wanted.later]
        if wanted.later and known[: len(passed)] != passed[: len(known)]:
            yield f": the first parameters are not {', '.join(passed)}"
    elif isinstance(node, ast.ClassDef):
        members = sources.members(module, node)
        made = members.get("__init__")
        if isinstance(made, ast.FunctionDef):
            yield from _without(made, wanted.parameters, "")
        else:  # a dataclass, or the like
            yield from (f": no field {name}" for name in wanted.parameters if name not in members)
        for name, given in wanted.members.items():
            member = members.get(name)
            if member is None and name in wanted.since:
                continue
            if member is None:
                yield f".{name}: no such member"
            elif given and isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from _without(member, given, f".{name}")
            elif given:
                yield f".{name}: is no method"


def _without(
    function: ast.FunctionDef | ast.AsyncFunctionDef, wanted: Sequence[str], name: str
) -> Iterator[str]:
    known, takes_any = parameters(function)
    yield from (
        f"{name}: no parameter {each}" for each in wanted if each not in known and not takes_any
    )


# Where sources are


def sources_at(place: Path) -> Sources:
    """Return the sources in a wheel, a source archive or a folder that holds ``vllm/``."""
    if place.is_dir():
        return Sources(lambda file: _text(place / file))
    if place.suffix in {".whl", ".zip"}:
        wheel = zipfile.ZipFile(place)
        inside = frozenset(wheel.namelist())
        return Sources(lambda file: wheel.read(file).decode() if file in inside else None)
    with tarfile.open(place) as archive:
        files = {
            re.sub(r"^[^/]+/", "", each.name): opened.read().decode()
            for each in archive
            if each.name.endswith(".py") and (opened := archive.extractfile(each)) is not None
        }
    return Sources(files.get)


def _text(file: Path) -> str | None:
    return file.read_text(encoding="utf-8") if file.is_file() else None


def installed() -> Path:
    """Return the folder that the installed vLLM is in, without importing it."""
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("vLLM is not installed: name a wheel, a folder or a version")
    return Path(next(iter(spec.submodule_search_locations))).parent
