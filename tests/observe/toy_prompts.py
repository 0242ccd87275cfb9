"""Prompts of the toy's corpus for the doctor."""

from __future__ import annotations

from collections.abc import Callable

from cacheblend_rag import Document
from tests.toy import DemoPrompt, generate_prompts


def prompts(count: int = 1) -> list[DemoPrompt]:
    """Return prompts of whole documents in order, of more than 1,000 tokens."""
    return list(generate_prompts("adjacent", count, 5))


def documents(prompt: DemoPrompt) -> list[Document]:
    return [Document(one.document_id, one.chunks) for one in prompt.documents]


def text_of(prompt: DemoPrompt, change: Callable[[str], str] = lambda chunk: chunk) -> str:
    """Return a prompt's text; change: what becomes of its chunks."""
    return "".join(change(text) if kind == "chunk" else text for kind, text in prompt.segments())
