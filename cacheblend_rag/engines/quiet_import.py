"""Imports transformers quickly and silences its messages on the terminal."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from threading import Event, Lock
from types import ModuleType
from typing import Any, cast

from cacheblend_rag.engines.deferred_import import (
    deferred,
    distributions_looked_up,
    dynamo_deferred,
)

UNUSED = ("sklearn", "scipy")
"""If they are installed, transformers imports them for a decoding method and a loss."""
DEFERRED = frozenset(
    {
        # for tensor parallelism and FSDP; these import SymPy
        "torch.distributed._composable.fsdp",
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
        "transformers.distributed.sharding_utils",
        "transformers.distributed.tensor_parallel",
        # for masks that are compiled
        "torch._dynamo",
    }
)
"""What transformers imports by itself that one process, without compiling, does not use."""

_lock, _deferral = Lock(), ExitStack()
_entered: list[bool] = []
_own_command = Event()


def is_own_command() -> None:
    """Say that this process is a command of this package, in which nothing else uses transformers.

    Only there are transformers' imports deferred: a program that uses the package gets the whole
    library.
    """
    _own_command.set()


def quiet_libraries() -> None:
    """Import transformers, and keep its progress bars and advice off the terminal.

    What it imports for other purposes than ours is left out; in a command of this package, it is
    imported when it is used: that saves more than half of the time.
    """
    with ExitStack() as stack:
        if "transformers" not in sys.modules:
            for module in UNUSED:
                stack.enter_context(_left_out(module))
            if _own_command.is_set():
                stack.enter_context(_nothing_collected())
                stack.enter_context(distributions_looked_up())
            stack.enter_context(without_unused())
        # These import what generates, and what every model does
        from transformers import AutoModelForCausalLM, PreTrainedModel  # noqa: F401
        from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


@contextmanager
def without_unused() -> Iterator[None]:
    """Let transformers not import what one process does not use, while it is imported or loads.

    It does nothing but in a command of this package. Threads may be in it at the same time: it ends
    when the last one leaves.
    """
    if not _own_command.is_set():
        yield
        return
    with _lock:
        if not _entered:
            _deferral.enter_context(dynamo_deferred())
            _deferral.enter_context(deferred("transformers", DEFERRED, PREPARED))
        _entered.append(True)
    try:
        yield
    finally:
        with _lock:
            _entered.pop()
            if not _entered:
                _deferral.close()


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Search for no garbage meanwhile, nor later among what is imported, which stays anyway."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


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


def _read_once(import_utils: Any) -> None:
    """Let transformers read the sources of its models once, and only the ends of files.

    It looks for the names that each exports, twice: they exceed its cache.
    """
    read = getattr(import_utils, "create_import_structure_from_path", None)
    uncached, exported = (
        getattr(read, "__wrapped__", None),
        getattr(import_utils, "fetch__all__", None),
    )
    if uncached is None or exported is None:  # another release, or done already
        return
    kept = cache(uncached)

    def names(source: str) -> Any:
        # Names are taken from the last assignment that begins a line.
        return exported(source[max(0, source.rfind("\n__all__") + 1) :])

    import_utils.create_import_structure_from_path = lambda path: kept(str(path))
    import_utils.fetch__all__ = names


PREPARED = {"transformers.utils.import_utils": _read_once}
