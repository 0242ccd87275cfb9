"""Copies one layer of every chunk into the prompt's KV buffer, unpacked, keys re-rotated.

On NVIDIA GPUs with Triton one kernel does so (`kernels/placement.py`); ``has_kernel`` decides for
both engines. Elsewhere, and for int4, ``place_parts`` does, one chunk after the other.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from functools import cache

import torch

from cacheblend_rag.blend.fused import FusedKV
from cacheblend_rag.blend.layer_part import LayerPart, WholePart
from cacheblend_rag.blend.rotary import Rotation
from cacheblend_rag.blend.stack import Geometry
from cacheblend_rag.kv.chunk_kv import ChunkKV

_LOG = logging.getLogger(__name__)


@cache
def has_kernel(device: torch.device) -> bool:
    """Whether chunks are placed on a device by the kernel: if it is there, and does what it should.

    The first call tries it, which waits for the device.
    """
    is_nvidia = device.type == "cuda" and torch.version.cuda is not None
    if not is_nvidia or importlib.util.find_spec("triton") is None:
        return False
    try:
        if _places_alike(device):
            return True
        _LOG.warning("the kernel that places chunk KV computes wrong numbers here: it is not used")
    except Exception:  # of a compiler, for one: everything works without it, only slower
        _LOG.warning("the kernel that places chunk KV does not work here", exc_info=True)
    return False


def _places_alike(device: torch.device) -> bool:
    """Whether the kernel places what its twin does, up to a rounding, for native and fp8."""
    from cacheblend_rag.blend.kernels.placement import LayerLaunches, tables_of

    layers, size, draw = 2, 40, torch.Generator().manual_seed(0)
    angles = torch.arange(layers * 32, device=device).view(layers, 32).float()
    turn = Rotation(angles.cos(), angles.sin())
    parts: list[WholePart] = []
    for index, is_packed in enumerate((False, True)):
        numbers = torch.randn(layers, 2, 2, size, 64, generator=draw).to(torch.bfloat16)
        kv = ChunkKV(numbers, 0)
        stored = (kv.packed() if is_packed else kv).mapped(lambda tensor: tensor.to(device))
        parts.append(WholePart(stored, LayerPart(index * size, stored.layer(0), turn)))
    shape = Geometry(layers, 2, 2, 64, torch.bfloat16, device)
    found, wanted = (FusedKV(shape, len(parts) * size) for _ in range(2))
    table, launches = tables_of(parts)
    place = LayerLaunches(found, torch.from_numpy(table).to(device), launches, on_host=False)
    for layer in range(layers):
        place(layer)
        own = [(part.first.start, part.kv.layer(layer)) for part in parts]
        place_parts(wanted, layer, [LayerPart(*each, turn.of(layer)) for each in own])
    same_keys = torch.allclose(found.keys, wanted.keys, rtol=0.02, atol=0.02)
    return same_keys and torch.equal(found.values, wanted.values)


def place_parts(fused: FusedKV, layer: int, parts: Sequence[LayerPart]) -> None:
    """Copy one layer of chunks to their positions in a prompt's KV.

    parts: their tensors may be on any device.
    """
    for part in parts:
        (kv,) = part.kv.unpacked().numbers
        fused.place(layer, part.start, kv[0], kv[1], part.turn)
