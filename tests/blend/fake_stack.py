"""FakeStack: a small decoder in plain PyTorch that notes what is asked of it, and its reference.

`FakeStack` runs layers as the blend pass drives them; what it ran, and what a `WatchedKV` was
written and read, stands in one log. `Reference` knows nothing of the pass: it holds a whole prompt
of one layer after the other as square matrices, with the causal mask laid out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from cacheblend_rag.blend.cost import LayerCost
from cacheblend_rag.blend.fused import FusedKV
from cacheblend_rag.blend.rotary import Rotation, rotated
from cacheblend_rag.blend.rows import Rows
from cacheblend_rag.blend.stack import Attend, AttentionCall, Geometry, Reduction

LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 4, 4, 2, 8, 50
HIDDEN = HEADS * HEAD_DIM
PAIRS = HEAD_DIM // 2
SCALING = 0.4
WINDOWS = (None, 9, None, 9)
FREQUENCIES = 0.7 ** torch.arange(PAIRS)

Kind = Literal["run", "probe", "write", "read", "upload"]


class Event(NamedTuple):
    """Something done in a layer; rows: the positions it was done for, in order."""

    kind: Kind
    layer: int
    rows: tuple[int, ...]


@dataclass(frozen=True)
class Turns:
    """What layers are to know of some positions: how far each row is turned."""

    positions: Tensor
    by: Rotation


def alone(part: Tensor) -> Tensor:
    """What a rank hears that is alone: itself."""
    return part


@dataclass
class FakeStack:
    """A DecoderStack of random weights, always the same.

    windows: of each layer, hence their number. softcap: of all logits. reduced, first: what ranks
    answer, as in ``all_reduce`` and ``broadcast``. log: what was done, in order. device: where its
    weights are.
    """

    windows: Sequence[int | None] = WINDOWS
    softcap: float | None = None
    row_block: int = 1000
    reduced: Callable[[Tensor, Reduction], Tensor] = lambda part, _: part
    first: Callable[[Tensor], Tensor] = alone
    log: list[Event] = field(default_factory=list)
    device: torch.device = torch.device("cpu")  # noqa: RUF009

    def __post_init__(self) -> None:
        draw = torch.Generator().manual_seed(0)

        def weights(*shape: int) -> Tensor:
            drawn = torch.randn(len(self.windows), *shape, generator=draw) * shape[-1] ** -0.5
            return drawn.to(self.device)

        self.embedding = torch.randn(VOCABULARY, HIDDEN, generator=draw).to(self.device)
        self.query = weights(HEADS * HEAD_DIM, HIDDEN)
        self.key, self.value = (weights(KV_HEADS * HEAD_DIM, HIDDEN) for _ in range(2))
        self.out, self.up, self.down = (weights(HIDDEN, HIDDEN) for _ in range(3))

    @property
    def geometry(self) -> Geometry:
        depth = len(self.windows)
        return Geometry(depth, HEADS, KV_HEADS, HEAD_DIM, torch.float32, self.device)

    @property
    def costs(self) -> tuple[LayerCost, ...]:
        """Another one a layer, so that no layer's work passes for another's."""
        return tuple(
            LayerCost(1000.0 + layer, 300.0 + layer, 7.0 + layer, window)
            for layer, window in enumerate(self.windows)
        )

    def embed(self, token_ids: Tensor) -> Tensor:
        return self.embedding[token_ids]

    def position_inputs(self, positions: Tensor) -> Turns:
        angles = positions[0, :, None].float() * FREQUENCIES.to(self.device)
        return Turns(positions[0], Rotation(angles.cos(), angles.sin()))

    def run_layer(
        self, layer: int, hidden: Tensor, position_inputs: Turns, attend: Attend
    ) -> Tensor:
        rows = tuple(position_inputs.positions.tolist())
        x = normed(hidden)
        call = AttentionCall(
            layer,
            query=turned(split(x @ self.query[layer].T, HEADS), position_inputs),
            key=turned(split(x @ self.key[layer].T, KV_HEADS), position_inputs),
            value=split(x @ self.value[layer].T, KV_HEADS),
            scaling=SCALING,
            window=self.windows[layer],
            softcap=self.softcap,
        )
        try:
            attended = attend(call)
        except Exception:
            self.log.append(Event("probe", layer, rows))
            raise
        self.log.append(Event("run", layer, rows))
        return self.after_attention(layer, hidden, attended.flatten(2))

    def after_attention(self, layer: int, hidden: Tensor, attended: Tensor) -> Tensor:
        hidden = hidden + attended @ self.out[layer].T
        return hidden + functional.silu(normed(hidden) @ self.up[layer].T) @ self.down[layer].T

    def rotation(self, offset: int) -> Rotation:
        angles = (offset * FREQUENCIES.to(self.device)).expand(len(self.windows), PAIRS)
        return Rotation(angles.cos(), angles.sin())

    def all_reduce(self, part: Tensor, how: Reduction) -> Tensor:
        return self.reduced(part, how)

    def broadcast(self, part: Tensor) -> Tensor:
        return self.first(part)


def normed(hidden: Tensor) -> Tensor:
    return hidden * hidden.square().mean(-1, keepdim=True).add(1e-6).rsqrt()


def split(flat: Tensor, heads: int) -> Tensor:
    """(1, rows, heads x head_dim) as (1, heads, rows, head_dim)."""
    return flat.view(1, -1, heads, HEAD_DIM).transpose(1, 2)


def turned(keys: Tensor, turns: Turns) -> Tensor:
    """Turn each row by its own position: rows stand where layers do in a Rotation."""
    return rotated(keys[0].transpose(0, 1)[:, :, None], turns.by)[:, :, 0].transpose(0, 1)[None]


class WatchedKV(FusedKV):
    """Notes what is written and read; nothing lies in it but NaN, until something is laid there."""

    def __init__(self, stack: FakeStack, tokens: int, reserve: int = 0) -> None:
        super().__init__(stack.geometry, tokens, reserve)
        self.log = stack.log
        self.keys.fill_(torch.nan)
        self.values.fill_(torch.nan)

    def write(self, layer: int, rows: Rows, keys: Tensor, values: Tensor) -> None:
        self.log.append(Event("write", layer, tuple(rows.host.tolist())))
        super().write(layer, rows, keys, values)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        self.log.append(Event("read", layer, ()))
        return super().layer(layer)


class Reference:
    """A prompt of which some KV is given, one layer after the other, all tokens at once.

    keys, values: (layers, kv_heads, tokens, head_dim), what is fused in the end. hidden: (tokens,
    hidden), of which only computed rows mean anything.
    """

    def __init__(self, stack: FakeStack, ids: Tensor, keys: Tensor, values: Tensor) -> None:
        self.stack, self.keys, self.values = stack, keys.clone(), values.clone()
        self.hidden = stack.embedding[ids]
        angles = torch.arange(ids.numel())[:, None].double() * FREQUENCIES.double()
        self._turns = torch.polar(torch.ones_like(angles), angles)

    def fresh(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values (kv_heads, tokens, head_dim) that the layer gives the hidden states."""
        x = normed(self.hidden)
        keys = self._turned(split(x @ self.stack.key[layer].T, KV_HEADS)[0])
        return keys, split(x @ self.stack.value[layer].T, KV_HEADS)[0]

    def write(self, layer: int, rows: Sequence[int]) -> None:
        """Put the rows' fresh KV in place of what there was."""
        keys, values = self.fresh(layer)
        self.keys[layer][:, rows], self.values[layer][:, rows] = keys[:, rows], values[:, rows]

    def shares(self, layer: int) -> Tensor:
        """(heads, tokens, tokens): how each token shares its attention out."""
        x = normed(self.hidden)
        query = self._turned(split(x @ self.stack.query[layer].T, HEADS)[0])
        keys = self.keys[layer].repeat_interleave(HEADS // KV_HEADS, 0)
        distance = torch.arange(len(x))[:, None] - torch.arange(len(x))[None]
        hidden = (distance < 0) | (distance >= (self.stack.windows[layer] or len(x)))
        logits = query @ keys.transpose(1, 2) * SCALING
        if self.stack.softcap is not None:
            logits = self.stack.softcap * torch.tanh(logits / self.stack.softcap)
        return logits.masked_fill(hidden, -torch.inf).softmax(-1)

    def advance(self, layer: int, rows: Sequence[int]) -> None:
        """Run the layer, for these rows only."""
        values = self.values[layer].repeat_interleave(HEADS // KV_HEADS, 0)
        attended = (self.shares(layer) @ values).transpose(0, 1).flatten(1)
        after = self.stack.after_attention(layer, self.hidden, attended)
        self.hidden = self.hidden.clone()
        self.hidden[rows] = after[rows]

    def _turned(self, part: Tensor) -> Tensor:
        first, second = part.double().chunk(2, -1)
        moved = torch.complex(first, second) * self._turns
        return torch.cat((moved.real, moved.imag), -1).float()


def plain_kv(stack: FakeStack, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """KV and hidden states of tokens computed as an ordinary model would, from position 0."""
    empty = torch.zeros(len(stack.windows), KV_HEADS, ids.numel(), HEAD_DIM)
    reference = Reference(stack, ids, empty, empty)
    every: list[Any] = list(range(ids.numel()))
    for layer in range(len(stack.windows)):
        reference.write(layer, every)
        reference.advance(layer, every)
    return reference.keys, reference.values, reference.hidden
