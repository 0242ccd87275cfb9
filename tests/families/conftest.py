"""vLLM starts by forking here and compiles nothing, which takes a fifth of the time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engines.vllm.forking import fork_engines


@pytest.fixture(scope="module")
def _forked_and_eager() -> Iterator[None]:
    fork_engines()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TORCHDYNAMO_DISABLE", "1")
        environment.setenv("VLLM_CPU_CI_ENV", "1")
        yield
