"""What a guard finds: on the toy model, and in simulated traffic that is good, or drifts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cacheblend_rag import GuardConfig, GuardReport, SamplingParams, TransformersEngine, open_engine
from cacheblend_rag.bench.interleave import Advance
from cacheblend_rag.bench.plan import Plan, option
from cacheblend_rag.cli.plan_command import facts
from cacheblend_rag.engines.guard_bound import DriftingMean, Floats, samples_to_notice
from cacheblend_rag.engines.guard_state import DRIFT, LEAST_EXCESS, bounded
from cacheblend_rag.quality.dataset import lead_text
from cacheblend_rag.quality.rules import ALWAYS
from cacheblend_rag.settings import BlendConfig
from tests.benchmarks.command import benchmark_app
from tests.toy import INSTRUCTION, LEARNED_SETTINGS, TOY
from tests.toy.questions import toy_dataset

SEED = 20260101
GOOD = 0.8
"""The divergence of good traffic, in limits."""
WAYS = (("instruction", 0.0), ("instruction", 0.16), ("document", 0.0))
"""Lead-ins and ratios that are measured on the toy model."""


@dataclass(frozen=True, kw_only=True)
class GuardPlan(Plan):
    """What a guard with default settings finds.

    On the toy model: the mean divergence of each lead-in in each setting of its notes. Simulated:
    how often it raises the ratio for nothing, in traffic whose excess is 0.8 limits on average, and
    after how many samples it notices an excess of 1.5 limits; excesses are drawn from beta
    distributions that are about as wide as their mean.
    """

    questions: int = option(40, "Questions of each setting, on the toy model; 0 is none.", least=0)
    runs: int = option(2000, "Simulated engines.", least=1)
    samples: int = option(500, "Samples of each.", least=1)


def measure_guard(plan: GuardPlan, _: Advance = lambda _: None) -> dict[str, object]:
    """Return ``measured``, by lead-in, ratio and setting, and ``simulated``."""
    ways = WAYS if plan.questions else ()
    rows = [one for way in ways for one in _measured(*way, plan.questions)]
    return {"measured": rows, "simulated": _simulated(plan)}


def _measured(lead_in: str, ratio: float, questions: int) -> Iterator[dict[str, object]]:
    """Yield what an engine's guard says of each setting's questions."""
    for setting in LEARNED_SETTINGS:
        config = BlendConfig(selector="hkvd", recompute_ratio=ratio, **ALWAYS)
        guard = GuardConfig(sample_share=1.0, most_waiting=questions, limit=3.0)
        instruction = lead_text(INSTRUCTION)
        engine = open_engine(
            "transformers",
            model=TOY,
            config=config,
            lead_in=lead_in,
            instruction=instruction,
            guard=guard,
        )
        assert isinstance(engine, TransformersEngine)
        report = asked(engine, setting, questions)
        engine.close()
        yield {
            "lead_in": lead_in,
            "ratio": ratio,
            "setting": setting,
            "compared": report.compared,
            "divergence": report.divergence,
            "prefill_divergence": report.prefill_divergence,
            "excess": report.excess,
        }


def asked(engine: TransformersEngine, setting: str, questions: int) -> GuardReport:
    """Ask an engine the toy model's questions, and return its guard's report."""
    for question in toy_dataset([setting], questions, SEED).questions:
        engine.precompute(question.documents, progress=False)
        engine.generate(question.prompt(INSTRUCTION), SamplingParams.greedy(max_tokens=8))
        while engine.guard_report().waiting:
            pass
    return engine.guard_report()


def _simulated(plan: GuardPlan) -> dict[str, object]:
    config, draw = GuardConfig(), np.random.default_rng(SEED)
    limit, bad = bounded(config.limit), bounded(DRIFT * config.limit)
    good = _followed(config, plan.runs)
    for _ in range(plan.samples):
        good.observe(_drawn(draw, GOOD * limit, plan.runs))
    false = float(good.is_above(limit).mean())
    said = samples_to_notice(
        bad, limit, bad, error=config.error / 2, window=config.window, seen=plan.samples
    )
    drifted, noticed = _followed(config, plan.runs), np.full(plan.runs, said + 1)
    for _ in range(plan.samples):
        drifted.observe(_drawn(draw, GOOD * limit / 2, plan.runs))
    for count in range(1, said + 1):
        drifted.observe(_drawn(draw, bad, plan.runs))
        noticed = np.where(drifted.is_above(limit), np.minimum(noticed, count), noticed)
    return {
        "false_alarms": false,
        "said_samples": said,
        "median_samples": float(np.median(noticed)),
        "p95_samples": float(np.quantile(noticed, 0.95)),
        "noticed": float((noticed <= said).mean()),
    }


def _followed(config: GuardConfig, runs: int) -> DriftingMean:
    return DriftingMean(
        error=config.error / 2,
        window=config.window,
        told=(bounded(config.limit),),
        low=LEAST_EXCESS,
        high=1.0,
        shape=(runs,),
    )


def _drawn(draw: np.random.Generator, mean: float, runs: int) -> Floats:
    return draw.beta(1.0, (1 - mean) / mean, runs)


def show_guard(result: dict[str, object]) -> None:
    """Print the results."""
    rows = result["measured"]
    assert isinstance(rows, list)
    for row in rows:
        print(
            f"{row['lead_in']:12} ratio {row['ratio']:g} {row['setting']:10} "
            f"divergence {row['divergence']:.3f}, of prefill {row['prefill_divergence']:.3f}, "
            f"excess {row['excess']:+.3f} ({row['compared']} compared)"
        )
    simulated = result["simulated"]
    assert isinstance(simulated, dict)
    facts("simulated")(simulated)


app = benchmark_app(GuardPlan, measure_guard, show_guard)

if __name__ == "__main__":
    app()
