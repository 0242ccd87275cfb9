"""What the script of a client is given, and how it tells what it saw.

The program runs the script in the client's own environment, which has nothing of this project.
"""

from __future__ import annotations

import json
import os
import sys

URL, KEY, MODEL = (os.environ[f"CLIENT_{name}"] for name in ("URL", "KEY", "MODEL"))
NOTES: list[str] = json.loads(os.environ["CLIENT_NOTES"])
QUESTION = "What is a cache? Answer in one sentence."
ABOUT = "What do the notes say?"
MOST_TOKENS = 16


def tell(answer: str | None, streamed: str | None, after_tool: str | None) -> None:
    """Print the texts of an answer, of the same one streamed, and of one after a tool's result."""
    seen = {"answer": answer, "streamed": streamed, "after_tool": after_tool}
    sys.stdout.write(json.dumps(seen) + "\n")
