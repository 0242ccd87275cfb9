"""The kernel that places chunks against its twin, in Triton's interpreter, on drawn layers.

test_placement.py runs it. What the interpreter does differently:
it cuts float32 to bfloat16 instead of rounding, so rotated bfloat16 keys may be one step off.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cacheblend_rag.blend.copy_stream import TABLE_BYTES, PinnedBuffers
from cacheblend_rag.blend.fused import FusedKV
from cacheblend_rag.blend.kernels.placement import is_readable, place_by_kernel, table_of
from cacheblend_rag.blend.layer_part import LayerPart
from cacheblend_rag.blend.placement import place_parts
from cacheblend_rag.blend.transfer import Upload
from tests.blend.fake_copy_stream import FakeCopyStream
from tests.blend.test_placement import buffer, part_of, turn_by
from tests.blend.test_transfer import ROW_BYTES, geometry, laid_plainly, parts_of, sent
from tests.blend.test_transfer import buffer as kv_buffer

CLOSE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 4e-2}


@st.composite
def layers(draw: st.DrawFn) -> tuple[FusedKV, list[LayerPart]]:
    heads, width = draw(st.integers(1, 3)), draw(st.sampled_from([8, 16, 24, 64]))
    dtype, interleaved = draw(st.sampled_from(list(CLOSE))), draw(st.booleans())
    pairs = draw(st.sampled_from([0, 1, width // 4, width // 2, width // 2]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    parts, at = [], draw(st.integers(0, 3))
    for _ in range(draw(st.integers(1, 4))):
        tokens, skip = draw(st.integers(1, 37)), draw(st.integers(0, 3))
        whole = torch.randn(2, heads, tokens + skip, width, generator=generator).mul(3).to(dtype)
        part = part_of(whole, draw(st.sampled_from(["native", "fp8"])))
        by = draw(st.none() | st.integers(-99, 9999))
        turn = None if by is None else turn_by(by, pairs, interleaved=interleaved)
        parts.append(LayerPart(at, part.cut(skip, skip + tokens), turn))
        at += tokens + draw(st.integers(0, 3))
    return buffer(heads, width, at, dtype), parts


@settings(max_examples=30, deadline=None, derandomize=True)
@given(layers(), st.integers(0, 1), st.integers(1, 3))
def test_chunks_are_placed_as_by_the_twin(
    drawn: tuple[FusedKV, list[LayerPart]], layer: int, programs: int
) -> None:
    fused, parts = drawn
    assert all(map(is_readable, parts))
    wanted = deepcopy(fused)
    place_parts(wanted, layer, parts)
    table, launches = table_of(parts)
    place_by_kernel(*fused.of_layer(layer), torch.tensor(table), launches, programs=programs)
    near = CLOSE[fused.keys.dtype]
    torch.testing.assert_close(fused.keys, wanted.keys, atol=near, rtol=near, equal_nan=True)
    torch.testing.assert_close(fused.values, wanted.values, atol=0, rtol=0, equal_nan=True)
    for part in (part for part in parts if part.turn is None):
        here = slice(part.start, part.start + part.kv.tokens)
        assert torch.equal(fused.keys[layer, :, here], wanted.keys[layer, :, here])


def test_an_upload_reads_in_place_what_of_a_chunk_is_page_locked() -> None:
    """As the numbers of packed chunks that were read from disk, whose scales are elsewhere."""
    copy_stream, staged = FakeCopyStream(), list[Tensor]()

    class Noted(Upload):
        def _send(self, load: Any) -> None:
            staged.extend(source for _, source in load.sources)
            super()._send(load)

    buffers = PinnedBuffers(copy_stream, 2, 9 * ROW_BYTES, table_bytes=TABLE_BYTES)
    fused = kv_buffer("fused", geometry(copy_stream))
    parts = parts_of(0, fused.keys.device, "fp8")
    for part in parts:
        copy_stream.pin(part.kv.tensors[0])
    upload = Noted(buffers, fused, 0, parts, copy_stream.worked())
    sent(upload)
    upload.arrive()
    assert staged
    assert not any(copy_stream.is_pinned(tensor) for tensor in staged)
    assert copy_stream.errors == []
    for one, other in zip(
        fused.layer(0), laid_plainly("fused", copy_stream, "fp8")[0], strict=True
    ):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5, equal_nan=True)
