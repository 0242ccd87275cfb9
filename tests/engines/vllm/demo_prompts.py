"""The demo's corpus as documents and prompts of plain text."""

from __future__ import annotations

from cacheblend_rag import Document
from tests.toy import INSTRUCTION, DemoPrompt

HEAD = f"<bos>{INSTRUCTION}\n\n"


def documents(*prompts: DemoPrompt) -> list[Document]:
    """Return the documents that prompts are about."""
    return [Document(d.document_id, d.chunks) for prompt in prompts for d in prompt.documents]


def text(prompt: DemoPrompt) -> str:
    """Return a prompt with its passages and question."""
    passages = "\n\n".join(prompt.chunk_texts)
    return f"{HEAD}{passages}\n\nQuestion: {prompt.question.question}\nAnswer:"
