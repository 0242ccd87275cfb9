"""The trial of a model, over fake ones that do as they should, or not in one thing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from cacheblend_rag.blend import FusedKV, trial
from cacheblend_rag.blend.passes import attend_fused
from cacheblend_rag.blend.rotary import Layout, Rotation, Table
from cacheblend_rag.blend.rows import Rows
from cacheblend_rag.blend.stack import Attend, AttentionCall, probe_layer
from cacheblend_rag.blend.trial import (
    MOST_BEHIND,
    TRIAL_TOKENS,
    Reference,
    check_embedding,
    check_layers,
    close,
    find_layouts,
    key_traits,
    made_up,
    tokens_behind,
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

    def position_inputs(self, positions: Tensor) -> Turns:
        angles = self.angle(positions[0])[:, None] * FREQUENCIES
        return Turns(positions[0], Rotation(angles.cos(), angles.sin()))

    def run_layer(
        self, layer: int, hidden: Tensor, position_inputs: Turns, attend: Attend
    ) -> Tensor:
        self.key[layer] *= self.scale
        by = position_inputs.by
        if layer in self.still:
            by = Rotation(torch.ones_like(by.cos), torch.zeros_like(by.sin))
        try:
            return super().run_layer(layer, hidden, Turns(position_inputs.positions, by), attend)
        finally:
            self.key[layer] /= self.scale

    def tables(self, offset: int) -> list[Table | None]:
        angles = offset * FREQUENCIES
        table = (angles.cos(), angles.sin())
        return [None if i in self.tableless else table for i in range(len(self.windows))]


def behind(stack: FakeStack, tokens: int = 30) -> FusedKV:
    ids = trial_tokens(VOCABULARY, torch.device("cpu"))
    inputs = stack.position_inputs(torch.zeros(1, TRIAL_TOKENS, dtype=torch.long))
    return made_up(stack, tokens, probe_layer(stack, 0, stack.embed(ids[None]), inputs))


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


# What is tried


def test_the_tokens_of_the_trial_are_the_same_each_time() -> None:
    ids = trial_tokens(VOCABULARY, torch.device("cpu"))
    assert ids.shape == (TRIAL_TOKENS,)
    assert torch.equal(ids, trial_tokens(VOCABULARY, torch.device("cpu")))
    assert len(set(ids.tolist())) > TRIAL_TOKENS // 2
    assert 0 <= int(ids.min()) <= int(ids.max()) < VOCABULARY
    assert set(trial_tokens(2, torch.device("cpu")).tolist()) == {0, 1}
    assert trial_tokens(VOCABULARY, torch.device("meta")).is_meta


@pytest.mark.parametrize(
    ("windows", "context", "tokens"),
    [
        ((None, None), 9_000, TRIAL_TOKENS),
        ((None, 48, 9), 9_000, 48 + TRIAL_TOKENS),
        ((0, None), 9_000, TRIAL_TOKENS),
        ((MOST_BEHIND,), 99_000, MOST_BEHIND),
        ((MOST_BEHIND - 1,), 99_000, MOST_BEHIND),
        ((MOST_BEHIND + 1, 7), 99_000, 7 + TRIAL_TOKENS),  # too wide to show
        ((48,), 60, 60 - TRIAL_TOKENS),
        ((48,), TRIAL_TOKENS, 0),
        ((48,), 1, 0),
    ],
)
def test_as_many_tokens_stand_behind_as_let_windows_show(
    windows: tuple[int | None, ...], context: int, tokens: int
) -> None:
    assert tokens_behind(windows, context) == tokens


def test_made_up_kv_is_sized_as_real_kv_is() -> None:
    stack = FakeStack()
    inputs = stack.position_inputs(torch.zeros(1, TRIAL_TOKENS, dtype=torch.long))
    ids = trial_tokens(VOCABULARY, torch.device("cpu"))
    call = probe_layer(stack, 0, stack.embed(ids[None]), inputs)
    large = AttentionCall(0, call.query, call.key * 30, call.value, 1.0)
    fused = made_up(stack, 500, large)
    assert fused.tokens == 500 + TRIAL_TOKENS
    for kv, real in ((fused.keys, large.key), (fused.values, large.value)):
        assert kv.shape[2] == fused.tokens
        torch.testing.assert_close(kv.std(), real.std(), atol=0, rtol=0.05)
        assert abs(float(kv.mean())) < 0.05 * float(real.std())
    again = made_up(stack, 500, large)
    assert torch.equal(fused.keys, again.keys)
    assert torch.equal(fused.values, again.values)
    assert not torch.equal(fused.keys[0], fused.keys[1])


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
            "positions, are not those that it computes there$",
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
            "^its layers are handed no rotary table: keys of layer 2, moved by 1976 positions",
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

    with refused("^its layers turn different components of their keys$"):
        find_layouts(Mixed(), trial_tokens(VOCABULARY, torch.device("cpu")), WINDOW)


def test_what_one_rank_cannot_turn_none_can() -> None:
    def other_failed(part: Tensor, how: str) -> Tensor:
        return torch.ones_like(part)

    with refused("cannot be undone by an offset: keys of layer 0"):
        find_layouts(TriedFake(reduced=other_failed), trial_tokens(9, torch.device("cpu")), WINDOW)


def test_traits_tell_sizes_and_speeds_of_keys() -> None:
    ids = trial_tokens(VOCABULARY, torch.device("cpu"))
    traits = key_traits(FakeStack(), ids)
    keys = fake_stack.plain_kv(FakeStack(), ids)[0][0]
    size = float(keys.square().mean().sqrt().log2()) * trial.TRAIT_STEPS
    speed = float(FREQUENCIES.log2().mean()) * trial.TRAIT_STEPS
    assert traits == [round(size), *[round(speed)] * 4]
    assert key_traits(TriedFake(scale=2.0), ids) == [traits[0] + 8, *traits[1:]]

    class Slower(FakeStack):
        def rotation(self, offset: int) -> Rotation:
            angles = (offset * FREQUENCIES / 2).repeat(4, 1)
            angles[2] = 0.0  # a layer that turns nothing
            return Rotation(angles.cos(), angles.sin())

    assert key_traits(Slower(), ids) == [
        traits[0], traits[1] - 8, traits[1] - 8, 0, traits[1] - 8,
    ]  # fmt: skip


# What layers make


def test_a_model_that_does_in_parts_what_it_does_whole_passes() -> None:
    fused = behind(FakeStack())
    wanted = reference(fused)
    check_embedding(FakeStack(), wanted)
    check_layers(FakeStack(), wanted, fused)
    start = wanted.start
    keys = fake_stack.Reference(FakeStack(), wanted.token_ids, fused.keys, fused.values)
    assert not torch.equal(fused.keys[:, :, start:], behind(FakeStack()).keys[:, :, start:])
    assert keys.keys.shape == fused.keys.shape


@pytest.mark.parametrize("layer", range(4))
def test_a_layer_that_gives_another_result_is_named(layer: int) -> None:
    fused = behind(FakeStack())
    wanted = reference(fused)
    odd = FakeStack()
    odd.down[layer] *= 1.02
    with refused(
        f"^layer {layer}, driven alone on some of its rows, gives another result than in the model$"
    ):
        check_layers(odd, wanted, fused)


def test_a_window_that_attention_is_not_told_of_shows() -> None:
    fused = behind(FakeStack())
    wanted = reference(fused)
    with refused("^layer 1, driven alone"):
        check_layers(FakeStack(windows=(None, None, None, 9)), wanted, fused)
    with refused("^layer 3, driven alone"):
        check_layers(FakeStack(windows=(None, 9, None, 8)), wanted, fused)


def test_rows_of_the_trial_attend_apart_and_by_the_attention_given() -> None:
    fused = behind(FakeStack())
    wanted = reference(fused)
    asked: list[tuple[int, list[int]]] = []

    def attention(call: AttentionCall, seen: FusedKV, rows: Rows) -> Tensor:
        asked.append((call.layer, (rows.host - wanted.start).tolist()))
        return attend_fused(call, seen, rows)

    check_layers(FakeStack(), wanted, fused, attention)
    odd = list(trial.ODD_ROWS)
    rest = [row for row in range(TRIAL_TOKENS) if row not in odd]
    assert asked == [(layer, part) for layer in range(4) for part in (odd, rest)]


def test_more_rounding_is_let_pass_where_the_model_rounds() -> None:
    fused = behind(FakeStack())
    wanted = reference(fused)
    near = FakeStack()
    near.down[2] *= 1.02
    check_layers(near, wanted, fused, rounded=True)
    near.down[2] *= 2
    with refused("layer 2"):
        check_layers(near, wanted, fused, rounded=True)


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


def test_a_layer_that_fails_on_another_rank_fails_here() -> None:
    fused = behind(FakeStack())
    wanted = reference(fused)
    with refused("^layer 0, driven alone"):
        check_layers(FakeStack(reduced=lambda part, how: torch.ones_like(part)), wanted, fused)


def states(rows: int = 8, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(1, rows, 16, generator=torch.Generator().manual_seed(2)).to(dtype)


@pytest.mark.parametrize(
    ("by", "dtype", "rounded", "passes"),
    [
        (0.0009, torch.float32, False, True),
        (0.0011, torch.float32, False, False),
        (0.18, torch.float32, True, True),
        (0.22, torch.float32, True, False),
        (0.04, torch.float16, False, True),
        (0.06, torch.float16, False, False),
        (0.04, torch.bfloat16, False, True),
        (0.18, torch.bfloat16, True, True),
    ],
)
def test_results_are_close_but_for_rounding(
    by: float, dtype: torch.dtype, rounded: bool, passes: bool
) -> None:
    wanted = states(dtype=dtype)
    found = (wanted.float() * (1 + by)).to(dtype)
    assert close(found, wanted, rounded=rounded) == passes
    assert close(wanted, wanted)


def test_a_large_residual_hides_nothing() -> None:
    before, added = states() * 1_000, states(8)[:, :, torch.randperm(16)]
    wanted = before + added
    found = before + added * 1.02
    assert close(found, wanted)
    assert not close(found, wanted, before)
    assert close(before + added * 1.0005, wanted, before)


@pytest.mark.parametrize(("dtype", "passes"), [(torch.float32, False), (torch.float16, True)])
def test_in_low_precision_the_median_token_decides(dtype: torch.dtype, passes: bool) -> None:
    wanted = states(dtype=dtype)
    found = wanted.clone()
    found[:, :4] *= 3
    assert close(found, wanted) == passes
    found[:, :5] *= 3
    assert not close(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_may_be_off_by_the_rounding_of_far_positions(dtype: torch.dtype) -> None:
    wanted = torch.full((1, 2, 3, 4), 2.0, dtype=dtype)
    least = 0.05 if dtype == torch.bfloat16 else 0.001
    for offset in (0, 100_000):
        tolerance = 2.0 * (least + offset * 2.4e-7)
        same = trial._close_keys(offset)
        assert same((wanted.float() + 0.95 * tolerance), wanted)
        assert not same((wanted.float() + 1.05 * tolerance), wanted)
    nothing = torch.zeros_like(wanted)
    assert trial._close_keys(0)(nothing, nothing)


def test_what_this_rank_cannot_turn_it_tells_the_others() -> None:
    told: list[list[int]] = []

    def reduced(part: Tensor, how: str) -> Tensor:
        told.append(part.tolist())
        return part

    ids = trial_tokens(VOCABULARY, torch.device("cpu"))
    find_layouts(TriedFake(reduced=reduced), ids, WINDOW)
    assert told == [[0]] * 4
    told.clear()
    with refused("cannot be undone"):
        find_layouts(TriedFake(reduced=reduced, angle=lambda p: p.float().sqrt()), ids, WINDOW)
    assert told == [[1]]
