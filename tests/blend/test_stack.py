"""Attributes of other libraries' objects are put back as they were."""

from __future__ import annotations

from contextlib import suppress

from torch import nn

from cacheblend_rag.blend.stack import replaced


def test_a_hook_of_another_library_is_there_again_afterwards() -> None:
    plain, hooked = nn.Linear(2, 2), nn.Linear(2, 2)
    hook = hooked.forward = lambda given: given  # type: ignore[method-assign]
    for layer in (plain, hooked):
        before = dict(vars(layer))
        with suppress(RuntimeError), replaced(layer, "forward", print):
            assert layer.forward is print
            raise RuntimeError
        assert vars(layer) == before
    assert hooked.forward is hook
