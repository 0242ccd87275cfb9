"""`python -m tests.benchmarks.kept_turns`: what vLLM spends on keeping the turns of a conversation.

After each answer vLLM computes the prompt and the answer again, to store the turn's KV. That is
compared with the time to first token of the same prompt, with reuse and by full prefill.
"""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

from cacheblend_rag import Conversation, SamplingParams, open_engine
from cacheblend_rag.bench.conversation import INSTRUCTION, draw_turns
from cacheblend_rag.bench.interleave import Advance
from cacheblend_rag.bench.plan import option
from cacheblend_rag.bench.plans import ConversationPlan
from cacheblend_rag.cli import output
from cacheblend_rag.engines.vllm.engine import VLLMEngine
from cacheblend_rag.engines.vllm.protocol import Failed, KeepResult
from cacheblend_rag.errors import CacheBlendError
from cacheblend_rag.settings import BlendConfig
from tests.benchmarks.command import benchmark_app

PATIENCE = 600.0


@dataclass(frozen=True, kw_only=True)
class KeptTurnsPlan(ConversationPlan):
    """The work of keeping each turn of a conversation in vLLM, which runs in this process."""

    turns: int = option(5, "Turns.", least=1)
    dtype: str = option("float32", "vLLM's. Many processors compute bfloat16 very slowly.")


@dataclass(frozen=True)
class KeptTurn:
    """One turn. ours_seconds, full_seconds: to the first token of its prompt.

    keep_seconds: work on keeping the turn. compute_share: that work's floating-point operations, as
    a share of full prefill's of the prompt and the answer.
    """

    turn: int
    prompt_tokens: int
    reused_tokens: int
    ours_seconds: float
    full_seconds: float
    keep_seconds: float
    compute_share: float


def measure_kept_turns(plan: KeptTurnsPlan, advance: Advance = lambda _: None) -> dict[str, Any]:
    """Return a row for each turn; raises CacheBlendError if vLLM does not keep one."""
    advance(f"loading {plan.model}")
    opened = open_engine(
        "vllm",
        model=plan.model,
        dtype=plan.dtype,
        instruction=INSTRUCTION,
        config=BlendConfig(cost_model=False),
    )
    assert isinstance(opened, VLLMEngine)
    with closing(opened) as engine:
        kept = _watch(engine)
        passages, questions = draw_turns(plan, engine)
        advance("precomputing passages")
        engine.precompute([one for turn in passages for one in turn], progress=False)
        sampling = SamplingParams.greedy(plan.answer_tokens, ignore_eos=True)
        conversation = Conversation(
            engine, instruction=INSTRUCTION, sampling=sampling, prompt_tokens=plan.prompt_tokens
        )
        rows = []
        for turn, (texts, question) in enumerate(zip(passages, questions, strict=True), start=1):
            advance(f"turn {turn} of {plan.turns}")
            answer = conversation.ask(question, texts)
            result = _next(kept, turn)
            assert conversation.last is not None
            full = engine.generate_full(
                conversation.last.fitted.prepared, SamplingParams.greedy(max_tokens=1)
            )
            rows.append(
                KeptTurn(
                    turn=turn,
                    prompt_tokens=answer.prompt_tokens,
                    reused_tokens=answer.report.reused_tokens,
                    ours_seconds=answer.report.seconds.time_to_first_token,
                    full_seconds=full.report.seconds.time_to_first_token,
                    keep_seconds=result.work_seconds or 0.0,
                    compute_share=result.compute_share,
                )
            )
    return {"model": plan.model, "turns": [asdict(row) for row in rows]}


def _watch(engine: VLLMEngine) -> list[KeepResult | Failed]:
    """Return a list that gets the result of each ``keep`` job."""
    keep, results = engine._jobs.keep, list[KeepResult | Failed]()

    async def watched(*arguments: Any) -> KeepResult | Failed:
        results.append(await keep(*arguments))
        return results[-1]

    engine._jobs.keep = watched  # type: ignore[method-assign]  # the only place that sees all
    return results


def _next(kept: list[KeepResult | Failed], turn: int) -> KeepResult:
    """Wait for the result of a turn."""
    deadline = time.monotonic() + PATIENCE
    while len(kept) < turn:
        if time.monotonic() > deadline:
            raise CacheBlendError(f"turn {turn} was not kept within {PATIENCE:.0f} s")
        time.sleep(0.05)
    result = kept[turn - 1]
    if isinstance(result, Failed):
        raise CacheBlendError(f"turn {turn} was not kept: {result.error}")
    return result


def _show(found: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(title=f"{found['model']}: keeping turns", box=None, title_justify="left")
    for heading in ("turn", "prompt", "reused", "first token", "full", "keeping", "of full's work"):
        table.add_column(heading, justify="right")
    for row in found["turns"]:
        table.add_row(
            str(row["turn"]),
            f"{row['prompt_tokens']:,}",
            f"{row['reused_tokens']:,}",
            output.duration(row["ours_seconds"]),
            output.duration(row["full_seconds"]),
            output.duration(row["keep_seconds"]),
            output.percent(row["compute_share"]),
        )
    output.result_console().print(table)


app = benchmark_app(KeptTurnsPlan, measure_kept_turns, _show)

if __name__ == "__main__":
    app()
