"""OpenAI's agents: a tool returns a list, on chat completions as other servers have them."""

from __future__ import annotations

import asyncio

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from given import ABOUT, KEY, MODEL, MOST_TOKENS, NOTES, QUESTION, URL, tell
from openai import AsyncOpenAI


@function_tool
def search(words: str) -> list[str]:
    """Search the notes."""
    return NOTES


async def main() -> None:
    set_tracing_disabled(True)
    model = OpenAIChatCompletionsModel(MODEL, AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY))
    short = ModelSettings(temperature=0, max_tokens=MOST_TOKENS)
    plain = Agent("plain", model=model, model_settings=short)
    agent = Agent("agent", model=model, model_settings=ModelSettings(temperature=0, max_tokens=64))
    agent.tools.append(search)
    streaming = Runner.run_streamed(plain, QUESTION)
    streamed = "".join(
        [
            event.data.delta
            async for event in streaming.stream_events()
            if event.type == "raw_response_event"
            and event.data.type == "response.output_text.delta"
        ]
    )
    answer, after = await Runner.run(plain, QUESTION), await Runner.run(agent, ABOUT)
    tell(answer.final_output, streamed, after.final_output)


asyncio.run(main())
