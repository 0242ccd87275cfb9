"""litellm, whose users write the messages of tools themselves."""

from __future__ import annotations

import json

import litellm
from given import ABOUT, KEY, MODEL, MOST_TOKENS, NOTES, QUESTION, URL, tell

SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "parameters": {
            "type": "object",
            "properties": {"words": {"type": "string", "maxLength": 20}},
            "required": ["words"],
        },
    },
}


def ask(messages, **more):
    return litellm.completion(
        model=f"openai/{MODEL}", api_base=f"{URL}/v1", api_key=KEY, messages=messages,
        temperature=0, **{"max_tokens": MOST_TOKENS, **more},
    )  # fmt: skip


question = [{"role": "user", "content": QUESTION}]
streamed = "".join(chunk.choices[0].delta.content or "" for chunk in ask(question, stream=True))
about = [{"role": "user", "content": ABOUT}]
called = ask(about, tools=[SEARCH], max_tokens=64).choices[0].message
result = json.dumps([{"title": f"note {at}", "text": text} for at, text in enumerate(NOTES)])
told = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": result}
after = ask([*about, called.model_dump(), told], tools=[SEARCH])
tell(ask(question).choices[0].message.content, streamed, after.choices[0].message.content)
