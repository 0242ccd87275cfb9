"""Text for terminals and pages: without the control characters that they would obey."""

from __future__ import annotations

import re

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """Return text without control characters, line breaks and tabs aside: terminals obey them."""
    return CONTROL.sub("", text)
