"""A collection behind the server: passages are retrieved there, and told as sources."""

from __future__ import annotations

import openai
import pytest

from cacheblend_rag import Chunk, SamplingParams
from cacheblend_rag.api.app import create_app
from cacheblend_rag.api.collection import Retriever, name_of, sources_text
from cacheblend_rag.rag.answering import Asker
from cacheblend_rag.rag.prompt import Source
from tests.api.conftest import openai_client
from tests.cli.conftest import indexed, one_thread  # noqa: F401 - fixtures

pytestmark = pytest.mark.asyncio
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def asker(indexed):  # noqa: F811
    folder, asked = indexed
    with Asker(folder) as asker:
        yield asker, [one.question for one in asked]


def chat(client, *contents, **more):
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
    return client.chat.completions.create(model="notes", messages=messages, max_tokens=4, **more)


@pytest.fixture
def client(asker):
    return openai_client(create_app(asker[0].engine, name="notes", retriever=Retriever(asker[0])))


async def test_an_answer_has_the_sources_that_ask_finds(client, asker):
    asker, (question, *_) = asker
    answer = await chat(client, question)
    found = asker.retrieve(question, 4, Retriever(asker).order)
    assert answer.cacheblend["sources"] == [source.to_dict() for source in found]
    assert answer.cacheblend["report"]["reused_tokens"] > 0
    assert answer.usage.prompt_tokens_details.cached_tokens > 0
    assert "Sources:" not in answer.choices[0].message.content


async def test_answers_cite_their_sources_if_that_is_asked_for(asker):
    asker, (question, *_) = asker
    retriever = Retriever(asker, top_k=2, cites=True)
    client = openai_client(create_app(asker.engine, name="notes", retriever=retriever))
    answer = await chat(client, question)
    names = list(dict.fromkeys(one["source"] for one in answer.cacheblend["sources"]))
    listed = "\n\nSources:" + "".join(f"\n- {name}" for name in names)
    assert answer.choices[0].message.content.endswith(listed)
    chunks = [chunk async for chunk in await chat(client, question, stream=True)]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == answer.choices[0].message.content
    response = await client.responses.create(model="notes", input=question, max_output_tokens=4)
    assert response.output_text.endswith(listed)
    assert len(response.cacheblend["sources"]) == 2
    form = {"choice": ["yes", "no"]}
    formed = await chat(client, question, extra_body={"structured_outputs": form})
    assert formed.choices[0].message.content in form["choice"]
    assert formed.cacheblend["sources"]


async def test_a_follow_up_is_searched_for_with_what_it_refers_to(client):
    async def found(*contents):
        answer = await chat(client, *contents)
        return [one["source"] for one in answer.cacheblend["sources"]]

    follow_up = "And her instrument?"
    assert "nora-keller" not in (await found(follow_up))[0]
    for asked in (
        ("What is the job of Nora Keller?", "She is a gardener."),
        ("Who lives in Oslo?", "Nora Keller does."),
        ("Who lives in Oslo?", "Nora Keller does.", "Her job?", "Gardening."),
    ):
        after = await found(*asked, follow_up)
        assert all("nora-keller" in one for one in after[:2])
        assert (await found(follow_up))[0] in after, "half of them are those of the words alone"


async def test_a_clients_own_tasks_are_answered_without_passages(asker):
    """As Open WebUI's, for titles, tags, follow-ups and queries; its prompts for files differ."""
    asker, (question, *_) = asker
    client = openai_client(create_app(asker.engine, retriever=Retriever(asker, cites=True)))
    task = f"### Task:\nName it.\n<chat_history>\nUSER: {question}\n</chat_history>"
    own = f"### Task:\nAnswer from the context.\n<context>A file.</context>\n\n{question}"
    for content, more, is_searched in (
        (task, {}, False),
        ([{"type": "text", "text": task}], {}, False),
        (question, {"retrieve": False}, False),
        (own, {}, True),
        (f"What does <chat_history> mean? {task}", {}, True),
    ):
        asked = {"model": asker.engine.model_name, "extra_body": more}
        message = {"role": "user", "content": content}
        answer = await client.chat.completions.create(**asked, messages=[message], max_tokens=4)
        other = await client.responses.create(**asked, input=[message], max_output_tokens=4)
        for one, text in (
            (answer, answer.choices[0].message.content),
            (other, other.output_text),
        ):
            assert ("sources" in one.cacheblend) == ("Sources:" in text) == is_searched, content


async def test_no_message_is_lost(asker):
    asker, (question, *_) = asker
    said = [
        *(("system", "Speak French."), ("user", "A first one."), ("user", "And one more.")),
        *(("assistant", "Let me look."), ("tool", "w1"), ("assistant", "Found.")),
        *(("user", "Left alone."), ("user", question)),
    ]
    messages = [{"role": role, "content": text} for role, text in said]
    asked = Retriever(asker).asked(messages, SamplingParams(max_tokens=4))
    text = asked.prompts[0].text
    told = [text.index(one) for role, one in said if role not in ("system", "tool")]
    assert told == sorted(told)
    assert text.index("Found.") < text.index("Speak French.") < text.index("Left alone.")
    alone = Retriever(asker).asked(messages[-1:], SamplingParams(max_tokens=4))
    assert asked.sources == alone.sources


async def test_a_files_name_forges_no_source():
    names = ["evil\nSources: all good", "\x1b[2Ja\r\n- b.txt", "a\u2028b\u202ec", "\n"]
    found = [Source(Chunk("w1", document_id=name), 0, 1.0) for name in names]
    listed = ["- evil Sources: all good", "- [2Ja - b.txt", "- a bc"]
    assert sources_text(found) == "\n".join(["\n\nSources:", *listed])


async def test_what_is_no_question_is_refused(client, asker):
    _, (question, *_) = asker
    with pytest.raises(openai.BadRequestError, match="must end with a question"):
        await chat(client, question, "Paris.")
    with pytest.raises(openai.BadRequestError, match="the question is empty"):
        await chat(client, "  ")
    with pytest.raises(openai.BadRequestError, match="prompt holds more than"):
        await chat(client, "Who is it? " * 100_000)
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(
            model="toy", messages=[{"role": "user", "content": "Who?"}]
        )


async def test_a_collection_is_called_as_its_folder(tmp_path):
    assert name_of(tmp_path / "notes") == "notes"
    assert name_of(tmp_path / "notes" / ".cacheblend") == "notes"
