"""No memory for a blend pass: it is given up and freed, and ordinary prefill answers."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from cacheblend_rag import (
    Chunk,
    Document,
    OutOfMemoryError,
    SamplingParams,
    TransformersEngine,
    memory,
)
from cacheblend_rag.blend import FusedKV
from cacheblend_rag.engines.transformers import prefill as prefill_module
from cacheblend_rag.engines.transformers.loop import loop_of
from cacheblend_rag.engines.transformers.ordinary_prefill import OrdinaryPrefill
from cacheblend_rag.prefill.prompt_pass import PromptPass
from tests.engines.transformers.conftest import EngineFactory
from tests.models import SHAPE, prompt_of, words
from tests.refusing import RefusingDevice, on_device

CHUNKS = [Chunk(words(12, seed)) for seed in range(2)]
PROMPT = prompt_of(words(3, 90), *CHUNKS, words(4, 91))
SHORT = SamplingParams(max_tokens=3)
STEPS = PromptPass.steps


class Buffers:
    """The fused KV that was made, as long as anything holds it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._made: list[weakref.ref[Any]] = []
        make = FusedKV.__init__

        def watched(fused: FusedKV, *arguments: Any, **options: Any) -> None:
            make(fused, *arguments, **options)
            self._made += map(weakref.ref, (fused, fused.keys, fused.values))

        monkeypatch.setattr(FusedKV, "__init__", watched)

    @property
    def left(self) -> int:
        return sum(made() is not None for made in self._made)


@pytest.fixture(scope="module")
def small() -> PreTrainedModel:
    """Of two layers: the passes of these tests are many."""
    torch.manual_seed(7)
    model = LlamaForCausalLM(LlamaConfig(**{**SHAPE, "num_hidden_layers": 2})).eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture
def engine(small: PreTrainedModel, make_engine: EngineFactory) -> TransformersEngine:
    """One that chooses rows by what it computes of a layer."""
    engine = make_engine(with_model=small, selector="hkvd", recompute_ratio=0.2)
    engine.precompute(CHUNKS, progress=False)
    return engine


@contextmanager
def no_collection() -> Iterator[None]:
    """Nothing is freed but by what is let go of: circles of references stay."""
    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(memory.gc, "collect", lambda: 0)
            yield
    finally:
        gc.enable()


@contextmanager
def run_on(device: RefusingDevice, engine: TransformersEngine) -> Iterator[None]:
    """Have all of a model's work be on such a device."""
    loop = loop_of(engine.model)
    loop.call(device.__enter__)
    try:
        yield
    finally:
        loop.call(lambda: device.__exit__(None, None, None))


def refuse(monkeypatch: pytest.MonkeyPatch, device: RefusingDevice) -> None:
    """Have blend passes run on such a device."""
    monkeypatch.setattr(PromptPass, "steps", on_device(device, STEPS))


def plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PromptPass, "steps", STEPS)


@pytest.mark.parametrize(("selector", "step"), [("hkvd", 4), ("question_mid", 9)])
def test_wherever_a_pass_finds_no_memory_ordinary_prefill_answers(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch, selector: str, step: int
) -> None:
    """One of so many allocations fails; the next request blends as if nothing had been."""
    config = engine.config.with_changes(selector=selector)
    blended = engine.generate(PROMPT, SHORT, config=config)
    assert blended.report.blended
    plain = engine.generate_full(PROMPT, SHORT)
    buffers, prefill = Buffers(monkeypatch), OrdinaryPrefill.prefill
    left: list[int] = []

    def watched(*arguments: Any) -> Any:
        left.append(buffers.left)
        return prefill(*arguments)

    monkeypatch.setattr(OrdinaryPrefill, "prefill", watched)
    for nth in count(1, step):
        device = RefusingDevice(nth)
        refuse(monkeypatch, device)
        with no_collection():
            answer = engine.generate(PROMPT, SHORT, config=config)
        if not device.refused:  # there are no more
            break
        assert answer.token_ids == plain.token_ids, nth
        assert answer.report.reason is not None
        assert answer.report.reason.startswith("no room: CUDA out of memory"), nth
        assert {chunk.reason for chunk in answer.report.chunks} == {"no room"}
        assert (answer.report.reused_tokens, answer.report.blended) == (0, False)
        plainly(monkeypatch)
        again = engine.generate(PROMPT, SHORT, config=config)
        assert again.token_ids == blended.token_ids, nth
        assert again.report.reason is None
    assert nth > 100
    assert set(left) == {0}, "ordinary prefill began with nothing of the pass left"


@pytest.mark.parametrize("nth", [1, 60])
def test_ordinary_prefill_without_memory_is_one_line(engine: TransformersEngine, nth: int) -> None:
    """At its begin, and in its midst; nothing of it is left, and the next request is served."""
    with pytest.MonkeyPatch.context() as patch:
        buffers = Buffers(patch)
        device = RefusingDevice(nth)
        with no_collection(), run_on(device, engine):
            with pytest.raises(OutOfMemoryError) as caught:
                engine.generate_full(PROMPT, SHORT)
            assert device.refused == 1
            assert buffers.left == 0
    assert "\n" not in str(caught.value)
    assert f"a prompt of {len(engine.prepare(PROMPT).token_ids)} tokens" in str(caught.value)
    assert "release()" in str(caught.value)
    assert engine.generate(PROMPT, SHORT).report.blended


def test_decoding_without_memory_is_one_line(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Growing the KV needs memory, too; the text that came before it was handed out."""
    reserve = 16
    monkeypatch.setattr(prefill_module, "GROWTH_TOKENS", reserve)
    many = SamplingParams(max_tokens=3 * reserve)
    whole = engine.generate_full("w5 w6", many).text
    pieces: list[str] = []
    device = RefusingDevice(most=40_000)
    with run_on(device, engine), pytest.raises(OutOfMemoryError, match="lower max_tokens"):
        pieces.extend(delta.text for delta in engine.stream("w5 w6", many))
    assert reserve // 2 < len(pieces) <= reserve + 1
    assert whole.startswith("".join(pieces))


# Index time


def test_batches_are_halved_until_there_is_room(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = [Chunk(words(20 + n, 100 + n)) for n in range(8)]
    too_long = Chunk(words(700, 200))
    sizes: list[int] = []
    decode = type(small_decoder(engine)).forward

    def small_device(self: Any, input_ids: torch.Tensor, **options: Any) -> Any:
        sizes.append(input_ids.numel())
        if input_ids.numel() > 60:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return decode(self, input_ids=input_ids, **options)

    monkeypatch.setattr(type(small_decoder(engine)), "forward", small_device)
    report = engine.precompute([too_long, *chunks], progress=False)
    assert (report.computed, dict(report.refused)) == (8, {"no room": 1})
    assert max(sizes) > 4 * 60, "larger ones were tried first"
    monkeypatch.undo()
    assert all(engine.store.contains(engine.key(chunk)) for chunk in chunks)
    assert engine.precompute([too_long, *chunks], progress=False).computed == 1


def small_decoder(engine: TransformersEngine) -> Any:
    return engine.model.get_decoder()


@pytest.mark.parametrize("lead_in", ["instruction", "document"])
def test_a_document_without_room_is_refused_and_the_others_stored(
    small: PreTrainedModel, make_engine: EngineFactory, lead_in: str
) -> None:
    engine = make_engine(with_model=small, lead_in=lead_in)
    long = Document("long", tuple(words(200, n) for n in range(3)), separator=" ")
    short = [Document(f"d{n}", (words(9, n), words(8, 50 + n)), separator=" ") for n in range(2)]
    device = RefusingDevice(most=100_000)
    with run_on(device, engine):  # hidden states of 390 tokens
        report = engine.precompute([short[0], long, short[1]], progress=False)
    assert device.refused
    assert report.computed == 4
    assert dict(report.refused) == {"no room": 3}
    assert engine.precompute([short[0], long, short[1]], progress=False).computed == 3
