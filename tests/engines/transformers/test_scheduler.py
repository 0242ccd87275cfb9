"""Requests that decode at the same time share forward passes, and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, cast

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import PreTrainedModel

from cacheblend_rag import Chunk, OutOfMemoryError, SamplingParams, TransformersEngine
from cacheblend_rag.engines.answer import Delta, Generation
from cacheblend_rag.engines.transformers import batched_decode, cache, scheduler
from cacheblend_rag.engines.transformers import prefiller as prefiller_module
from cacheblend_rag.text.prompt import BlendPrompt
from tests.engines.transformers.conftest import EngineFactory
from tests.models import make_model, prompt_of, words

PATIENCE = 60.0
TOKENS, LONG = 24, 400
CHUNKS = [[Chunk(words(20, 10 * prompt + n)) for n in range(2)] for prompt in range(8)]
PROMPTS = [
    prompt_of(words(3 + prompt, 90 + prompt), *chunks, words(4, 70 + prompt))
    for prompt, chunks in enumerate(CHUNKS)
]


def greedy(tokens: int = TOKENS) -> SamplingParams:
    return SamplingParams.greedy(max_tokens=tokens, ignore_eos=True)


class Steps:
    """The decode steps of a model: how many texts each forward pass over one token had.

    seen: is called in each of them, in the thread that runs the model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.sizes: list[int] = []
        self.seen: Callable[[], object] = lambda: None
        self.hook = model.model.layers[1].mlp.register_forward_pre_hook(self._note)

    def _note(self, _: Any, given: tuple[Tensor, ...]) -> None:
        if given[0].shape[1] == 1:
            self.sizes.append(given[0].shape[0])
            self.seen()


@pytest.fixture
def steps(model: PreTrainedModel) -> Iterator[Steps]:
    noted = Steps(model)
    yield noted
    noted.hook.remove()


@pytest.fixture
def engine(make_engine: EngineFactory) -> Iterator[TransformersEngine]:
    engine = make_engine(recompute_ratio=0.0, reuse_prefix=False)
    engine.precompute([chunk for chunks in CHUNKS for chunk in chunks], progress=False)
    yield engine
    engine.close()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, a step waits for all that took part in the last one."""
    monkeypatch.setattr(scheduler, "LEAST_PATIENCE_SECONDS", PATIENCE)
    monkeypatch.setattr(scheduler, "MOST_PATIENCE_SECONDS", PATIENCE)


def in_threads(works: Sequence[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(works)) as pool:
        return [done.result(PATIENCE) for done in [pool.submit(work) for work in works]]


def last_of(stream: Iterator[Delta]) -> Generation:
    *_, last = stream
    return cast(Generation, last.generation)


def decoded(streams: Sequence[Iterator[Delta]]) -> list[Generation]:
    """Prefill the requests one after another, then decode each in a thread of its own."""
    for stream in streams:
        next(stream)
    return in_threads([partial(last_of, stream) for stream in streams])


def alone(
    engine: TransformersEngine, prompts: Sequence[BlendPrompt], sampling: SamplingParams
) -> list[tuple[int, ...]]:
    return [engine.generate(prompt, sampling).token_ids for prompt in prompts]


@pytest.mark.usefixtures("patient")
def test_a_batch_takes_as_many_passes_as_one_answer(
    engine: TransformersEngine, steps: Steps
) -> None:
    wanted = alone(engine, PROMPTS, greedy())
    assert steps.sizes == [1] * (len(PROMPTS) * (TOKENS - 1))
    steps.sizes.clear()
    answers = engine.generate_batch(PROMPTS, greedy())
    assert [answer.token_ids for answer in answers] == wanted
    assert steps.sizes == [len(PROMPTS)] * (TOKENS - 1)
    for answer in answers:
        assert answer.report.blended
        assert answer.report.reused_tokens == 40
        assert answer.report.seconds.decode > 0


@pytest.mark.usefixtures("patient")
def test_each_request_keeps_its_own_sampling(engine: TransformersEngine, steps: Steps) -> None:
    asked = [
        (PROMPTS[0], SamplingParams(max_tokens=9, temperature=0.9, seed=3)),
        (PROMPTS[1], SamplingParams(max_tokens=30, temperature=0.7, top_p=0.8, seed=4)),
        (PROMPTS[2], SamplingParams(max_tokens=30, temperature=0.0, repetition_penalty=1.3)),
        (PROMPTS[3], greedy(17)),
    ]
    text = engine.generate(PROMPTS[4], greedy(30)).text
    asked.append((PROMPTS[4], SamplingParams(max_tokens=30, temperature=0.0, stop=text[40:45])))
    wanted = [engine.generate(*one) for one in asked]
    assert wanted[-1].finish_reason == "stop"
    found = decoded([engine.stream(*one) for one in asked])
    assert [(a.token_ids, a.text, a.finish_reason) for a in found] == [
        (a.token_ids, a.text, a.finish_reason) for a in wanted
    ]
    assert max(steps.sizes) == len(asked)


def test_a_request_joins_while_another_decodes(engine: TransformersEngine, steps: Steps) -> None:
    long, late = engine.generate(PROMPTS[0], greedy(LONG)), engine.generate(PROMPTS[1], greedy())
    steps.sizes.clear()
    has_begun = threading.Event()
    steps.seen = has_begun.set

    def join() -> Generation:
        assert has_begun.wait(PATIENCE)
        return engine.generate(PROMPTS[1], greedy())

    first, second = in_threads([lambda: engine.generate(PROMPTS[0], greedy(LONG)), join])
    assert (first.token_ids, second.token_ids) == (long.token_ids, late.token_ids)
    assert steps.sizes[0] == steps.sizes[-1] == 1
    assert max(steps.sizes) == 2


def test_a_slow_reader_holds_up_nobody(engine: TransformersEngine, steps: Steps) -> None:
    """Others go on while it does not read; its own answer is as it would be."""
    wanted = alone(engine, PROMPTS[:2], greedy())
    slow = engine.stream(PROMPTS[0], greedy())
    pieces = [next(slow)]
    begun, both = threading.Event(), threading.Event()
    steps.sizes.clear()

    def see() -> None:
        begun.set()
        if steps.sizes[-1] == 2:
            both.set()

    steps.seen = see

    def read() -> None:
        assert begun.wait(PATIENCE)
        while not both.is_set():
            pieces.append(next(slow))

    in_threads([read, lambda: engine.generate(PROMPTS[1], greedy(LONG))])
    assert engine.generate(PROMPTS[1], greedy()).token_ids == wanted[1], "while it is not read"
    pieces.extend(slow)
    answer = cast(Generation, pieces[-1].generation)
    assert answer.token_ids == wanted[0]
    assert "".join(piece.text for piece in pieces) == answer.text


def test_a_cancelled_request_disturbs_nobody(engine: TransformersEngine, steps: Steps) -> None:
    wanted = alone(engine, PROMPTS[:2], greedy(60))
    cancel = threading.Event()
    steps.sizes.clear()
    steps.seen = lambda: cancel.set() if max(steps.sizes) > 1 else None
    *others, cancelled = decoded([
        *(engine.stream(prompt, greedy(60)) for prompt in PROMPTS[:2]),
        engine.stream(PROMPTS[2], greedy(LONG), cancel=cancel),
    ])  # fmt: skip
    assert [answer.token_ids for answer in others] == wanted
    assert cancelled.finish_reason == "cancelled"
    assert 0 < len(cancelled.token_ids) < LONG


def refuse_growth(monkeypatch: pytest.MonkeyPatch, *, also_alone: bool) -> list[int]:
    """Let there be no memory for larger caches, or only in the main thread; returns sizes asked."""
    asked: list[int] = []
    grow = cache._grow

    def failing(fused: Any, tokens: int) -> None:
        asked.append(tokens)
        if also_alone or threading.current_thread() is not threading.main_thread():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        grow(fused, tokens)

    monkeypatch.setattr(prefiller_module, "GROWTH_TOKENS", 8)
    monkeypatch.setattr(cache, "_grow", failing)
    return asked


def test_a_request_that_fails_fails_alone(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the longest has to grow its cache, for which there is no memory."""
    wanted = alone(engine, PROMPTS[:3], greedy(8))
    asked = refuse_growth(monkeypatch, also_alone=True)

    *streams, failing = [
        engine.stream(prompt, greedy(8 if n < 3 else 60)) for n, prompt in enumerate(PROMPTS[:4])
    ]
    for stream in (*streams, failing):
        next(stream)

    def fail() -> None:
        with pytest.raises(OutOfMemoryError, match="lower max_tokens"):
            list(failing)

    *found, _ = in_threads([*(partial(last_of, stream) for stream in streams), fail])
    assert asked
    assert [answer.token_ids for answer in found] == wanted


def test_a_batch_answers_again_what_found_no_memory_beside_the_others(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are answered again are alone, in the thread that asked."""
    wanted = alone(engine, PROMPTS[:3], greedy())
    asked = refuse_growth(monkeypatch, also_alone=False)
    answers = engine.generate_batch(PROMPTS[:3], greedy())
    assert [answer.token_ids for answer in answers] == wanted
    assert len(asked) > 3


@pytest.mark.usefixtures("patient")
def test_a_step_that_fails_is_run_in_smaller_batches(
    engine: TransformersEngine, steps: Steps, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    wanted = alone(engine, PROMPTS[:4], greedy())
    steps.sizes.clear()
    monkeypatch.setattr(engine._scheduler, "_has_warned", False)
    tried: list[int] = []

    def small(stack: Any, caches: Sequence[Any], token_ids: Sequence[int]) -> Tensor:
        tried.append(len(caches))
        if len(caches) > 2:
            raise ValueError("odd")
        return batched_decode.decode_batch(stack, caches, token_ids)

    monkeypatch.setattr(scheduler, "decode_batch", small)
    answers = engine.generate_batch(PROMPTS[:4], greedy())
    assert [answer.token_ids for answer in answers] == wanted
    assert max(tried) == 4
    assert max(steps.sizes) == 2
    told = [record for record in caplog.records if "in smaller batches" in record.getMessage()]
    assert len(told) == 1


@pytest.mark.usefixtures("patient")
def test_when_the_thread_that_runs_the_model_is_interrupted_another_one_does(
    engine: TransformersEngine, steps: Steps
) -> None:
    wanted = alone(engine, PROMPTS[:3], greedy())
    steps.sizes.clear()
    interrupted: list[int] = []

    def interrupt() -> None:
        if steps.sizes[-1] == 3 and not interrupted:
            interrupted.append(threading.get_ident())
            raise KeyboardInterrupt

    steps.seen = interrupt

    streams = [engine.stream(prompt, greedy()) for prompt in PROMPTS[:3]]
    for stream in streams:
        next(stream)

    def read(stream: Iterator[Delta]) -> tuple[int, ...] | None:
        try:
            return last_of(stream).token_ids
        except KeyboardInterrupt:
            assert interrupted == [threading.get_ident()]
            return None

    found = in_threads([partial(read, stream) for stream in streams])
    assert interrupted
    assert found.count(None) == 1
    assert all(one in (None, own) for one, own in zip(found, wanted, strict=True))


@pytest.mark.usefixtures("patient")
def test_engines_around_one_model_share_passes(
    engine: TransformersEngine, make_engine: EngineFactory, steps: Steps
) -> None:
    other = make_engine(recompute_ratio=0.0, reuse_prefix=False, namespace="other")
    other.precompute(CHUNKS[1], progress=False)
    asked = [(engine, PROMPTS[0]), (other, PROMPTS[1])]
    wanted = [one.generate(prompt, greedy()).token_ids for one, prompt in asked]
    steps.sizes.clear()
    found = decoded([one.stream(prompt, greedy()) for one, prompt in asked])
    assert [answer.token_ids for answer in found] == wanted
    assert steps.sizes == [2] * (TOKENS - 1)
    other.close()
    assert engine.generate(PROMPTS[0], greedy(4)).token_ids == wanted[0][:4]


def test_requests_of_two_adapters_decode_at_once(make_engine: EngineFactory) -> None:
    """One that was prefilled before a change ends as it does alone; a later one has its own KV."""
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(3)
    peft = get_peft_model(make_model(), config, adapter_name="default").eval()
    peft.add_adapter("b", config)
    engine = make_engine(with_model=peft, recompute_ratio=0.0, reuse_prefix=False)

    def after_change(*, beside: bool) -> list[tuple[int, ...]]:
        peft.set_adapter("default")
        first = engine.stream(PROMPTS[0], greedy(40))
        pieces = [next(first)]
        peft.set_adapter("b")
        works = [lambda: pieces.extend(first), lambda: engine.generate(PROMPTS[1], greedy(40))]
        answers = in_threads(works) if beside else [work() for work in works]
        return [cast(Generation, pieces[-1].generation).token_ids, answers[1].token_ids]

    assert after_change(beside=True) == after_change(beside=False)
    engine.close()
