"""Questions over made-up text of any length, by the rules of RULER (arXiv 2404.06654).

- ``niah``: one of the sentences of a text tells the number of a thing. In every second question
  three others tell numbers of other things (multi-key).
- ``vt``: variable tracking. A variable is set to a number, the next to that variable, and so on,
  four times; the answer is all five names.
- ``cwe``: common-word extraction. In a list of numbered words ten occur 30 times each, the
  others three times; the answer is the ten.

Text and words are this project's. It is cut into documents of several chunks.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.quality.data.retrieval import ADJACENT, SHUFFLED, retrieval
from cacheblend_rag.quality.data.sentences import CountTokens, estimate_tokens
from cacheblend_rag.quality.data.words import ADJECTIVES, NOUNS, VERBS
from cacheblend_rag.quality.dataset import DEFAULT_INSTRUCTION, EvalDataset, EvalQuestion
from cacheblend_rag.text.chunk import Document

RULER_TOKENS = 2000
RULER_SETTINGS = (ADJACENT, SHUFFLED)
CHUNK_TOKENS = 100
CHUNKS_PER_DOCUMENT = 4
OTHER_KEYS = 3
HOPS = 4
COMMON_WORDS, COMMON_TIMES, OTHER_TIMES = 10, 30, 3


@dataclass(frozen=True)
class _Task:
    """A question with its text in pieces; needles: which of them hold the answer.

    A word list has no needles: all of it holds the answer.
    """

    question: str
    answer: str
    kind: str
    pieces: Sequence[str]
    needles: frozenset[str] = frozenset()


MakeTask = Callable[[int, int, random.Random, CountTokens], _Task]
"""Takes a question's number, the most tokens, a source of random numbers, a counter of tokens."""


def generate(
    task: str,
    tokens: int,
    questions: int,
    seed: int,
    count_tokens: CountTokens = estimate_tokens,
    *,
    setting: str = ADJACENT,
    chunk_tokens: int = CHUNK_TOKENS,
) -> EvalDataset:
    """Return questions over made-up documents.

    task: ``niah``, ``vt`` or ``cwe``. tokens: about how many a question's documents have
    together. setting: adjacent or shuffled. chunk_tokens: most of a chunk, unless one sentence has
    more. Raises ConfigError for an unknown name, and if the text would not fit into the tokens or
    would need more words than there are.
    """
    if task not in TASKS:
        raise ConfigError(f"task={task!r} of RULER must be one of {', '.join(TASKS)}")
    if setting not in RULER_SETTINGS:
        raise ConfigError(
            f"setting={setting!r} of RULER must be one of {', '.join(RULER_SETTINGS)}"
        )
    if tokens < 1 or chunk_tokens < 1:
        raise ConfigError(f"tokens={tokens} and chunk_tokens={chunk_tokens} must be at least 1")
    found = []
    for index in range(questions):
        rng = random.Random(f"{task} {seed} {index}")
        made = TASKS[task](index, tokens, rng, count_tokens)
        chunks = _chunks(made.pieces, chunk_tokens, count_tokens)
        found.append(_question(made, _documents(chunks, index), setting, rng))
    return EvalDataset(f"ruler-{task}", tuple(found), DEFAULT_INSTRUCTION)


def _documents(chunks: Sequence[str], index: int) -> tuple[Document, ...]:
    return tuple(
        Document(f"{index}-{first}", tuple(chunks[first : first + CHUNKS_PER_DOCUMENT]))
        for first in range(0, len(chunks), CHUNKS_PER_DOCUMENT)
    )


def _question(
    task: _Task, documents: tuple[Document, ...], setting: str, rng: random.Random
) -> EvalQuestion:
    gold = tuple(
        chunk
        for document in documents
        for chunk in document.to_chunks()
        if not task.needles or any(needle in chunk.text for needle in task.needles)
    )
    passages = tuple(retrieval(setting)(documents, gold, rng))
    return EvalQuestion(
        task.question, (task.answer,), passages, documents, setting, task.kind, gold
    )


def _chunks(pieces: Sequence[str], chunk_tokens: int, count_tokens: CountTokens) -> list[str]:
    chunks: list[str] = []
    for piece in pieces:
        longer = f"{chunks[-1]} {piece}" if chunks else piece
        if chunks and count_tokens(longer) <= chunk_tokens:
            chunks[-1] = longer
        else:
            chunks.append(piece)
    return chunks


def _needle_task(index: int, tokens: int, rng: random.Random, count_tokens: CountTokens) -> _Task:
    many = index % 2 == 1
    count = 1 + OTHER_KEYS if many else 1
    pairs = zip(rng.sample(ADJECTIVES, count), rng.sample(NOUNS, count), strict=True)
    things = [f"{adjective} {noun}" for adjective, noun in pairs]
    numbers = rng.sample(range(1_000_000, 10_000_000), count)
    told = [
        f"The magic number of the {thing} is {number}."
        for thing, number in zip(things, numbers, strict=True)
    ]
    return _Task(
        question=f"What is the magic number of the {things[0]}?",
        answer=str(numbers[0]),
        kind="niah multi-key" if many else "niah single",
        pieces=_hidden(told, tokens, rng, count_tokens, in_order=False),
        needles=frozenset(told[:1]),
    )


def _variable_task(index: int, tokens: int, rng: random.Random, count_tokens: CountTokens) -> _Task:
    names: dict[str, None] = {}
    while len(names) <= HOPS:
        names["".join(rng.choices(string.ascii_uppercase, k=5))] = None
    value, chain = str(rng.randint(10_000, 99_999)), list(names)
    told = [
        f"VAR {name} = {before}."
        for name, before in zip(chain, [value, *(f"VAR {n}" for n in chain)], strict=False)
    ]
    return _Task(
        question=f"Which {len(chain)} variables have the value {value}?",
        answer=", ".join(chain),
        kind="vt",
        pieces=_hidden(told, tokens, rng, count_tokens, in_order=True),
        needles=frozenset(told),
    )


def _common_words_task(
    index: int, tokens: int, rng: random.Random, count_tokens: CountTokens
) -> _Task:
    words = sorted({*ADJECTIVES, *NOUNS, *VERBS})
    rng.shuffle(words)
    common, others = words[:COMMON_WORDS], iter(words[COMMON_WORDS:])
    listed = common * COMMON_TIMES
    left = tokens - sum(count_tokens(_entry(100, word)) for word in listed)
    for word in others:
        left -= OTHER_TIMES * count_tokens(_entry(1000, word))
        if left < 0:
            break
        listed += [word] * OTHER_TIMES
    else:
        raise ConfigError(f"tokens={tokens} is more than the words of RULER's cwe fill: use fewer")
    if len(listed) == COMMON_WORDS * COMMON_TIMES:
        raise ConfigError(f"tokens={tokens} is too few for RULER's cwe: use more")
    rng.shuffle(listed)
    return _Task(
        question=f"Which {COMMON_WORDS} words are the most common in the list?",
        answer=", ".join(common),
        kind="cwe",
        pieces=[_entry(place, word) for place, word in enumerate(listed, 1)],
    )


def _entry(place: int, word: str) -> str:
    return f"{place}. {word}"


def _hidden(
    told: Sequence[str], tokens: int, rng: random.Random, count_tokens: CountTokens, in_order: bool
) -> list[str]:
    """Return sentences at random places among others, up to so many tokens in all."""
    left = tokens - sum(count_tokens(sentence) for sentence in told)
    others: list[str] = []
    for sentence in _other_sentences(rng):
        left -= count_tokens(sentence)
        if left < 0:
            break
        others.append(sentence)
    if len(others) < len(told):
        raise ConfigError(f"tokens={tokens} is too few for RULER's questions: use more")
    places = rng.sample(range(len(others)), len(told))
    if in_order:
        places.sort()
    hidden = dict(zip(places, told, strict=True))
    return [
        sentence
        for place, other in enumerate(others)
        for sentence in (hidden.get(place), other)
        if sentence
    ]


def _other_sentences(rng: random.Random) -> Iterator[str]:
    """Yield sentences without numbers, endlessly."""
    while True:
        near, far = (f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}" for _ in range(2))
        verb, noun = rng.choice(VERBS), rng.choice(NOUNS)
        yield rng.choice(
            (
                f"The {near} is kept behind the {far}.",
                f"Nobody can {verb} the {near} without a {noun}.",
                f"In the evening they {verb} near the {far} and talk about the {noun}.",
                f"A {near} and a {far} are painted on the {noun}.",
                f"Whoever wants to {verb} looks for the {near} first.",
            )
        )


TASKS: dict[str, MakeTask] = {
    "niah": _needle_task,
    "vt": _variable_task,
    "cwe": _common_words_task,
}
