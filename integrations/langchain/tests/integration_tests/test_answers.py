"""Answers of ChatCacheBlend against the plain engine's, in every way LangChain asks for them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from cacheblend_rag import BlendConfig, Delta, Document, SamplingParams, TransformersEngine
from cacheblend_rag.errors import EngineUnavailableError
from langchain_core.caches import InMemoryCache
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.runnables import RunnableParallel
from toy import INSTRUCTION, TOY, generate_prompts
from transformers import GenerationConfig

from langchain_cacheblend import ChatCacheBlend
from tests.cache_keys import cache_key
from tests.models import make_tokenizer, random_engine, random_model

DOCUMENTS = [
    Document(f"doc-{i}", tuple(f"Note {i}.{j}: " + text for j in range(3)))
    for i, text in enumerate(
        [
            "the quiet river stands near the old bridge and the small garden. " * 3,
            "many people visit the large museum each summer and the tower too. " * 3,
            "a path leads from the harbour to the distant castle on the road. " * 3,
        ]
    )
]


def prompt_over(*documents: Document, question: str = "Where is the museum?") -> str:
    passages = "\n\n".join(text for document in documents for text in document.chunks)
    return f"{passages}\n\nQuestion: {question}"


@pytest.fixture
def engine() -> Iterator[TransformersEngine]:
    found = random_engine()
    found.precompute(DOCUMENTS, progress=False)
    yield found
    found.close()


def test_stop_strings_end_an_answer_and_are_cut_from_it(engine: TransformersEngine) -> None:
    llm = ChatCacheBlend(engine=engine, max_tokens=24)
    whole = llm.invoke("hello").text
    stop = whole[6:10]
    cut = llm.invoke("hello", stop=[stop])
    assert cut.text == whole[: whole.index(stop)]
    assert cut.response_metadata["finish_reason"] == "stop"
    assert ChatCacheBlend(engine=engine, max_tokens=24, stop=[stop]).invoke("hello").text == (
        cut.text
    )


def test_one_stop_string_needs_no_list(engine: TransformersEngine) -> None:
    llm = ChatCacheBlend(engine=engine, max_tokens=24)
    whole = llm.invoke("hello").text
    cut = whole[: whole.index(whole[6:10])]
    for options in ({"stop": whole[6:10]}, {"stop_sequences": whole[6:10]}):
        assert llm.invoke("hello", **options).text == cut
        assert llm.bind(**options).invoke("hello").text == cut
        assert ChatCacheBlend(engine=engine, **options).invoke("hello").text == cut


def test_calls_take_other_libraries_names(engine: TransformersEngine) -> None:
    llm = ChatCacheBlend(engine=engine, max_tokens=24)
    answers = [llm.invoke("hello", max_new_tokens=3), llm.bind(max_new_tokens=3).invoke("hello")]
    assert [answer.usage_metadata["output_tokens"] for answer in answers] == [3, 3]


def test_a_seed_repeats_what_was_drawn(engine: TransformersEngine) -> None:
    llm = ChatCacheBlend(engine=engine, max_tokens=12, temperature=1.5, seed=3)
    assert llm.invoke("hello").text == llm.invoke("hello").text
    assert llm.invoke("hello").text != llm.invoke("hello", seed=4).text


def test_sampling_that_is_not_given_is_the_models_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt is answered as by transformers' own ``generate``."""
    model, tokenizer = random_model(), make_tokenizer(chat_template=False)
    engine = random_engine(chat_template=False)
    llm = ChatCacheBlend(engine=engine, max_tokens=12, seed=3)
    ids = tokenizer("hello", return_tensors="pt")
    answers, keys = [], set()
    for settings in ({}, {"repetition_penalty": 1.8}, {"do_sample": True, "temperature": 0.9}):
        own = GenerationConfig(pad_token_id=0, **settings)
        monkeypatch.setattr(model, "generation_config", own)
        torch.manual_seed(3)
        tokens = model.generate(**ids, max_new_tokens=12)[0, ids["input_ids"].shape[1] :]
        answers.append(tokenizer.decode(tokens, skip_special_tokens=True))
        assert llm.invoke("hello").text == answers[-1]
        keys.add(cache_key(llm))
    assert len(set(answers)) == len(keys) == 3
    assert llm.invoke("hello", temperature=0.0).text == answers[0]


def test_messages_are_rendered_as_the_engine_renders_them(engine: TransformersEngine) -> None:
    messages = [{"role": "system", "content": "Answer."}, {"role": "user", "content": "Who?"}]
    answer = ChatCacheBlend(engine=engine, max_tokens=8).invoke(
        [SystemMessage("Answer."), HumanMessage("Who?")]
    )
    assert answer.text == engine.generate_full(messages, SamplingParams(max_tokens=8)).text


def test_a_model_without_a_chat_template_reads_plain_text() -> None:
    engine = random_engine(chat_template=False)
    engine.precompute(DOCUMENTS, progress=False)
    llm = ChatCacheBlend(engine=engine, max_tokens=8)
    text = prompt_over(*DOCUMENTS)
    answer = llm.invoke([SystemMessage("Answer."), HumanMessage(text)], recompute_ratio=1.0)
    plain = engine.generate_full(f"Answer.\n\n{text}", SamplingParams(max_tokens=8))
    assert answer.text == plain.text
    assert sum(chunk["hit"] for chunk in answer.response_metadata["cacheblend"]["chunks"]) == 9


def test_batches_and_parallel_branches(engine: TransformersEngine) -> None:
    llm = ChatCacheBlend(engine=engine, max_tokens=6)
    texts = [prompt_over(document) for document in DOCUMENTS]
    single = [llm.invoke(text).text for text in texts]
    assert [answer.text for answer in llm.batch(texts)] == single
    branches = RunnableParallel(a=llm, b=llm.bind(max_tokens=2)).invoke(texts[0])
    assert branches["a"].text == single[0]
    assert branches["b"].usage_metadata["output_tokens"] == 2


async def test_32_requests_side_by_side_answer_as_one_by_one(engine: TransformersEngine) -> None:
    llm = ChatCacheBlend(engine=engine, max_tokens=4)
    texts = [
        prompt_over(DOCUMENTS[i % 3], DOCUMENTS[(i + 1) % 3], question=f"Is it {i}?")
        for i in range(32)
    ]
    together = await asyncio.gather(*(llm.ainvoke(text) for text in texts))
    assert [answer.text for answer in together] == [llm.invoke(text).text for text in texts]


async def test_the_event_loop_runs_while_a_layer_computes(
    engine: TransformersEngine,
) -> None:
    """Each forward of layer 0, in prefill and decode, waits until the event loop has run."""
    has_run, waits = Event(), 0

    def wait_for_the_loop(*_: Any) -> None:
        nonlocal waits
        waits += 1
        has_run.clear()
        assert has_run.wait(30), "the event loop waits for the model"

    async def run() -> None:
        while True:
            has_run.set()
            await asyncio.sleep(0)

    llm, text = ChatCacheBlend(engine=engine, max_tokens=10), prompt_over(*DOCUMENTS)
    runner = asyncio.create_task(run())
    norm = engine.model.model.layers[0].input_layernorm
    with norm.register_forward_pre_hook(wait_for_the_loop):
        await asyncio.gather(*(llm.ainvoke(text) for _ in range(2)))
        assert waits >= 10
        waits = 0
        assert len([piece async for piece in llm.astream(text)]) > 1
        assert waits >= 10
    runner.cancel()


async def test_cancelling_a_request_stops_its_work(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[str] = []
    answer, began = engine._answer, Event()

    def watched(*args: Any) -> Iterator[Delta]:
        try:
            for delta in answer(*args):
                began.set()
                if delta.generation:
                    ends.append(delta.generation.finish_reason)
                yield delta
        except GeneratorExit:
            ends.append("closed")
            raise

    monkeypatch.setattr(engine, "_answer", watched)
    llm = ChatCacheBlend(engine=engine, max_tokens=16000)
    task = asyncio.create_task(llm.ainvoke("hello"))
    await asyncio.to_thread(began.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async for _ in llm.astream("hello"):
        break
    while len(ends) < 2:  # what still runs when an engine is closed ends in other ways
        await asyncio.sleep(0.01)
    for _ in llm.stream("hello"):
        break
    await asyncio.to_thread(engine.close)
    assert sorted(ends) == ["cancelled", "cancelled", "closed"]


def test_the_llm_cache_answers_until_the_blend_config_changes(engine: TransformersEngine) -> None:
    cache = InMemoryCache()
    text = prompt_over(DOCUMENTS[0])

    def ask(**options: object) -> bool:
        llm = ChatCacheBlend(engine=engine, max_tokens=2, cache=cache, **options)
        message = llm.invoke(text)
        return "total_cost" in (message.usage_metadata or {})  # what langchain-core adds on a hit

    assert not ask()
    assert ask()
    assert not ask(blend_config=BlendConfig(recompute_ratio=0.5))
    assert not ask(temperature=0.3, seed=1)
    assert ask(blend_config=BlendConfig(recompute_ratio=0.5))


def report_of(message: AIMessage) -> dict[str, Any]:
    return dict(message.response_metadata["cacheblend"])


@pytest.mark.parametrize("options", [{}, {"streaming": True}])
async def test_an_answer_from_the_llm_cache_tells_no_other_calls_report(
    options: dict[str, Any], engine: TransformersEngine
) -> None:
    llm = ChatCacheBlend(engine=engine, max_tokens=2, cache=InMemoryCache(), **options)
    text = prompt_over(DOCUMENTS[0])
    kept = llm.generate([[HumanMessage(text)]])
    first = kept.generations[0][0].message
    asked = [llm.invoke(text), *llm.batch([text]), await llm.ainvoke(text)]
    assert [report_of(message) for message in asked] == [{"cached": True}] * 3
    assert {message.text for message in asked} == {first.text}
    assert asked[0].response_metadata["finish_reason"] == "length"
    assert report_of(first)["seconds"]
    assert kept.generations[0][0].message is first
    assert report_of(llm.invoke(text, max_tokens=1))["seconds"]


def test_braces_and_control_characters_in_passages() -> None:
    texts = (
        "Use {braces} and {{double}} ones, {0} and %s and ${x} too. " * 4,
        "A bell \x07, a tab \t, a null \x00 and an escape \x1b stand here. " * 4,
        "Marks <bos> and <eos> in a text are text; \u202e and \ue000 too. " * 4,
    )
    engine = random_engine()
    engine.precompute([Document("odd", texts)], progress=False)
    answer = ChatCacheBlend(engine=engine, max_tokens=4).invoke("\n\n".join(texts) + "\n\nWho?")
    assert [c["hit"] for c in answer.response_metadata["cacheblend"]["chunks"]] == [True] * 3


def test_a_store_of_another_model_is_not_used(tmp_path: Path) -> None:
    text = "the quiet river stands near the old bridge. " * 12
    options = {"kv_path": tmp_path, "blend_config": BlendConfig(min_tokens=0)}
    ours = ChatCacheBlend(model=TOY, max_tokens=2, **options)
    ours.engine.precompute([text], progress=False)
    other = ChatCacheBlend(
        model=random_model(), tokenizer=make_tokenizer(), max_tokens=2, **options
    )
    report = other.invoke(text).response_metadata["cacheblend"]
    assert not report["blended"]
    assert [chunk["reason"] for chunk in report["chunks"]] == ["other model"]
    again = ChatCacheBlend(model=TOY, max_tokens=2, **options)
    assert again.invoke(text).response_metadata["cacheblend"]["blended"]


def test_a_server_that_is_down() -> None:
    with pytest.raises(EngineUnavailableError) as raised:
        ChatCacheBlend(model=TOY, engine="http://127.0.0.1:9").invoke("hello")
    assert "127.0.0.1:9" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_demo_model_answers() -> None:
    prompt = next(iter(generate_prompts("adjacent", 1, 11)))
    llm = ChatCacheBlend(model=TOY, instruction=f"<bos>{INSTRUCTION}\n\n", max_tokens=8)
    llm.engine.precompute(
        [Document(d.document_id, d.chunks) for d in prompt.documents], progress=False
    )
    passages = "\n\n".join(prompt.chunk_texts)
    answer = llm.invoke(
        [
            SystemMessage(INSTRUCTION),
            HumanMessage(f"{passages}\n\nQuestion: {prompt.question.question}\nAnswer:"),
        ]
    )
    assert answer.response_metadata["cacheblend"]["blended"]
    assert answer.response_metadata["model_name"] == "toy"
    assert answer.text.strip() == prompt.question.answer
