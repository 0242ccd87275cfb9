"""What is not worth blending, and which tokens stay as stored: the greatest priors, one by one."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from cacheblend_rag import BlendConfig
from cacheblend_rag.prefill.policy import LEAST_CHANGE, free_tokens, protected_tokens, too_little

PRIORS = st.lists(st.sampled_from([0.0, 0.25, 1.0, 3.0, 64.0]), min_size=1, max_size=20)


@given(PRIORS, st.sampled_from([0.0, 0.3, 0.5, 0.9, 0.99]))
def test_the_fewest_tokens_that_hold_the_share_stay(prior: list[float], share: float) -> None:
    protected = protected_tokens(torch.tensor(prior), share).tolist()
    kept = [value for value, stays in zip(prior, protected, strict=True) if stays]
    assert sum(kept) >= share * sum(prior)
    assert not kept or sum(kept) - min(kept) < share * sum(prior)
    freed = [value for value, stays in zip(prior, protected, strict=True) if not stays]
    assert not kept or not freed or min(kept) >= max(freed)
    first = sorted(range(len(prior)), key=lambda token: -prior[token])[: len(kept)]
    assert [token for token, stays in enumerate(protected) if stays] == sorted(first)


def test_tokens_that_their_document_hardly_changed_are_free() -> None:
    assert not protected_tokens(torch.zeros(5), 0.9).any()
    assert not protected_tokens(torch.full((5,), LEAST_CHANGE * 0.99), 0.9).any()
    mixed = torch.tensor([LEAST_CHANGE, LEAST_CHANGE * 0.9])
    assert protected_tokens(mixed, 0.9).tolist() == [True, False]


def test_without_a_prior_nothing_is_free_unless_nothing_is_protected() -> None:
    assert not free_tokens(3, None, 0.1).any()
    assert free_tokens(3, None, 0.0).all()


def test_too_few_tokens_are_not_blended() -> None:
    assert too_little(0, 9) == ("no chunk of the prompt is stored", None)
    assert too_little(8, 9) == ("8 reusable tokens are fewer than min_tokens=9", "too short")
    assert too_little(9, 9) is too_little(1, 0) is None
    assert too_little(195, BlendConfig().min_tokens) is None  # an ordinary chunk, as refine has one
