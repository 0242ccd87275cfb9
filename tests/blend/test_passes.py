"""BlendPass over a fake stack: which rows run, what is written, what is read, for every selector.

Whatever the pass makes is held against dense layers of which the causal mask is laid out, and rows
that were picked by sorting a list.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from cacheblend_rag import BlendConfig
from cacheblend_rag.blend import BlendPass, FusedKV, plan_schedule
from cacheblend_rag.blend.passes import Candidates
from cacheblend_rag.blend.selectors import SELECTORS, Evidence, make_selector
from cacheblend_rag.blend.steps import run_to_end
from tests.blend.fake_stack import (
    HIDDEN,
    LAYERS,
    VOCABULARY,
    WINDOWS,
    Event,
    FakeStack,
    Reference,
    WatchedKV,
)

LENGTHS = {"head": 3, "a": 7, "between": 2, "b": 6, "c": 8, "question": 4}
ENDS = dict(zip(LENGTHS, torch.tensor(list(LENGTHS.values())).cumsum(0).tolist(), strict=True))
SPANS = {name: (ENDS[name] - length, ENDS[name]) for name, length in LENGTHS.items()}
TOKENS = sum(LENGTHS.values())
CHECKS: tuple[dict[str, Any], ...] = (
    {},
    {"check_layers": (2,)},
    {"check_layers": (LAYERS - 1,)},
    {"check_layers": (1, 3), "recompute_ratio": (0.6, 0.25)},
    {"check_layers": (1, 2, 3), "recompute_ratio": (0.9, 0.5, 0.1)},
)


@dataclass(frozen=True)
class Prompt:
    """Text, three chunks and a question. hits: chunks with cached KV. protected: never recomputed.

    whole: there is nothing behind the last chunk, whose last token yields the logits.
    """

    hits: str = "abc"
    protected: str = ""
    whole: bool = False

    @property
    def tokens(self) -> int:
        return SPANS["c"][1] if self.whole else TOKENS

    @property
    def ids(self) -> Tensor:
        draw = torch.Generator().manual_seed(4)
        return torch.randint(VOCABULARY, (TOKENS,), generator=draw)[: self.tokens]

    @property
    def candidates(self) -> Candidates:
        known = Candidates.none(TOKENS)
        draw = torch.Generator().manual_seed(9)
        known.prior, known.question_attention = torch.rand(2, TOKENS, generator=draw).unbind()
        for name in self.hits:
            here = slice(*SPANS[name])
            known.cached[here] = True
            known.eligible[here] = name not in self.protected
            known.offsets[here] = torch.arange(LENGTHS[name])
        return known.first(self.tokens)

    def laid(self, fused: FusedKV) -> FusedKV:
        """Put cached KV where there is some: any KV, so that it deviates in every layer."""
        draw = torch.Generator().manual_seed(6)
        for kv in (fused.keys, fused.values):
            drawn = torch.randn(kv.shape, generator=draw)
            kv[:, :, self.candidates.cached] = drawn[:, :, self.candidates.cached]
        return fused


PROMPTS = {
    "all stored": Prompt(),
    "one missing": Prompt(hits="ac"),
    "one protected": Prompt(protected="b"),
    "missing and protected": Prompt(hits="bc", protected="c"),
    "none stored": Prompt(hits=""),
    "ends with a chunk": Prompt(whole=True),
}


@dataclass
class Case:
    """One pass, as it was run. first: the fused buffer before it."""

    prompt: Prompt
    config: BlendConfig
    stack: FakeStack
    run: BlendPass
    first: FusedKV

    @classmethod
    def of(
        cls, prompt: Prompt, config: BlendConfig, stack: FakeStack | None = None, **options: Any
    ) -> Case:
        stack = stack or FakeStack()
        first, fused = (prompt.laid(WatchedKV(stack, prompt.tokens)) for _ in range(2))
        schedule = plan_schedule(config, LAYERS)
        run = BlendPass(stack, prompt.ids, fused, prompt.candidates, schedule, **options)
        run_to_end(run.steps())
        return cls(prompt, config, stack, run, first)


class Slow:
    """What a pass should make, and on which rows.

    probed: of each check layer, the rows that came there. rows: of each layer, those that ran on.
    """

    def __init__(self, case: Case) -> None:
        config, known = case.config, case.prompt.candidates
        self.known, self.needs_hidden = known, bool(case.run.last)
        self.selector = make_selector(config.selector, config.selector_options)
        self.reference = Reference(
            case.stack,
            case.prompt.ids,
            case.first.keys.nan_to_num(),
            case.first.values.nan_to_num(),
        )
        self.last = case.prompt.tokens - 1
        self.always = set((~known.cached).nonzero()[:, 0].tolist())
        self.always |= {self.last} if self.needs_hidden else set()
        self.eligible = set(known.eligible.nonzero()[:, 0].tolist())
        self.probed: dict[int, list[int]] = {}
        self.rows: list[list[int]] = []
        self._run(config)

    @property
    def hidden(self) -> Tensor:
        return self.reference.hidden[self.last]

    @property
    def recomputed(self) -> list[bool]:
        kept = set(self.rows[-1])
        return [cached and i in kept for i, cached in enumerate(self.known.cached.tolist())]

    def _run(self, config: BlendConfig) -> None:
        checks = dict(zip(config.check_layers, map(config.ratio_at, range(9)), strict=False))
        ratio = self.selector.fixed_ratio
        ratio = config.ratio if ratio is None else ratio
        if not self.selector.needs_fresh_kv or set(checks.values()) in ({0}, {1}):
            ratio = max(checks.values()) if self.selector.needs_fresh_kv else ratio
            checks, rows = {}, self._kept(self.eligible, ratio, {})
        else:
            rows = sorted(self.always | self.eligible)
        for layer in range(LAYERS):
            if layer in checks:
                self.probed[layer] = rows
                rows = self._checked(layer, rows, checks[layer])
            self.reference.write(layer, rows)
            self.reference.advance(layer, rows)
            self.rows.append(rows)

    def _checked(self, layer: int, rows: Sequence[int], ratio: float) -> list[int]:
        keys, values = self.reference.fresh(layer)
        among = sorted(self.eligible & set(rows) - self.always)
        fresh = {
            "fresh": (keys[:, among], values[:, among]),
            "cached": (
                self.reference.keys[layer][:, among],
                self.reference.values[layer][:, among],
            ),
        }
        kept = self._kept(set(among), ratio, fresh)
        self.reference.write(layer, rows)
        return kept

    def _kept(self, among: set[int], ratio: float, fresh: dict[str, Any]) -> list[int]:
        """Those always computed, and the share of the eligible that scores best among some."""
        order = sorted(among - self.always)
        if ratio == 1 and not fresh:
            return sorted(self.always | set(order))
        if ratio == 0 or not order:
            return sorted(self.always)
        seen = (self.known.offsets, self.known.prior, self.known.question_attention)
        evidence = Evidence(*(part[order] for part in seen), **fresh)  # type: ignore[index,arg-type]
        scores = self.selector.score(evidence).tolist()
        best = sorted(zip(scores, order, strict=True), key=lambda pair: (-pair[0], pair[1]))
        count = math.ceil(Fraction(str(ratio)) * len(self.eligible))
        return sorted(self.always | {i for score, i in best[:count] if score > -math.inf})


def every_schedule() -> Iterator[Any]:
    """Each selector that the registry names, with the schedules that mean something to it."""
    for name, kind in SELECTORS.items():
        for settings in CHECKS if kind.needs_fresh_kv else ({},):
            for ratio in (0.0, 0.3, 1.0) if kind.fixed_ratio is None and not settings else (0.3,):
                config = BlendConfig(selector=name, **{"recompute_ratio": ratio, **settings})
                layers = "" if not settings else "-" + "".join(map(str, config.check_layers))
                yield pytest.param(config, id=f"{name}{layers}-{ratio}")


WAYS: dict[str, dict[str, int]] = {
    "at once": {"rows": TOKENS, "last": 1},
    "in blocks": {"rows": 4, "last": 1},
    "KV only": {"rows": 4, "last": 0},
}


def schedules_prompts_ways() -> Iterator[Any]:
    """Each schedule in each way, each of these with another prompt."""
    for index, schedule in enumerate(every_schedule()):
        for turn, way in enumerate(WAYS):
            prompt = list(PROMPTS)[(index + 2 * turn) % len(PROMPTS)]
            case = PROMPTS[prompt], *schedule.values, WAYS[way]
            yield pytest.param(case, id=f"{schedule.id}-{prompt}-{way}")


@pytest.fixture(scope="module", params=list(schedules_prompts_ways()))
def both(request: pytest.FixtureRequest) -> tuple[Case, Slow]:
    """A pass that was run, and what it should have made."""
    prompt, config, way = request.param
    case = Case.of(prompt, config, FakeStack(row_block=way["rows"]), last=way["last"])
    return case, Slow(case)


def test_a_pass_makes_what_dense_layers_make(both: tuple[Case, Slow]) -> None:
    case, slow = both
    fused = case.run.fused
    torch.testing.assert_close(fused.keys, slow.reference.keys, atol=1e-4, rtol=0)
    torch.testing.assert_close(fused.values, slow.reference.values, atol=1e-4, rtol=0)
    assert case.run.recomputed.tolist() == slow.recomputed
    if slow.needs_hidden:
        assert case.run.hidden.shape == (1, 1, HIDDEN)
        torch.testing.assert_close(case.run.hidden[0, 0], slow.hidden, atol=1e-4, rtol=0)
    for layer in range(LAYERS):
        kept = torch.ones(case.prompt.tokens, dtype=torch.bool)
        kept[flat(case.stack.log, "write", layer)] = False
        for now, then in ((fused.keys, case.first.keys), (fused.values, case.first.values)):
            assert torch.equal(now[layer][:, kept], then[layer][:, kept])


def test_a_layer_runs_and_writes_its_rows_and_no_other(both: tuple[Case, Slow]) -> None:
    case, slow = both
    log, most = case.stack.log, case.stack.row_block
    for layer, rows in enumerate(slow.rows):
        came = slow.probed.get(layer, [])
        if layer < LAYERS - 1:
            ran, probed, written = rows, came, came + rows
        else:
            ran = [slow.last] if slow.needs_hidden else []
            rest = [row for row in rows if row not in ran]  # of which only the KV is wanted
            probed, written = came + rest, came + rest + ran
        assert flat(log, "run", layer) == ran
        assert flat(log, "probe", layer) == probed
        assert flat(log, "write", layer) == written
        here = [event for event in log if event.layer == layer]
        blocks = [event.rows for event in here if event.kind == "run"]
        assert len(blocks) == -(-len(ran) // most)
        assert max(map(len, blocks), default=0) <= most
        assert sum(event.kind == "read" for event in here) == len(blocks)


def flat(log: Sequence[Event], kind: str, layer: int) -> list[int]:
    return [row for event in log for row in event.rows if event[:2] == (kind, layer)]


# What it costs


def test_work_is_that_of_the_rows_of_each_layer(both: tuple[Case, Slow]) -> None:
    case, _ = both
    work = 0.0
    for event in case.stack.log:
        cost = case.stack.costs[event.layer]
        if event.kind == "run":
            window = WINDOWS[event.layer] or TOKENS
            work += sum(cost.per_row + cost.per_pair * min(i + 1, window) for i in event.rows)
        elif event.kind == "probe":
            work += cost.per_row_probe * len(event.rows)
    assert case.run.work == work


# Ranks


@pytest.mark.parametrize("selector", ["hkvd", "random"])
def test_rows_are_those_that_the_first_rank_scored_best(selector: str) -> None:
    config = BlendConfig(selector=selector, recompute_ratio=0.16)

    def others(scores: Tensor) -> Tensor:
        return torch.arange(len(scores)).float()

    case = Case.of(Prompt(), config, stack=FakeStack(first=others))
    eligible = case.prompt.candidates.eligible.nonzero()[:, 0].tolist()
    count = math.ceil(Fraction("0.16") * len(eligible))
    assert case.run.recomputed.nonzero()[0].tolist() == eligible[-count:]


def test_deviation_is_that_of_all_ranks_heads() -> None:
    asked: list[str] = []

    def summed(part: Tensor, how: str) -> Tensor:
        asked.append(how)
        return part + 1000.0 * torch.arange(len(part))

    config = BlendConfig(selector="hkvd", check_layers=(1, 2), recompute_ratio=0.16)
    case = Case.of(Prompt(), config, stack=FakeStack(reduced=summed))
    eligible = case.prompt.candidates.eligible.nonzero()[:, 0].tolist()
    count = math.ceil(Fraction("0.16") * len(eligible))
    assert asked == ["sum", "sum"]
    assert case.run.recomputed.nonzero()[0].tolist() == eligible[-count:]
