"""What the connector costs requests that have nothing to blend.

Three vLLMs over one model are alive at a time and are asked in turn: with the connector, without
it, and without it once more. The last two differ in nothing, so what stands between them is what
the method cannot tell apart.
"""

from __future__ import annotations

import random
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from cacheblend_rag.bench.interleave import Advance, Case, run_in_turns
from cacheblend_rag.bench.vllm import VLLMSetting, running_vllm
from cacheblend_rag.bench.workload import ONE_TOKEN, draw_words
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.text.prompt import BlendPrompt

if TYPE_CHECKING:
    from cacheblend_rag.engines.answer import Generation
    from cacheblend_rag.engines.vllm.engine import VLLMEngine

WITH, WITHOUT, AGAIN = "with the connector", "without it", "without it, again"
QUESTION_TOKENS = 32
CACHED_PROMPTS = 2


@dataclass(frozen=True)
class OverheadPlan:
    """Requests of ``prompt_tokens`` for the first token, and of ``decoded`` tokens behind a short
    prompt, ``repeat`` times each.
    """

    setting: VLLMSetting
    prompt_tokens: int = 1024
    decoded: int = 64
    repeat: int = 20

    def __post_init__(self) -> None:
        shape = self.setting.shape
        if self.longest >= shape.max_positions:
            raise ConfigError(
                f"prompt_tokens={self.prompt_tokens}, decoded={self.decoded} must be below "
                f"{shape.max_positions}, the positions of {shape.name}"
            )

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its answer."""
        return max(self.prompt_tokens, QUESTION_TOKENS + self.decoded)


@dataclass(frozen=True)
class Overhead:
    """What was measured of one quantity. Seconds are medians.

    slowdown: median over turns of with / without - 1. noise: the same of again / without - 1.
    """

    with_seconds: float
    without_seconds: float
    again_seconds: float
    slowdown: float
    noise: float

    @classmethod
    def of(cls, runs: dict[str, list[float]], quantity: str) -> Overhead:
        """Compare the turns of one quantity."""
        made = {kind: runs[f"{quantity} {kind}"] for kind in (WITH, WITHOUT, AGAIN)}
        return cls(
            with_seconds=median(made[WITH]),
            without_seconds=median(made[WITHOUT]),
            again_seconds=median(made[AGAIN]),
            slowdown=_excess(made[WITH], made[WITHOUT]),
            noise=_excess(made[AGAIN], made[WITHOUT]),
        )


def measure_overhead(plan: OverheadPlan, advance: Advance = lambda _: None) -> dict[str, Any]:
    """Return ``ttft`` and ``decode`` (seconds a token) as Overhead's fields, and the parameters."""
    setting = plan.setting
    advance("building the model")
    with setting.saved_model() as folder, ExitStack() as stack:
        kinds = (WITHOUT, WITH, AGAIN)
        options = setting.options(plan.longest, CACHED_PROMPTS, len(kinds))
        cases: dict[str, Case] = {}
        for kind in kinds:
            advance(f"starting vLLM {kind}")
            engine = stack.enter_context(
                running_vllm("vllm", folder, options=options, connector=kind == WITH)
            )
            cases[f"ttft {kind}"] = partial(_first_token, plan, engine)
            cases[f"decode {kind}"] = partial(_decode, plan, engine)
        runs = run_in_turns(cases, plan.repeat, advance)
    return {
        "shape": setting.shape.name,
        "prompt_tokens": plan.prompt_tokens,
        "decoded": plan.decoded,
        "repeat": plan.repeat,
        "ttft": asdict(Overhead.of(runs, "ttft")),
        "decode": asdict(Overhead.of(runs, "decode")),
        "runs": runs,
    }


def _first_token(plan: OverheadPlan, engine: VLLMEngine, turn: int) -> float:
    answer = _ask(plan, engine, turn, plan.prompt_tokens, ONE_TOKEN)
    return answer.report.seconds.time_to_first_token


def _decode(plan: OverheadPlan, engine: VLLMEngine, turn: int) -> float:
    sampling = SamplingParams.greedy(max_tokens=plan.decoded, ignore_eos=True)
    answer = _ask(plan, engine, turn, QUESTION_TOKENS, sampling)
    return answer.report.seconds.decode / (len(answer.token_ids) - 1)


def _ask(
    plan: OverheadPlan, engine: VLLMEngine, turn: int, tokens: int, sampling: SamplingParams
) -> Generation:
    words = draw_words(random.Random(turn), tokens, plan.setting.shape.vocabulary)
    return engine.generate(BlendPrompt.of(words), sampling)


def _excess(ones: list[float], others: list[float]) -> float:
    return median(one / other for one, other in zip(ones, others, strict=True)) - 1
