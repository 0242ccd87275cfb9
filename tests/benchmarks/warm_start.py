"""`python -m tests.benchmarks.warm_start`: requests right after a start, against later ones.

One process computes chunk KV into a folder. Fresh processes then open an engine over that folder
and ask requests one after another, each over stored chunks that no request before it used: all load
from disk, so that only what an engine prepares once can make the first one slower.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from cacheblend_rag.bench.interleave import Advance
from cacheblend_rag.bench.plan import Plan, option
from cacheblend_rag.cli.plan_command import facts
from cacheblend_rag.engines.factory import open_engine
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.settings import EMBEDDED, VLLM, BlendConfig
from cacheblend_rag.text.chunk import Chunk
from cacheblend_rag.text.prompt import BlendPrompt
from tests.benchmarks.command import benchmark_app

if TYPE_CHECKING:
    from cacheblend_rag.engines.base import Engine

ENGINES = (EMBEDDED, VLLM)
INSTRUCTION = "Answer the question from these notes of lighthouse keepers. Be brief.\n\n"
SENTENCE = "In {year}, the keeper of lighthouse {number} at Vell wrote down {ships} ships at sea. "
QUESTION = "\n\nWhich of these lighthouses saw the most ships? Answer:"
DOCUMENT = "lighthouses"


@dataclass(frozen=True, kw_only=True)
class WarmStartPlan(Plan):
    """Time to first token of the first request after a start, over that of the last."""

    engine: str = option(EMBEDDED, f"{' or '.join(ENGINES)} (in process).")
    model: str = option("smollm2", "Model name, folder or GGUF file.")
    dtype: str = option("float32", "Many processors compute bfloat16 very slowly.")
    requests: int = option(10, "Requests of each process.", least=2)
    chunks: int = option(4, "Chunks in each request, which no other one has.", least=1)
    sentences: int = option(8, "Sentences of a chunk, about 20 tokens each.", least=1)
    repeat: int = option(5, "Fresh processes; medians over them are shown.", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.engine not in ENGINES:
            raise ConfigError(f"engine={self.engine!r} must be {' or '.join(ENGINES)}")


def measure_warm_start(plan: WarmStartPlan, advance: Advance = lambda _: None) -> dict[str, Any]:
    """Return seconds of each request by process, their medians, and first over last."""
    with TemporaryDirectory() as folder:
        advance("computing chunks")
        prompt_tokens = _in_fresh_process(_precompute, plan, Path(folder))
        runs = []
        for number in range(plan.repeat):
            advance(f"process {number + 1} of {plan.repeat}")
            runs.append(_in_fresh_process(_ask, plan, Path(folder)))
    medians = [median(seconds) for seconds in zip(*(run["seconds"] for run in runs), strict=True)]
    return {
        "engine": plan.engine,
        "model": plan.model,
        "prompt_tokens": prompt_tokens,
        "start_seconds": median(run["start"] for run in runs),
        "seconds": medians,
        "first_over_last": median(run["seconds"][0] / run["seconds"][-1] for run in runs),
        "second_over_last": median(run["seconds"][1] / run["seconds"][-1] for run in runs),
        "runs": runs,
    }


def _in_fresh_process(
    work: Callable[[WarmStartPlan, Path], Any], plan: WarmStartPlan, folder: Path
) -> Any:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work, plan, folder).result()


def _precompute(plan: WarmStartPlan, folder: Path) -> int:
    """Store the KV of all requests' chunks; returns a prompt's tokens."""
    with closing(_open(plan, folder)) as engine:
        if engine.blend_refusal is not None:
            raise ConfigError(f"blending is off: {engine.blend_refusal}")
        asked = [_chunks(plan, request) for request in range(plan.requests)]
        engine.precompute([chunk for chunks in asked for chunk in chunks], progress=False)
        return len(engine.prepare(_prompt(asked[0])).token_ids)


def _ask(plan: WarmStartPlan, folder: Path) -> dict[str, Any]:
    """Return the seconds until an engine is open, and those of each request's only token."""
    began = time.perf_counter()
    with closing(_open(plan, folder)) as engine:
        start = time.perf_counter() - began
        seconds = []
        for request in range(plan.requests):
            prompt = _prompt(_chunks(plan, request))
            began = time.perf_counter()
            answer = engine.generate(prompt, SamplingParams.greedy(max_tokens=1, ignore_eos=True))
            seconds.append(time.perf_counter() - began)
            if not answer.report.blended or answer.report.reused_tokens == 0:
                raise ConfigError(f"request {request} was not blended: {answer.report.reason}")
    return {"start": start, "seconds": seconds}


def _open(plan: WarmStartPlan, folder: Path) -> Engine:
    return open_engine(
        plan.engine,
        model=plan.model,
        dtype=plan.dtype,
        kv_path=folder,
        instruction=INSTRUCTION,
        config=BlendConfig(cost_model=False, min_tokens=0),
    )


def _prompt(chunks: Sequence[Chunk]) -> BlendPrompt:
    return BlendPrompt.of(
        INSTRUCTION, *(part for chunk in chunks for part in (chunk, "\n\n")), QUESTION
    )


def _chunks(plan: WarmStartPlan, request: int) -> list[Chunk]:
    return [
        Chunk(_text(plan, request * plan.chunks + number), DOCUMENT)
        for number in range(plan.chunks)
    ]


def _text(plan: WarmStartPlan, lighthouse: int) -> str:
    return "".join(
        SENTENCE.format(year=1800 + year, number=lighthouse, ships=(year * 7 + lighthouse) % 97)
        for year in range(plan.sentences)
    ).strip()


app = benchmark_app(WarmStartPlan, measure_warm_start, facts("first requests after a start"))

if __name__ == "__main__":
    app()
