"""Haystack: an agent whose tool returns documents."""

from __future__ import annotations

from typing import Annotated

from given import ABOUT, KEY, MODEL, MOST_TOKENS, NOTES, QUESTION, URL, tell
from haystack import Document
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import tool
from haystack.utils import Secret


@tool
def search(words: Annotated[str, "what to search for"]) -> list[Document]:
    """Search the notes."""
    return [Document(content=text, meta={"note": at}) for at, text in enumerate(NOTES)]


def generator(most_tokens: int) -> OpenAIChatGenerator:
    return OpenAIChatGenerator(
        api_key=Secret.from_token(KEY), api_base_url=f"{URL}/v1", model=MODEL,
        generation_kwargs={"temperature": 0, "max_tokens": most_tokens},
    )  # fmt: skip


question, parts = [ChatMessage.from_user(QUESTION)], []
plain = generator(MOST_TOKENS)
answer = plain.run(question)["replies"][0].text
plain.run(question, streaming_callback=lambda chunk: parts.append(chunk.content))
agent = Agent(chat_generator=generator(64), tools=[search])
after = agent.run(messages=[ChatMessage.from_user(ABOUT)])
tell(answer, "".join(parts), after["messages"][-1].text)
