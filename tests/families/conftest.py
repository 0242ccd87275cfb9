"""vLLM starts by forking here, which takes a quarter of the time; nothing else differs."""

from __future__ import annotations

import pytest

from tests.engines.vllm.forking import fork_engines


@pytest.fixture(scope="session")
def _forked() -> None:
    fork_engines()
