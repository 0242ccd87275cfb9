"""The wordings that notes are made of, beside their facts."""

from __future__ import annotations

import random
import re

from .subjects import words

_SLOT = re.compile(r"\{(\w+)\}")
_TOKEN = re.compile(r"'s|\w+|[^\w\s]")

INTRODUCTIONS = (
    "This note is about {name}.",
    "These pages describe {name}.",
    "What follows concerns {name}.",
    "The subject of this note is {name}.",
)
OPENINGS = (
    "According to the records,",
    "As far as we know,",
    "It is well known that",
    "The files say that",
)
_ADJECTIVES = words(
    "small quaint quiet large famous narrow warm cold bright dark gentle heavy simple modern "
    "wooden distant busy lonely pleasant steep"
)
_NOUNS = words(
    "river market bridge garden museum station harbour forest tower square library school road "
    "valley theatre hotel kitchen letter story festival lake castle church street wall"
)
_TIMES = words("morning evening summer winter spring autumn week season")
_VERBS = words("stands lies opens waits begins changes rests remains appears")
_PLACES = words("near behind beside above below beyond")
_FILLERS = (
    "The {adjective} {noun} {verb} {place} the {noun}.",
    "Many people visit the {adjective} {noun} each {time}.",
    "It was a {adjective} {time}, and the {noun} was {adjective}.",
    "Some say that the {noun} {verb} {place} the {noun}.",
    "There is a {adjective} {noun} {place} the {noun}.",
    "In the {time} the {noun} often {verb} {place} the road.",
    "The weather was {adjective} and the {noun} was {adjective}.",
    "Every {time} the {noun} {verb} {place} the {adjective} {noun}.",
    "Visitors remember the {noun} because it {verb} {place} a {adjective} {noun}.",
    "Nobody knows why the {adjective} {noun} {verb} there.",
    "A path leads from the {noun} to the {adjective} {noun}.",
    "On most days the {noun} is {adjective} and the {noun} is {adjective}.",
)
_SLOTS = {
    "adjective": _ADJECTIVES,
    "noun": _NOUNS,
    "time": _TIMES,
    "verb": _VERBS,
    "place": _PLACES,
}


def draw_filler(rng: random.Random) -> str:
    """Draw a sentence that says nothing about any subject."""
    return _SLOT.sub(lambda slot: rng.choice(_SLOTS[slot[1]]), rng.choice(_FILLERS))


def estimate_tokens(text: str) -> int:
    """Words and punctuation marks, which the demo tokenizer makes one token each."""
    return len(_TOKEN.findall(text))
