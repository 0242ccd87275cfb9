from __future__ import annotations

import pytest

from cacheblend_rag.settings.sizes import size


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (2048, "2.0 KiB"), (3 << 20, "3.0 MiB"), (5 << 40, "5120.00 GiB")],
)
def test_sizes_carry_their_unit(nbytes, text):
    assert size(nbytes) == text
