"""The guides, in two languages, and the commands and programs on them.

A comment ``<!-- not run here: REASON -->`` before a block says that a test cannot run it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.readme import DOCS, ROOT

NAMES = ("tuning", "troubleshooting", "deployment")
ENGLISH = {name: DOCS / f"{name}.md" for name in NAMES}
CHINESE = {name: DOCS / "zh" / f"{name}.md" for name in NAMES}
PAIRS = {
    "README": (ROOT / "README.md", ROOT / "docs" / "zh" / "README.md"),
    **{name: (ENGLISH[name], CHINESE[name]) for name in NAMES},
}
MOVED = DOCS / "zh" / "from-the-original.md"
"""What settings and headings of the original became; in English a section of another page."""
PROGRAM = "cacheblend-rag"
_BLOCK = re.compile(
    r"^(?:<!-- not run here: (?P<reason>.+?) -->\n)?```(?P<language>\w+)\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`(cacheblend-rag [^`]+)`")


@dataclass(frozen=True)
class Block:
    """A block of a page; reason: why no test runs it, None if one does."""

    language: str
    body: str
    reason: str | None

    @property
    def commands(self) -> list[list[str]]:
        """The words of each command, without comments; a backslash continues a line."""
        lines = self.body.replace("\\\n", " ").splitlines()
        return [words for line in lines if (words := shlex.split(line, comments=True))]


def blocks(page: Path) -> Iterator[Block]:
    """Yield a page's blocks that have a language, in order."""
    for found in _BLOCK.finditer(page.read_text()):
        yield Block(found["language"], found["body"], found["reason"])


def inline_commands(page: Path) -> list[list[str]]:
    """Return the words of our commands within sentences and tables; none with ``...``."""
    text = _FENCED.sub("", page.read_text())
    return [shlex.split(said) for said in _INLINE.findall(text) if "..." not in said]
