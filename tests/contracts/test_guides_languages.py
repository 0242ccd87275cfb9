"""The Chinese pages say the same commands and programs as the English ones, and link to them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.contracts.pages import (
    CHINESE,
    ENGLISH,
    MOVED,
    NAMES,
    PAIRS,
    Block,
    blocks,
    inline_commands,
)

CODE = ("sh", "python", "toml", "json", "yaml")
_TITLE = re.compile(r"^#+ (.+)$", re.MULTILINE)
_FIGURE = re.compile(r" ?[\d.,-]+(?:x| ?%| m?s)? ?")
_LINK = re.compile(r"\]\(([^)]+)\)")


@pytest.mark.parametrize("name", PAIRS)
def test_both_languages_have_the_same_code(name: str) -> None:
    english, chinese = PAIRS[name]
    assert [_meaning(block) for block in _code(chinese)] == [
        _meaning(block) for block in _code(english)
    ]


@pytest.mark.parametrize("name", NAMES)
def test_both_languages_name_the_same_commands_and_figures(name: str) -> None:
    assert _set(inline_commands(CHINESE[name])) == _set(inline_commands(ENGLISH[name]))
    assert _figures(CHINESE[name]) == _figures(ENGLISH[name])


@pytest.mark.parametrize("name", NAMES)
def test_pages_link_to_their_other_language(name: str) -> None:
    assert f"](zh/{name}.md)" in ENGLISH[name].read_text()
    assert f"](../{name}.md)" in CHINESE[name].read_text()
    assert CHINESE[name].read_text().split("\n\n")[1].startswith("读完本页")


@pytest.mark.parametrize(
    "page", [MOVED, *(page for pair in PAIRS.values() for page in pair)], ids=str
)
def test_what_pages_link_to_is_there(page: Path) -> None:
    for link in _LINK.findall(page.read_text()):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in {_slug(title) for title in _TITLE.findall(target.read_text())}, link


def _code(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.language in CODE]


def _meaning(block: Block) -> object:
    """What a block does: without comments, which are in the page's language."""
    if block.language == "sh":
        return block.commands
    if block.language == "python":
        return ast.dump(ast.parse(block.body))
    return block.body


def _figures(page: Path) -> list[list[str]]:
    """Return the cells of tables that hold a figure alone, row by row."""
    rows = [line.split("|")[1:-1] for line in page.read_text().splitlines() if line[:1] == "|"]
    return [[cell.strip() for cell in row if _FIGURE.fullmatch(cell)] for row in rows]


def _set(commands: list[list[str]]) -> set[tuple[str, ...]]:
    return {tuple(words) for words in commands}


def _slug(title: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    plain = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", title).replace("`", "").lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
