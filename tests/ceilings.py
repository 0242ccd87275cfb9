"""Ceilings of the code's size, which only fall: ``python -m tests.ceilings`` (part of make lint).

Lines and files of each folder, circles of imports, options of each command, pages of the docs.
``--lower`` writes what is lower now than its ceiling to ceilings.json; nothing raises one but a
hand, for a stated reason. ``--table`` prints the sums.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grimp
import networkx
import typer

from cacheblend_rag.cli.main import app
from cacheblend_rag.settings import (
    BlendConfig,
    EngineConfig,
    GuardConfig,
    LeadInConfig,
    StoreConfig,
    names_of,
)

ROOT = Path(__file__).parents[1]
FILE = Path(__file__).with_name("ceilings.json")
PACKAGE = "cacheblend_rag"
DEEP = ("engines", "engines/vllm")
"""Folders of the package whose folders have ceilings of their own."""
Sizes = dict[str, dict[str, int]]


def measured() -> Sizes:
    """Return what the code has now, by kind and place."""
    package = ROOT / PACKAGE
    parents = [package, *(package / name for name in DEEP)]
    places = {
        str(folder.relative_to(ROOT)): list(folder.rglob("*.py"))
        for folder in (package, *(file.parent for p in parents for file in p.glob("*/__init__.py")))
    }
    others = [file for name in ("tests", "integrations") for file in (ROOT / name).rglob("*.py")]
    tests = [file for file in others if "tests" in file.relative_to(ROOT).parts]
    places |= {"tests": tests, "integrations": [file for file in others if file not in tests]}
    pages = {file: len(file.read_text().splitlines()) for file in (ROOT / "docs").glob("*.md")}
    return {
        "docs": {
            "pages": len(pages) + 1,
            "lines of the longest page": max(pages.values()),
            "lines of README.md": len((ROOT / "README.md").read_text().splitlines()),
        },
        "lines": {
            place: sum(len(file.read_text().splitlines()) for file in files)
            for place, files in sorted(places.items())
        },
        "files": {place: len(files) for place, files in sorted(places.items())},
        "circles of imports": {PACKAGE: len(list(circles()))},
        "options": dict(options(typer.main.get_command(app))),
    }


def circles() -> Iterator[set[str]]:
    """Yield the groups of modules that import each other, imports for types alone included."""
    graph = grimp.build_graph(PACKAGE, cache_dir=None)
    imports = networkx.DiGraph(
        (module, other)
        for module in graph.modules
        for other in graph.find_modules_directly_imported_by(module)
    )
    for group in networkx.strongly_connected_components(imports):
        if len(group) > 1:
            yield group


def options(command: Any, name: str = "") -> Iterator[tuple[str, int]]:
    """Yield each command with the number of its options, ``--help`` aside."""
    if hasattr(command, "commands"):
        for one in sorted(command.commands):
            yield from options(command.get_command(None, one), f"{name} {one}".strip())
    else:
        kinds = [p.param_type_name for p in command.params if p.name != "help"]
        yield name, kinds.count("option")


def above(sizes: Sizes, ceilings: Sizes) -> Iterator[str]:
    """Yield a line for each size above its ceiling; what has none has a ceiling of 0."""
    for kind, places in sizes.items():
        for place, size in places.items():
            ceiling = ceilings.get(kind, {}).get(place, 0)
            if size > ceiling:
                yield f"{kind} of {place}: {size}, and at most {ceiling} are allowed"


def lowered(sizes: Sizes, ceilings: Sizes) -> Sizes:
    """Return the ceilings, each no higher than the size under it; those of nothing are gone."""
    return {
        kind: {
            place: min(size, ceilings[kind][place])
            for place, size in places.items()
            if place in ceilings[kind]
        }
        for kind, places in sizes.items()
    }


def table(sizes: Sizes) -> Iterator[str]:
    """Yield the lines of a Markdown table of the sums, and what one answer enters."""
    entered = [sys.executable, "-m", "tests.entered"]
    files = json.loads(subprocess.run(entered, check=True, capture_output=True).stdout)
    kinds = (EngineConfig, StoreConfig, BlendConfig, LeadInConfig, GuardConfig)
    rows = {
        f"{PACKAGE}, lines": sizes["lines"][PACKAGE],
        f"{PACKAGE}, files": sizes["files"][PACKAGE],
        "integrations without tests, lines": sizes["lines"]["integrations"],
        "tests, lines": sizes["lines"]["tests"],
        **{f"docs, {name}": count for name, count in sizes["docs"].items()},
        "options of all commands": sum(sizes["options"].values()),
        "fields of settings": sum(len(names_of(kind)) for kind in kinds),
        "circles of imports": sizes["circles of imports"][PACKAGE],
        "files that one answer enters": files["generate"],
    }
    yield from ("| | |", "| --- | --- |")
    yield from (f"| {name} | {count:,} |" for name, count in rows.items())


def main() -> None:
    """Check the code, lower the ceilings, or print the sums."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--lower", action="store_true", help="write what has become lower")
    parser.add_argument("--table", action="store_true", help="print the sums")
    asked = parser.parse_args()
    sizes, ceilings = measured(), json.loads(FILE.read_text())
    if asked.table:
        sys.stdout.write("\n".join(table(sizes)) + "\n")
    elif asked.lower:
        FILE.write_text(json.dumps(lowered(sizes, ceilings), indent=1) + "\n")
    elif found := list(above(sizes, ceilings)):
        raise SystemExit("\n".join(found))


if __name__ == "__main__":
    main()
