"""Try families of models, and print a Markdown table, which stands in docs/models.md.

`python -m tests.families` tries all of ``models.py`` on the embedded engine, `--vllm` tries IN_VLLM
in vLLM. Families by name: only these.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformers
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel

from cacheblend_rag import CacheBlendError
from tests.families.models import IN_VLLM, Family, builders, families, save_family
from tests.families.reference import DOCUMENTS, asked, off, own_logits, retrieved, three_chunks
from tests.families.test_embedded import ALL, NONE, opened

LARGEST_MODEL = 60_000_000
SLOW = {"kimi_linear", "prophetnet"}
"""Their plain code on a CPU takes minutes for what is measured."""


def built(name: str) -> PreTrainedModel:
    """Return a family's model once it has run; raises whatever keeps it from that."""
    if name in families():
        _check_size(families()[name])
    model = builders()[name]()
    model(input_ids=torch.arange(2, 12)[None], use_cache=False)
    return model


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


def measured(model: PreTrainedModel) -> tuple[str | None, list[str]]:
    """Return why a model is refused, or None, and what stands in its row.

    How far ratio 1 and ratio 0 are off the model's own forward, and how many of 16 tokens it would
    have chosen, too.
    """
    with closing(opened(model)) as engine:
        prompt, chunks = three_chunks()
        engine.precompute(chunks, progress=False)
        found = []
        for config, reusing in ((ALL, False), (NONE, True)):
            answer = engine.generate(prompt, asked(16), config=config)
            wanted = own_logits(model, prompt, answer, reusing=reusing and answer.report.blended)
            alike = int((wanted.argmax(-1) == torch.tensor(answer.token_ids)).sum())
            if not answer.report.blended:
                return engine.blend_refusal, ["", "", f"{alike}/16"]
            found.append(f"{off(answer, wanted):.0e}")
        return None, [*found, f"{alike}/16"]


def print_embedded(names: Sequence[str]) -> None:
    """Try families on the embedded engine and print the table."""
    lines, left, blended = [], [], 0
    for name in tqdm(names):
        try:
            model = built(name)
        except Exception as error:
            left.append(f"- {name}: {type(error).__name__}: {str(error).splitlines()[0][:80]}")
            continue
        refusal, found = measured(model)
        blended += refusal is None
        state = "blended" if refusal is None else f"refused: {refusal}"
        lines.append(f"| {name} | {state} | {' | '.join(found)} |")
    told = f"{blended} of {len(lines)} families are blended"
    print(f"{told} (transformers {transformers.__version__}):\n")
    print("| family | on the embedded engine | ratio 1 | ratio 0 | greedy |")
    print("| --- | --- | --- | --- | --- |")
    print("\n".join([*lines, "\nNot tried:\n", *left]))


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
    from tests.families import test_on_vllm as there

    with there.opened(folder) as engine:
        if engine.blend_refusal is not None:
            return f"refused: {engine.blend_refusal}", ["", ""]
        engine.precompute(DOCUMENTS, progress=False)
        differences = (there.difference(engine, retrieved(), c) for c in (there.ALL, there.NONE))
        return "blended", [f"{one:.0e}" for one in differences]


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="families to try, all by default")
    parser.add_argument("--vllm", action="store_true", help="try them in vLLM")
    asked_for = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    if asked_for.vllm:
        print_in_vllm(asked_for.names or IN_VLLM)
    else:
        print_embedded(asked_for.names or list(builders()))


if __name__ == "__main__":
    main()
