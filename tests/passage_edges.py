"""How many of a passage's own tokens a chat prompt still holds, by what stands around the passage.

A tokenizer joins the text at a passage's edges with what stands beside it, so a few tokens there
are others than the passage has by itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cacheblend_rag.demo.passages import SINGLE_HOP_FILE, load_passages
from cacheblend_rag.quality.forms import load_dataset
from cacheblend_rag.text.encoder import PromptEncoder
from cacheblend_rag.text.token_index import TokenIndex

JOINS: dict[str, Callable[[Sequence[str]], str]] = {
    "blank lines": "\n\n".join,
    "lines": "\n".join,
    "spaces": " ".join,
    "nothing": "".join,
    "numbers": lambda texts: "\n\n".join(f"[{i}] {text}" for i, text in enumerate(texts, 1)),
    "bullets -": lambda texts: "\n".join(f"- {text}" for text in texts),
    "bullets *": lambda texts: "\n".join(f"* {text}" for text in texts),
    "tags": lambda texts: "\n".join(f"<document>{text}</document>" for text in texts),
    "tags on lines": lambda texts: "\n".join(f"<doc>\n{text}\n</doc>" for text in texts),
    "quotes": lambda texts: "\n".join(f'"{text}"' for text in texts),
    "labels": lambda texts: "\n\n".join(f"Content: {text}" for text in texts),
    "JSON": lambda texts: json.dumps([{"id": i, "text": text} for i, text in enumerate(texts)]),
    "JSON, UTF-8": lambda texts: json.dumps([{"text": one} for one in texts], ensure_ascii=False),
}
"""Texts of several passages, by what stands between them."""
Form = Callable[[str], str]
FORMS: tuple[Form, ...] = (
    str,
    lambda text: json.dumps(text)[1:-1],
    lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
)
"""The forms of a passage that are indexed: as it is, and as JSON writes it."""
IN_PROMPT = 4


@dataclass(frozen=True)
class Edges:
    """What was found of passages.

    found: share of all their tokens. lost: the prompt's tokens at each edge of a passage, two edges
    a passage, that are not found and have to be computed.
    """

    found: float
    lost: tuple[int, ...]

    @property
    def over_2(self) -> float:
        """Share of the edges that lost more than two tokens."""
        return sum(lost > 2 for lost in self.lost) / len(self.lost)


def texts_of(*files: Path) -> list[str]:
    """Return different texts of data sets; by default those that come with the project."""
    sets = [load_dataset(file) for file in files or (SINGLE_HOP_FILE,)]
    sample = [] if files else [passage.text for passage in load_passages().passages]
    texts = (chunk.text for one in sets for q in one.questions for chunk in q.passages)
    return list(dict.fromkeys([*sample, *(text.strip() for text in texts)]))


def passages_of(texts: Iterable[str], encoder: PromptEncoder, tokens: int) -> Iterator[str]:
    """Yield passages of about so many tokens; every other one ends with a sentence."""
    ends_with_word, rest = False, ""
    for text in texts:
        rest = f"{rest}\n\n{text}" if rest else text
        while len(ids := encoder.chunk(rest)) > 1.2 * tokens:
            room = round(tokens * len(rest) / len(ids))
            mark = " " if ends_with_word else ". "
            cut = rest.rfind(mark, room // 2, room) + len(mark) - 1
            cut = cut if cut > room // 2 else rest.rindex(" ", 0, room)
            yield rest[:cut].strip()
            rest, ends_with_word = rest[cut:].strip(), not ends_with_word


class PassageIndex:
    """Passages of one length, indexed in the tokens of one tokenizer.

    passages: their texts.
    """

    def __init__(
        self,
        tokenizer: Any,
        texts: Iterable[str],
        tokens: int,
        most: int,
        forms: Sequence[Form] = FORMS,
    ) -> None:
        """Index ``most`` passages of so many tokens, which share no text, in several forms."""
        self._tokenizer, encoder = tokenizer, PromptEncoder(tokenizer)
        self.passages: list[str] = []
        self._index = TokenIndex[tuple[int, int]]()
        self._sizes: list[list[int]] = []
        for passage in passages_of(texts, encoder, tokens):
            if self._index.find(encoder.chunk(passage)):
                continue  # its text is another passage's in part: that one might be found instead
            written = [encoder.chunk(form(passage)) for form in forms]
            for form, ids in enumerate(written):
                self._index.add(ids, (len(self.passages), form))
            self.passages.append(passage)
            self._sizes.append([len(ids) for ids in written])
            if len(self.passages) == most:
                break

    def edges(self, join: str) -> Edges:
        """Look for the passages in chat prompts, ``IN_PROMPT`` in each, joined in one way."""
        total, found, lost = 0, 0, list[int]()
        for first in range(0, len(self.passages) - len(self.passages) % IN_PROMPT, IN_PROMPT):
            numbers = range(first, first + IN_PROMPT)
            text = self._prompt([self.passages[n] for n in numbers], join)
            ids, spans = self._encode(text)
            runs, before = self._index.find(ids), 0
            for number in numbers:
                mine = [run for run in runs if run.name[0] == number]
                tail = max((run.skip + run.end - run.start for run in mine), default=0)
                # Forms that differ at the end only: the shortest that holds the runs is meant.
                total += min(size for size in self._sizes[number] if size >= tail)
                found += sum(run.end - run.start for run in mine)
                begin, end = _place(text, self.passages[number], before)
                before = end
                own = [at for at, (low, high) in enumerate(spans) if low < end and begin < high]
                start = min((run.start for run in mine), default=own[-1] + 1)
                stop = max((run.end for run in mine), default=own[-1] + 1)
                lost += [max(start - own[0], 0), max(own[-1] + 1 - stop, 0)]
        return Edges(found / total, tuple(lost))

    def _prompt(self, texts: list[str], join: str) -> str:
        context = JOINS[join](texts)
        content = f"Answer from the passages.\n\n{context}\n\nQuestion: Who was first?\nAnswer:"
        message = {"role": "user", "content": content}
        return str(
            self._tokenizer.apply_chat_template(
                [message], tokenize=False, add_generation_prompt=True
            )
        )

    def _encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the text's tokens and the characters that each stands for."""
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return encoded["input_ids"], encoded["offset_mapping"]


def _place(text: str, passage: str, after: int) -> tuple[int, int]:
    """Return where a form of a passage begins and ends in a text, from a character on."""
    for form in FORMS:
        begin = text.find(form(passage), after)
        if begin >= 0:
            return begin, begin + len(form(passage))
    raise AssertionError("the prompt does not hold the passage")
