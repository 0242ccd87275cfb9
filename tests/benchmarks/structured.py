"""How often answers in JSON and forced calls of tools are valid, and what holding to a form costs.

Answers are drawn at a temperature, each with another seed. Half of them are to a chat alone, half
to one with retrieved passages, whose KV is reused.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import jsonschema
import torch

from cacheblend_rag import (
    BlendConfig,
    ChatPrompt,
    Generation,
    SamplingParams,
    StructuredOutputs,
    TransformersEngine,
)
from cacheblend_rag.bench.interleave import Advance
from cacheblend_rag.bench.plan import Plan, option
from cacheblend_rag.cli.plan_command import facts
from cacheblend_rag.demo.passages import load_passages
from cacheblend_rag.engines.structured import closed
from cacheblend_rag.engines.transformers.guiding import Guides
from cacheblend_rag.engines.transformers.loading import vocabulary_size
from tests.benchmarks.command import benchmark_app

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "subject": {"type": "string", "maxLength": 40},
        "kind": {"enum": ["person", "place", "event", "thing"]},
        "year": {"type": ["integer", "null"], "minimum": 0, "maximum": 2100},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 16}, "maxItems": 3},
    },
    "required": ["subject", "kind", "year", "tags"],
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the passages for a text.",
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "string"}, "count": {"type": "integer"}},
                "required": ["query"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Look up when a person was born or died.",
            "parameters": {
                "type": "object",
                "properties": {
                    "person": {"type": "string"},
                    "event": {"enum": ["birth", "death"]},
                    "places": {"type": "array", "items": {"type": "string"}},
                },
                "required": ["person", "event"],
            },
        },
    },
]


@dataclass(frozen=True, kw_only=True)
class StructuredPlan(Plan):
    """How often JSON and forced calls are valid, and the time that the form takes, per token."""

    model: str = option("smollm2", "Model name, folder or GGUF file.")
    answers: int = option(100, "Answers in JSON, without passages and with them.", least=1)
    calls: int = option(20, "Forced calls.", least=1)
    tokens: int = option(128, "Tokens an answer, at most.", least=1)
    temperature: float = option(0.7, "Of every answer.")
    passages: int = option(3, "Passages a prompt.", least=1)


def measure_structured(plan: StructuredPlan, advance: Advance) -> dict[str, Any]:
    """Return how many answers were valid, and milliseconds a token."""
    sample = load_passages()
    config = BlendConfig(min_tokens=0, cost_model=False)
    with closing(TransformersEngine(plan.model, dtype="float32", config=config)) as engine:
        engine.precompute(sample.documents(), progress=False)
        form = StructuredOutputs(json=SCHEMA)
        answers: dict[str, list[Generation]] = {}
        for kind in ("alone", "with passages"):
            answers[kind] = []
            for i in range(plan.answers):
                advance(f"answer {i + 1} of {plan.answers}, {kind}")
                question = sample.questions[i % len(sample.questions)].question
                first = i % (len(sample.passages) - plan.passages)
                told = [one.text for one in sample.passages[first : first + plan.passages]]
                content = f"Describe in JSON what this is about: {question}"
                if kind != "alone":
                    content = "\n\n".join([*told, content])
                asked = SamplingParams(
                    plan.tokens, temperature=plan.temperature, seed=i, structured_outputs=form
                )
                answers[kind].append(engine.generate([{"role": "user", "content": content}], asked))
        calls = [_called(engine, plan, i, advance) for i in range(plan.calls)]
        masks = _mask_milliseconds(engine, form, [one for all_ in answers.values() for one in all_])
    decode = [
        1e3 * one.report.seconds.decode / max(1, len(one.token_ids) - 1) for one in answers["alone"]
    ]
    blended = answers["with passages"]
    return {
        "model": plan.model,
        "answers": plan.answers,
        "valid_alone": sum(map(_is_valid, answers["alone"])),
        "valid_with_passages": sum(map(_is_valid, blended)),
        "blended": sum(one.report.blended for one in blended),
        "calls": plan.calls,
        "valid_calls": sum(calls),
        "mask_milliseconds": statistics.median(masks),
        "mask_milliseconds_worst": max(masks),
        "decode_milliseconds": statistics.median(decode),
    }


def _is_valid(answer: Generation) -> bool:
    schema = closed(SCHEMA)
    try:
        jsonschema.validate(json.loads(answer.text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return answer.finish_reason == "stop"


def _called(engine: TransformersEngine, plan: StructuredPlan, i: int, advance: Advance) -> bool:
    """Whether a forced call is one call with valid arguments."""
    advance(f"call {i + 1} of {plan.calls}")
    question = load_passages().questions[i % 8].question
    choice: Any = "required" if i % 2 else {"type": "function", "function": {"name": "look_up"}}
    prompt = ChatPrompt([{"role": "user", "content": question}], TOOLS, choice)
    asked = SamplingParams(plan.tokens, temperature=plan.temperature, seed=i)
    answer = engine.generate(prompt, asked)
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    try:
        [call] = answer.tool_calls
        jsonschema.validate(json.loads(call.arguments), schemas[call.name])
    except (ValueError, KeyError, jsonschema.ValidationError):
        return False
    return answer.finish_reason == "stop"


def _mask_milliseconds(
    engine: TransformersEngine, form: StructuredOutputs, answers: Sequence[Generation]
) -> list[float]:
    """Return what ruling tokens out takes at each step of answers, apart from the model."""
    width = vocabulary_size(engine.model, engine.tokenizer)
    guides = Guides(engine.tokenizer, width, [engine.tokenizer.eos_token_id])
    logits = torch.zeros(1, engine.model.config.get_text_config().vocab_size)
    found = []
    for answer in answers:
        guide = guides.guide(form)
        for token in answer.token_ids:
            began = time.perf_counter()
            guide.allowed(logits)
            guide.take(token)
            found.append(1e3 * (time.perf_counter() - began))
    return found


app = benchmark_app(StructuredPlan, measure_structured, facts("structured outputs"))

if __name__ == "__main__":
    app()
