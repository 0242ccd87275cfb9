"""Driven layers on padded rows can be replayed for another prompt, as a CUDA graph would do it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from cacheblend_rag.bench.gpu.graphs import LAYERS, SHORTER, PaddedDrive
from cacheblend_rag.bench.gpu.kernels import PADDED
from cacheblend_rag.bench.gpu.layer import Drive, open_layers, random_kv, random_rows
from cacheblend_rag.bench.gpu.scene import Dimensions, Scene
from cacheblend_rag.bench.shapes import TOY
from cacheblend_rag.blend.fused import FusedKV
from cacheblend_rag.engines.transformers.stack import TransformersStack
from tests.bench.recording import Recording

TOKENS, ROWS, PADDED_ROWS = 64, 9, 12
SCENE = Scene(is_toy=True, dimensions=Dimensions.of(TOY))


@pytest.fixture(scope="module")
def stack() -> TransformersStack:
    with torch.inference_mode():
        return open_layers(SCENE, LAYERS)


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def beginning_of(fused: FusedKV, stack: TransformersStack, tokens: int) -> FusedKV:
    """Return a copy of the KV of the first tokens."""
    copy = FusedKV(stack.geometry, tokens)
    copy.keys.copy_(fused.keys[:, :, :tokens])
    copy.values.copy_(fused.values[:, :, :tokens])
    return copy


@pytest.mark.parametrize("name", PADDED)
def test_a_replay_computes_other_rows_of_a_shorter_prompt(stack, name):
    fused = random_kv(stack, TOKENS)
    first = Drive(stack, fused, random_rows(SCENE, TOKENS, ROWS))
    padded = PaddedDrive(stack, fused, PADDED_ROWS, PADDED[name])
    padded.take(first)
    with Recording() as graph:
        hidden = padded.all()
    before = hidden.clone()

    shorter = TOKENS - SHORTER
    rows = random_rows(SCENE, shorter, ROWS - 2, seed=1)
    other = Drive(stack, beginning_of(fused, stack, shorter), rows)
    padded.take(other)
    graph.replay()
    wanted = other.all()
    torch.testing.assert_close(hidden[:, : len(rows)], wanted, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(hidden, before, atol=1e-2)
    for kept, new in ((fused.keys, other.fused.keys), (fused.values, other.fused.values)):
        torch.testing.assert_close(kept[:, :, :shorter], new, rtol=1e-4, atol=1e-5)


def test_layers_as_they_are_hold_numbers_of_their_prompt(stack):
    """So the test above can fail, and capturing needs what `PaddedDrive` does."""
    fused = random_kv(stack, TOKENS)
    first = Drive(stack, fused, random_rows(SCENE, TOKENS - 20, ROWS))
    kept = beginning_of(fused, stack, TOKENS)
    with Recording() as graph:
        hidden = first.all()
    other = Drive(stack, kept, random_rows(SCENE, TOKENS, ROWS, seed=1))
    first.rows.device.copy_(other.rows.device)
    first.hidden.copy_(other.hidden)
    fused.keys.copy_(kept.keys)
    fused.values.copy_(kept.values)
    for arguments, new in zip(first.inputs.arguments, other.inputs.arguments, strict=True):
        for into, table in zip(
            arguments["position_embeddings"], new["position_embeddings"], strict=True
        ):
            into.copy_(table)
    graph.replay()
    assert not torch.allclose(hidden, other.all(), atol=1e-2)
