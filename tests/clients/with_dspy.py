"""DSPy, whose programs put passages into a field; its agents call tools by text, not by calls."""

from __future__ import annotations

import asyncio

import dspy
from dspy.utils.exceptions import AdapterParseError
from given import ABOUT, KEY, MODEL, MOST_TOKENS, NOTES, QUESTION, URL, tell

told = {"api_base": f"{URL}/v1", "api_key": KEY, "temperature": 0, "cache": False}
lm = dspy.LM(f"openai/{MODEL}", max_tokens=MOST_TOKENS, **told)
dspy.configure(lm=lm, adapter=dspy.ChatAdapter(use_json_adapter_fallback=False))
plain = dspy.Predict("question -> answer")
about = dspy.Predict("context: list[str], question -> answer")


def said(program: dspy.Predict, **fields: object) -> str:
    """Return what the model says: one of this size misses the form that DSPy asks for."""
    try:
        return str(program(**fields).answer)
    except AdapterParseError as error:
        return str(error.lm_response)


async def streamed() -> str:
    text = ""
    try:
        async for part in dspy.streamify(plain)(question=QUESTION):
            text += part.choices[0].delta.content or ""
    except Exception:  # of the form, once all pieces have come
        if not text:
            raise
    return text


tell(
    said(plain, question=QUESTION),
    asyncio.run(streamed()),
    said(about, context=NOTES, question=ABOUT),
)
