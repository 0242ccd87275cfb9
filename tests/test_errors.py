"""Errors reach another process whole: process pools and task queues pickle them."""

from __future__ import annotations

import pickle

import pytest

from cacheblend_rag import errors
from cacheblend_rag.errors import (
    CacheBlendError,
    MissingExtraError,
    PromptTooLongError,
    StoreError,
    UnsupportedModelError,
)
from cacheblend_rag.reason import ReasonCode


@pytest.mark.parametrize(
    "error",
    [
        MissingExtraError("vLLM", "vllm"),
        PromptTooLongError(3000, 2048, at_least=True, answer_tokens=512),
        StoreError("full"),
        UnsupportedModelError("its layers differ", ReasonCode.UNSUPPORTED_LAYERS),
    ],
)
def test_an_error_is_the_same_after_pickling(error: CacheBlendError) -> None:
    found = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert type(found) is type(error)
    assert str(found) == str(error)
    assert vars(found) == vars(error)


def test_no_error_is_of_a_kind_that_a_framework_takes_for_a_malformed_answer() -> None:
    """LlamaIndex's synthesizers go on after a ValueError or TypeError, with "Empty Response"."""
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    ours = [kind for kind in kinds if issubclass(kind, CacheBlendError)]
    assert len(ours) > 10
    assert not any(issubclass(kind, ValueError | TypeError) for kind in ours)
