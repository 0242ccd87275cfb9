"""``python -m tests.benchmarks.NAME``: keyword parameters of a function become its options."""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from cacheblend_rag.engines.model_files import quiet_libraries
from cacheblend_rag.errors import CacheBlendError


def run(measure: Callable[..., dict[str, Any]], given: Sequence[str] | None = None) -> None:
    """Call ``measure`` with the options of the command line; print what it returns as JSON.

    An option is of its default's type: true or false is a flag, a tuple takes several values.
    """
    parser = argparse.ArgumentParser(description=inspect.getdoc(measure))
    parser.add_argument("--json", action="store_true", help="print one line")
    for name, parameter in inspect.signature(measure).parameters.items():
        flag, default = f"--{name.replace('_', '-')}", parameter.default
        if isinstance(default, bool):
            parser.add_argument(flag, action="store_true")
        elif isinstance(default, tuple):
            parser.add_argument(flag, nargs="+", type=type(default[0]), default=default)
        else:
            parser.add_argument(flag, type=type(default), default=default, help=f"{default!r}")
    asked = vars(parser.parse_args(given))
    indent = None if asked.pop("json") else 1
    quiet_libraries()
    try:
        print(json.dumps(measure(**asked), indent=indent, allow_nan=False))
    except CacheBlendError as error:
        sys.exit(str(error))


def say(label: str) -> None:
    """Tell what is done next."""
    print(label, file=sys.stderr)
