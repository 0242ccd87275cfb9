"""How long a neighbour waits for its next token while a long prompt is served.

One request decodes, a token a step, in the same vLLM that then gets a long prompt: to blend,
between its steps; to prefill in pieces, as vLLM does by default; or, in a second vLLM that takes
the whole prompt in one step, to prefill at once.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from itertools import pairwise
from statistics import median
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from cacheblend_rag.bench.interleave import Advance, run_in_turns
from cacheblend_rag.bench.plan import option
from cacheblend_rag.bench.plans import BlendPlan, TtftPlan
from cacheblend_rag.bench.ttft import check_blend, draw_texts
from cacheblend_rag.bench.vllm import running_vllm
from cacheblend_rag.bench.workload import ONE_TOKEN, draw_words
from cacheblend_rag.cli.plan_command import facts
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.vllm.connector.settings import ConnectorSettings
from cacheblend_rag.errors import CacheBlendError
from cacheblend_rag.rag import checks
from cacheblend_rag.settings import VLLM, StoreConfig
from cacheblend_rag.text.prompt import BlendPrompt
from tests.benchmarks.command import benchmark_app

if TYPE_CHECKING:
    from cacheblend_rag.engines.answer import Generation
    from cacheblend_rag.engines.vllm.engine import VLLMEngine

NEIGHBOUR_PROMPT = 16
TOKENS_AROUND = 8
CACHED_PROMPTS = 4
BLEND, PIECEWISE, FULL, ALONE = "blend", "chunked prefill", "full prefill", "alone"


class _Neighbour:
    """A request that decodes in a thread until it is stopped, noting when its tokens come."""

    def __init__(self, engine: VLLMEngine, prompt: BlendPrompt, tokens: int) -> None:
        self._arrived: list[float] = []
        self._cancel, self._came = Event(), Event()
        sampling = SamplingParams.greedy(max_tokens=tokens, ignore_eos=True)
        self._stream = engine.stream(prompt, sampling, cancel=self._cancel)
        self._thread = Thread(target=self._listen, daemon=True)

    def __enter__(self) -> _Neighbour:
        self._thread.start()
        self.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._cancel.set()
        self._thread.join()

    def wait(self) -> None:
        """Return after some more tokens; raises CacheBlendError when none are left to come."""
        wanted = len(self._arrived) + TOKENS_AROUND
        while len(self._arrived) < wanted:
            self._came.clear()
            self._came.wait(1.0)
            if not self._thread.is_alive():
                raise CacheBlendError("the neighbour ended too soon: give a smaller prompt")

    def worst_gap(self, start: float, end: float) -> float:
        """Return the longest time between two tokens, of the gaps that touch [start, end]."""
        gaps = [b - a for a, b in pairwise(self._arrived) if b > start and a < end]
        return max(gaps)

    def _listen(self) -> None:
        for delta in self._stream:
            if delta.text:
                self._arrived.append(time.perf_counter())
                self._came.set()


@dataclass(frozen=True)
class _Case:
    """A long request beside a neighbour; ``seconds`` gathers its own times to first token."""

    plan: TtftPlan
    engine: VLLMEngine
    ask: Callable[[int], Generation] | None
    seconds: list[float]

    def __call__(self, turn: int) -> float:
        """Return the neighbour's worst gap meanwhile."""
        shape = self.plan.model_shape
        prompt = BlendPrompt.of(draw_words(random.Random(turn), NEIGHBOUR_PROMPT, shape.vocabulary))
        tokens = self.engine.context_window - NEIGHBOUR_PROMPT
        with _Neighbour(self.engine, prompt, tokens) as neighbour:
            started = time.perf_counter()
            if self.ask is None:
                neighbour.wait()
            else:
                self.ask(turn)
            ended = time.perf_counter()
            neighbour.wait()
        self.seconds.append(ended - started)
        return neighbour.worst_gap(started, ended)


@dataclass(frozen=True, kw_only=True)
class GapPlan(BlendPlan):
    """The longest a decoding neighbour waits in vLLM while a long prompt is served."""

    chunks: int = option(8, "Chunks in the prompt.", least=1)
    ratio: float = option(0.15, "Recompute ratio.")
    repeat: int = option(5, "Timed runs each; medians are shown.", least=1)
    eager: bool = option(False, "vLLM without compiling the model.")

    def ttft(self) -> TtftPlan:
        """The plan of the long prompt; raises ConfigError for one that cannot be."""
        given = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "ratio"}
        return TtftPlan(ratios=(self.ratio,), tiers=("host",), **given)


def measure_gaps(gaps: GapPlan, advance: Advance = lambda _: None) -> dict[str, Any]:
    """Return the worst gaps, the blend's over a full prefill's, and the parameters.

    Gaps are medians over turns of each turn's worst.
    """
    plan, ratio = gaps.ttft(), gaps.ratio
    checks.check_engine(VLLM)
    advance("building the model")
    texts = draw_texts(plan)
    prompt = texts.prompt()
    options = plan.setting.options(plan.prompt_tokens, CACHED_PROMPTS, engines=2)
    whole = {**options, "max_num_batched_tokens": plan.prompt_tokens + NEIGHBOUR_PROMPT}
    room = 2 * plan.model_shape.kv_bytes(plan.prompt_tokens, plan.torch_dtype)
    settings = ConnectorSettings(store=StoreConfig(host_bytes=room))

    def blended(engine: VLLMEngine, _turn: int) -> Generation:
        generation = engine.generate(prompt, ONE_TOKEN, config=plan.blend_config(ratio))
        check_blend(plan, generation, ratio, "host")
        return generation

    def full(engine: VLLMEngine, _turn: int) -> Generation:
        return engine.generate_full(prompt, ONE_TOKEN)

    with plan.setting.served_model() as folder:
        advance("starting vLLM twice")
        with (
            running_vllm("vllm", folder, options=options, settings=settings) as engine,
            running_vllm("vllm", folder, options=whole, connector=False) as unchunked,
        ):
            engine.precompute(texts.chunks, progress=False)
            cases = {
                BLEND: _Case(plan, engine, partial(blended, engine), []),
                PIECEWISE: _Case(plan, engine, partial(full, engine), []),
                FULL: _Case(plan, unchunked, partial(full, unchunked), []),
                ALONE: _Case(plan, engine, None, []),
            }
            runs = run_in_turns(cases, plan.repeat, advance)
    worst = {name: median(run) for name, run in runs.items()}
    seconds = {name: median(case.seconds[1:]) for name, case in cases.items()}
    return {
        "blend_gap_seconds": worst[BLEND],
        "full_gap_seconds": worst[FULL],
        "chunked_gap_seconds": worst[PIECEWISE],
        "alone_gap_seconds": worst[ALONE],
        "over_full": worst[BLEND] / worst[FULL],
        "over_chunked": worst[BLEND] / worst[PIECEWISE],
        "blend_seconds": seconds[BLEND],
        "full_seconds": seconds[FULL],
        "chunked_seconds": seconds[PIECEWISE],
        "shape": plan.shape,
        "prompt_tokens": plan.prompt_tokens,
        "selector": plan.selector,
        "ratio": ratio,
        "repeat": plan.repeat,
        "runs": runs,
    }


app = benchmark_app(GapPlan, measure_gaps, facts("a neighbour's worst gap between tokens"))

if __name__ == "__main__":
    app()
