"""CUDA graphs of layers on few rows, which a fast GPU computes sooner than they are queued.

A graph holds addresses and shapes. So rows are padded to a multiple, every input has a buffer of
its own, and the kernels that write and read the prompt's KV are told its address on the device. One
graph per layer and number of rows serves all prompts. Layers are captured from the second time on
that a number of rows comes, some of them in each pass, right after they were computed without a
graph, and are compared with that.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from cacheblend_rag.blend.fused import FusedKV
from cacheblend_rag.blend.row_attention import attend_by_positions
from cacheblend_rag.blend.rows import Rows
from cacheblend_rag.blend.stack import AttentionCall, DecoderStack
from cacheblend_rag.memory import lack_of_memory

logger = logging.getLogger(__name__)

MULTIPLE = 64
"""Rows are padded to a multiple of this."""
MOST_ROWS = 1024
"""With more rows the device takes longer than the host, so that a graph saves nothing."""
CAPTURED_AT_ONCE = 16
"""Most layers that a pass captures, which takes some 4 ms each: no request is to wait for all."""
KEPT_SIZES = 16
"""Of so many padded numbers of rows graphs are kept; of those that came last."""
TOLERANCE = 1e-2
"""Largest relative error, by norm, of a graph's output against the same layer run eagerly."""

Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]
"""Records what a function queues on the device, and returns the function that queues it again."""


class LayerGraphs:
    """The graphs of one model's layers, for its driving thread.

    capture: of CUDA by default. Graphs hold the addresses of weights, so they are for a model whose
    weights stay where they are; those that are written in place are read anew.
    """

    def __init__(
        self, stack: DecoderStack, layers: Sequence[nn.Module], capture: Capture | None = None
    ) -> None:
        self._stack = stack
        self._capture = capture or CudaCapture(stack.geometry.device)
        self._modules = [module for layer in layers for module in layer.modules()]
        self._seen: OrderedDict[int, _Inputs | None] = OrderedDict()
        self.is_on = True

    def of(self, rows: Rows, fused: FusedKV) -> PromptGraphs | None:
        """Return the graphs for rows of a prompt; None if layers are to be run without.

        Hooks may do anything, so a model that has some on its layers gets no graphs.
        """
        if not self.is_on or not 1 < len(rows) <= MOST_ROWS or not fused.keeps_layers:
            return None
        if any(module._forward_hooks or module._forward_pre_hooks for module in self._modules):
            return None
        size = -(-len(rows) // MULTIPLE) * MULTIPLE
        if size not in self._seen:
            self._seen[size] = None
            while len(self._seen) > KEPT_SIZES:
                self._seen.popitem(last=False)
            return None
        self._seen.move_to_end(size)
        inputs = self._seen[size]
        if inputs is None:
            inputs = self._seen[size] = _Inputs.of(self._stack, size)
        return PromptGraphs(self, inputs, rows, fused)

    def give_up(self, why: str) -> None:
        """Run all layers without graphs from now on."""
        self.is_on = False
        self._seen.clear()
        logger.warning("layers are run without CUDA graphs: %s", why)


@dataclass
class _Inputs:
    """The buffers that graphs of one number of rows read and write.

    positions: (rows,) int64, -1 for padding. address: see KVAddress. hidden, out: (1, rows,
    hidden); padding stays 0 in ``hidden``. arguments: the stack's position inputs. replays: by
    layer. user: a token of whose prompt is in them, which does not keep that prompt's KV.
    """

    positions: Tensor
    address: Tensor
    hidden: Tensor
    out: Tensor
    arguments: Any
    replays: dict[int, Replay] = field(default_factory=dict)
    user: object = None

    @classmethod
    def of(cls, stack: DecoderStack, size: int) -> _Inputs:
        of = stack.geometry
        # Such tensors may be written to in and out of inference mode.
        with torch.inference_mode(mode=False), torch.no_grad():
            positions = torch.full((size,), -1, device=of.device)
            hidden = torch.zeros_like(stack.embed(torch.zeros_like(positions)[None]))
            copies: dict[int, Tensor] = {}

            def copied(tensor: Tensor) -> Tensor:
                return copies.setdefault(id(tensor), tensor.clone())

            given = stack.position_inputs(torch.zeros_like(positions)[None])
            arguments = tree_map_only(Tensor, copied, given)
            address = torch.zeros(4, dtype=torch.long, device=of.device)
            return cls(positions, address, hidden, torch.zeros_like(hidden), arguments)


def _tensors(inputs: Any) -> list[Tensor]:
    """Return the different tensors among the arguments of all layers."""
    leaves = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    return list({id(leaf): leaf for leaf in leaves}.values())


class PromptGraphs:
    """Runs layers on the rows of one prompt by graphs."""

    def __init__(self, graphs: LayerGraphs, inputs: _Inputs, rows: Rows, fused: FusedKV) -> None:
        self._graphs, self._inputs, self._rows, self._fused = graphs, inputs, rows, fused
        self._stack, self._may_capture = graphs._stack, CAPTURED_AT_ONCE
        self._token = object()

    def run(self, layer: int, hidden: Tensor) -> Tensor | None:
        """Return the hidden states, (1, rows, hidden), after a layer; valid until its next run.

        Their fresh KV is written, too. None if the layer must be run without a graph.
        """
        inputs = self._inputs
        is_captured = layer in inputs.replays
        if not self._graphs.is_on or not (is_captured or self._may_capture):
            return None
        if inputs.user is not self._token:
            self._fill()
        inputs.hidden[:, : len(self._rows)] = hidden
        if not is_captured:
            self._may_capture -= 1
            return self._captured(layer)
        inputs.replays[layer]()
        return inputs.out[:, : len(self._rows)]

    def _fill(self) -> None:
        """Put the prompt's rows into the buffers."""
        inputs, rows, keys = self._inputs, self._rows.device, self._fused.keys
        missing = len(inputs.positions) - len(rows)
        inputs.positions[: len(rows)] = rows
        padded = torch.cat((rows, rows[-1:].expand(missing)))
        inputs.positions[len(rows) :] = -1
        inputs.hidden[:, len(rows) :] = 0
        new = _tensors(self._stack.position_inputs(padded[None]))
        for into, tensor in zip(_tensors(inputs.arguments), new, strict=True):
            into.copy_(tensor)
        numbers = [keys.data_ptr(), self._fused.values.data_ptr(), *keys.stride()[:2]]
        inputs.address.copy_(torch.tensor(numbers), non_blocking=True)
        inputs.user = self._token

    def _captured(self, layer: int) -> Tensor | None:
        """Run a layer eagerly, capture it as a CUDA graph, and compare both outputs."""
        inputs, count = self._inputs, len(self._rows)

        def work() -> None:
            self._run(layer)

        try:
            work()
            wanted = inputs.out[:, :count].clone()
            replay = self._graphs._capture(work)
            inputs.out.zero_()
            replay()
            found = inputs.out[:, :count]
            error = float((found - wanted).float().norm() / wanted.float().norm())
        except torch.AcceleratorError:
            raise
        except Exception as failure:  # a graph only saves time: whatever stops it, the pass goes on
            if lack_of_memory(failure) is not None:
                return None
            self._graphs.give_up(f"{type(failure).__name__}: {' '.join(str(failure).split())}")
            return None
        if not error <= TOLERANCE:
            self._graphs.give_up(f"layer {layer} differs by {error:.2g} of its size")
            return None  # the layer is run again, since the graph has written its KV, too
        inputs.replays[layer] = replay
        return found

    def _run(self, layer: int) -> None:
        """Run a layer on the buffers; nothing in it depends on numbers of the host."""
        inputs = self._inputs

        def attend(call: AttentionCall) -> Tensor:
            return attend_by_positions(call, inputs.positions, inputs.address)

        inputs.out.copy_(self._stack.run_layer(layer, inputs.hidden, inputs.arguments, attend))


class CudaCapture:
    """Captures CUDA graphs, whose memory is shared by all of them: they run one after another."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._stream: Any = None

    def __call__(self, work: Callable[[], None]) -> Replay:
        """Capture; other threads may use the device meanwhile."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            # What `torch.cuda.graph` does, without emptying PyTorch's cache of memory first.
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        return graph.replay
