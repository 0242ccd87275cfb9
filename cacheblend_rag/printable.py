"""Text for terminals and pages: without the control characters that they would obey."""

from __future__ import annotations

import re

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


REVERSING = re.compile(r"[\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Marks that change the order in which text is shown."""


def one_line(name: str) -> str:
    """Return a name, of a file or a document, as ``printable`` on one line and in its own order.

    Anybody may have chosen it: it must not look like more lines, or like another name.
    """
    return " ".join(REVERSING.sub("", printable(name)).split())


def printable(text: str) -> str:
    """Return text without control characters, line breaks and tabs aside: terminals obey them."""
    return CONTROL.sub("", text)
