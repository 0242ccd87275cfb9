"""What counts as near full prefill, on made-up figures."""

from __future__ import annotations

import pytest

from cacheblend_rag.quality.fidelity import PromptFidelity
from cacheblend_rag.quality.verify import small_set


def judged(kl: float, plain: float, *, recomputes: bool = True) -> str:
    blends, reuses = ([PromptFidelity(one, one, 1.0, True)] * 3 for one in (kl, plain))
    return small_set._judged(blends, reuses, recomputes=recomputes).status


@pytest.mark.parametrize(
    ("kl", "plain", "recomputes", "status"),
    [
        (0.05, 0.08, True, "ok"),
        (0.08, 0.05, True, "failed"),
        (0.05, 0.05, True, "failed"),
        (0.05, 0.05, False, "ok"),
        (0.0005, 0.0001, True, "ok"),
        (0.26, 0.9, True, "failed"),
        (0.26, 0.26, False, "failed"),
        (float("nan"), 0.1, True, "failed"),
    ],
)
def test_a_blend_must_be_near_and_nearer_than_plain_reuse(
    kl: float, plain: float, recomputes: bool, status: str
) -> None:
    assert judged(kl, plain, recomputes=recomputes) == status
