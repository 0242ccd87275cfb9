"""The search itself, on made-up figures: what is measured, what is dropped, what wins."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pytest

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.quality.fidelity import PromptFidelity
from cacheblend_rag.quality.ladder import AT_ONCE, Bar, Candidate, Ladder, candidates, rungs
from cacheblend_rag.quality.records import PromptRecord

FULL_SECONDS = 10.0


def candidate(number: int) -> Candidate:
    return Candidate("document", "question", number / 100)


def record(f1: float = 1.0, kl: float = 0.0, seconds: float = FULL_SECONDS) -> PromptRecord:
    fidelity = PromptFidelity(kl, kl, 1.0, kl == 0)
    return PromptRecord("x", f1, f1, f1, f1, 0.3, 10, 3, fidelity=fidelity, ttft_seconds=seconds)


class Bench:
    """Gives every candidate its own KL and seconds, on any prompt, and counts measurements."""

    def __init__(self, figures: Mapping[Candidate, tuple[float, float]]) -> None:
        self.figures, self.sizes = figures, dict.fromkeys(figures, 0)
        self.ladder = Ladder(list(figures), Bar("fidelity"))

    def measure(self, left: Sequence[Candidate], size: int) -> None:
        self.ladder.full += [record() for _ in range(size - len(self.ladder.full))]
        for one in left:
            kl, seconds = self.figures[one]
            self.ladder.results[one] = [record(kl=kl, seconds=seconds)] * size
            self.sizes[one] = size


def test_the_cheapest_that_holds_wins_and_hopeless_ones_are_dropped_at_once() -> None:
    hopeless, cheap, dear, dearest = map(candidate, (1, 2, 3, 4))
    bench = Bench({hopeless: (2.0, 1), cheap: (0.03, 2), dear: (0.01, 3), dearest: (0.0, 4)})
    assert bench.ladder.climb([4, 8], bench.measure) == cheap
    assert bench.sizes == {hopeless: 4, cheap: 8, dear: 8, dearest: 4}


def test_dearer_ones_get_their_turn_if_no_cheap_one_holds_at_last() -> None:
    tempting, dearer = ([candidate(n) for n in numbers] for numbers in (range(1, 6), range(6, 11)))
    figures = {one: (0.01, 2.0 + place) for place, one in enumerate(dearer)}
    bench = Bench({**dict.fromkeys(tempting, (0.04, 1.0)), **figures})
    flat = bench.measure

    def worse_later(left: Sequence[Candidate], size: int) -> None:
        flat(left, size)
        if size == 8:
            for one in set(tempting) & set(left):
                bench.ladder.results[one] = [record(kl=0.5, seconds=1)] * size

    assert bench.ladder.climb([4, 8], worse_later) == dearer[0]
    assert [bench.sizes[one] for one in dearer] == [8] * AT_ONCE + [4]


def test_those_next_to_the_cheapest_that_holds_so_far_go_on() -> None:
    many = [candidate(n) for n in range(1, 9)]
    bench = Bench({one: (0.0, 1.0 + place) for place, one in enumerate(many)})
    flat = bench.measure

    def spread(left: Sequence[Candidate], size: int) -> None:
        """The first six fail on average, by so little that four prompts leave it open."""
        flat(left, size)
        for place, one in enumerate(many):
            if one in left:
                kls = [0.0, 0.12 if place < 6 else 0.06] * (size // 2)
                bench.ladder.results[one] = [record(kl=kl, seconds=1.0 + place) for kl in kls]

    assert bench.ladder.climb([4, 8], spread) == many[6]
    assert [bench.sizes[one] for one in many] == [4] * 4 + [8] * 4


def test_the_best_go_on_if_none_holds_so_far() -> None:
    many = [candidate(n) for n in range(1, 5)]
    bench = Bench(dict.fromkeys(many, (0.0, 1.0)))
    flat, rounds = bench.measure, []
    highest = dict(zip(many, (0.3, 0.2, 0.12, 0.4), strict=True))

    def spread(left: Sequence[Candidate], size: int) -> None:
        flat(left, size)
        rounds.append(list(left))
        for one in left:
            kls = [0.0, highest[one]] * (size // 2)
            bench.ladder.results[one] = [record(kl=kl, seconds=1.0) for kl in kls]

    assert bench.ladder.climb([4, 8], spread) is None
    assert rounds == [many, many[1:3], [many[0], many[3]]]


def test_nothing_wins_if_nothing_holds_or_nothing_is_sooner() -> None:
    bench = Bench({candidate(1): (0.5, 1), candidate(2): (0.4, 2)})
    assert bench.ladder.climb([4, 8], bench.measure) is None
    assert set(bench.sizes.values()) == {4}
    slow = Bench({candidate(1): (0.0, FULL_SECONDS + 1)})
    assert slow.ladder.climb([8], slow.measure) is None


def test_fidelity_is_judged_by_its_mean_and_a_score_by_its_lower_end() -> None:
    full = [record(f1=1.0)] * 40
    kept = Bar("fidelity").kept([record(kl=0.04)] * 39 + [record(kl=0.4)], full)
    assert kept.quality == pytest.approx(math.exp(-0.049))
    assert kept.low < 0.95 < kept.quality
    assert Bar("fidelity").holds(kept)
    scored = Bar("score").kept([record(f1=1.0)] * 39 + [record(f1=0.0)], full)
    assert scored.quality == pytest.approx(39 / 40)
    assert scored.low < 0.95
    assert not Bar("score").holds(scored)
    assert Bar("score").may_hold(scored)
    assert Bar("score").holds(Bar("score").kept(full, full))


def test_a_score_that_full_prefill_hardly_ever_gets_shows_nothing() -> None:
    full = [record(f1=0.0)] * 7 + [record(f1=1.0)]
    kept = Bar("score").kept(full, full)
    assert (kept.quality, kept.low, kept.high) == (1.0, 0.0, math.inf)
    assert Bar("score").may_hold(kept)
    assert not Bar("score").holds(kept)


def test_rungs_end_with_every_prompt() -> None:
    assert rungs(40) == [8, 16, 32, 40]
    assert rungs(8) == [8]
    assert rungs(3) == [3]


def test_candidates_are_every_combination_once() -> None:
    found = candidates(20, lead_ins=("bos",), selectors=("none", "prior", "hkvd"), ratios=(0.1, 0))
    assert [one.label for one in found] == [
        "bos none 0", "bos prior 0.1", "bos hkvd 0.1 at 1", "bos hkvd 0.1 at 4",
    ]  # fmt: skip
    assert found[-1].config().check_layers == (4,)
    assert found[-1].config().cost_model is False
    assert len(candidates(30)) == 2 * (1 + 4 + 4 * 2)
    for wrong in ({"selectors": ["best"]}, {"ratios": [2.0]}, {"lead_ins": ["poem"]}):
        with pytest.raises(ConfigError):
            candidates(20, **wrong)
