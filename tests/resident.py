"""Memory of other processes."""

from __future__ import annotations

import os
from pathlib import Path


def resident_mib(group: int) -> float:
    """Return the resident memory of a process group, in MiB."""
    pages = 0
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and os.getpgid(int(process.name)) == group:
                pages += int((process / "statm").read_text().split()[1])
        except (OSError, ValueError):  # ended meanwhile
            continue
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)
