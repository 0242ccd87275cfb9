"""vLLM's own prefill is the reference: ratio 1 equals it bit for bit, on every model family."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.forward_context import set_forward_context

from cacheblend_rag import BlendConfig, BlendPrompt, Document, TransformersEngine
from cacheblend_rag.blend.fused import FusedKV
from cacheblend_rag.blend.stack import probe_layer
from cacheblend_rag.engines.sampling import ResolvedSampling
from cacheblend_rag.engines.vllm.engine import VLLMEngine
from cacheblend_rag.engines.vllm.in_process import vllm_sampling
from cacheblend_rag.engines.vllm.job_client import ask_status
from cacheblend_rag.engines.vllm.transport import VLLMRequest
from cacheblend_rag.engines.vllm.versions import installed_version
from tests.engines.vllm.forking import GPU_DEFAULTS
from tests.engines.vllm.inprocess import InProcessEngine
from tests.engines.vllm.opening import request_of
from tests.engines.vllm.shared import STEP_TOKENS
from tests.families.models import save_family
from tests.models import FAMILIES, make_tokenizer, prompt_of, words

DOCUMENTS = (
    Document("a", (words(60, 1), words(150, 2)), separator=" w77 "),
    Document("b", (words(203, 3), words(91, 4)), separator=" w77 "),
)
SHORT = ResolvedSampling(max_tokens=6)
SOME = 0.3
HAS_FP8 = torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()

COMPILED = ("llama", "gemma3", "qwen3-moe")
"""Compiling takes a minute each; these have all that is compiled for the layers alone, and two of
them what no other family here has: two rotary tables, and experts alone."""
KINDS = {
    "llama-yarn": "a rotary table that scales keys",
    "gemma2": "windows in some layers, capped logits, a scale of its own",
    "qwen2_moe": "experts that are given other blocks of rows here than there",
    "cohere2": "rotary pairs side by side, layers without rotary, LayerNorm",
    "exaone_moe": "experts, shared ones too, beside windows",
    "glm4": "a part of each head turned, in pairs side by side",
    "granite": "layers that pass on a bare state, multipliers",
    "stablelm": "layers that return two values and have no residual",
    "gpt_neox": "vLLM's Transformers backend, a part of each head turned, LayerNorm",
    "olmo3": "the same backend with windows in some layers",
    "smollm3": "the same backend with layers without rotary",
}
"""Families, and what each alone has of what the connector treats in its own way: how layers are
called and what they return, rotary layouts and tables, windows, scales, caps, experts. To the
connector qwen2, qwen3, phi3, ernie4_5 and others are like one of these, or like llama; all of them
are tried by `python -m tests.families --vllm`."""

NOT_ON_031 = {"exaone_moe": "it reads a field that the config lacks"}
"""Families that vLLM 0.31 cannot load, and why."""

OpenFamily = Callable[..., InProcessEngine]


def retrieved(count: int = 3, seed: int = 9, opening: int = 50) -> BlendPrompt:
    """A prompt over chunks out of order: one document whole, the other without its beginning.

    seed: of the question; vLLM knows a prompt it has seen already. opening: seed of the words
    before the chunks; with another, vLLM's prefix cache has nothing of the prompt.
    """
    first, second = (document.to_chunks() for document in DOCUMENTS)
    chosen = (second[1], *first)[:count]
    parts: list[Any] = [words(9, opening)]
    for chunk in chosen:
        parts += [chunk, " w7 "]
    return prompt_of(*parts, words(23, seed))


def logprobs(engine: VLLMEngine, request: VLLMRequest) -> list[float]:
    """Greedy tokens' log-probabilities, as vLLM itself returns them."""
    sampling = vllm_sampling(request)
    sampling.logprobs, sampling.ignore_eos = 1, True

    async def run() -> list[float]:
        found: list[float] = []
        async for step in _outputs(engine, request, sampling):
            out = step.outputs[0]
            found += [
                top[token].logprob for top, token in zip(out.logprobs, out.token_ids, strict=True)
            ]
        return found

    return engine.transport.run(run())


def _outputs(engine: Any, request: VLLMRequest, sampling: Any) -> Any:
    if isinstance(engine, InProcessEngine):
        return engine.vllm.outputs(request, sampling)
    prompt = {"prompt_token_ids": list(request.token_ids), "cache_salt": request.salt}
    return engine.transport.vllm.generate(prompt, sampling, uuid.uuid4().hex)


def difference(engine: VLLMEngine, prompt: BlendPrompt, ratio: float) -> float:
    """Largest difference of log-probabilities between a blended prompt and ordinary prefill.

    Neither is served by vLLM's prefix cache.
    """
    config = engine.config.with_changes(recompute_ratio=ratio)
    asked = request_of(engine, prompt, SHORT, config)
    blend = replace(asked, salt=uuid.uuid4().hex)
    plain = VLLMRequest(asked.token_ids, SHORT, uuid.uuid4().hex)
    pairs = zip(logprobs(engine, blend), logprobs(engine, plain), strict=True)
    return max(abs(a - b) for a, b in pairs)


@pytest.fixture
def open_family(model_folder: Callable[[str], Path]) -> Iterator[OpenFamily]:
    """Open an engine over a family with the documents indexed; it is closed after the test."""
    with ExitStack() as opened:

        def open_engine(family: str | Path = "llama", **options: Any) -> InProcessEngine:
            config = BlendConfig(min_tokens=0, selector="hkvd")
            folder = family if isinstance(family, Path) else model_folder(family)
            engine = opened.enter_context(closing(InProcessEngine.open(folder, config, **options)))
            index(engine)
            return engine

        yield open_engine


def index(engine: InProcessEngine) -> None:
    report = engine.precompute(DOCUMENTS, progress=False)
    assert (report.computed, report.refused) == (4, {})


OTHER_BLOCKS = 5e-6
"""Rounding where rows are computed in other blocks than vLLM's: on some processors (those with AVX2
only) a matrix product rounds a row by how many rows there are."""


def check_exact(engine: InProcessEngine, seed: int = 9, rounding: float = 0.0) -> None:
    """Ratio 1 is ordinary prefill; less is not, and is blended all the same."""
    prompt = retrieved(seed=seed)
    assert difference(engine, prompt, 1.0) <= rounding
    reused = difference(engine, prompt, 0.0)
    assert reused > 1e-4, "plain reuse of moved chunks is never exact"
    assert math.isfinite(reused)
    some = engine.generate(prompt, SHORT, config=engine.config.with_changes(recompute_ratio=SOME))
    assert [chunk.hit for chunk in some.report.chunks] == [True] * 3
    assert some.report.recomputed_tokens > 0


def test_ratio_1_equals_ordinary_prefill(llama: InProcessEngine) -> None:
    index(llama)
    check_exact(llama)


@pytest.mark.skipif(not GPU_DEFAULTS, reason="set TRITON_INTERPRET=1")
def test_with_a_gpus_defaults_what_is_not_blended_is_computed_by_vllm(
    open_family: OpenFamily,
) -> None:
    engine = open_family("llama")
    config = engine.core.vllm_config
    assert config.use_v2_model_runner
    assert config.scheduler_config.async_scheduling
    asked = request_of(engine, retrieved(), SHORT, engine.config.with_changes(min_tokens=10_000))
    plain = VLLMRequest(asked.token_ids, SHORT, "plain")
    assert logprobs(engine, asked) == logprobs(engine, plain)


@pytest.mark.parametrize("family", KINDS)
def test_ratio_1_equals_ordinary_prefill_in_other_families(
    open_family: OpenFamily, tmp_path: Path, family: str
) -> None:
    if installed_version().startswith("0.31.") and family in NOT_ON_031:
        pytest.skip(f"vLLM {installed_version()}: {NOT_ON_031[family]}")
    # Experts are given all rows of a step at once, here in other blocks than there.
    rounding = OTHER_BLOCKS if family == "qwen2_moe" else 0.0
    folder = family if family in FAMILIES else save_family(family, tmp_path)
    check_exact(open_family(folder), rounding=rounding)


def test_a_window_in_all_layers_is_blended(open_family: OpenFamily) -> None:
    engine = open_family("mistral-sliding")
    check_exact(engine)
    unstored = engine.config.with_changes(min_tokens=10_000)
    asked = request_of(engine, retrieved(seed=11), SHORT, engine.config)
    assert asked.job is not None
    refused = replace(asked, job=replace(asked.job, config=unstored))
    plain = VLLMRequest(asked.token_ids, SHORT, "plain")
    assert logprobs(engine, refused) == logprobs(engine, plain)


@pytest.mark.skipif(not HAS_FP8, reason="vLLM's CPU build needs AVX-512 or AMX for it")
def test_ratio_1_equals_ordinary_prefill_with_an_fp8_cache(open_family: OpenFamily) -> None:
    """Of vLLM's own backend; of others in connector/test_fp8.py and test_on_gpus.py."""
    engine = open_family("llama", kv_cache_dtype="fp8")
    assert {a.kv_cache.itemsize for a in engine.worker_connector.blender.stack.attention} == {1}
    check_exact(engine)


@pytest.mark.parametrize("family", COMPILED)
def test_a_compiled_model_is_exact_too(open_family: OpenFamily, family: str) -> None:
    engine = open_family(family, enforce_eager=False)
    check_exact(engine)
    assert ask_status(engine.transport).compilations == 0, "all kernels are compiled at start"
    check_single_rows(engine)


def check_single_rows(engine: InProcessEngine) -> None:
    """Rows are computed alone as among others, by kernels that are there already.

    The kernels of one row are others, and the compiler would begin only when a request needs one.
    """
    stack = engine.worker_connector.blender.stack
    no_recompiling = torch._dynamo.config.patch(error_on_recompile=True)
    in_worker = set_forward_context(None, engine.core.vllm_config)
    with in_worker, torch.inference_mode(), no_recompiling:
        hidden = torch.randn_like(stack.embed(torch.arange(5)[None]))
        calls = [
            probe_layer(
                stack, 1, hidden[:, rows], stack.position_inputs(torch.arange(5)[None, rows])
            )
            for rows in (slice(None), *(slice(i, i + 1) for i in range(5)))
        ]
    for name in ("query", "key", "value"):
        together, *alone = [getattr(call, name) for call in calls]
        assert torch.equal(together, torch.cat(alone, 2))


def test_rows_beyond_one_block_are_run_in_several(
    short_steps: InProcessEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    index(short_steps)
    blender = short_steps.worker_connector.blender
    monkeypatch.setattr(blender.jobs, "mode", "native")
    assert blender.stack.row_block == STEP_TOKENS < len(short_steps.tokenize(retrieved().text))
    assert difference(short_steps, retrieved(), 1.0) <= OTHER_BLOCKS


@pytest.mark.parametrize("mode", ["auto", "native", "sdpa"])
def test_memory_that_nothing_has_written_is_not_read(
    short_steps: InProcessEngine, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Whatever is in it: kernels read blocks of the cache to their ends, and 0 x NaN is NaN."""
    index(short_steps)
    blender = short_steps.worker_connector.blender
    monkeypatch.setattr(blender.jobs, "mode", mode)
    monkeypatch.setattr(blender.stack, "row_block", 20)  # one ends just before a separator
    config = short_steps.config.with_changes(selector="hkvd", recompute_ratio=SOME)
    asked = request_of(short_steps, retrieved(), SHORT, config)
    expected = logprobs(short_steps, replace(asked, salt=f"{mode} before"))
    begin = FusedKV.__init__

    def unwritten(fused: FusedKV, *given: Any, **named: Any) -> None:
        begin(fused, *given, **named)
        fused.keys.fill_(math.nan)
        fused.values.fill_(math.nan)

    monkeypatch.setattr(FusedKV, "__init__", unwritten)
    assert logprobs(short_steps, replace(asked, salt=f"{mode} after")) == expected
    assert difference(short_steps, retrieved(), 1.0) <= (1e-4 if mode == "sdpa" else OTHER_BLOCKS)


def test_pytorchs_attention_is_ordinary_prefill_but_for_rounding(
    llama: InProcessEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    index(llama)
    blender = llama.worker_connector.blender
    monkeypatch.setattr(blender.jobs, "mode", "sdpa")
    assert difference(llama, retrieved(), 1.0) < 1e-4


@pytest.mark.parametrize("selector", ["chunk_head", "hkvd", "prior", "question_mid", "random"])
def test_both_engines_trace_the_same(
    llama: InProcessEngine, model_folder: Callable[[str], Path], selector: str
) -> None:
    config = BlendConfig(
        min_tokens=0, selector=selector, recompute_ratio=SOME, cost_model=False, trace=True
    )
    embedded = TransformersEngine(
        model_folder("llama"), tokenizer=make_tokenizer(), config=config, dtype=torch.float32
    )
    traces = []
    for engine in (embedded, llama):
        engine.precompute(DOCUMENTS, progress=False)
        report = engine.generate(retrieved(seed=31), SHORT, config=config).report
        assert report.trace is not None
        assert report.trace.rows[-1] == report.recomputed_tokens > 0
        traces.append(report.trace)
    embedded.close()
    ours, theirs = traces
    assert ours.rows == theirs.rows
    for one, other in zip(ours.selections, theirs.selections, strict=True):
        assert (one.layer, one.positions, one.chosen) == (
            other.layer, other.positions, other.chosen
        )  # fmt: skip
        assert sum(one.chosen) == ours.rows[-1]
        for part in ("scores", "key_deviations", "value_deviations"):
            wanted, found = getattr(one, part), getattr(other, part)
            assert found == pytest.approx(wanted, rel=1e-3, abs=1e-6)
    assert ours.protected == theirs.protected
    assert len(ours.layers) == len(theirs.layers) > 0
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        assert (mine.layer, mine.tokens) == (other.layer, other.tokens)
        for part in ("mean", "median", "most", "size"):
            wanted, found = getattr(mine.values, part), getattr(other.values, part)
            assert found == pytest.approx(wanted, rel=1e-3, abs=1e-6)
