"""What holds for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from cacheblend_rag.prefill import policy
from tests.model_names.fixtures import gguf_file, model_cache  # noqa: F401 - fixtures
from tests.real.fixtures import smollm2_folder  # noqa: F401 - fixtures

LONG = ("contracts", "real")
"""Folders whose files take minutes: they come first, since at the end one process would wait."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.parent.name not in LONG)


@pytest.fixture(scope="session", autouse=True)
def _machine_decides_nothing() -> Iterator[None]:
    """How busy the machine is never counts against blending, and no CPU has AMX for bfloat16."""
    has = getattr(torch.cpu, "get_capabilities", dict)()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "MARGIN", 1e9)
        patch.setattr(
            torch.cpu, "get_capabilities", lambda: {**has, "amx_bf16": False}, raising=False
        )
        yield
