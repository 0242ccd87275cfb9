"""The programs and commands on README and the pages of the docs, as they stand there."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
BIN = Path(sys.executable).parent
BLOCKS = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language: str, page: Path = README) -> list[str]:
    """Return a page's blocks of a language, in order; of a diff, the program it results in."""
    found = [body for name, body in BLOCKS.findall(page.read_text()) if name == language]
    return [_applied(body) for body in found] if language == "diff" else found


def commands(program: str, page: Path = README) -> list[list[str]]:
    """Return the words of each call of a program on a page."""
    lines = "".join(blocks("sh", page)).splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))[:1] == [program]]


def _applied(diff: str) -> str:
    return "".join(line[1:] for line in diff.splitlines(keepends=True) if not line.startswith("-"))
