"""LlamaIndex's function agent on OpenAILike: a tool returns nodes' texts."""

from __future__ import annotations

import asyncio

from given import ABOUT, KEY, MODEL, MOST_TOKENS, NOTES, QUESTION, URL, tell
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.llms.openai_like import OpenAILike


def search(words: str = "") -> list[NodeWithScore]:
    """Search the notes."""
    return [NodeWithScore(node=TextNode(text=text), score=1.0) for text in NOTES]


def model(most_tokens: int) -> OpenAILike:
    return OpenAILike(
        model=MODEL, api_base=f"{URL}/v1", api_key=KEY, max_tokens=most_tokens, temperature=0,
        is_chat_model=True, is_function_calling_model=True, context_window=8192,
    )  # fmt: skip


async def ask_agent() -> str:
    agent = FunctionAgent(tools=[search], llm=model(64), streaming=False)
    return str(await agent.run(ABOUT))


question = [ChatMessage(role="user", content=QUESTION)]
streamed = "".join(part.delta or "" for part in model(MOST_TOKENS).stream_chat(question))
answer = model(MOST_TOKENS).chat(question).message.content
tell(answer, streamed, asyncio.run(ask_agent()))
