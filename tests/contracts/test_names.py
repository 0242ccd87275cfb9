"""The contracts go through public names: no module, private member or patch of ours."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from tests.contracts.names import FRAMEWORKS, PACKAGE

ROOT = Path(__file__).parents[2]
FAMILIES = Path(__file__).parents[1] / "families"
FILES = sorted([*Path(__file__).parent.rglob("*.py"), *FAMILIES.glob("test_*.py")])
OURS = ("cacheblend_rag", "langchain_cacheblend", "llama_index.llms.cacheblend")


def test_the_names_are_public() -> None:
    assert set(import_module("cacheblend_rag").__all__) >= PACKAGE


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_contract_uses_public_names_alone(file: Path) -> None:
    assert not list(_faults(file, set()))


def test_what_is_not_public_is_noticed(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    for line in (
        "from cacheblend_rag.kv import codec",
        "import cacheblend_rag.kv",
        "from cacheblend_rag import KVKey",
        "from langchain_cacheblend import chains",
        "from langchain_cacheblend.chains import create_cacheblend_chain",
        "engine._store",
        "monkeypatch.setattr('cacheblend_rag.memory.free', None)",
        "monkeypatch.setattr(engine, 'registry', None)",
        "from tests.servers import redis",
    ):
        wrong.write_text(line)
        assert len(list(_faults(wrong, set()))) == 1, line


def _faults(file: Path, seen: set[Path]) -> Iterator[str]:
    """Yield what a file, or a helper in tests/ that it imports, uses and contracts may not."""
    if file in seen:
        return
    seen.add(file)
    for node in ast.walk(ast.parse(file.read_text())):
        place = f"{file.name}:{getattr(node, 'lineno', 0)}: "
        match node:
            case ast.Import(names=names):
                yield from (place + one.name for one in names if one.name.startswith(OURS))
            case ast.ImportFrom(module=str(module), names=names) if module.startswith("tests."):
                if helper := _file(module):
                    faults = list(_faults(helper, seen))
                    yield from [f"{place}{module}: {faults[0]}"] if faults else []
                else:  # a package: its modules are imported
                    for one in names:
                        if helper := _file(f"{module}.{one.name}"):
                            yield from _faults(helper, seen)
            case ast.ImportFrom(module=str(module), names=names) if module.startswith(OURS):
                yield from (
                    f"{place}{module}.{one.name}"
                    for one in names
                    if not _is_public(module, one.name)
                )
            case ast.Attribute(value=value, attr=attr) if _is_private(attr):
                if not (isinstance(value, ast.Name) and value.id in {"self", "cls"}):
                    yield f"{place}.{attr}"
            case ast.Attribute(value=ast.Name(id="monkeypatch"), attr="setattr"):
                yield f"{place}monkeypatch.setattr"


def _file(module: str) -> Path | None:
    path = ROOT.joinpath(*module.split("."))
    found = [one for one in (path.with_suffix(".py"), path / "__init__.py") if one.is_file()]
    return found[0] if found and found[0].name != "__init__.py" else None


def _is_public(module: str, name: str) -> bool:
    if module == "cacheblend_rag":
        return name in PACKAGE
    return module in FRAMEWORKS and name in import_module(module).__all__


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")
