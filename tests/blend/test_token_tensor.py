"""Token ids become the tensor that PyTorch makes of them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from cacheblend_rag.blend.rows import token_tensor


@pytest.mark.parametrize("ids", [(), (3,), [5, 0, 128_255], range(9000)])
def test_it_is_the_tensor_of_the_ids(ids: Sequence[int]) -> None:
    made = token_tensor(ids, torch.device("cpu"))
    assert made.equal(torch.tensor(list(ids), dtype=torch.int64))
    assert token_tensor(ids, torch.device("meta")).is_meta
