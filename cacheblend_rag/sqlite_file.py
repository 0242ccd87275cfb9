"""Opens SQLite files that anybody may have written."""

from __future__ import annotations

import sqlite3
from pathlib import Path


def connect(path: Path, mode: str, wait_seconds: float) -> sqlite3.Connection:
    """Open a file in autocommit mode, for any thread, without running code from its schema.

    Args:
        path: the file.
        mode: ``ro``, or ``rw`` for one that exists.
        wait_seconds: how long a statement waits for other processes' locks.

    Raises:
        sqlite3.Error: when it cannot be opened.
    """
    file = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}",
        uri=True,
        timeout=wait_seconds,
        isolation_level=None,
        check_same_thread=False,
    )
    # SQLite does not check that values stored as text are UTF-8.
    file.text_factory = lambda stored: stored.decode("utf-8", "replace")
    file.execute("PRAGMA trusted_schema = OFF")
    file.execute("PRAGMA cell_size_check = ON")
    return file
