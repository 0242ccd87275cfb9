"""pydantic-ai: a tool returns objects."""

from __future__ import annotations

import asyncio

from given import ABOUT, KEY, MODEL, MOST_TOKENS, NOTES, QUESTION, URL, tell
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY))
plain = Agent(model, model_settings={"temperature": 0, "max_tokens": MOST_TOKENS})
agent = Agent(model, model_settings={"temperature": 0, "max_tokens": 64})


class Note(BaseModel):
    title: str
    text: str


@agent.tool_plain
def search(words: str) -> list[Note]:
    """Search the notes."""
    return [Note(title=f"note {at}", text=text) for at, text in enumerate(NOTES)]


async def stream() -> str:
    async with plain.run_stream(QUESTION) as answer:
        return "".join([text async for text in answer.stream_text(delta=True)])


streamed = asyncio.run(stream())
tell(plain.run_sync(QUESTION).output, streamed, agent.run_sync(ABOUT).output)
