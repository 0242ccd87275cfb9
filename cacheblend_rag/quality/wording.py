"""Checks of what is said to the model: the chat template, the tokenizer, the chunks' seams."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from cacheblend_rag.engines.base import Engine
from cacheblend_rag.errors import PromptError
from cacheblend_rag.quality.dataset import EvalDataset, EvalQuestion, PromptFrame
from cacheblend_rag.text.chat import begins_as_rendered, render_chat
from cacheblend_rag.text.encoder import encode_plainly

TEMPLATE, TOKENIZER, SEAMS = "template", "tokenizer", "seams"
MOST_EDGES = 0.1
"""Share of the passages' tokens that may be joined with the text beside them."""


@dataclass(frozen=True)
class Check:
    """One check of a model, with its result.

    Args:
        name: short and unique.
        status: ``ok``, ``failed`` or ``skipped``.
        found: what was found, or why it was skipped.
        remedy: what to do about a failure.
        measured: figures by name; KL is in nats, shares are from 0 to 1.
    """

    name: str
    status: Literal["ok", "failed", "skipped"]
    found: str
    remedy: str = ""
    measured: Mapping[str, float] = field(default_factory=dict)


def check_template(tokenizer: Any, data: EvalDataset) -> Check:
    """Check that a chat template leaves every text as it is and where it belongs."""
    if not getattr(tokenizer, "chat_template", None):
        return Check(TEMPLATE, "skipped", "there is no chat template: prompts are plain text")
    try:
        wrong = next(_wrong_renderings(tokenizer, data), None)
    except PromptError as error:
        wrong = str(error)
    if wrong is None:
        return Check(TEMPLATE, "ok", "instruction, passages and turns stand as given, in order")
    remedy = "set tokenizer.chat_template to the one the model came with"
    return Check(TEMPLATE, "failed", wrong, remedy)


def _wrong_renderings(tokenizer: Any, data: EvalDataset) -> Iterator[str]:
    question = data.questions[0]
    content = "\n\n".join([*(one.text for one in question.passages), question.question])
    user = {"role": "user", "content": content}
    if content not in render_chat([user], tokenizer).text:
        yield "it changes or drops the text of the user's message"
    system = {"role": "system", "content": data.instruction}
    told = render_chat([system, user], tokenizer).text
    if told.find(data.instruction) > told.find(content):
        yield "it puts the instruction behind the passages, which are precomputed after it"
    turns = [("user", "alpha one"), ("assistant", "beta two"), ("user", "gamma three")]
    told = render_chat([{"role": r, "content": c} for r, c in turns], tokenizer).text
    places = [told.find(text) for _, text in turns]
    if -1 in places or places != sorted(places):
        yield "it drops or reorders the turns of a conversation"
    opening = encode_plainly(tokenizer, told)[:2]
    if len(opening) == 2 and opening[0] == opening[1] == getattr(tokenizer, "bos_token_id", None):
        yield "it begins with the BOS token twice"


def check_tokenizer(tokenizer: Any, questions: Sequence[EvalQuestion]) -> Check:
    """Check that decoding gives texts back, but for case, accents and white space."""
    texts = {text for one in questions for text in (one.question, *(p.text for p in one.passages))}
    plainly = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    lost = []
    for text in sorted(texts):
        again = tokenizer.decode(list(encode_plainly(tokenizer, text)), **plainly)
        if _bare(again) != _bare(text):
            lost.append(text)
    if not lost:
        return Check(TOKENIZER, "ok", f"{len(texts)} texts come back")
    found = f"{len(lost)} of {len(texts)} texts do not come back, such as {lost[0][:60]!r}"
    return Check(TOKENIZER, "failed", found, "use the tokenizer the model was trained with")


def _bare(text: str) -> str:
    letters = unicodedata.normalize("NFKD", text.casefold())
    return "".join(one for one in letters if not (one.isspace() or unicodedata.combining(one)))


def lead_tokens(engine: Engine) -> tuple[int, ...]:
    """Return the tokens that an engine computes chunks after, those of a document aside."""
    opens = not begins_as_rendered(engine.instruction, engine.tokenizer)
    return engine.encoder.leading(engine.instruction, opens=opens)


def check_seams(engine: Engine, frame: PromptFrame, questions: Sequence[EvalQuestion]) -> Check:
    """Check that passages are separable, and that prompts begin with the lead-in's tokens."""
    lead = lead_tokens(engine)
    encoded = [engine.prepare(frame.prompt(question)).encoded for question in questions]
    inseparable = sum(len(one.inseparable) for one in encoded)
    apart = sum(one.token_ids[: len(lead)] != lead for one in encoded)
    spans = [span for one in encoded for span in one.spans]
    tokens = sum(span.end - span.start for span in spans)
    edges = sum(len(span.before) + len(span.after) for span in spans)
    share = edges / max(1, tokens + edges)
    measured = {"inseparable": inseparable, "edge_share": share, "other_beginnings": apart}
    if inseparable or share > MOST_EDGES:
        found = f"{inseparable} passages, and {share:.1%} of the tokens, are joined with their seam"
        remedy = "put a line break or another separator between passages"
        return Check(SEAMS, "failed", found, remedy, measured)
    if apart:
        found = f"{apart} prompts begin with other tokens than passages are computed after"
        return Check(SEAMS, "failed", found, "let the instruction end with a blank line", measured)
    told = f"all passages are found, {share:.1%} of their tokens at joined edges"
    return Check(SEAMS, "ok", told, measured=measured)
