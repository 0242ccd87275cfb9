"""What a release of vLLM has under a name, read from its sources by ``ast`` without running them.

So a build for GPUs can be read where there is none. ``releases.json`` keeps what was read of each
release: the test suite downloads none of them. `source_contract` compares it with this package.
"""

from __future__ import annotations

import ast
import json
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Protocol

FILE = Path(__file__).with_name("releases.json")
Function = ast.FunctionDef | ast.AsyncFunctionDef
Place = tuple[str, ast.stmt]
"""A statement, and the module that it is in."""


class Release(Protocol):
    """What a release has under full names such as ``vllm.config.VllmConfig.parallel_config``."""

    def look(self, name: str) -> str | None:
        """Return the class of the value, of what a call returns, or the class that has the name.

        It is "" if that is none of vLLM's, or unknown. None says that there is no such name.
        """

    def takes(self, name: str) -> list[str] | None:
        """Return the parameters of a call, with "=" behind those that have a default.

        None says that it takes any, or that they are unknown.
        """


@dataclass(frozen=True)
class Sources:
    """The files of a vLLM release. read: returns a file's text by its path, None for no file."""

    read: Callable[[str], str | None]

    def look(self, name: str) -> str | None:
        found = self._named(name)
        if found is None:
            return None
        module, node = found
        if isinstance(node, ast.ClassDef):
            return f"{module}.{node.name}"
        if isinstance(node, Function):
            return self._kind(module, node.returns)
        annotation = getattr(node, "annotation", None)
        return self._kind(module, annotation)

    def takes(self, name: str) -> list[str] | None:
        match self._named(name):
            case module, ast.ClassDef() as node:
                made = self._members(module, node).get("__init__")
                if made is not None:
                    return _parameters(made[1])
                fields = self._fields(module, node)
                return [each + "=" * (line.value is not None) for each, line in fields.items()]
            case _, node:
                return _parameters(node)
        return None

    @cached_property
    def _named(self) -> Callable[[str], Place | None]:
        """Find what says a name, of a module or a class."""

        @cache
        def named(name: str) -> Place | None:
            place, _, last = name.rpartition(".")
            if self._module(place):
                return self._find(place, last)
            match named(place):
                case where, ast.ClassDef() as node:
                    return self._members(where, node).get(last)
            return None

        return named

    @cached_property
    def _module(self) -> Callable[[str], ast.Module | None]:
        @cache
        def parsed(name: str) -> ast.Module | None:
            path = name.replace(".", "/")
            for file in (f"{path}.py", f"{path}/__init__.py"):
                if (text := self.read(file)) is not None:
                    return ast.parse(text)
            return None

        return parsed

    def _find(self, module: str, name: str) -> Place | None:
        """Return what a module means by a name, and the module that says it."""
        tree = self._module(module)
        for node in _statements(tree.body if tree else []):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    found = (alias.asname or alias.name) == name and self._find(
                        self._absolute(module, node), alias.name
                    )
                    if found:
                        return found
            elif getattr(node, "name", None) == name or name in _assigned(node):
                return module, node
        return None

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        is_package = self.read(f"{module.replace('.', '/')}/__init__.py") is not None
        parts = module.split(".")
        kept = parts[: len(parts) - node.level + is_package]
        return ".".join([*kept, *([node.module] if node.module else [])])

    def _kind(self, module: str, annotation: ast.expr | None) -> str:
        """Return the class of vLLM's that an annotation names, else ""."""
        match annotation:
            case ast.Constant(value=str(text)):
                return self._kind(module, ast.parse(text, mode="eval").body)
            case ast.BinOp(left=left, right=right):
                return self._kind(module, left) or self._kind(module, right)
            case ast.Subscript(value=ast.Name(id="Optional" | "SkipValidation"), slice=inner):
                return self._kind(module, inner)
            case ast.Name(id=name):
                there = self._find(module, name)
                if there and isinstance(there[1], ast.ClassDef):
                    return f"{there[0]}.{there[1].name}"
        return ""

    def _bases(self, module: str, node: ast.ClassDef) -> Iterator[tuple[str, ast.ClassDef]]:
        """Yield a class and what it inherits from, the furthest first."""
        for base in reversed(node.bases):
            base = base.value if isinstance(base, ast.Subscript) else base
            there = self._find(module, base.id) if isinstance(base, ast.Name) else None
            if there and isinstance(there[1], ast.ClassDef) and there[1] is not node:
                yield from self._bases(there[0], there[1])
        yield module, node

    def _fields(self, module: str, node: ast.ClassDef) -> dict[str, ast.AnnAssign]:
        """Return what a dataclass, or the like, is made of."""
        return {
            line.target.id: line
            for _, one in self._bases(module, node)
            for line in one.body
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
            if not ast.unparse(line.annotation).startswith("ClassVar")
        }

    @cached_property
    def _members(self) -> Callable[[str, ast.ClassDef], dict[str, Place]]:
        """Find what says each thing that a class or its instances have, inherited ones too."""

        @cache
        def members(module: str, node: ast.ClassDef) -> dict[str, Place]:
            found: dict[str, Place] = {}
            for where, one in self._bases(module, node):
                for line in _statements(one.body):
                    if isinstance(line, Function):
                        found |= {name: (where, stored) for name, stored in _stored(line)}
                        found[line.name] = where, line
                    else:
                        found |= dict.fromkeys(_assigned(line), (where, line))
            return found

        return members


def _parameters(node: ast.stmt) -> list[str] | None:
    """Return the parameters of a function, ``self`` aside; None if it takes any."""
    if not isinstance(node, Function) or node.args.kwarg or node.args.vararg:
        return None
    given = node.args
    in_order = [*given.posonlyargs, *given.args]
    optional = {one.arg for one in in_order[len(in_order) - len(given.defaults) :]}
    named = zip(given.kwonlyargs, given.kw_defaults, strict=True)
    optional |= {one.arg for one, default in named if default is not None}
    names = (one.arg for one in (*in_order, *given.kwonlyargs))
    return [name + "=" * (name in optional) for name in names if name not in {"self", "cls"}]


def _stored(method: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[str, ast.stmt]]:
    """Yield the attributes of ``self`` that a method writes, each as an annotated name."""
    kinds = {one.arg: one.annotation for one in (*method.args.args, *method.args.kwonlyargs)}
    for node in ast.walk(method):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            annotation = getattr(node, "annotation", None)
            if annotation is None and isinstance(node.value, ast.Name):
                annotation = kinds.get(node.value.id)
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                    said = annotation or ast.Constant(None)
                    yield target.attr, ast.AnnAssign(target, said, None, 0)


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements, those inside of ``if`` and ``try`` too."""
    for node in body:
        yield node
        for part in ("body", "orelse", "handlers", "finalbody"):
            if isinstance(node, ast.If | ast.Try):
                for inner in getattr(node, part, []):
                    inside = inner.body if isinstance(inner, ast.ExceptHandler) else [inner]
                    yield from _statements(inside)


def _assigned(node: ast.stmt) -> set[str]:
    """Return the names that a statement assigns a value to."""
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {each.id for each in targets if isinstance(each, ast.Name)}


def sources_at(place: Path) -> Sources:
    """Return the sources in a wheel, or in a folder that holds ``vllm/``."""
    if place.is_dir():
        return Sources(lambda file: _text(place / file))
    wheel = zipfile.ZipFile(place)
    inside = frozenset(wheel.namelist())
    return Sources(lambda file: wheel.read(file).decode() if file in inside else None)


def _text(file: Path) -> str | None:
    return file.read_text(encoding="utf-8") if file.is_file() else None


@dataclass
class Record:
    """What was read of a release.

    file, sha256: of the wheel. names, calls: answers of ``look`` and ``takes``. release: is asked
    for what is not there yet; without one, LookupError says that it was never asked for.
    """

    file: str
    sha256: str
    names: dict[str, str | None] = field(default_factory=dict)
    calls: dict[str, list[str] | None] = field(default_factory=dict)
    release: Release | None = None

    def look(self, name: str) -> str | None:
        if name not in self.names:
            self.names[name] = self._asked(name).look(name)
        return self.names[name]

    def takes(self, name: str) -> list[str] | None:
        if name not in self.calls:
            self.calls[name] = self._asked(name).takes(name)
        return self.calls[name]

    def _asked(self, name: str) -> Release:
        if self.release is None:
            command = f"python -m {__package__}.source_contract --record"
            raise LookupError(f"{name} is in no record: run {command}")
        return self.release


def recorded() -> dict[str, Record]:
    """Return what was read of each release, the oldest first."""
    found = dict[str, Record]()
    names, calls = dict[str, Any](), dict[str, Any]()
    for version, one in json.loads(FILE.read_text(encoding="utf-8")).items():
        names, calls = names | one["names"], calls | one["calls"]
        found[version] = Record(one["file"], one["sha256"], names, calls)
    return found


def keep(records: Mapping[str, Record]) -> None:
    """Write what was read of releases, the oldest first: of each what differs from the one before.

    A name is a line.
    """
    told = dict[str, Any]()
    names, calls = dict[str, Any](), dict[str, Any]()
    for version, one in records.items():
        new = {"names": _other(one.names, names), "calls": _other(one.calls, calls)}
        told[version] = {"file": one.file, "sha256": one.sha256, **new}
        names, calls = one.names, one.calls
    text = json.dumps(told, indent=1)
    text = re.sub(r"\[[^]]*\]", lambda one: " ".join(one[0].split()), text)
    FILE.write_text(text + "\n", encoding="utf-8")


def _other(new: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
    return {name: new[name] for name in sorted(new) if name not in old or new[name] != old[name]}
