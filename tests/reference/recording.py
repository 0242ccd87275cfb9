"""Record a command as an animated SVG: ``python -m tests.reference.recording FILE.svg COMMAND...``.

Lines come when the command printed them, the whole within LONGEST seconds, and stay.
"""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS = 118
LONGEST = 20.0
"""Seconds that the recording takes at most; a longer run is shown faster."""
STYLE = """
text[data-at] { animation: shown 1ms both; }
@keyframes shown { from { visibility: hidden; } to { visibility: visible; } }
@media (prefers-reduced-motion: reduce) { text[data-at] { animation: none; } }
"""


def record(command: list[str]) -> list[tuple[float, str]]:
    """Run a command in a terminal; returns each line of stdout, and the seconds until it came."""
    ours, its = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(COLUMNS)}
    begun = time.monotonic()
    with subprocess.Popen(
        command, stdout=its, stderr=subprocess.DEVNULL, env=environment
    ) as process:
        os.close(its)
        lines = []
        # OSError is how a terminal says that its other end was closed.
        with open(ours, errors="replace", newline="\n") as output, suppress(OSError):
            for line in output:
                lines.append((time.monotonic() - begun, line.rstrip()))  # noqa: PERF401 - its time
    if process.returncode:
        raise SystemExit(process.returncode)
    return lines


def drawn(lines: list[tuple[float, str]], title: str) -> str:
    """Return recorded lines as an SVG, each of which appears at its time."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    times = list[float]()
    for at, line in lines:
        wrapped = Text.from_ansi(line).wrap(console, COLUMNS) or [Text()]
        for one in wrapped:
            console.print(one, no_wrap=True)
            times.append(at)
    faster = max(1.0, times[-1] / LONGEST)

    def delayed(found: re.Match[str]) -> str:
        at = times[min(int(found["line"]), len(times) - 1)] / faster
        return f'<text data-at="{at:.2f}" style="animation-delay:{at:.2f}s"{found["rest"]}'

    svg = re.sub(r"@font-face {.*?}", "", console.export_svg(title=title), flags=re.DOTALL)
    svg = re.sub(r'<text(?P<rest>[^>]*clip-path="url\(#[^)]*-line-(?P<line>\d+)\)")', delayed, svg)
    return svg.replace("</style>", f"{STYLE}</style>", 1)


if __name__ == "__main__":
    file, *words = sys.argv[1:]
    Path(file).write_text(drawn(record(words), " ".join(words)))
