"""Checks of what is said to the model: the chat template, the tokenizer, the chunks' seams."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any

from cacheblend_rag.engines.base import Engine
from cacheblend_rag.errors import PromptError
from cacheblend_rag.quality.dataset import EvalDataset, EvalQuestion, PromptFrame
from cacheblend_rag.quality.verify.check import Check
from cacheblend_rag.text.chat import begins_as_rendered, render_chat
from cacheblend_rag.text.encoder import encode_plainly

TEMPLATE = Check("template", "renders instruction, passages and question by the chat template")
TOKENIZER = Check("tokenizer", "encodes texts and decodes them again")
SEAMS = Check("seams", "finds the passages' own tokens in the prompt's")

MOST_EDGES = 0.1
"""Share of the passages' tokens that may be joined with the text beside them."""
SHOWN = 30


def check_template(tokenizer: Any, data: EvalDataset) -> Check:
    """Check that a chat template leaves every text as it is and where it belongs."""
    if not getattr(tokenizer, "chat_template", None):
        return TEMPLATE.skipped("the tokenizer has no chat template: prompts are plain text")
    try:
        wrong = next(_wrong_renderings(tokenizer, data), None)
    except PromptError as error:
        wrong = str(error)
    if wrong is None:
        return TEMPLATE.ok("instruction, passages and turns stand as they were given, in order")
    return TEMPLATE.failed(wrong, "set tokenizer.chat_template to the one the model came with")


def _wrong_renderings(tokenizer: Any, data: EvalDataset) -> Iterator[str]:
    question = data.questions[0]
    content = "\n\n".join([*(one.text for one in question.passages), question.question])
    user = {"role": "user", "content": content}
    plain = render_chat([user], tokenizer).text
    if content not in plain:
        yield "it changes or drops the text of the user's message"
    if question.passages[0].text not in plain:
        yield "it changes the passages"
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
    """Check that decoding gives the text back, but for what its normalizer says."""
    texts = dict.fromkeys(
        text for one in questions for text in (one.question, *(p.text for p in one.passages))
    )
    exact, lost = 0, []
    for text in texts:
        back = tokenizer.decode(
            list(encode_plainly(tokenizer, text)),
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )
        exact += back.strip() == text.strip()
        if _bare(back) != _bare(text):
            lost.append((text, back))
    measured = {"texts": len(texts), "exact": exact, "lost": len(lost)}
    if not lost:
        same = exact == len(texts)
        found = "all come back" if same else "all come back, in the tokenizer's normal form"
        return TOKENIZER.ok(f"{len(texts)} texts: {found}", measured)
    place = _difference(*lost[0])
    found = f"{len(lost)} of {len(texts)} texts do not come back: {place}"
    return TOKENIZER.failed(found, "use the tokenizer that the model was trained with", measured)


def _bare(text: str) -> str:
    """Return a text without what normalizers take away: case, accents, white space."""
    letters = unicodedata.normalize("NFKD", text.casefold())
    return "".join(one for one in letters if not (one.isspace() or unicodedata.combining(one)))


def _difference(text: str, back: str) -> str:
    pairs = enumerate(zip(text, back, strict=False))
    at = next((i for i, (one, other) in pairs if one != other), min(len(text), len(back)))
    return f"{text[at : at + SHOWN]!r} became {back[at : at + SHOWN]!r}"


def lead_tokens(engine: Engine) -> tuple[int, ...]:
    """Return the tokens that an engine computes chunks after, those of a document aside."""
    opens = not begins_as_rendered(engine.instruction, engine.tokenizer)
    return engine.encoder.leading(engine.instruction, opens=opens)


def check_seams(engine: Engine, frame: PromptFrame, questions: Sequence[EvalQuestion]) -> Check:
    """Check that passages are separable, and that prompts begin with the lead-in's tokens."""
    lead = lead_tokens(engine)
    inseparable = apart = tokens = edges = 0
    for question in questions:
        encoded = engine.prepare(frame.prompt(question)).encoded
        inseparable += len(encoded.inseparable)
        apart += encoded.token_ids[: len(lead)] != lead
        for span in encoded.spans:
            tokens += span.end - span.start
            edges += len(span.before) + len(span.after)
    share = edges / max(1, tokens + edges)
    measured = {
        "passages": sum(len(one.passages) for one in questions),
        "inseparable": inseparable,
        "edge_share": share,
        "other_beginnings": apart,
    }
    if inseparable or share > MOST_EDGES:
        found = f"{inseparable} passages, and {share:.1%} of the tokens, are joined with their seam"
        remedy = "put a line break or another separator between passages"
        return SEAMS.failed(found, remedy, measured)
    if apart:
        found = f"{apart} prompts begin with other tokens than passages are computed after"
        return SEAMS.failed(found, "let the instruction end with a blank line", measured)
    return SEAMS.ok(
        f"all passages are found, {share:.1%} of their tokens at joined edges", measured
    )
