"""Step: one driven layer on chosen rows: host time, device time, kernels, synchronizations."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cacheblend_rag.blend.fused import FusedKV
from cacheblend_rag.blend.row_attention import RowAttention
from cacheblend_rag.blend.rows import Rows
from cacheblend_rag.blend.stack import AttentionCall
from cacheblend_rag.engines.transformers.stack import TransformersStack
from tests.benchmarks.gpu.scene import NO_CUDA, Doing, Row, Scene
from tests.benchmarks.gpu.timing import Work, attempt, times, told

LAYERS, LAYER = 2, 1
REAL_TOKENS, TOY_TOKENS = 8192, 64
REAL_ROWS = (33, 205, 410, 1229, 2458, 8192)
TOY_ROWS = (9, 64)
REPEAT = 10
MICROSECONDS = 1e-3


@torch.inference_mode()
def measure(scene: Scene, doing: Doing) -> Iterator[Row]:
    """Yield a row for each number of rows, then what a pass does once per choice of rows."""
    doing("building the model")
    stack = open_layers(scene, LAYERS)
    tokens = scene.pick(REAL_TOKENS, TOY_TOKENS)
    fused = random_kv(stack, tokens)
    for count in scene.pick(REAL_ROWS, TOY_ROWS):
        doing(f"{count} rows")
        drive = Drive(stack, fused, scene.random_rows(tokens, count))
        row: Row = {"rows": count, "tokens": tokens}
        yield attempt(row, partial(_measured, scene, drive))
    ids = torch.arange(tokens, device=scene.device)[None]
    chosen = scene.random_rows(tokens, scene.pick(REAL_ROWS, TOY_ROWS)[1])
    once: dict[str, Work] = {
        "embedding of all tokens": lambda: stack.embed(ids % 100),
        "position inputs of all tokens": lambda: stack.position_inputs(ids),
        f"position inputs of {len(chosen)} rows": lambda: stack.position_inputs(
            chosen.device[None]
        ),
    }
    for name, work in once.items():
        doing(name)
        yield attempt({"once": name}, partial(times, scene.device, [work] * REPEAT, warm=1))


def build_layers(scene: Scene, layers: int) -> PreTrainedModel:
    """Return a model with random weights that has only so many layers."""
    return scene.shape(layers).build_model(dtype=scene.dtype, device=scene.device)


def open_layers(scene: Scene, layers: int) -> TransformersStack:
    """Return such a model as a stack that can be driven, but moves no keys: it is not tested."""
    return TransformersStack(build_layers(scene, layers))


def random_kv(stack: TransformersStack, tokens: int) -> FusedKV:
    """Return a buffer of all layers that is filled with random KV."""
    fused = FusedKV(stack.geometry, tokens)
    fused.keys.normal_()
    fused.values.normal_()
    return fused


class Drive:
    """Runs layers on rows, as a pass does."""

    def __init__(self, stack: TransformersStack, fused: FusedKV, rows: Rows) -> None:
        self.stack, self.fused, self.rows = stack, fused, rows
        self._attend = RowAttention()
        self.inputs = stack.position_inputs(rows.device[None])
        self.hidden = stack.embed(rows.device[None] % 100)

    def layer(self, layer: int, hidden: Tensor) -> Tensor:
        """Return the hidden states after one layer."""

        def attend(call: AttentionCall) -> Tensor:
            self.fused.write(layer, self.rows, call.key, call.value)
            return self._attend(call, self.fused, self.rows)

        return self.stack.run_layer(layer, hidden, self.inputs, attend)

    def all(self) -> Tensor:
        """Return the hidden states after all layers."""
        hidden = self.hidden
        for layer in range(self.stack.geometry.layers):
            hidden = self.layer(layer, hidden)
        return hidden


def _measured(scene: Scene, drive: Drive) -> Row:
    work: Work = partial(drive.layer, LAYER, drive.hidden)
    taken = times(scene.device, [work] * scene.pick(REPEAT, 3), warm=2)
    if not scene.has_cuda:
        return {**taken, "on the device": NO_CUDA}
    return {**taken, "synchronizations": _synchronizations(work), **_kernels(work), **_graph(work)}


def _synchronizations(work: Work) -> str:
    """Return whether the work makes the host wait for the device, and where."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        work()
    except RuntimeError as error:
        return told(error)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "none"


def _kernels(work: Work) -> Row:
    """Return how many kernels run, how long, and which take longest, in microseconds."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            work()
            torch.cuda.synchronize()
        found: list[Any] = list(seen.events() or ())
        events = [one for one in found if one.device_type == DeviceType.CUDA]
    except Exception as error:  # CUPTI is not available on every machine
        return {"kernels": told(error)}
    events.sort(key=lambda one: -one.device_time)
    return {
        "kernels": len(events),
        "busy_ms": round(MICROSECONDS * sum(one.device_time for one in events), 4),
        "largest": [[one.name[:60], round(one.device_time, 1)] for one in events[:5]],
    }


def _graph(work: Work) -> Row:
    """Return whether a CUDA graph can hold the layer as it is, and how long that takes."""
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        device = torch.device("cuda", torch.cuda.current_device())
        return {"graph": "possible", "graph_ms": times(device, [graph.replay] * REPEAT)["ms"]}
    except Exception as error:
        return {"graph": told(error)}
