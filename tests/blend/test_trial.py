"""The trial of a model, over fake ones that do as they should, or not in one thing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cacheblend_rag.blend import FusedKV, rounding
from cacheblend_rag.blend.rotary import Layout, Rotation, Table
from cacheblend_rag.blend.rounding import EIGHT_BIT_STEP
from cacheblend_rag.blend.row_attention import RowAttention
from cacheblend_rag.blend.rows import Rows
from cacheblend_rag.blend.stack import Attend, AttentionCall, Geometry
from cacheblend_rag.blend.trial import (
    TRIAL_TOKENS,
    Reference,
    check_embedding,
    check_layers,
    find_layouts,
    made_up,
    trial_tokens,
)
from cacheblend_rag.errors import UnsupportedModelError
from tests.blend import fake_stack
from tests.blend.fake_stack import FREQUENCIES, VOCABULARY, FakeStack, Turns

WINDOW = 2_000
HALVES = Layout(interleaved=False, spread="pairs")


@dataclass
class TriedFake(FakeStack):
    """A fake that is not known yet. angle: of a position, by which keys are turned."""

    layouts: Sequence[Layout | None] | None = None
    angle: Callable[[Tensor], Tensor] = field(default=lambda positions: positions.float())
    still: tuple[int, ...] = ()
    tableless: tuple[int, ...] = ()
    scale: float = 1.0
    shifted: int = 0
    normless: bool = False
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("embedding", "query", "key", "value", "out", "up", "down"):
            setattr(self, name, getattr(self, name).to(self.dtype))

    @property
    def geometry(self) -> Geometry:
        return replace(super().geometry, dtype=self.dtype)

    def position_inputs(self, positions: Tensor) -> Turns:
        angles = self.angle(positions[0] + self.shifted)[:, None] * FREQUENCIES
        return Turns(positions[0], Rotation(angles.cos(), angles.sin()))

    def run_layer(
        self, layer: int, hidden: Tensor, position_inputs: Turns, attend: Attend
    ) -> Tensor:
        self.key[layer] *= self.scale
        by = position_inputs.by
        if layer in self.still:
            by = Rotation(torch.ones_like(by.cos), torch.zeros_like(by.sin))
        inputs = Turns(position_inputs.positions, by)
        try:
            if not self.normless:
                return super().run_layer(layer, hidden, inputs, attend)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(fake_stack, "normed", lambda hidden: hidden)
                return super().run_layer(layer, hidden, inputs, attend)
        finally:
            self.key[layer] /= self.scale

    def tables(self, offset: int) -> list[Table | None]:
        angles = offset * FREQUENCIES
        table = (angles.cos(), angles.sin())
        return [None if i in self.tableless else table for i in range(len(self.windows))]


def tokens() -> Tensor:
    return trial_tokens(VOCABULARY, torch.device("cpu"))


def behind(stack: FakeStack, count: int = 30) -> FusedKV:
    return made_up(stack, tokens(), count)


def reference(fused: FusedKV) -> Reference:
    """What dense layers make of the trial's tokens behind the made-up KV."""
    ids = trial_tokens(VOCABULARY, torch.device("cpu"))
    start, inputs, outputs = fused.tokens - TRIAL_TOKENS, [], []
    whole = torch.cat((torch.zeros(start, dtype=torch.long), ids))
    dense = fake_stack.Reference(FakeStack(), whole, fused.keys, fused.values)
    rows = list(range(start, fused.tokens))
    for layer in range(fake_stack.LAYERS):
        inputs.append(dense.hidden[rows][None])
        dense.write(layer, rows)
        dense.advance(layer, rows)
        outputs.append(dense.hidden[rows][None])
    return Reference(ids, start, inputs, outputs)


def refused(message: str) -> Any:
    return pytest.raises(UnsupportedModelError, match=message)


# How keys turn


def test_how_each_layer_turns_its_keys_is_found() -> None:
    ids = trial_tokens(VOCABULARY, torch.device("cpu"))
    assert find_layouts(TriedFake(), ids, WINDOW) == [HALVES] * 4
    assert find_layouts(TriedFake(still=(1,)), ids, WINDOW) == [HALVES, None, HALVES, HALVES]
    assert find_layouts(TriedFake(still=(0, 2), tableless=(0, 2)), ids, WINDOW) == [
        None, HALVES, None, HALVES,
    ]  # fmt: skip
    assert find_layouts(TriedFake(), ids, TRIAL_TOKENS + 1) == [HALVES] * 4


@pytest.mark.parametrize(
    ("stack", "message"),
    [
        (
            TriedFake(angle=lambda positions: positions.float().sqrt()),
            "^its rotary embedding cannot be undone by an offset: keys of layer 0, moved by 1976 "
            "positions, differ from those computed there$",
        ),
        (
            TriedFake(angle=lambda positions: positions.clamp(max=1_900).float()),
            "its rotary embedding cannot be undone by an offset",  # near its context's end only
        ),
        (
            TriedFake(angle=lambda p: torch.where((p > 990) & (p < 1_100), p + 3, p).float()),
            "its rotary embedding cannot be undone by an offset",  # at the first offset only
        ),
        (
            TriedFake(tableless=(2, 3)),
            "^its layers get no rotary table: keys of layer 2, moved by 1976 positions",
        ),
    ],
    ids=["other turns", "far", "near", "no table"],
)
def test_keys_that_do_not_turn_by_an_offset_are_refused(stack: TriedFake, message: str) -> None:
    ids = trial_tokens(VOCABULARY, torch.device("cpu"))
    with refused(message):
        find_layouts(stack, ids, WINDOW)


def test_layers_that_turn_other_components_are_refused() -> None:
    class Mixed(TriedFake):
        def run_layer(
            self, layer: int, hidden: Tensor, position_inputs: Turns, attend: Attend
        ) -> Tensor:
            by = position_inputs.by
            paired = Rotation(by.cos, by.sin, interleaved=layer == 2)
            inputs = Turns(position_inputs.positions, paired)
            return super().run_layer(layer, hidden, inputs, attend)

    with refused("^its layers rotate different components of their keys$"):
        find_layouts(Mixed(), trial_tokens(VOCABULARY, torch.device("cpu")), WINDOW)


def test_what_one_rank_cannot_turn_none_can() -> None:
    def other_failed(part: Tensor, how: str) -> Tensor:
        return torch.ones_like(part)

    with refused("cannot be undone by an offset: keys of layer 0"):
        find_layouts(TriedFake(reduced=other_failed), trial_tokens(9, torch.device("cpu")), WINDOW)


# What layers make


@pytest.mark.parametrize("layer", [0, 3])
def test_a_layer_that_gives_another_result_is_named(layer: int) -> None:
    fused = behind(FakeStack())
    wanted = reference(fused)
    odd = FakeStack()
    odd.down[layer] *= 1.02
    with refused(
        f"^layer {layer}, run alone on some rows, gives a different result than in the model$"
    ):
        check_layers(odd, wanted, fused)


class Eight:
    """Attention over KV in fp8, as a cache of 8 bits has it."""

    def __call__(self, call: AttentionCall, fused: FusedKV, rows: Rows) -> Tensor:
        kept = FusedKV(replace(FakeStack().geometry), fused.tokens)
        for own, stored in ((fused.keys, kept.keys), (fused.values, kept.values)):
            stored.copy_(own.to(torch.float8_e4m3fn).float())
        return RowAttention()(call, kept, rows)


def test_more_rounding_is_let_pass_where_the_model_keeps_kv_in_8_bits() -> None:
    fused = behind(FakeStack())
    wanted = reference(fused)
    with refused("layer 0"):
        check_layers(FakeStack(), wanted, fused, Eight())
    check_layers(FakeStack(), wanted, fused, Eight(), cache_step=EIGHT_BIT_STEP)
    odd = FakeStack()
    odd.down[2] *= 2
    with refused("layer 2"):
        check_layers(odd, wanted, fused, Eight(), cache_step=EIGHT_BIT_STEP)


def test_layers_with_quantized_weights_may_round_more_than_their_type() -> None:
    fused = behind(FakeStack())
    wanted = reference(fused)

    class Rounded(FakeStack):
        def after_attention(self, layer: int, hidden: Tensor, attended: Tensor) -> Tensor:
            rough = attended.to(torch.float8_e4m3fn).float()
            return super().after_attention(layer, hidden, rough)

    with refused("layer 0"):
        check_layers(Rounded(), wanted, fused)
    with refused("layer 0"):  # other rounding than the model's own
        check_layers(Rounded(), wanted, fused, quantized=True)
    start, outputs = wanted.start, []
    rows = Rows.at(np.arange(start, fused.tokens), torch.device("cpu"))
    for layer, before in enumerate(wanted.inputs):
        noisy = before + before * 1e-6  # sends some numbers to another step
        outputs.append(whole(Rounded(), layer, noisy, rows, fused))
    own = replace(wanted, outputs=outputs)
    check_layers(Rounded(), own, fused, quantized=True)


def test_other_embeddings_are_refused() -> None:
    wanted = reference(behind(FakeStack()))
    off = FakeStack()
    off.embedding = off.embedding * 1.01
    wide = FakeStack()
    wide.embedding = torch.cat((wide.embedding, wide.embedding), -1)
    other_rank = FakeStack(reduced=lambda part, how: torch.ones_like(part))
    for stack in (off, wide, other_rank):
        with refused(
            r"^its first layer gets more than the tokens' embeddings \(learned positions\?\)$"
        ):
            check_embedding(stack, wanted)


# What is tried in 16 bits


def whole(stack: FakeStack, layer: int, hidden: Tensor, rows: Rows, fused: FusedKV) -> Tensor:
    """A layer of all rows at once, with attention written out in float32."""
    inputs = stack.position_inputs(rows.device[None])
    noise = rounding.attend_unfused

    def attend(call: AttentionCall) -> Tensor:
        fused.write(layer, rows, call.key, call.value)
        keys, values = fused.layer(layer)
        return noise(call, keys, values, rows=rows, draw=None)

    return stack.run_layer(layer, hidden, inputs, attend)


def own_reference(stack: TriedFake, fused: FusedKV) -> Reference:
    """What a fake in 16 bits makes of the trial's tokens."""
    start, inputs, outputs = fused.tokens - TRIAL_TOKENS, [], []
    rows = Rows.at(np.arange(start, fused.tokens), torch.device("cpu"))
    hidden = stack.embed(tokens()[None])
    for layer in range(fake_stack.LAYERS):
        inputs.append(hidden)
        outputs.append(hidden := whole(stack, layer, hidden, rows, fused))
    return Reference(tokens(), start, inputs, outputs)


LOW = [torch.bfloat16, torch.float16]
FAULTS: dict[str, Callable[[torch.dtype], TriedFake]] = {
    "rotary off by one": lambda dtype: TriedFake(dtype=dtype, shifted=1),
    "rotary of the wrong sign": lambda dtype: TriedFake(dtype=dtype, angle=lambda p: -p.float()),
    "norm left out": lambda dtype: TriedFake(dtype=dtype, normless=True),
    "window one short": lambda dtype: TriedFake(dtype=dtype, windows=(None, 8, None, 8)),
    "window one wide": lambda dtype: TriedFake(dtype=dtype, windows=(None, 10, None, 10)),
    "no window": lambda dtype: TriedFake(dtype=dtype, windows=(None,) * 4),
    "softcap": lambda dtype: TriedFake(dtype=dtype, softcap=1.0),
}


@pytest.mark.parametrize("dtype", LOW, ids=str)
class TestIn16Bits:
    def check(self, stack: TriedFake, dtype: torch.dtype) -> None:
        own = TriedFake(dtype=dtype)
        fused = behind(own)
        wanted = own_reference(own, fused)
        check_embedding(stack, wanted)
        check_layers(stack, wanted, fused)

    def test_a_model_passes(self, dtype: torch.dtype) -> None:
        self.check(TriedFake(dtype=dtype), dtype)

    @pytest.mark.parametrize("fault", FAULTS)
    def test_faults_are_refused(self, fault: str, dtype: torch.dtype) -> None:
        with refused("run alone on some rows, gives a different result"):
            self.check(FAULTS[fault](dtype), dtype)


# What depends on positions otherwise


class Positioned(TriedFake):
    """A fake in which something changes by the absolute position, from ``since`` on."""

    what, since = "", 0

    def run_layer(
        self, layer: int, hidden: Tensor, position_inputs: Turns, attend: Attend
    ) -> Tensor:
        far = (position_inputs.positions >= self.since).float()[:, None]
        grown = (1 + 0.1 * far).to(hidden.dtype)

        def changed(call: AttentionCall) -> Tensor:
            if layer == 2 and self.what == "queries":
                call = replace(call, query=call.query * grown)
            if layer == 2 and self.what == "values":
                call = replace(call, value=call.value * grown)
            if layer == 2 and self.what == "scaling":
                call = replace(call, scaling=call.scaling * float(grown.max()))
            return attend(call)

        done = super().run_layer(layer, hidden, position_inputs, changed)
        return done * grown if layer == 2 and self.what == "output" else done


@pytest.mark.parametrize(
    ("dtype", "since"),
    [(torch.float32, 900), (torch.bfloat16, WINDOW - TRIAL_TOKENS), (torch.float16, 900)],
    ids=str,
)
@pytest.mark.parametrize("what", ["queries", "values", "scaling", "output"])
def test_what_changes_by_absolute_position_is_refused(
    what: str, dtype: torch.dtype, since: int
) -> None:
    stack = Positioned(dtype=dtype)
    stack.what, stack.since = what, since
    by = 1_000 if since == 900 else WINDOW - TRIAL_TOKENS
    with refused(
        "^it depends on absolute positions beyond its rotary embedding: the "
        f"{what} of layer 2 changes at position {by}$"
    ):
        find_layouts(stack, tokens(), WINDOW)
    stack.since = WINDOW
    assert find_layouts(stack, tokens(), WINDOW) == [HALVES] * 4


def test_queries_may_come_as_rounded_as_the_cache_is() -> None:
    class Rough(TriedFake):
        def run_layer(
            self, layer: int, hidden: Tensor, position_inputs: Turns, attend: Attend
        ) -> Tensor:
            def rounded(call: AttentionCall) -> Tensor:
                query = call.query.to(torch.float8_e4m3fn).float()
                return attend(replace(call, query=query))

            return super().run_layer(layer, hidden, position_inputs, rounded)

    with refused("queries of layer 0"):
        find_layouts(Rough(), tokens(), WINDOW)
    assert find_layouts(Rough(), tokens(), WINDOW, cache_step=EIGHT_BIT_STEP) == [HALVES] * 4
