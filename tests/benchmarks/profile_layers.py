"""Which layers' question attention finds the tokens worth recomputing: to choose a probe's layers.

Each layer alone ranks the tokens of each prompt; told is how many of its first tenth are also among
those of the mean over all layers, and of `question` as it is by default. Then a few sets of layers
choose what is recomputed, and the model's predictions are compared with full prefill's.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import Tensor

from cacheblend_rag import BlendConfig, BlendPrompt, SamplingParams
from cacheblend_rag.bench.interleave import Advance
from cacheblend_rag.bench.plan import Plan, option
from cacheblend_rag.blend.schedule import row_count
from cacheblend_rag.blend.selectors import make_selector
from cacheblend_rag.cli import output
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.quality.data import load_dataset
from cacheblend_rag.quality.dataset import EvalDataset, EvalQuestion
from cacheblend_rag.quality.rules import ALWAYS
from cacheblend_rag.rag.prompt import RagPrompt, Turn
from tests.benchmarks.command import benchmark_app
from tests.toy.questions import toy_dataset

Row = dict[str, Any]
Sets = dict[str, tuple[str, dict[str, Any]]]
SETS: Sets = {
    "nothing recomputed": ("none", {}),
    "random": ("random", {}),
    "question": ("question", {}),
    "question_mid": ("question_mid", {}),
    "question_mid, alone": ("question_mid", {"span": [0.4, 0.5], "alone": True}),
    "prophet": ("prophet", {}),
    "infoflow": ("infoflow", {}),
    "span 0.25-0.5": ("question_mid", {"span": [0.25, 0.5]}),
    "span 0.4-0.6": ("question_mid", {"span": [0.4, 0.6]}),
}


@dataclass(frozen=True, kw_only=True)
class LayersPlan(Plan):
    """Which layers' question attention finds the tokens worth recomputing.

    Long passages are cut into documents of several chunks, which are computed after the text before
    them. Divergence is from full prefill, over the tokens of its greedy answer, in nats.
    """

    model: str = option("smollm2", "Model name, folder or GGUF file.")
    data: str = option("", "Questions, in a format that `eval --dataset` reads; none: the demo's.")
    questions: int = option(10, "Questions, the first ones.", least=1)
    passages: int = option(4, "Passages a question, at most.", least=1)
    passage_words: int = option(330, "Words a passage, at most.", least=1)
    chunk_words: int = option(110, "Words a chunk, at most.", least=1)
    ratio: float = option(0.1, "Recompute ratio.")
    answer_tokens: int = option(16, "Tokens of the greedy answer, at most.", least=1)

    @property
    def dataset(self) -> EvalDataset:
        """The questions: of a file, or of the demo."""
        if self.data:
            return load_dataset(Path(self.data))
        return toy_dataset(["adjacent"], self.questions, 1)

    @property
    def config(self) -> BlendConfig:
        """What all runs have in common."""
        return BlendConfig(recompute_ratio=self.ratio, **ALWAYS)


def measure_layers(plan: LayersPlan, advance: Advance) -> dict[str, Any]:
    """Return a row a layer, and a row a set of layers."""
    data = (
        load_dataset(Path(plan.data)) if plan.data else toy_dataset(["adjacent"], plan.questions, 1)
    )
    with closing(_engine(plan.model, data)) as engine:
        asked = []
        for question in data.questions[: plan.questions]:
            advance(f"full prefill of prompt {len(asked) + 1}")
            asked.append(_Asked.of(engine, data, _cut(question, plan), plan.answer_tokens))
        layers = _layer_rows(asked, plan, advance)
        best = _three_best(layers)
        sets = SETS | {f"layers {best}": ("question_mid", {"layers": best})}
        rows = _set_rows(asked, plan, sets, advance)
    return {"model": plan.model, "questions": len(asked), "layers": layers, "sets": rows}


def _engine(model: str, data: EvalDataset) -> TransformersEngine:
    def lead_in(tokenizer: Any) -> str:
        return RagPrompt(tokenizer, data.instruction).lead_in

    return TransformersEngine(model, instruction=lead_in, lead_in="document", dtype="float32")


def _cut(question: EvalQuestion, plan: LayersPlan) -> EvalQuestion:
    """Return the question over some of its passages, long ones in several chunks."""
    every = max(1, len(question.documents) // plan.passages)
    documents = tuple(
        replace(document, chunks=_pieces(document.chunks, plan))
        for document in question.documents[::every][: plan.passages]
    )
    chunks = tuple(chunk for document in documents for chunk in document.to_chunks())
    return replace(question, documents=documents, passages=chunks)


def _pieces(chunks: tuple[str, ...], plan: LayersPlan) -> tuple[str, ...]:
    if len(chunks) > 1:
        return chunks
    words = chunks[0].split()[: plan.passage_words]
    starts = range(0, len(words), plan.chunk_words)
    return tuple(" ".join(words[start : start + plan.chunk_words]) for start in starts)


@dataclass(frozen=True)
class _Asked:
    """One prompt, with full prefill's answer to it. expected: (tokens, vocabulary) log-probs."""

    engine: TransformersEngine
    prompt: BlendPrompt
    answer: tuple[int, ...]
    expected: Tensor

    @classmethod
    def of(
        cls, engine: TransformersEngine, data: EvalDataset, question: EvalQuestion, tokens: int
    ) -> _Asked:
        engine.precompute(question.documents, progress=False)
        turn = Turn(question.question, tuple(chunk.text for chunk in question.passages))
        rag = RagPrompt(engine.tokenizer, data.instruction)
        prompt = rag.segmented([turn], engine.registry)
        greedy = SamplingParams.greedy(max_tokens=tokens, ignore_eos=True)
        answer = tuple(engine.generate_full(prompt, greedy).token_ids)
        return cls(engine, prompt, answer, engine.score(prompt, answer, full=True).log_probs)

    def divergence(self, config: BlendConfig) -> tuple[float, float]:
        """Return the mean divergence from full prefill, in nats, and the share of compute."""
        found = self.engine.score(self.prompt, self.answer, config=config)
        nats = (self.expected.exp() * (self.expected - found.log_probs)).sum(-1)
        return float(nats.mean()), found.report.compute_share

    def best(self, config: BlendConfig, ratio: float, **options: Any) -> set[int]:
        """Return the positions of the highest scores by ``question_mid`` with these options."""
        one = config.with_changes(
            selector="question_mid", selector_options=options, recompute_ratio=1e-6, trace=True
        )
        trace = self.engine.score(self.prompt, self.answer[:1], config=one).report.trace
        assert trace is not None
        (selection,) = trace.selections
        count = row_count(ratio, len(selection.positions))
        ranked = sorted(zip(selection.scores, selection.positions, strict=True), reverse=True)
        return {position for _, position in ranked[:count]}


def _layer_rows(asked: Sequence[_Asked], plan: LayersPlan, advance: Advance) -> list[Row]:
    """Return each layer's overlap with all layers and with ``question``."""
    overlaps: dict[int, list[tuple[float, float]]] = {}
    for index, one in enumerate(asked):
        advance(f"prompt {index + 1} of {len(asked)}, layer by layer")
        best = partial(one.best, plan.config, plan.ratio)
        mean, question = best(span=[0.0, 1.0]), best(span=[0.5, 1.0], heads="max")
        for layer in range(one.engine.model.config.num_hidden_layers):
            own = best(layers=[layer])
            shares = (len(own & mean) / len(own), len(own & question) / len(own))
            overlaps.setdefault(layer, []).append(shares)
    return [
        {
            "layer": layer,
            "all_layers": fmean(a for a, _ in found),
            "question": fmean(b for _, b in found),
        }
        for layer, found in overlaps.items()
    ]


def _three_best(rows: Sequence[Row]) -> list[int]:
    """Return the middle layers that overlap best with ``question``."""
    middle = make_selector("question_mid").probe.observed(len(rows))
    ranked = sorted(middle, key=lambda layer: -rows[layer]["question"])
    return sorted(ranked[:3])


def _set_rows(asked: Sequence[_Asked], plan: LayersPlan, sets: Sets, advance: Advance) -> list[Row]:
    """Return each set's divergence and compute, means over the prompts."""
    rows = []
    for name, (selector, options) in sets.items():
        advance(name)
        config = plan.config.with_changes(selector=selector, selector_options=options)
        found = [one.divergence(config) for one in asked]
        layers = asked[0].engine.model.config.num_hidden_layers
        rows.append(
            {
                "set": name,
                "nats": fmean(nats for nats, _ in found),
                "compute_share": fmean(share for _, share in found),
                "kv_before": make_selector(selector, options).kv_before(layers),
            }
        )
    return rows


def show(found: dict[str, Any]) -> None:
    output.print_facts("overlap of the best tokens", {"prompts": found["questions"]})
    output.print_rows(
        ["layer", "with all layers", "with question"],
        [(r["layer"], f"{r['all_layers']:.2f}", f"{r['question']:.2f}") for r in found["layers"]],
    )
    output.print_facts("divergence from full prefill", {"model": found["model"]})
    output.print_rows(
        ["set", "nats a token", "share of compute", "share of KV before layer 0"],
        [
            (r["set"], *(f"{r[name]:.4f}" for name in ("nats", "compute_share", "kv_before")))
            for r in found["sets"]
        ],
    )


app = benchmark_app(LayersPlan, measure_layers, show)

if __name__ == "__main__":
    app()
