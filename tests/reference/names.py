"""The reference page of public Python names, from the sources, as griffe reads them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import griffe

from tests.readme import ROOT

PACKAGES = {
    "cacheblend_rag": ROOT,
    "llama_index.llms.cacheblend": ROOT / "integrations" / "llama-index",
    "llama_index.postprocessor.cacheblend": ROOT / "integrations" / "llama-index",
    "langchain_cacheblend": ROOT / "integrations" / "langchain",
}
"""The packages, and where their sources are."""
HEAD = """# Python names

After this page you know every public name, with its parameters. What is not listed here may change
at any time.
"""


def names_page() -> str:
    """Return the public names of all packages as a page of Markdown."""
    return "\n".join([HEAD, *(line for name in PACKAGES for line in _of_package(name))])


def _of_package(name: str) -> Iterator[str]:
    places = [str(ROOT), str(PACKAGES[name])]
    package = griffe.load(name, search_paths=places, resolve_aliases=True)
    yield f"## `{name}`\n"
    for public in sorted(package.exports or (), key=str):
        found = package[str(public)]
        yield from _told(found.final_target if found.is_alias else found, package.exports)
    yield ""


def _told(found: griffe.Object, exports: Sequence[Any] | None) -> Iterator[str]:
    """Yield the lines of a name; those of a public base class are not repeated."""
    yield _line(found)
    if not found.is_class:
        return
    public = {str(name) for name in exports or ()}
    bases = [base.name for base in found.mro() if base.name in public]
    members = found.members if bases else found.all_members
    for name, one in members.items():
        if one.is_function and not name.startswith("_") and one.path.startswith(tuple(PACKAGES)):
            yield f"    {_line(one)}"
    yield from (f"    - what `{base}` has" for base in bases)


def _line(found: griffe.Object) -> str:
    return f"- `{_call(found)}`" + (f": {_sentence(found)}" if found.docstring else "")


def _call(found: griffe.Object) -> str:
    """Return a name with its parameters; a class's are those of its ``__init__``."""
    if found.is_attribute:
        return found.name
    given = [one for one in found.parameters if one.name not in {"self", "cls"}]
    marked, seen = list[str](), set[griffe.ParameterKind | None]()
    for one in given:
        if one.kind is griffe.ParameterKind.keyword_only and not seen & {
            griffe.ParameterKind.var_positional, one.kind
        }:  # fmt: skip
            marked.append("*")
        seen.add(one.kind)
        stars = {"var_positional": "*", "var_keyword": "**"}.get(one.kind.name if one.kind else "")
        default = f"={one.default}" if one.default is not None and not stars else ""
        marked.append(f"{stars or ''}{one.name}{default}")
    return f"{found.name}({', '.join(marked)})"


def _sentence(found: griffe.Object) -> str:
    told = found.docstring.value.partition("\n\n")[0] if found.docstring else ""
    return " ".join(told.replace("``", "`").split())
