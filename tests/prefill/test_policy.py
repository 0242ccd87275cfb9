"""What is not worth blending, and the words for it."""

from __future__ import annotations

from cacheblend_rag.prefill.policy import too_little


def test_too_few_tokens_are_not_blended() -> None:
    assert too_little(0, 0) == ("no chunk of the prompt is stored", None)
    assert too_little(0, 9) == ("no chunk of the prompt is stored", None)
    assert too_little(8, 9) == ("8 reusable tokens are fewer than min_tokens=9", "too short")
    assert too_little(1, 2) is not None
    assert too_little(9, 9) is None
    assert too_little(1, 0) is None
