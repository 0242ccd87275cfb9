"""LangChain's agent on ChatOpenAI: a tool returns documents."""

from __future__ import annotations

from given import ABOUT, KEY, MODEL, MOST_TOKENS, NOTES, QUESTION, URL, tell
from langchain.agents import create_agent
from langchain_core.documents import Document
from langchain_openai import ChatOpenAI


def search(words: str) -> list[Document]:
    """Search the notes."""
    return [Document(text, metadata={"note": at}) for at, text in enumerate(NOTES)]


def model(most_tokens: int) -> ChatOpenAI:
    told = {"base_url": f"{URL}/v1", "api_key": KEY, "model": MODEL, "max_tokens": most_tokens}
    return ChatOpenAI(**told, temperature=0)


streamed = "".join(chunk.text for chunk in model(MOST_TOKENS).stream(QUESTION))
after = create_agent(model(64), [search]).invoke({"messages": [("user", ABOUT)]})
tell(model(MOST_TOKENS).invoke(QUESTION).text, streamed, after["messages"][-1].text)
