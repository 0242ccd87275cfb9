"""What holds for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cacheblend_rag.prefill import policy


@pytest.fixture(scope="session", autouse=True)
def _noise_decides_nothing() -> Iterator[None]:
    """Prefill of models so small is never held against blending, however busy the machine is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "MARGIN", 1e9)
        yield
