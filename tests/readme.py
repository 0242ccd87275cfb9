"""The README's programs and commands, as they stand there."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
BIN = Path(sys.executable).parent
BLOCKS = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    """Return the blocks of a language, in order; of a diff, what its new lines make."""
    found = [body for name, body in BLOCKS.findall(README.read_text()) if name == language]
    return [_applied(body) for body in found] if language == "diff" else found


def commands(program: str) -> list[list[str]]:
    """Return the arguments of each of a program's calls, by its path below the checkout."""
    lines = "".join(blocks("sh")).splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))[:1] == [program]]


def _applied(diff: str) -> str:
    return "".join(line[1:] for line in diff.splitlines(keepends=True) if not line.startswith("-"))
