"""`python -m tests.benchmarks.any_client`: the time to first token that an unmodified client gets.

Each prompt is asked three ways, in turn, of one vLLM server: by ordinary prefill, by our client,
which says where chunks stand, and by LangChain's ChatOpenAI, in whose requests the server finds
them. It needs the package ``langchain-openai``.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from cacheblend_rag import Document, SamplingParams, open_engine
from cacheblend_rag.bench.interleave import Advance
from cacheblend_rag.bench.plan import Plan, option
from cacheblend_rag.bench.workload import draw_passage, sample_sentences
from cacheblend_rag.cli import output
from cacheblend_rag.demo.passages import load_passages
from cacheblend_rag.engines.vllm.connector.settings import ConnectorSettings
from cacheblend_rag.engines.vllm.protocol import OFF_PARAMS
from cacheblend_rag.engines.vllm.serve import running_server
from cacheblend_rag.models import public_name, resolve
from cacheblend_rag.settings import BlendConfig, Profile
from tests.benchmarks.command import benchmark_app

INSTRUCTION = "Answer from the passages."
ANSWER_TOKENS = 4
WAYS = ("plain", "ours", "ChatOpenAI")


@dataclass(frozen=True, kw_only=True)
class AnyClientPlan(Plan):
    """The time to first token of prompts over stored passages, for clients of a server."""

    model: str = option("smollm2", "A model's name or folder.")
    dtype: str = option("float32", "vLLM's. Many processors compute bfloat16 very slowly.")
    prompts: int = option(10, "Prompts, each asked in all ways.", least=2)
    passages: int = option(6, "Passages in a prompt.", least=1)
    passage_tokens: int = option(300, "Tokens of each.", least=64)
    seed: int = option(1, "Of the draw.")


@dataclass(frozen=True)
class AnyClientRow:
    """One prompt: seconds to the first token, and tokens that the server says were cached."""

    prompt_tokens: int
    cached_tokens: int
    plain_seconds: float
    ours_seconds: float
    any_seconds: float


def measure_any_client(plan: AnyClientPlan, advance: Advance = lambda _: None) -> dict[str, Any]:
    """Return a row for each prompt, and medians."""
    advance(f"serving {plan.model}")
    # Loading is never given up for being slow: what is compared would not be the same work.
    settings = ConnectorSettings(profile=Profile(blend=BlendConfig(cost_model=False)))
    flags = ["--dtype", plan.dtype, "--max-model-len", "4096"]
    source = resolve(plan.model)
    with running_server(source, settings=settings, flags=flags, served_name="model") as server:
        rows = _rows(plan, server.url, str(source), advance)
    told = {
        "plain_seconds": median(row.plain_seconds for row in rows),
        "ours_seconds": median(row.ours_seconds for row in rows),
        "any_seconds": median(row.any_seconds for row in rows),
        "any_to_ours": median(row.any_seconds / row.ours_seconds for row in rows),
        "any_to_plain": median(row.any_seconds / row.plain_seconds for row in rows),
    }
    return {"model": public_name(plan.model), "prompts": [asdict(row) for row in rows], **told}


def _rows(plan: AnyClientPlan, url: str, source: str, advance: Advance) -> list[AnyClientRow]:
    from langchain_openai import ChatOpenAI

    rng, sentences = random.Random(plan.seed), sample_sentences()
    questions = load_passages().questions
    engine = open_engine(url, model=source, instruction="")
    found = ChatOpenAI(
        base_url=f"{url}/v1", api_key="none", model="model", temperature=0,
        max_completion_tokens=ANSWER_TOKENS, stream_usage=True, max_retries=0,
    )  # fmt: skip
    rows: list[AnyClientRow] = []
    try:
        texts = [
            draw_passage(rng, sentences, plan.passage_tokens, engine)
            for _ in range(3 * plan.passages)
        ]
        advance(f"precomputing {len(texts)} passages")
        engine.precompute(
            [Document(f"passage {i}", (text,)) for i, text in enumerate(texts)], progress=False
        )
        for number in range(-1, plan.prompts):  # the first one warms everything up
            advance(f"prompt {max(number, 0) + 1} of {plan.prompts}")
            passages = "\n\n".join(rng.sample(texts, plan.passages))
            question = f"Question {number}: {rng.choice(questions).question}"
            messages = [{"role": "user", "content": f"{INSTRUCTION}\n\n{passages}\n\n{question}"}]
            off = {"kv_transfer_params": dict(OFF_PARAMS), "cache_salt": uuid.uuid4().hex}
            usage: dict[str, Any] = {}

            def chat(model: Any, messages: Any = messages, usage: Any = usage) -> float:
                return _first(lambda: model.stream(messages), usage)

            def ours(messages: Any = messages) -> float:
                sampling = SamplingParams.greedy(ANSWER_TOKENS)
                return _first(lambda: engine.stream(messages, sampling), {})

            ways: dict[str, Callable[[], float]] = {
                "plain": lambda chat=chat, off=off: chat(found.bind(extra_body=off)),
                "ours": ours,
                "ChatOpenAI": lambda chat=chat: chat(found),
            }
            seconds, told = dict[str, float](), dict[str, Any]()
            for way in rng.sample(WAYS, len(WAYS)):
                seconds[way] = ways[way]()
                if way == "ChatOpenAI":
                    told = dict(usage)
            if number >= 0:
                rows.append(
                    AnyClientRow(
                        prompt_tokens=told["input_tokens"],
                        cached_tokens=told.get("input_token_details", {}).get("cache_read", 0),
                        plain_seconds=seconds["plain"],
                        ours_seconds=seconds["ours"],
                        any_seconds=seconds["ChatOpenAI"],
                    )
                )
    finally:
        engine.close()
    return rows


def _first(stream: Callable[[], Any], usage: dict[str, Any]) -> float:
    """Return the seconds to the first text of a stream; reads all of it, and its usage."""
    started, first = time.perf_counter(), 0.0
    for piece in stream():
        text = getattr(piece, "text", "") or getattr(piece, "content", "")
        if text and not first:
            first = time.perf_counter() - started
        usage.update(getattr(piece, "usage_metadata", None) or {})
    return first or time.perf_counter() - started


def _show(found: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(title=f"{found['model']}: seconds to first token", box=None)
    for heading in ("prompt", "cached", *WAYS):
        table.add_column(heading, justify="right")
    for row in found["prompts"]:
        table.add_row(
            f"{row['prompt_tokens']:,}",
            f"{row['cached_tokens']:,}",
            *(output.duration(row[f"{way}_seconds"]) for way in ("plain", "ours", "any")),
        )
    output.result_console().print(table)
    output.result_console().print(
        f"medians: plain {output.duration(found['plain_seconds'])}, "
        f"ours {output.duration(found['ours_seconds'])}, "
        f"ChatOpenAI {output.duration(found['any_seconds'])}; "
        f"ChatOpenAI to ours, pair by pair: {found['any_to_ours']:.3f}"
    )


app = benchmark_app(AnyClientPlan, measure_any_client, _show)

if __name__ == "__main__":
    app()
