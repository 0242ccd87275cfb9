"""This project, kvboost and plain transformers on the same prompts, side by side in one process.

``python -m tests.benchmarks.peers --dataset FILE`` installs kvboost into a folder of its own, once,
and runs all systems on one model object, in float32 on the CPU. A question is answered in two
scenarios. Before each a system forgets everything; then it sees the prompt's passages, each alone,
and an earlier prompt: another question over the same passages, in another order (``reordered``) or
in the same one (``prefix``).

- transformers keeps the earlier prompt's KV and reuses what both prompts begin with.
- kvboost gets the passages and the earlier prompt by its ``warm``. It runs with its defaults, and
  with all that it offers for more reuse and for repair.
- This project precomputes the passages' documents and answers the earlier prompt. It runs with its
  defaults, and with plain reuse, which recomputes nothing.

A first token's time is what the caller waits; its speedup is over the system's own full prefill. KL
and ``same`` compare predictions with those of transformers' full prefill, along its greedy answer.
``recovered`` is (system - no passages) / (full prefill - no passages), a ratio of sums over the
prompts that full prefill answers. Kept bytes are the KV of all that was seen.
"""

from __future__ import annotations

import copy
import json
import logging
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from operator import truediv
from pathlib import Path
from statistics import mean
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor
from transformers import DynamicCache

from cacheblend_rag import BlendPrompt, Document, SamplingParams, TransformersEngine
from cacheblend_rag.engines.model_files import load_tokenizer
from cacheblend_rag.errors import CacheBlendError
from cacheblend_rag.quality.dataset import EvalQuestion, PromptFrame
from cacheblend_rag.quality.fidelity import divergences
from cacheblend_rag.quality.measure import ANSWER_TOKENS, ONE_TOKEN
from cacheblend_rag.quality.questions import choose_questions
from cacheblend_rag.quality.scores import figure, holds_answer, recovered, token_f1
from tests.readme import ROOT

KVBOOST = "kvboost==0.9.0"
SCENARIOS, CLOCKS, SCORES = ("reordered", "prefix"), ("wall", "cpu"), ("f1", "holds", "logprob")
Seconds = tuple[float, float]
"""By the wall clock, and of the CPU."""
Answers = Sequence[Sequence[int]]
Record = dict[str, Any]


class Told(NamedTuple):
    """An answer, and log-probabilities at each step of the answers that were given to score."""

    first: Seconds
    text: str
    log_probs: Sequence[Tensor]
    reused_tokens: int


def scores(told: Told, golds: Sequence[str], gold: Sequence[int]) -> tuple[float, float, float]:
    """Return SCORES; gold: the last answer that was scored."""
    logprob = told.log_probs[-1].gather(1, torch.tensor(gold)[:, None]).sum()
    return token_f1(told.text, golds), float(holds_answer(told.text, golds)), float(logprob)


def timer() -> Callable[[], Seconds]:
    """Return a function that tells how long ago this was."""
    wall, cpu = time.perf_counter(), time.process_time()
    return lambda: (time.perf_counter() - wall, time.process_time() - cpu)


def forced(
    model: Any, cache: DynamicCache, tokens: int, first: Tensor, answers: Answers
) -> Iterator[Tensor]:
    """Yield log-probabilities along answers, after so many tokens of KV and their last logits."""
    for answer in answers:
        cache.crop(tokens - cache.get_seq_length())
        later = model(torch.tensor([answer]), past_key_values=cache).logits[0, :-1]
        yield torch.cat([first, later]).log_softmax(-1)


class Transformers:
    name = "transformers, prompt cache"

    def __init__(self, engine: TransformersEngine) -> None:
        self.model, self.tokenizer = engine.model, engine.tokenizer
        self.seen, self.cache = torch.empty(0, dtype=torch.long), DynamicCache()

    def encode(self, prompt: BlendPrompt) -> Tensor:
        return torch.tensor(self.tokenizer.encode(prompt.text))

    def see(self, documents: Sequence[Document], earlier: BlendPrompt) -> int:
        """Forget all, and see these; returns the bytes of what is kept."""
        self.seen, self.cache = self.encode(earlier), DynamicCache()
        self.model(self.seen[None], past_key_values=self.cache, logits_to_keep=1)
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.cache.layers)

    def full(self, prompt: BlendPrompt) -> None:
        self.model(self.encode(prompt)[None], logits_to_keep=1)

    def tell(self, prompt: BlendPrompt, answers: Answers) -> Told:
        took, ids = timer(), self.encode(prompt)
        cache, most = copy.deepcopy(self.cache), min(len(self.seen), len(ids) - 1)
        alike = int((self.seen[:most] == ids[:most]).long().cumprod(0).sum())
        cache.crop(alike - len(self.seen))
        out = self.model(ids[None, alike:], past_key_values=cache, logits_to_keep=1)
        rows, found = [out.logits[0]], [int(out.logits.argmax())]
        first = took()
        while len(found) < ANSWER_TOKENS and found[-1] != self.tokenizer.eos_token_id:
            rows.append(self.model(torch.tensor([found[-1:]]), past_key_values=cache).logits[0])
            found.append(int(rows[-1].argmax()))
        self.predicted = torch.cat(rows).log_softmax(-1)  # along its own answer
        text = self.tokenizer.decode(found, skip_special_tokens=True)
        return Told(first, text, [*forced(self.model, cache, len(ids), rows[0], answers)], alike)


class KVBoost:
    def __init__(self, name: str, engine: TransformersEngine, **settings: Any) -> None:
        import kvboost

        self.name, self.baseline = name, kvboost.GenerationMode.BASELINE
        options = {"device": "cpu", "max_cache_bytes": 4 << 30, **settings}
        self.engine = kvboost.KVBoost(engine.model, engine.tokenizer, **options)
        self.engine._normalize_past_kv = self._keep  # gets the cache after each step

    def _keep(self, cache: DynamicCache) -> DynamicCache:
        self.cache = cache
        return cache

    def see(self, documents: Sequence[Document], earlier: BlendPrompt) -> int:
        self.engine.reset_cache()
        for text in (*(one for document in documents for one in document.chunks), earlier.text):
            self.engine.warm(text)
        return int(self.engine.cache_stats()["hot_memory_mb"] * 1e6)

    def full(self, prompt: BlendPrompt) -> None:
        self.engine.generate(prompt.text, 1, self.baseline)

    def tell(self, prompt: BlendPrompt, answers: Answers) -> Told:
        took, seconds = timer(), []
        options = {"cacheable_prefix_len": 0}  # stores nothing after the answer
        options["on_token"] = lambda _: seconds.append(took())
        told = self.engine.generate(prompt.text, ANSWER_TOKENS, **options)
        row = torch.from_numpy(told.first_token_logits)[None]
        found = forced(self.engine.model, self.cache, told.prompt_tokens, row, answers)
        return Told(seconds[0], told.output_text, [*found], told.cached_tokens)


class Ours:
    def __init__(self, name: str, engine: TransformersEngine, **settings: Any) -> None:
        self.name, self.engine = name, engine
        self.config = engine.config.with_changes(**settings)

    def see(self, documents: Sequence[Document], earlier: BlendPrompt) -> int:
        for key in self.engine.store.entries():
            self.engine.store.evict(key)
        self.engine.precompute(documents, progress=False)
        self.engine.generate(earlier, ONE_TOKEN, config=self.config)
        return sum(tier["bytes"] or 0 for tier in self.engine.store.stats().values())

    def full(self, prompt: BlendPrompt) -> None:
        self.engine.generate_full(prompt, ONE_TOKEN)

    def tell(self, prompt: BlendPrompt, answers: Answers) -> Told:
        took, options = timer(), {"config": self.config}
        self.engine.generate(prompt, ONE_TOKEN, **options)
        first = took()
        sampling = SamplingParams.greedy(ANSWER_TOKENS)
        told, found = self.engine.generate_and_score(prompt, sampling, lambda _: answers, **options)
        return Told(first, told.text, [one.log_probs for one in found], told.report.reused_tokens)


@torch.inference_mode()
def measure(
    systems: Sequence[Any], plain: Transformers, frame: PromptFrame, asked: EvalQuestion, turn: int
) -> Iterator[Record]:
    """Yield each system's record in each scenario. plain: has seen nothing. turn: who begins."""
    prompt, bare = (frame.prompt(asked, bare=bare) for bare in (False, True))
    golds, before = asked.answers, "" if prompt.is_rendered else " "
    gold = plain.tokenizer.encode(before + golds[0], add_special_tokens=False)
    none = scores(plain.tell(bare, [gold]), golds, gold)
    full, wanted = scores(plain.tell(prompt, [gold]), golds, gold), plain.predicted
    answer, fulls = wanted.argmax(-1), {}
    systems = (*systems[turn % len(systems) :], *systems[: turn % len(systems)])
    for system in systems:  # those of a kind share it
        took = timer()
        if type(system) not in fulls:
            system.full(prompt)
            fulls[type(system)] = took()
    first, *rest = asked.passages
    mixed = (*random.Random(turn).sample(rest, len(rest)), first)
    earlier = replace(asked, question="Which places do the notes name?")
    orders = zip(SCENARIOS, (mixed, asked.passages), strict=True)
    for (scenario, passages), system in product(orders, systems):
        kept = system.see(asked.documents, frame.prompt(replace(earlier, passages=passages)))
        told = system.tell(prompt, [answer.tolist(), gold])
        yield {
            "scenario": scenario,
            "system": system.name,
            "tokens": len(plain.encode(prompt)),
            "reused_tokens": told.reused_tokens,
            "kept_bytes": kept,
            "kl": float(divergences(wanted, told.log_probs[0]).mean()),
            "same": float((told.log_probs[0].argmax(-1) == answer).all()),
            **_named("first", CLOCKS, told.first),
            **_named("own_full", CLOCKS, fulls[type(system)]),
            **_named("own", SCORES, scores(told, golds, gold)),
            **_named("full", SCORES, full),
            **_named("none", SCORES, none),
        }


def _named(what: str, names: Sequence[str], values: Sequence[float]) -> dict[str, float]:
    return {f"{what}_{name}": value for name, value in zip(names, values, strict=True)}


def rows(records: Sequence[Record]) -> list[Record]:
    """Return figures by scenario and system: means over prompts, and values with 95 % intervals."""
    found = []
    for scenario, system in dict.fromkeys((one["scenario"], one["system"]) for one in records):
        own = [one for one in records if (one["scenario"], one["system"]) == (scenario, system)]
        answered = [one for one in own if one["full_holds"]]
        row = {"scenario": scenario, "system": system, "answered": len(answered)}
        row |= {name: mean(one[name] for one in own) for name in own[0] if name not in row}
        row["kl"] = _figure(lambda kl: kl, own, "kl")
        for name in CLOCKS:
            row[f"speedup_{name}"] = _figure(truediv, own, f"own_full_{name}", f"first_{name}")
        for name in SCORES:
            columns = (f"{of}_{name}" for of in ("own", "none", "full"))
            row[f"recovered_{name}"] = _figure(recovered, answered, *columns)
        found.append(row)
    return found


def _figure(of: Callable[..., Any], records: Sequence[Record], *names: str) -> list[Any]:
    return list(figure(of, *([one[name] for one in records] for name in names)))


def table(found: dict[str, Record]) -> str:
    """Return a file's figures as a table of Markdown: a row for each model and system."""
    head = ("sooner", "KL", "F1 kept")
    columns = [f"{scenario}: {one}" for scenario, one in product(SCENARIOS, head)]
    lines = [["model", "system", *columns, "KV kept"], ["---"] * (len(columns) + 3)]
    for model, run in found.items():
        for system in dict.fromkeys(row["system"] for row in run["rows"]):
            own = [row for row in run["rows"] if row["system"] == system]
            told = [text for row in own for text in _told(row)]
            lines.append([model, system, *told, f"{own[0]['kept_bytes'] / 1e6:.0f} MB"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _told(row: Record) -> Iterator[str]:
    (sooner, (least, most)), (kl, _) = row["speedup_cpu"], row["kl"]
    yield f"{sooner:.1f}x ({least:.1f} to {most:.1f})"
    yield f"{kl:.3f}"
    yield f"{row['recovered_f1'][0]:.2f}"


def install_kvboost() -> None:
    """Let kvboost be imported, with the torch and transformers of this interpreter."""
    folder = ROOT / "build" / KVBOOST
    if not folder.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder]
        subprocess.run([*pip, KVBOOST], check=True)
    sys.path.append(str(folder))


def main(
    *,
    model: str = "smollm2",
    dataset: str = "single-hop",
    questions: Annotated[int, typer.Option(min=1)] = 8,
    out: Path = Path("peers.json"),
) -> None:
    """Write the figures of each system and scenario, and print them.

    model, dataset: as `eval` takes them; of a file's settings, the first one. out: a JSON file of
    figures by model, where those of other models stay.
    """
    try:
        data, tokenizer = choose_questions(dataset, questions), load_tokenizer(model)
    except CacheBlendError as error:
        raise SystemExit(str(error)) from error
    install_kvboost()
    logging.disable(logging.WARNING)
    frame = PromptFrame.of(tokenizer, data.instruction)
    engine = TransformersEngine(model, instruction=frame.opening, device="cpu", dtype="float32")
    best = {"recompute_strategy": "cacheblend", "chunk_boundary_window": 16}
    systems = [
        Transformers(engine),
        KVBoost("kvboost, defaults", engine),
        KVBoost("kvboost, best settings", engine, **best, overlap_k=16, sink_tokens=32),
        Ours("this project, defaults", engine),
        Ours("this project, plain reuse", engine, selector="none", recompute_ratio=0.0),
    ]
    asked = data.of_setting(data.settings[0])
    one = asked[0].documents[0]
    short = replace(asked[0], documents=(one,), passages=one.to_chunks())
    records, found = [], json.loads(out.read_text()) if out.exists() else {}
    for turn, question in enumerate((short, *asked), -1):  # the short one warms up
        for record in measure(systems, Transformers(engine), frame, question, turn):
            print(json.dumps(record), file=sys.stderr, flush=True)
            records += [record] if turn >= 0 else []
        found[engine.model_name] = {
            "dataset": data.name,
            "prompts": turn + 1,
            "threads": torch.get_num_threads(),
            "rows": rows(records),
        }
        out.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))


if __name__ == "__main__":
    typer.run(main)
