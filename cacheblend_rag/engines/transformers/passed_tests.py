"""Records in a file that a model passed its tests, so that later processes need not repeat them.

A record holds for a state of everything that the tests depend on: the model's files and settings,
precision and device, the versions of the libraries, this package's sources, the processor. Models
that did not pass are tested each time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

import torch
import transformers
from transformers import PreTrainedModel

from cacheblend_rag.blend.rotary import LAYOUTS, Layout
from cacheblend_rag.engines.transformers.ordinary_prefill import OrdinaryPrefill
from cacheblend_rag.engines.transformers.stack import TransformersStack
from cacheblend_rag.folders import make_folder

logger = logging.getLogger(__name__)

PACKAGE = Path(__file__).parents[2]
SOURCES = ("blend", "engines")
LONGEST = 1 << 16
_file: ContextVar[Path | None] = ContextVar("passed_tests", default=None)


@contextmanager
def recorded_in(file: Path) -> Iterator[None]:
    """Let models that are loaded by name meanwhile use a record of their tests, and write one."""
    token = _file.set(file)
    try:
        yield
    finally:
        _file.reset(token)


@dataclass(frozen=True)
class PassedTests:
    """What the tests of a model found.

    layouts: how each layer rotates its keys. The others: see OrdinaryPrefill.
    """

    layouts: tuple[Layout | None, ...]
    cache_name: str
    positioned: bool
    decodes_batches: bool

    @classmethod
    def of(cls, stack: TransformersStack, ordinary: OrdinaryPrefill) -> Self:
        """Return what was found of a model that passed."""
        found = (ordinary.cache_name, ordinary.positioned, ordinary.decodes_batches)
        return cls(tuple(stack.layouts or ()), *found)

    def ordinary(self, model: PreTrainedModel, stack: TransformersStack) -> OrdinaryPrefill:
        """Return how the model is run without blending."""
        return OrdinaryPrefill(model, stack, self.cache_name, self.positioned, self.decodes_batches)

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> Self:
        """Return what ``plain`` wrote; raises KeyError, TypeError or ValueError for others."""
        known = {astuple(layout): layout for layout in LAYOUTS}
        layouts = (None if one is None else known[tuple(one)] for one in plain["layouts"])
        name, flags = plain["cache_name"], (plain["positioned"], plain["decodes_batches"])
        if not isinstance(name, str) or not all(isinstance(flag, bool) for flag in flags):
            raise ValueError("no record of tests")
        return cls(tuple(layouts), name, *flags)

    def plain(self) -> dict[str, Any]:
        """Return JSON values."""
        layouts = [None if layout is None else list(astuple(layout)) for layout in self.layouts]
        return {**vars(self), "layouts": layouts}


@dataclass(frozen=True)
class TestRecord:
    """The record for one model in its current state."""

    __test__ = False  # no test of pytest's

    file: Path
    state: str

    @classmethod
    def of(cls, model: PreTrainedModel, weights: str) -> Self | None:
        """Return the record for a model, None outside ``recorded_in``; weights: their hash."""
        file = _file.get()
        return None if file is None else cls(file, _state(model, weights))

    def read(self, layers: int) -> PassedTests | None:
        """Return what the tests found in this state, of so many layers; None without a record."""
        try:
            with self.file.open(encoding="utf-8") as file:
                plain = json.loads(file.read(LONGEST))
            passed = PassedTests.read(plain)
            return passed if (plain["state"], len(passed.layouts)) == (self.state, layers) else None
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError):
            logger.info("%s is not a record of a model's tests: the model is tested", self.file)
            return None

    def write(self, passed: PassedTests) -> None:
        """Record what the tests found; failures are logged and ignored."""
        begun = self.file.with_name(f"{self.file.name}.{uuid4().hex}.tmp")
        try:
            make_folder(self.file.parent)
            with os.fdopen(os.open(begun, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as to:
                json.dump({"state": self.state, **passed.plain()}, to)
            begun.replace(self.file)
        except OSError as error:
            logger.info("no record of the model's tests was written: %s", error)


def _state(model: PreTrainedModel, weights: str) -> str:
    """Return a hash of everything that the tests of a model depend on."""
    device = model.device
    told = [
        weights,
        f"{type(model).__module__}.{type(model).__qualname__}",
        model.config.to_dict(),
        str(model.config._attn_implementation),
        str(model.dtype),
        torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        torch.__version__,
        transformers.__version__,
        torch.get_float32_matmul_precision(),
        platform.machine(),
        torch.backends.cpu.get_cpu_capability(),
        _sources(),
    ]
    text = json.dumps(told, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _sources() -> list[tuple[str, int, int]]:
    """Return the names, sizes and times of the sources of the tests and of what they test."""
    found = (path for name in SOURCES for path in (PACKAGE / name).rglob("*.py"))
    return sorted((str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in found)
