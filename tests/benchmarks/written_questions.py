"""Writes single-hop questions by rules, from the first sentences of encyclopedia paragraphs.

A paragraph begins with a sentence that says what its subject is: "X (born DATE) is a singer", "X
is a 2001 film directed by Y". A rule is such a pattern and the question that it answers. Running
text is cut into paragraphs before each such sentence.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cacheblend_rag.quality.data.sentences import estimate_tokens, split_sentences
from cacheblend_rag.quality.data.words import words_of

MOST_TOKENS = 120
_NO_SUBJECT = words_of(
    "it he she they this that these those there his her its their we i you who which what when in "
    "on a an at as by for from with after before during however also one some many most all both "
    "each"
)
_GENERIC = words_of("city town film county headquarters population capital name")
_SUBJECT = r"(?P<subject>[^,.;:()!?]{3,48}?)"
_LEAD = re.compile(
    rf"^{_SUBJECT} (?:\([^)]{{0,120}}\),? )?(?:is|was|are|were) (?:an?|the|one) ", re.IGNORECASE
)
_MONTHS = "january|february|march|april|may|june|july|august|september|october|november|december"
_MONTH = f"(?:{_MONTHS})"
_PEOPLES = (
    "american|british|english|scottish|irish|welsh|french|german|italian|spanish|portuguese|dutch|"
    "danish|swedish|norwegian|finnish|polish|russian|serbian|greek|turkish|indian|chinese|japanese|"
    "korean|canadian|australian|mexican|brazilian|argentine|african|european|roman|latin|egyptian|"
    "christian|jewish|islamic|united states|england|france|germany|italy|spain|india|china|japan|"
    "canada|australia|london|new york|california|texas|pennsylvania|hong kong"
)
_SMALL_WORDS = words_of(
    "a an and at by de del der di du for in la le of on or the to und van von y"
)
_DATE = rf"(?:{_MONTH} \d{{1,2}}, \d{{4}}|\d{{1,2}} {_MONTH} \d{{4}})"
_DASH = " \u2013 "
_WORD = r"[^\W\d][\w'.-]*"
_NAME = rf"(?P<answer>{_WORD}(?: (?!(?:and|in|for|from|with|about)\b){_WORD}){{1,3}})"
_ROLES = (
    "author|writer|novelist|playwright|poet|journalist|singer|singer-songwriter|vocalist|musician|"
    "pianist|guitarist|trumpeter|saxophonist|drummer|composer|songwriter|rapper|artist|band|group|"
    "duo|director|filmmaker|philosopher"
)
_ROLE = re.compile(rf"^.*\b(?:{_ROLES}) ", re.IGNORECASE)
_STOP = r"(?=[,.;(]| (?:and )?starring| (?:in|for|from|about|based|which|that) |$)"
_A = rf"^{_SUBJECT} (?:\([^)]*\),? )?(?:is|was) (?:an?|the) "


@dataclass(frozen=True)
class _Rule:
    """kind: a label. pattern: of a paragraph's beginning, with subject and answer as groups."""

    kind: str
    pattern: re.Pattern[str]
    question: str


def _rule(kind: str, pattern: str, question: str) -> _Rule:
    return _Rule(kind, re.compile(pattern, re.IGNORECASE), question)


_RULES = (
    _rule("born", rf"^{_SUBJECT} \((?:[^)]*?; ?)?born (?P<answer>{_DATE})", "When was {} born?"),
    _rule("died", rf"^{_SUBJECT} \([^)]*?{_DASH}(?P<answer>{_DATE})\)", "When did {} die?"),
    _rule("born", rf"^{_SUBJECT} \((?P<answer>{_DATE}){_DASH}[^)]*\)", "When was {} born?"),
    _rule(
        "director", rf"{_A}[^.]*?(?<!owned and )\bdirected by {_NAME}{_STOP}", "Who directed {}?"
    ),
    _rule(
        "author",
        rf"{_A}[^.]*?\b(?:novel|book|play|poem|tragedy|story|collection)(?: written)? by "
        rf"{_NAME}{_STOP}",
        "Who wrote {}?",
    ),
    _rule("album", rf"{_A}[^.]*?\balbum by {_NAME}{_STOP}", "Whose album is {}?"),
    _rule("song", rf"{_A}[^.]*?\bsong by {_NAME}{_STOP}", "Who recorded the song {}?"),
    _rule(
        "county",
        rf"{_A}[^.]*?\b(?:in|of) (?P<answer>[\w-]+(?: [\w-]+)? county)\b",
        "In which county is {}?",
    ),
    _rule(
        "headquarters",
        rf"{_A}[^.]*?\bheadquartered in (?P<answer>[\w' -]+?)(?=[,.;]| and )",
        "Where is {} headquartered?",
    ),
)


@dataclass(frozen=True)
class WrittenQuestion:
    """A question of one step; subject: what it asks about, as the paragraph has it."""

    kind: str
    subject: str
    question: str
    answer: str
    paragraph: str


def tidy(text: str) -> str:
    """Return text of which each punctuation mark was a word of its own, with usual spaces."""
    for found, put in (
        (r"([(\[]) ", r"\1"),
        (r" ([)\],;:])", r"\1"),
        (r"(\w) - (\w)", r"\1-\2"),
        (r'" ([^"]*?) "', r'"\1"'),
        (r"(\d)([,.]) (\d)", r"\1\2\3"),
        (r"\((?:[;,] ?)+", "("),
        (r" \( ?\)", ""),
    ):
        text = re.sub(found, put, text)
    return re.sub(rf"({_MONTH} \d{{1,2}}),(\d{{4}})", r"\1, \2", text, flags=re.IGNORECASE)


def with_capitals(paragraph: str, names: Iterable[str] = ()) -> str:
    """Return a lower-case paragraph with capitals where rules know them; any other as it is.

    They know sentences' beginnings, the paragraph's subject and other names, months, and some
    countries and peoples. names: further names in the paragraph.
    """
    if paragraph != paragraph.lower():
        return paragraph
    lead = _LEAD.match(paragraph)
    known = [*([lead["subject"]] if lead else []), *names]
    text = " ".join(s[0].upper() + s[1:] for s in split_sentences(paragraph))
    for name in known:
        text = re.sub(rf"\b{re.escape(name)}\b", title_case(name), text, flags=re.IGNORECASE)
    dated = rf"\b(?:{_MONTHS}) \d|\d (?:{_MONTHS})\b|\b(?:{_PEOPLES})\b"
    return re.sub(dated, lambda found: found[0].title(), text)


def title_case(name: str) -> str:
    """Return a name with capitals, as titles of books and places have them."""
    words = name.split(" ")
    return " ".join(
        word if index and word in _SMALL_WORDS else word[:1].upper() + word[1:]
        for index, word in enumerate(words)
    )


def paragraphs_of(texts: Iterable[str]) -> list[str]:
    """Return the paragraphs in texts that may overlap, and be cut off at both ends.

    Of paragraphs that begin alike, the longest is returned.
    """
    found: dict[str, str] = {}
    for text in texts:
        for paragraph in _paragraphs(split_sentences(tidy(text))[1:-1]):
            found[paragraph[:60]] = max(found.get(paragraph[:60], ""), paragraph, key=len)
    return list(found.values())


def write_questions(paragraphs: Iterable[str]) -> Iterator[WrittenQuestion]:
    """Yield the questions that rules find in paragraphs, at most one a paragraph and rule."""
    for paragraph in paragraphs:
        for rule in _RULES:
            match = rule.pattern.match(paragraph)
            answer = _ROLE.sub("", f"{match['answer']} ").strip(" .") if match else ""
            if match and answer and _is_subject(match["subject"]):
                subject = match["subject"].strip()
                asked = title_case(subject) if subject == subject.lower() else subject
                yield WrittenQuestion(
                    rule.kind, subject, rule.question.format(asked), answer, paragraph
                )


def _paragraphs(sentences: list[str]) -> Iterator[str]:
    started: list[str] = []
    for sentence in sentences:
        if _is_lead(sentence):
            if started:
                yield " ".join(started)
            started = [sentence]
        elif started and estimate_tokens(" ".join([*started, sentence])) <= MOST_TOKENS:
            started.append(sentence)
    if started:
        yield " ".join(started)


def _is_lead(sentence: str) -> bool:
    lead = _LEAD.match(sentence)
    return lead is not None and _is_subject(lead["subject"])


def _is_subject(text: str) -> bool:
    words = text.lower().split()
    known = bool(words) and words[0].strip('"') not in _NO_SUBJECT
    return known and len(words) <= 6 and " ".join(words[1:]) not in _GENERIC
