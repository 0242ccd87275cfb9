"""Every name of vLLM that this package uses, held against a release's sources without running them.

`python -m tests.engines.vllm.source_contract PLACE` checks a release: PLACE is a wheel, a source
archive, an unpacked folder, or a version such as ``0.33.0``, which is fetched by pip. Without
PLACE, the installed vLLM is checked, as a test does.

Both sides are read by ``ast``: of this package, what it imports of vLLM, passes by name, reads of
parameters with vLLM's types, and overrides. So a build for GPUs can be checked where there is none.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path

import cacheblend_rag

PACKAGE = Path(cacheblend_rag.__file__).parent
Function = ast.FunctionDef | ast.AsyncFunctionDef
Place = tuple[str, str]
"""A module of vLLM's, and a name there."""
NAMED: dict[str, Place] = {
    "vllm_config": ("vllm.config", "VllmConfig"),
    "model_config": ("vllm.config", "ModelConfig"),
    "kv_cache_config": ("vllm.v1.kv_cache_interface", "KVCacheConfig"),
}
"""What parameters of these names are, where no annotation says it."""
OUR_OWN = {
    *("scheduler", "worker"),  # of CacheBlendConnector
    *("record", "record_found", "_count", "_add"),  # of BlendStats
}
"""Methods of our subclasses of vLLM's classes that override nothing."""


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
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    found = (alias.asname or alias.name) == name and self.find(
                        self._absolute(module, node), alias.name
                    )
                    if found:
                        return found
            elif name in _defined(node) or getattr(node, "name", None) == name:
                return module, node
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

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        is_package = self.read(f"{module.replace('.', '/')}/__init__.py") is not None
        parts = module.split(".")
        kept = parts[: len(parts) - node.level + is_package]
        return ".".join([*kept, *([node.module] if node.module else [])])


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements, those inside of ``if`` and ``try`` too."""
    for node in body:
        yield node
        for part in ("body", "orelse", "handlers", "finalbody"):
            if isinstance(node, ast.If | ast.Try):
                for inner in getattr(node, part, []):
                    inside = inner.body if isinstance(inner, ast.ExceptHandler) else [inner]
                    yield from _statements(inside)


def _defined(node: ast.stmt) -> set[str]:
    """Return the names that a statement gives a module, or a class and its instances."""
    if isinstance(node, Function):
        of_self = (one for one in ast.walk(node) if isinstance(one, ast.Attribute))
        stored = {one.attr for one in of_self if isinstance(one.ctx, ast.Store)}
        return {node.name, *stored}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {each.id for each in targets if isinstance(each, ast.Name)}


def parameters(function: Function) -> tuple[set[str], bool]:
    """Return a function's parameters without ``self``, and whether it takes any other by name."""
    given = function.args
    names = {each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
    return names - {"self", "cls"}, given.kwarg is not None


# What this package uses


def imported(tree: ast.AST) -> Iterator[tuple[str, Place]]:
    """Yield what a module of ours imports of vLLM: the name here, and its place."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            yield from ((a.asname or a.name, (node.module or "", a.name)) for a in node.names)


def broken(sources: Sources) -> list[str]:
    """Return what this package uses of vLLM that a release does not have, a line each."""
    found: list[str] = []
    for file in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        known = dict(imported(tree))
        where = file.relative_to(PACKAGE)
        for module, name in known.values():
            if sources.find(module, name) is None:
                found.append(f"{where}: {module}.{name}: no such name")
        found += [f"{where}: {line}" for line in _misused(sources, tree, known)]
    return found


def _misused(sources: Sources, tree: ast.Module, known: dict[str, Place]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in known:
            taken = _taken(sources, known[node.func.id])
            for one in node.keywords:
                if taken is not None and one.arg is not None and one.arg not in taken:
                    yield f"{node.func.id}: no parameter {one.arg}"
        elif isinstance(node, Function):
            yield from _unread(sources, node, known)
        elif isinstance(node, ast.ClassDef):
            bases = [known[b.id] for b in node.bases if isinstance(b, ast.Name) and b.id in known]
            if bases:
                yield from _unknown_hooks(sources, node, bases)


def _taken(sources: Sources, place: Place) -> set[str] | None:
    """Return the parameters of a function, or of a class when it is made; None if it takes any."""
    there = sources.find(*place)
    if there and isinstance(there[1], ast.ClassDef):
        members = sources.members(there[0], there[1])
        made = members.get("__init__")
        if not isinstance(made, Function):  # a dataclass, or the like
            return set(members)
        there = there[0], made
    if there and isinstance(there[1], Function):
        names, takes_any = parameters(there[1])
        return None if takes_any else names
    return None


def _members(sources: Sources, place: Place) -> dict[str, ast.stmt] | None:
    there = sources.find(*place)
    if there and isinstance(there[1], ast.ClassDef):
        return sources.members(there[0], there[1])
    return None


def _unread(sources: Sources, function: Function, known: dict[str, Place]) -> Iterator[str]:
    """Yield what is read of a parameter of vLLM's type that the type does not have."""
    given = {one.arg: one for one in (*function.args.args, *function.args.kwonlyargs)}
    kinds = {
        name: place
        for name, one in given.items()
        if (place := known.get(ast.unparse(one.annotation or ast.Constant(0))) or NAMED.get(name))
    }
    is_ours = "".join(ast.unparse(one) for one in ast.walk(function) if isinstance(one, ast.Assert))
    for node in ast.walk(function):
        name = ast.unparse(node.value) if isinstance(node, ast.Attribute) else ""
        if name in kinds and f"isinstance({name}, " not in is_ours:
            members = _members(sources, kinds[name])
            if members is not None and node.attr not in members:
                yield f"{kinds[name][1]}: no member {node.attr}"


def _unknown_hooks(sources: Sources, made: ast.ClassDef, bases: list[Place]) -> Iterator[str]:
    """Yield the methods of our subclass that override none, or take less than theirs."""
    theirs: dict[str, ast.stmt] = {}
    for base in bases:
        theirs |= _members(sources, base) or {}
    for method in (node for node in made.body if isinstance(node, Function)):
        there = theirs.get(method.name)
        if there is None and method.name not in OUR_OWN and not method.name.startswith("__"):
            yield f"{made.name}.{method.name}: no such hook"
        elif isinstance(there, Function) and method.name != "__init__":
            mine, takes_any = parameters(method)
            if not takes_any and not parameters(there)[0] <= mine:
                yield f"{made.name}.{method.name}: takes other parameters"


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


def fetched(version: str, folder: Path) -> Path:
    """Have pip fetch a release's wheel, which is hundreds of megabytes."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder)]
    subprocess.run([*command, f"vllm=={version}"], check=True)
    return next(folder.iterdir())


def main() -> None:
    """Check a release, and say what differs."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("place", nargs="?", help="a wheel, an archive, a folder or a version")
    place = parser.parse_args().place
    with tempfile.TemporaryDirectory() as folder:
        if place is None:
            where = installed()
        elif Path(place).exists():
            where = Path(place)
        elif re.fullmatch(r"\d[\w.]*", place):
            where = fetched(place, Path(folder))
        else:
            raise SystemExit(f"{place}: no such file or folder, and no version")
        lines = broken(sources_at(where))
    print("\n".join(lines) or f"{where.name}: all names agree")
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
