"""The steps on vLLM: is its answer the right one, how soon is its first token, how many a second.

The model's weights are random, saved once for all steps of a call. Each step is one vLLM, but for
throughput, which is three, one after another.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from threading import Event, Thread
from typing import Any

import torch

from cacheblend_rag import BlendConfig
from cacheblend_rag.bench.workload import ONE_TOKEN
from cacheblend_rag.engines.answer import Generation
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.vllm.connector.settings import ConnectorSettings
from cacheblend_rag.errors import CacheBlendError
from cacheblend_rag.settings import StoreConfig
from cacheblend_rag.text.prompt import BlendPrompt
from tests.benchmarks.gpu.requests import (
    CASES,
    HOST,
    REAL_CHUNKS,
    REPEAT,
    SEED,
    TOY_CHUNKS,
    TOY_REPEAT,
    Requests,
    Row,
    Scene,
    attempt,
    draw_bench_chunks,
    milliseconds,
    open_requests,
)
from tests.benchmarks.shapes import draw_words
from tests.benchmarks.throughput import SALT, Load, engine_options, running_vllm

ANSWER = SamplingParams.greedy(16, ignore_eos=True, logprobs=20)
ANSWER_TOKENS = 64
"""Room for the answers of all steps."""
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "eager": {"enforce_eager": True},
    "graphs": {},
    "chunked": {"enforce_eager": True, "max_num_batched_tokens": 1024},
    "fp8": {"enforce_eager": True, "kv_cache_dtype": "fp8"},
    "float32": {"enforce_eager": True, "dtype": "float32"},
}
"""Options of vLLM, with which blends must be exact. ``graphs``: it compiles the model and captures
CUDA graphs, its default. ``chunked``: a prompt takes several steps. float32 rounds least."""
DEFAULT = BlendConfig(min_tokens=0, reuse_prefix=False, cost_model=False)
ALIKE = {"ratio 0": CASES["reuse only, 0"], "the default": DEFAULT}
"""Blends that both engines must answer alike, but for rounding."""
EXACT_CHUNKS = 4
STREAMS = 4
ANSWERS = "answers.json"
RATES, TOY_RATES = (1.0, 2.0, 4.0, 8.0), (math.inf,)
NAMES = ("hkvd 0.15", "the default", "before layer 0, 0.05")
POLL_SECONDS = 0.001


def saved(scene: Scene) -> str:
    """Return the folder of the model, which is written if it is not there yet."""
    folder = Path(scene.folder, "model")
    if not folder.exists():
        part = Path(scene.folder, "part")
        scene.build_model().save_pretrained(part)
        scene.shape.build_tokenizer().save_pretrained(part)
        part.rename(folder)
        torch.cuda.empty_cache()  # vLLM takes nearly all
    return str(folder)


@contextmanager
def on_vllm(scene: Scene, chunks: int, prompts: int = 4, **options: Any) -> Iterator[Requests]:
    """Yield vLLM with so many stored chunks, and room for some prompts with all of them.

    options: further arguments of vLLM's engine, which stores nothing without a connector.
    """
    shape = scene.shape
    drawn = draw_bench_chunks(scene, chunks)
    tokens = chunks * scene.chunk_tokens
    room = StoreConfig(host_bytes=4 * shape.kv_bytes(tokens, scene.dtype))
    eager = {"enforce_eager": True} if scene.is_toy else {}
    own = engine_options(shape, scene.dtype, tokens + ANSWER_TOKENS, prompts)
    options = {**own, **eager, **options}
    with running_vllm(saved(scene), options, ConnectorSettings(store=room)) as engine:
        if "kv_transfer_config" not in options:
            if engine.blend_refusal is not None:
                raise CacheBlendError(f"the model cannot be blended: {engine.blend_refusal}")
            if (stored := engine.precompute(drawn, progress=False)).computed != chunks:
                raise CacheBlendError(f"not all chunks were stored: {stored}")
        yield Requests(scene, engine, drawn, "host", shape.vocabulary)


# Exactness


def embedded(shape: str, folder: str) -> Iterator[Row]:
    """Keep the embedded engine's answers, for the other steps to compare."""
    scene = Scene(shape, folder)
    saved(scene)
    told = {}
    with open_requests(scene, scene.build_model(), HOST, "host", EXACT_CHUNKS) as requests:
        prompt = requests.prompt(EXACT_CHUNKS)
        told["ordinary prefill"] = _told(requests.engine.generate_full(prompt, ANSWER))
        for name, config in ALIKE.items():
            told[name] = _told(requests.blend(prompt, config, ANSWER))
    Path(scene.folder, ANSWERS).write_text(json.dumps(told))
    yield from ({"case": name, "ids": one["ids"]} for name, one in told.items())


def exact(shape: str, folder: str, variant: str) -> Iterator[Row]:
    """Yield how far answers agree: of a blend with ordinary prefill, of vLLM with the embedded."""
    scene = Scene(shape, folder)
    file = Path(scene.folder, ANSWERS)
    known = json.loads(file.read_text()) if file.exists() else {}
    with on_vllm(scene, EXACT_CHUNKS, STREAMS + 2, **VARIANTS[variant]) as requests:
        yield {"case": "options of vLLM", **VARIANTS[variant]}
        prompt = requests.prompt(EXACT_CHUNKS)
        plain = _told(requests.engine.generate_full(prompt, ANSWER))

        def blend(config: BlendConfig) -> Row:
            return _told(requests.engine.generate(prompt, ANSWER, config=config))

        shared = CASES["hkvd 0.15"].with_changes(reuse_prefix=True)
        pairs: dict[str, Callable[[], Row]] = {
            "ratio 1 and ordinary prefill": lambda: _agreement(
                _told(requests.blend(prompt, CASES["all tokens, 1"], ANSWER)), plain
            ),
            "ratio 0, both engines": lambda: _agreement(
                _told(requests.blend(prompt, CASES["reuse only, 0"], ANSWER)), known["ratio 0"]
            ),
            "the default, both engines": lambda: _agreement(
                _told(requests.blend(prompt, DEFAULT, ANSWER)), known["the default"]
            ),
            "ordinary prefill, both engines": lambda: _agreement(plain, known["ordinary prefill"]),
            "ordinary prefill before and after blends": lambda: _agreement(
                plain, _told(requests.engine.generate_full(prompt, ANSWER))
            ),
            "a blend, and again from the prefix cache": lambda: _agreement(
                blend(shared), blend(shared)
            ),
            "streams beside blends": partial(_streams, requests),
        }
        for name, compare in pairs.items():
            yield attempt({"case": name}, compare)


def _told(answer: Generation) -> Row:
    """Return an answer's tokens, and what was likely in the place of its first, as plain values."""
    told = answer.logprobs or ()
    return {
        "ids": list(answer.token_ids),
        "likely": [[token, logprob] for token, _, logprob in told[0].top],
    }


def _agreement(one: Row, other: Row) -> Row:
    """Compare two answers.

    same_tokens: how many of the first ones are the same, of ``tokens``. first_difference: the
    largest of the log-probabilities of tokens that both call likely in the first place.
    """
    pairs = zip(one["ids"], other["ids"], strict=True)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(one["ids"]))
    mine, theirs = dict(one["likely"]), dict(other["likely"])
    both = mine.keys() & theirs.keys()
    return {
        "tokens": len(one["ids"]),
        "same_tokens": same,
        "first_difference": max(abs(mine[each] - theirs[each]) for each in both),
        "likely_in_both": len(both),
    }


def _streams(requests: Requests) -> Row:
    """Return how far streams agree with themselves alone, and their longest gap beside blends."""
    sampling = SamplingParams.greedy(ANSWER_TOKENS - 16, ignore_eos=True)
    draw = random.Random(SEED)
    texts = [draw_words(draw, 24, requests.vocabulary) for _ in range(STREAMS)]

    def read(text: str) -> tuple[list[int], float]:
        ids, gap, last = list[int](), 0.0, 0.0
        for piece in requests.engine.stream(text, sampling):
            now = time.perf_counter()
            gap, last = max(gap, now - last) if last else gap, now
            ids += piece.token_ids
        return ids, gap

    with ThreadPoolExecutor(STREAMS) as pool:
        alone = list(pool.map(read, texts))
        beside = pool.map(read, texts)
        for _ in range(STREAMS):
            requests.blend(requests.prompt(EXACT_CHUNKS), CASES["hkvd 0.15"])
        found = list(beside)
    return {
        "streams": STREAMS,
        "same_streams": sum(a == b for (a, _), (b, _) in zip(alone, found, strict=True)),
        "longest_gap_alone_ms": milliseconds(max(gap for _, gap in alone)),
        "longest_gap_ms": milliseconds(max(gap for _, gap in found)),
    }


# Time


def first_token(shape: str, folder: str) -> Iterator[Row]:
    """Yield how soon blends answer, beside ordinary prefill, and prefix caching, in one vLLM."""
    scene = Scene(shape, folder)
    counts, repeat = scene.pick(REAL_CHUNKS, TOY_CHUNKS), scene.pick(REPEAT, TOY_REPEAT)
    with on_vllm(scene, max(counts)) as requests:
        for chunks in counts:
            tokens = chunks * scene.chunk_tokens
            for name in NAMES:
                compared = partial(requests.compared, chunks, CASES.get(name, DEFAULT), repeat)
                row = {"chunk_tokens": tokens, "case": name}
                yield attempt(row, partial(_with_memory, scene, compared))
            timed = partial(_timed, requests, chunks, repeat, _with_first_chunk_cached)
            yield attempt({"chunk_tokens": tokens, "case": "prefix caching"}, timed)


def without_connector(shape: str, folder: str) -> Iterator[Row]:
    """Yield how soon vLLM answers without the connector and without prefix caching."""
    scene = Scene(shape, folder)
    counts, repeat = scene.pick(REAL_CHUNKS, TOY_CHUNKS), scene.pick(REPEAT, TOY_REPEAT)
    off: dict[str, Any] = {"enable_prefix_caching": False, "kv_transfer_config": None}
    with on_vllm(scene, max(counts), **off) as requests:
        for chunks in counts:
            timed = partial(_timed, requests, chunks, repeat, Requests.ordinary)
            yield attempt({"chunk_tokens": chunks * scene.chunk_tokens, "case": "plain"}, timed)


def _with_first_chunk_cached(requests: Requests, prompt: BlendPrompt) -> Generation:
    """Answer from vLLM's prefix cache, which has the prompt's first chunk."""
    first = BlendPrompt(prompt.segments[:1])
    requests.engine.generate_full(first, ONE_TOKEN, cache_salt=SALT)
    return requests.engine.generate_full(prompt, ONE_TOKEN, cache_salt=SALT)


def _timed(
    requests: Requests, chunks: int, repeat: int, ask: Callable[[Requests, BlendPrompt], Generation]
) -> Row:
    """Return the median time to the first token, after a warm-up."""
    runs = [
        milliseconds(ask(requests, requests.prompt(chunks)).report.seconds.time_to_first_token)
        for _ in range(repeat + 1)
    ]
    return {"ms": median(runs[1:]), "runs": runs[1:]}


def _with_memory(scene: Scene, measure: Callable[[], Row]) -> Row:
    """Add how much more memory of the device is taken meanwhile, by all processes together."""
    if not scene.has_cuda:
        return measure()
    free, done = [torch.cuda.mem_get_info(scene.device)[0]], Event()

    def watch() -> None:
        while not done.wait(POLL_SECONDS):
            free.append(torch.cuda.mem_get_info(scene.device)[0])

    watching = Thread(target=watch)
    watching.start()
    try:
        row = measure()
    finally:
        done.set()
        watching.join()
    return {**row, "device_mib_more": (free[0] - min(free)) >> 20}


def throughput(shape: str, folder: str) -> Iterator[Row]:
    """Yield what vLLM, its prefix caching and blends do at each rate of questions."""
    scene = Scene(shape, folder)
    real, toy = Load(scene.shape, 16, 40, 16), Load(scene.shape, 3, 4, 2, scene.chunk_tokens, 5, 3)
    options = {"enforce_eager": True} if scene.is_toy else {}
    yield from scene.pick(real, toy).rows(
        saved(scene), scene.dtype, CASES["hkvd 0.15"], scene.pick(RATES, TOY_RATES), **options
    )
