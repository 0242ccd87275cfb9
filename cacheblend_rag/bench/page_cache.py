"""Drops files from the system's page cache, to measure reading them from the disk itself."""

from __future__ import annotations

import os
from pathlib import Path

from cacheblend_rag.errors import CacheBlendError
from cacheblend_rag.kv.tiers.file_reads import cached_share


def drop_from_page_cache(folder: Path) -> None:
    """Drop a folder's files from the page cache, so that the next read waits for the disk.

    Raises CacheBlendError where the system keeps them in memory, as on a tmpfs.
    """
    for path in folder.rglob("*"):
        if not path.is_file():
            continue
        with path.open("rb+") as file:
            os.fsync(file)  # pages that are not written yet stay
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if cached_share(file.fileno(), 0, path.stat().st_size):
                raise CacheBlendError(
                    f"cold: the system keeps {path} in memory; set TMPDIR to a folder on a disk"
                )
