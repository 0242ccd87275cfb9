"""Try families of models, and print a Markdown table, which stands in docs/models.md.

`python -m tests.families` tries all of ``models.py`` on the embedded engine, `--vllm` tries IN_VLLM
in vLLM, `--dtype bfloat16` the families that are blended in that precision, with outliers. Families
by name: only these.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import torch
import transformers
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel

from cacheblend_rag import BlendConfig, CacheBlendError, SamplingParams, TransformersEngine
from cacheblend_rag.blend import BlendPass, FusedKV, plan_schedule
from cacheblend_rag.blend.passes import Candidates
from cacheblend_rag.blend.rotary import pair_sizes, rotated
from cacheblend_rag.blend.stack import replaced
from cacheblend_rag.blend.steps import run_to_end
from cacheblend_rag.engines.transformers.cache import FusedCache
from cacheblend_rag.engines.transformers.stack import TransformersStack
from cacheblend_rag.engines.transformers.trial import open_stack
from tests.families.models import (
    IN_VLLM,
    Family,
    builders,
    families,
    own_tokens,
    save_family,
    with_outliers,
)
from tests.families.reference import (
    CHUNK_TOKENS,
    DOCUMENTS,
    PROMPTS,
    retrieved,
    three_chunks,
    together,
)
from tests.models import make_tokenizer

Found = TypeVar("Found")


# What is measured

GREEDY = SamplingParams(max_tokens=16)
MOVED_BY = (1, 511, 8192)
LARGEST_MODEL = 60_000_000
SLOW = {"kimi_linear", "prophetnet"}
"""Their plain code on a CPU takes minutes for what is measured."""


@dataclass(frozen=True)
class Row:
    """What one family showed; differences are shares of the largest value compared.

    refusal: why it is not blended, or None. everything: of logits between a pass that recomputes
    all tokens and the model's own prefill. nothing: of logits when a chunk at position 0 is reused
    as it is stored. moved: of layer 0's keys, moved and computed in place. greedy: tokens of 16
    that are those of the model's own forward, which reads the whole text for each.
    """

    name: str
    refusal: str | None
    everything: float | None = None
    nothing: float | None = None
    moved: float | None = None
    greedy: int = 0

    def line(self) -> str:
        """Return a row of the table."""
        state = "blended" if self.refusal is None else f"refused: {self.refusal}"
        found = [
            "" if value is None else f"{value:.0e}"
            for value in (self.everything, self.nothing, self.moved)
        ]
        return f"| {self.name} | {state} | {' | '.join(found)} | {self.greedy}/16 |"


@dataclass(frozen=True)
class LowRow:
    """What one family showed in 16 bits, held against the same weights in float32.

    Errors are root mean squares of logits' differences from float32's, over some prompts, as
    shares of float32's logits' spread. refusal: why it is not blended, or None. own: of the model's
    own prefill. everything: of a pass that recomputes all tokens. nothing: of one that reuses a
    chunk at position 0 as it is stored. moved: the largest difference between layer 0's keys, moved
    by positions and computed there, of a pair of components as a share of its size.
    """

    name: str
    refusal: str | None
    own: float | None = None
    everything: float | None = None
    nothing: float | None = None
    moved: float | None = None

    def line(self) -> str:
        """Return a row of the table."""
        state = "blended" if self.refusal is None else f"refused: {self.refusal}"
        errors = (self.own, self.everything, self.nothing, self.moved)
        found = ["" if value is None else f"{value:.1e}" for value in errors]
        return f"| {self.name} | {state} | {' | '.join(found)} |"


@torch.no_grad()
def measure_low(name: str, model: PreTrainedModel, dtype: torch.dtype) -> LowRow:
    """Try one model in 16 bits, with outliers, on the prompt of ``measure``."""
    model = with_outliers(model).to(dtype)
    wide = deepcopy(model).float()
    tokenizer = make_tokenizer()
    engine = TransformersEngine(model, tokenizer=tokenizer, lead_in="none")
    if engine.blend_refusal is not None:
        return LowRow(name, engine.blend_refusal)
    everything, nothing, own = [], [], []
    for seed in PROMPTS:
        ids = torch.tensor(three_chunks(seed)[0].encode(tokenizer).token_ids)
        wanted = _own_logits(wide, ids)
        own.append(_error(_own_logits(model, ids), wanted))
        everything.append(_error(_blended_logits(engine, ids, 0, 1.0), wanted))
        nothing.append(_error(_blended_logits(engine, ids, CHUNK_TOKENS, 0.0), wanted))
    return LowRow(
        name,
        None,
        *(together(errors) for errors in (own, everything, nothing)),
        moved=max(_moved_pairs(engine, ids[:CHUNK_TOKENS], by) for by in MOVED_BY),
    )


def _own_logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=ids[None], use_cache=False).logits[0, -1]
    return logits


def _error(found: Tensor, wanted: Tensor) -> float:
    """Root mean square of a difference, but for what all tokens of the vocabulary share."""
    off = found.float() - wanted.float()
    return float((off - off.mean()).norm() / (wanted - wanted.mean()).float().norm())


@torch.no_grad()
def measure(name: str, model: PreTrainedModel) -> Row:
    """Try one model on a prompt of three chunks."""
    tokenizer = make_tokenizer()
    config = BlendConfig(recompute_ratio=1.0, min_tokens=0)
    engine = TransformersEngine(model, tokenizer=tokenizer, config=config, lead_in="none")
    prompt, chunks = three_chunks()
    engine.precompute(chunks, progress=False)
    answer = engine.generate(prompt, GREEDY)
    ids = torch.tensor([prompt.encode(tokenizer).token_ids])
    wanted = own_tokens(model, ids, 16)
    greedy = sum(a == b for a, b in zip(answer.token_ids, wanted, strict=False))
    if engine.blend_refusal is not None:
        return Row(name, engine.blend_refusal, greedy=greedy)
    assert answer.report.blended
    return Row(
        name,
        None,
        everything=_blended(engine, ids[0], 0, 1.0),
        nothing=_blended(engine, ids[0], CHUNK_TOKENS, 0.0),
        moved=max(_moved(engine, ids[0, :CHUNK_TOKENS], by) for by in MOVED_BY),
        greedy=greedy,
    )


@lru_cache(1)
def stack_of(model: PreTrainedModel) -> TransformersStack:
    """A model as the engine drives it."""
    return open_stack(model)


def own_kv(engine: TransformersEngine, ids: Tensor, start: int = 0) -> FusedKV:
    """The model's own KV of these tokens, at positions from ``start``."""
    fused = FusedKV(stack_of(engine.model).geometry, ids.numel())
    positions = torch.arange(start, start + ids.numel())[None]
    engine.model(
        input_ids=ids[None],
        position_ids=positions,
        past_key_values=FusedCache(fused, 0),
        use_cache=True,
    )
    return fused


def _blended(engine: TransformersEngine, ids: Tensor, cached: int, ratio: float) -> float:
    """Difference of logits when the KV of the first ``cached`` tokens is there already."""
    wanted = _own_logits(engine.model, ids)
    return _difference(_blended_logits(engine, ids, cached, ratio), wanted)


def _blended_logits(engine: TransformersEngine, ids: Tensor, cached: int, ratio: float) -> Tensor:
    stack = stack_of(engine.model)
    fused = FusedKV(stack.geometry, ids.numel())
    known = Candidates.none(ids.numel())
    if cached:
        own = own_kv(engine, ids[:cached])
        fused.keys[:, :, :cached], fused.values[:, :, :cached] = own.keys, own.values
        known.cached[:cached] = True
    config = BlendConfig(selector="random", recompute_ratio=ratio)
    schedule = plan_schedule(config, stack.geometry.layers)
    run = BlendPass(stack, ids, fused, known, schedule)
    with replaced(stack, "row_block", 97):
        run_to_end(run.steps())
    return stack.logits(run.hidden)[0]


def _moved(engine: TransformersEngine, ids: Tensor, by: int) -> float:
    here, there = own_kv(engine, ids).keys[:1], own_kv(engine, ids, by).keys[:1]
    return _difference(rotated(here, stack_of(engine.model).rotation(by).of(0)), there)


def _moved_pairs(engine: TransformersEngine, ids: Tensor, by: int) -> float:
    """How far a pair of key components is off, as a share of its size."""
    here, there = own_kv(engine, ids).keys[:1], own_kv(engine, ids, by).keys[:1]
    turn = stack_of(engine.model).rotation(by).of(0)
    off, size = (pair_sizes(part.float(), turn) for part in (rotated(here, turn) - there, there))
    return float((off / size.clamp(min=0.01 * float(size.median()))).max())


def _difference(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted.float()).abs().max() / wanted.float().abs().max())


# The command


def try_all(
    names: Iterable[str], measure: Callable[[str, PreTrainedModel], Found] = measure
) -> Iterator[Found | Row | tuple[str, str]]:
    """Measure families; of one that cannot be built or run at all, its name and why."""
    build = builders()
    for name in names:
        try:
            if name in families():
                _check_size(families()[name])
            model = build[name]()
            model(input_ids=torch.arange(2, 12)[None], use_cache=False)
        except Exception as error:
            yield name, f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
            continue
        try:
            yield measure(name, model)
        except Exception as error:
            line = str(error).splitlines()[0] if str(error) else ""
            yield Row(name, f"FAILED, {type(error).__name__}: {line}")


def _check_size(family: Family) -> None:
    if family.model_type in SLOW:
        raise ValueError("it takes minutes on a CPU")
    config = family.config()
    if hasattr(config, "vision_config") or hasattr(config, "audio_config"):
        raise ValueError("made of several models: it is tried by its part that reads text")
    with torch.device("meta"):
        weights = sum(w.numel() for w in AutoModelForCausalLM.from_config(config).parameters())
    if weights > LARGEST_MODEL:
        raise ValueError(f"{weights:,} weights, although it was made as small as is known how")


def print_embedded(names: Sequence[str]) -> None:
    """Try families on the embedded engine and print the table."""
    rows, left = [], []
    for found in tqdm(try_all(names), total=len(names)):
        (rows if isinstance(found, Row) else left).append(found)
    blended = sum(row.refusal is None for row in rows)
    print(
        f"{blended} of {len(rows)} families are blended (transformers "
        f"{transformers.__version__}):\n"
    )
    print("| family | on the embedded engine | ratio 1 | ratio 0 | moved keys | greedy |")
    print("| --- | --- | --- | --- | --- | --- |")
    for row in rows:
        print(row.line())
    print("\nNot tried:\n")
    for name, why in left:
        print(f"- {name}: {why}")


def print_low(names: Sequence[str], dtype: torch.dtype) -> None:
    """Try families in 16 bits, with outliers, and print the table of those that are blended."""
    in_low = partial(measure_low, dtype=dtype)
    rows = list(tqdm(try_all(names, in_low), total=len(names)))
    blended = [row for row in rows if isinstance(row, LowRow) and row.refusal is None]
    print(f"{len(blended)} of {len(rows)} families are blended:\n")
    print("| family | own | ratio 1 | ratio 0 | moved keys |")
    print("| --- | --- | --- | --- | --- |")
    for row in blended:
        print(row.line().replace(" blended |", ""))
    print("\nOthers:\n")
    for row in rows:
        if isinstance(row, tuple):
            print(f"- {row[0]}: {row[1]}")
        elif row.refusal is not None:
            print(f"- {row.name}: {row.refusal}")


def print_in_vllm(names: Sequence[str]) -> None:
    """Try families in vLLM, which computes each in a process of its own, and print the table."""
    print("| family | in vLLM | ratio 1 | ratio 0 |")
    print("| --- | --- | --- | --- |")
    for name in tqdm(names):
        with TemporaryDirectory() as folder:
            try:
                state, values = _in_vllm(save_family(name, Path(folder)))
            except CacheBlendError as error:
                state, values = f"FAILED: {error}", ["", ""]
        print(f"| {name} | {state} | {' | '.join(values)} |", flush=True)


def _in_vllm(folder: Path) -> tuple[str, list[str]]:
    from tests.families.test_on_vllm import ALL, NONE, difference, opened

    with opened(folder) as engine:
        if engine.blend_refusal is not None:
            return f"refused: {engine.blend_refusal}", ["", ""]
        engine.precompute(DOCUMENTS, progress=False)
        return "blended", [f"{difference(engine, retrieved(), c):.0e}" for c in (ALL, NONE)]


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="families to try, all by default")
    parser.add_argument("--vllm", action="store_true", help="try them in vLLM")
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=("float32", "bfloat16", "float16"),
        help="precision on the embedded engine; in 16 bits with outliers",
    )
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    if asked.vllm:
        print_in_vllm(asked.names or IN_VLLM)
    elif asked.dtype != "float32":
        print_low(asked.names or list(builders()), getattr(torch, asked.dtype))
    else:
        print_embedded(asked.names or list(builders()))


if __name__ == "__main__":
    main()
