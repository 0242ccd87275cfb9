"""Imports transformers quickly and silences its messages on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import cast


def quiet_libraries() -> None:
    """Import transformers, and keep its progress bars and advice off the terminal.

    If they are installed, transformers imports scikit-learn for a decoding method and SciPy for a
    loss, which are not used here and take a second.
    """
    with _left_out("sklearn"), _left_out("scipy"):
        from transformers import AutoModelForCausalLM  # noqa: F401 (imports what generates)
        from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


@contextmanager
def _left_out(module: str) -> Iterator[None]:
    """Hide an installed module from imports, unless it is imported already."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = cast("ModuleType", None)
    try:
        yield
    finally:
        del sys.modules[module]
