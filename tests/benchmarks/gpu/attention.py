"""Step: one layer's attention of scattered rows, in a new shape each time and in the same again.

Requests have prompts of different lengths, so each asks for attention of shapes that were not asked
for before. A kernel that is planned or compiled for each shape is fast here only in the second
column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from cacheblend_rag.blend.attention import visible_keys
from cacheblend_rag.blend.fused import FusedKV
from cacheblend_rag.blend.row_attention import RowAttention
from cacheblend_rag.blend.rows import Rows
from cacheblend_rag.blend.stack import AttentionCall
from tests.benchmarks.gpu.scene import Doing, Row, Scene
from tests.benchmarks.gpu.timing import Work, attempt, times

REAL_CASES = ((4096, 205), (4096, 614), (8192, 410), (8192, 1229), (16384, 820), (16384, 2458))
TOY_CASES = ((64, 9), (96, 40))
NEW_SHAPES, AGAIN = 4, 5
BACKENDS = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.MATH,
)
COMPARED_ROWS = 32
"""How many of the last rows are compared with attention in float32."""


@dataclass(frozen=True)
class Case:
    """Rows of a prompt whose KV is in a buffer of one layer."""

    call: AttentionCall
    fused: FusedKV
    rows: Rows

    @classmethod
    def draw(cls, scene: Scene, tokens: int, count: int) -> Case:
        """Return random rows, the last token among them."""
        of = scene.geometry
        fused = FusedKV(replace(of, layers=1), tokens)
        fused.keys.normal_()
        fused.values.normal_()
        rows = scene.random_rows(tokens, count, seed=tokens)
        keys, values = fused.layer(0)
        query = scene.random(1, count, of.heads, of.head_dim).transpose(1, 2)
        call = AttentionCall(
            0, query, keys[:, :, rows.device], values[:, :, rows.device], of.head_dim**-0.5
        )
        return cls(call, fused, rows)

    def last_rows(self, count: int) -> Tensor:
        """Return the last rows' attention in float32, (1, count, heads, head_dim)."""
        rows = self.rows.part(len(self.rows) - count, len(self.rows))
        keys, values = (part.float() for part in self.fused.layer(0))
        mask = visible_keys(rows, slice(0, self.fused.tokens), None)
        query = self.call.query[:, :, -count:].float()
        copies = query.shape[1] // keys.shape[1]
        logits = query @ keys.repeat_interleave(copies, 1).transpose(2, 3) * self.call.scaling
        shares = logits.masked_fill(~mask, -torch.inf).softmax(-1)
        return (shares @ values.repeat_interleave(copies, 1)).transpose(1, 2)


@torch.inference_mode()
def measure(scene: Scene, doing: Doing) -> Iterator[Row]:
    """Yield a row for each kernel and shape; ``error``: the largest, against float32."""
    drawn = {
        (tokens, count): [
            Case.draw(scene, tokens - step, count - step) for step in range(NEW_SHAPES)
        ]
        for tokens, count in scene.pick(REAL_CASES, TOY_CASES)
    }
    kernels = _kernels(scene)
    for (tokens, count), cases in drawn.items():
        for name, kernel in kernels.items():
            doing(f"{tokens} tokens, {count} rows, {name}")
            row = {"tokens": tokens, "rows": count, "kernel": name}
            yield attempt(row, partial(_measured, scene, cases, kernel))
        doing(f"{tokens} tokens, all rows")
        row = {"tokens": tokens, "rows": tokens, "kernel": "whole prompt, causal"}
        yield attempt(row, partial(_whole, scene, cases))


Kernel = Callable[[Case], Tensor]


def _measured(scene: Scene, cases: list[Case], kernel: Kernel) -> Row:
    new = times(scene.device, [partial(kernel, case) for case in cases])
    again = times(scene.device, [partial(kernel, cases[0])] * AGAIN)
    count = min(COMPARED_ROWS, len(cases[0].rows))
    found = kernel(cases[0])[:, -count:].float()
    error = (found - cases[0].last_rows(count)).abs().max()
    return {
        "new_shape_ms": new["ms"],
        "again_ms": again["ms"],
        "host_ms": again["host_ms"],
        "error": float(error),
    }


def _kernels(scene: Scene) -> dict[str, Kernel]:
    """Return the kernels by name: the project's, and PyTorch's with the mask that it needs."""
    found: dict[str, Kernel] = {
        "own": partial(_project, RowAttention()),
        "own without kernels": partial(_project, RowAttention(kernels=False)),
    }
    found |= {f"SDPA {backend.name}": partial(_forced, backend) for backend in BACKENDS}
    if scene.has_cuda:
        for is_on in (True, False):
            name = f"SDPA, PyTorch's choice, cuDNN {'on' if is_on else 'off'}"
            found[name] = partial(_chosen, is_on)
    else:
        found["SDPA, PyTorch's choice"] = partial(_masked, nullcontext)
    return found


def _project(attend: Callable[[AttentionCall, FusedKV, Rows], Tensor], case: Case) -> Tensor:
    return attend(case.call, case.fused, case.rows)


def _forced(backend: SDPBackend, case: Case) -> Tensor:
    return _masked(partial(sdpa_kernel, backend), case)


def _chosen(is_on: bool, case: Case) -> Tensor:
    return _masked(partial(_cudnn, is_on), case)


def _masked(context: Callable[[], AbstractContextManager[object]], case: Case) -> Tensor:
    """Attend with PyTorch's attention, and the mask that it needs."""
    keys, values = case.fused.layer(0)
    heads, width = case.call.query.shape[1], case.call.query.shape[3]
    copies = heads // keys.shape[1]
    query = case.call.query.reshape(1, keys.shape[1], -1, width)
    mask = visible_keys(case.rows, slice(0, case.fused.tokens), None).repeat(copies, 1)
    with context():
        done = functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
    return done.reshape(1, heads, -1, width).transpose(1, 2)


@contextmanager
def _cudnn(is_on: bool) -> Iterator[None]:
    cuda = torch.backends.cuda
    before = cuda.cudnn_sdp_enabled()
    cuda.enable_cudnn_sdp(is_on)
    try:
        yield
    finally:
        cuda.enable_cudnn_sdp(before)


def _whole(scene: Scene, cases: list[Case]) -> Row:
    def prefill(case: Case) -> Work:
        keys, values = case.fused.layer(0)
        query = scene.random(1, case.call.query.shape[1], case.fused.tokens, keys.shape[3])
        return partial(
            functional.scaled_dot_product_attention,
            query, keys, values, is_causal=True, enable_gqa=True,
        )  # fmt: skip

    works = [prefill(case) for case in cases]
    new, again = times(scene.device, works), times(scene.device, [works[0]] * AGAIN)
    return {"new_shape_ms": new["ms"], "again_ms": again["ms"], "host_ms": again["host_ms"]}
