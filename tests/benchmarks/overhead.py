"""What the connector costs requests that have nothing to blend.

Three vLLMs over one model are alive at a time and are asked in turn: with the connector, without
it, and without it once more. The last two differ in nothing, so what stands between them is what
the method cannot tell apart.
"""

from __future__ import annotations

import random
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from statistics import median
from typing import TYPE_CHECKING, Any

from cacheblend_rag.bench.interleave import Advance, Case, run_in_turns
from cacheblend_rag.bench.plan import ModelPlan, option
from cacheblend_rag.bench.vllm import VLLMSetting, running_vllm
from cacheblend_rag.bench.workload import ONE_TOKEN, draw_words
from cacheblend_rag.cli.plan_command import facts
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.rag import checks
from cacheblend_rag.settings import VLLM
from cacheblend_rag.text.prompt import BlendPrompt
from tests.benchmarks.command import benchmark_app

if TYPE_CHECKING:
    from cacheblend_rag.engines.answer import Generation
    from cacheblend_rag.engines.vllm.engine import VLLMEngine

WITH, WITHOUT, AGAIN = "with the connector", "without it", "without it, again"
QUESTION_TOKENS = 32
CACHED_PROMPTS = 2


@dataclass(frozen=True, kw_only=True)
class OverheadPlan(ModelPlan):
    """What the connector costs requests without chunks, against vLLM without it."""

    prompt_tokens: int = option(1024, "Tokens of prompts without chunks.", least=2)
    decoded: int = option(64, "Tokens of a timed answer.", least=2)
    repeat: int = option(20, "Timed runs each.", least=1)
    eager: bool = option(False, "vLLM without compiling the model.")

    def __post_init__(self) -> None:
        super().__post_init__()
        shape = self.model_shape
        if self.longest >= shape.max_positions:
            raise ConfigError(
                f"prompt_tokens={self.prompt_tokens}, decoded={self.decoded} must be below "
                f"{shape.max_positions}, the positions of {shape.name}"
            )

    @cached_property
    def setting(self) -> VLLMSetting:
        """The model and how vLLM runs it."""
        return VLLMSetting(self.model_shape, self.torch_dtype, self.torch_device, self.eager)

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
    checks.check_engine(VLLM)
    setting = plan.setting
    advance("building the model")
    with setting.served_model() as folder, ExitStack() as stack:
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
        "shape": plan.shape,
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
    words = draw_words(random.Random(turn), tokens, plan.model_shape.vocabulary)
    return engine.generate(BlendPrompt.of(words), sampling)


def _excess(ones: list[float], others: list[float]) -> float:
    return median(one / other for one, other in zip(ones, others, strict=True)) - 1


app = benchmark_app(OverheadPlan, measure_overhead, facts("requests without chunks"))

if __name__ == "__main__":
    app()
