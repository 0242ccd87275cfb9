"""Controlled English that can only be answered by attention across chunks.

Every document is about one person or company. Its first chunk names the subject; later chunks
say only "She", "his" or "The company". The documents of one prompt share type, pronoun and kinds
of fact and differ in values, so that a fact in a later chunk belongs to its subject only through
the chunk before it. All draws are deterministic in their seed.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

QuestionKind = Literal["direct", "referring"]
SegmentKind = Literal["text", "chunk"]

INSTRUCTION = "Read the notes below and answer the question. Give a short answer."
SETTINGS = ("adjacent", "fragments", "shuffled")
CHUNK_SEPARATOR = "\n\n"


@dataclass(frozen=True)
class PromptFrame:
    """The fixed text before the chunks (`head`) and after them (`tail`, holding `{question}`)."""

    head: str
    tail: str


BEGUN_FRAME = PromptFrame(f"{INSTRUCTION}\n\n", "\n\nQuestion: {question}")
DEFAULT_FRAME = PromptFrame(f"{INSTRUCTION}\n\n", "\n\nQuestion: {question}\nAnswer:")
OTHER_FRAMES = (
    PromptFrame(
        "Context information is below.\n---------------------\n",
        "\n---------------------\nGiven the context information and not prior knowledge, "
        "answer the query.\nQuery: {question}\nAnswer: ",
    ),
    PromptFrame(
        "You answer questions from documents. Use only the context.\n\n"
        "Context information is below.\n---------------------\n",
        "\n---------------------\nGiven the context information, answer the query.\n"
        "Query: {question}\nAnswer:",
    ),
    PromptFrame(
        "Use the following pieces of context to answer the question at the end. "
        "If you don't know the answer, just say that you don't know.\n\n",
        "\n\nQuestion: {question}\nHelpful Answer:",
    ),
    PromptFrame("Answer from the context.\n\nContext:\n", "\n\nQuestion: {question}\nAnswer:"),
    PromptFrame("You are a helpful assistant.\n\n", "\n\n{question}\nAnswer:"),
)


@dataclass(frozen=True)
class DemoDocument:
    """One document, as the passages it is indexed in."""

    document_id: str
    chunks: tuple[str, ...]

    @property
    def text(self) -> str:
        """The whole document."""
        return CHUNK_SEPARATOR.join(self.chunks)


@dataclass(frozen=True)
class DemoQuestion:
    """A question, its answer, and the document and chunk (by index) that hold the answer."""

    question: str
    answer: str
    kind: QuestionKind
    document: int
    chunk: int


@dataclass(frozen=True)
class DemoPrompt:
    """One question over retrieved chunks, given as (document, chunk) indices in prompt order."""

    documents: tuple[DemoDocument, ...]
    retrieved: tuple[tuple[int, int], ...]
    question: DemoQuestion
    setting: str

    @property
    def chunk_texts(self) -> tuple[str, ...]:
        """The retrieved chunks in prompt order."""
        return tuple(self.documents[d].chunks[c] for d, c in self.retrieved)

    def segments(self, frame: PromptFrame = DEFAULT_FRAME) -> list[tuple[SegmentKind, str]]:
        """The prompt as runs of text that are each tokenized by themselves."""
        parts: list[tuple[SegmentKind, str]] = [("text", frame.head)]
        for index, chunk in enumerate(self.chunk_texts):
            if index:
                parts.append(("text", CHUNK_SEPARATOR))
            parts.append(("chunk", chunk))
        parts.append(("text", frame.tail.format(question=self.question.question)))
        return parts


@dataclass(frozen=True)
class CorpusShape:
    """How large and how hard a draw is; pairs are inclusive bounds.

    Attributes:
        documents: documents in a draw.
        chunks: chunks a document.
        total_chunks: chunks in a draw.
        direct_facts: facts in each naming chunk.
        referring_facts: facts in each document's later chunks together.
        context_tokens: filler sentences are added until the chunks hold about this many tokens.
        names: size of the pools of first and last names.
        explicit: share of draws whose later chunks name the subject again.
        mixed: share of draws whose documents differ in type and kinds of fact.
        wordings: how many of the ways to state and to ask a fact are used.
        begun: questions are begun statements ("Clara Berg lives in") instead.
    """

    documents: tuple[int, int] = (4, 6)
    chunks: tuple[int, int] = (2, 3)
    total_chunks: tuple[int, int] = (10, 14)
    direct_facts: tuple[int, int] = (1, 2)
    referring_facts: tuple[int, int] = (3, 4)
    context_tokens: tuple[int, int] = (1090, 1390)
    names: tuple[int, int] = (32, 48)
    explicit: float = 0.0
    mixed: float = 0.0
    wordings: int = 2
    begun: bool = False


EVALUATION_SHAPE = CorpusShape()


@dataclass(frozen=True)
class _Attribute:
    """One kind of fact; every statement tells subject and kind before the value."""

    statements: tuple[str, ...]
    questions: tuple[str, ...]
    values: tuple[str, ...]


@dataclass(frozen=True)
class _SubjectKind:
    """A type of subject: its name pools, its pronouns and what is told about it."""

    first_names: tuple[str, ...]
    last_names: tuple[str, ...]
    pronoun: str
    possessive: str
    attributes: tuple[_Attribute, ...]


@dataclass(frozen=True)
class _Subject:
    name: str
    kind: _SubjectKind


@dataclass(frozen=True)
class _Fact:
    attribute: _Attribute
    value: str


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_WOMEN = _words(
    "Clara Edith Greta Helga Irene Julia Karin Laura Maria Nora Petra Sara Tilda Ursula Vera Wanda "
    "Agnes Berta Doris Elena Freya Hanna Ingrid Johanna Lena Monika Paula Renate Sophie Teresa "
    "Viola Yvonne"
)
_MEN = _words(
    "Adam Boris Carl David Emil Frank Georg Hugo Ivan Jonas Konrad Lars Martin Nils Oscar Paul "
    "Ralf Simon Tomas Ulrich Victor Walter Xaver Anton Bruno Dieter Erik Felix Gustav Henrik "
    "Isaac Julius"
)
_LAST_NAMES = _words(
    "Berg Lund Stone Marsh Field Wood Hill Brook Dahl Falk Grant Holm Jansen Keller Lang Moser "
    "Novak Olsen Peters Quist Roth Sander Thorn Unger Vogel Weber Zeller Abbot Carver Dunn Ellis "
    "Fisher Gibbs Harper Irwin Jarvis Kemp Lowell Mason Nash Orton Parker Reeves Salter Turner "
    "Upton Vance Wyatt"
)
_COMPANY_NAMES = _words(
    "Zenith Acme Orion Vertex Lumen Polar Nova Titan Quartz Helix Delta Omega Sigma Apex Atlas "
    "Borealis Cobalt Dynamo Ember Fulcrum Granite Horizon Jupiter Kestrel Lattice Meridian Nimbus "
    "Obsidian Pinnacle Raven Summit Tundra"
)
_COMPANY_SUFFIXES = _words(
    "Works Systems Motors Brothers Partners Industries Supply Trading Group Holdings Company Union "
    "Stores Limited Enterprises Services"
)

_CITIES = _words(
    "Paris London Berlin Madrid Rome Vienna Prague Oslo Lisbon Dublin Athens Cairo Delhi Tokyo "
    "Seoul Lima Quito Boston Denver Dallas Toronto Sydney Geneva Milan"
)
_COLOURS = _words("red blue green yellow purple orange black white brown pink grey silver")
_ANIMALS = _words(
    "dog cat parrot rabbit turtle hamster goat pony lizard ferret canary goldfish horse donkey"
)

_YEARS = tuple(str(year) for year in range(1948, 1988))

_PERSON_ATTRIBUTES = (
    _Attribute(
        ("{subject} works as a {value}.", "{possessive} job is that of a {value}."),
        ("What is the job of {name}?", "What does {name} work as?"),
        _words(
            "painter baker doctor lawyer teacher farmer pilot sailor nurse singer writer judge "
            "chemist tailor gardener carpenter butcher plumber banker dentist"
        ),
    ),
    _Attribute(
        ("{subject} was born in {value}.", "{possessive} year of birth is {value}."),
        ("In which year was {name} born?", "What is the year of birth of {name}?"),
        _YEARS,
    ),
    _Attribute(
        ("{subject} lives in {value}.", "{possessive} home is in {value}."),
        ("Where does {name} live?", "In which city is the home of {name}?"),
        _CITIES,
    ),
    _Attribute(
        ("{subject} plays the {value}.", "{possessive} instrument is the {value}."),
        ("Which instrument does {name} play?", "What is the instrument of {name}?"),
        _words(
            "piano violin cello flute guitar harp trumpet drums oboe organ banjo clarinet trombone "
            "accordion"
        ),
    ),
    _Attribute(
        ("{subject} owns a {value}.", "{possessive} pet is a {value}."),
        ("Which animal does {name} own?", "What is the pet of {name}?"),
        _ANIMALS,
    ),
    _Attribute(
        ("{subject} likes the colour {value}.", "{possessive} favourite colour is {value}."),
        ("Which colour does {name} like?", "What is the favourite colour of {name}?"),
        _COLOURS,
    ),
    _Attribute(
        ("{subject} likes to eat {value}.", "{possessive} favourite food is {value}."),
        ("What does {name} like to eat?", "What is the favourite food of {name}?"),
        _words(
            "bread cheese rice soup pasta fish apples cherries cake olives beans honey pears plums"
        ),
    ),
    _Attribute(
        ("{subject} speaks {value}.", "{possessive} second language is {value}."),
        ("Which language does {name} speak?", "What is the second language of {name}?"),
        _words(
            "French German Spanish Italian Polish Czech Dutch Danish Greek Turkish Arabic Hindi "
            "Swedish Finnish"
        ),
    ),
    _Attribute(
        ("{subject} trains in {value}.", "{possessive} sport is {value}."),
        ("Which sport does {name} train in?", "What is the sport of {name}?"),
        _words(
            "tennis rowing fencing boxing cycling sailing skating golf rugby cricket hockey judo "
            "archery wrestling"
        ),
    ),
    _Attribute(
        ("{subject} grows {value}.", "{possessive} favourite flowers are {value}."),
        ("Which flowers does {name} grow?", "What are the favourite flowers of {name}?"),
        _words(
            "roses tulips lilies daisies violets orchids poppies peonies irises asters dahlias "
            "crocuses"
        ),
    ),
)

_COMPANY_ATTRIBUTES = (
    _Attribute(
        ("{subject} makes {value}.", "{possessive} main product is {value}."),
        ("What does {name} make?", "What is the main product of {name}?"),
        _words(
            "lamps clocks bicycles engines pumps radios chairs boots knives carpets mirrors "
            "kettles tents ropes bottles windows"
        ),
    ),
    _Attribute(
        ("{subject} was founded in {value}.", "{possessive} founding year is {value}."),
        ("In which year was {name} founded?", "What is the founding year of {name}?"),
        _YEARS,
    ),
    _Attribute(
        ("{subject} is based in {value}.", "{possessive} head office is in {value}."),
        ("Where is {name} based?", "In which city is the head office of {name}?"),
        _CITIES,
    ),
    _Attribute(
        ("{subject} paints everything {value}.", "{possessive} house colour is {value}."),
        ("Which colour does {name} paint everything?", "What is the house colour of {name}?"),
        _COLOURS,
    ),
    _Attribute(
        ("{subject} uses a {value} as a symbol.", "{possessive} symbol is a {value}."),
        ("Which animal does {name} use as a symbol?", "What is the symbol of {name}?"),
        _ANIMALS,
    ),
    _Attribute(
        ("{subject} buys {value} in bulk.", "{possessive} main material is {value}."),
        ("What does {name} buy in bulk?", "What is the main material of {name}?"),
        _words(
            "steel copper cotton leather rubber timber glass wool paper clay marble nylon cork zinc"
        ),
    ),
    _Attribute(
        ("{subject} sells mainly to {value}.", "{possessive} largest market is {value}."),
        ("Where does {name} mainly sell?", "What is the largest market of {name}?"),
        _words(
            "France Germany Spain Italy Poland Canada Mexico Brazil Chile Peru Japan India Egypt "
            "Kenya"
        ),
    ),
    _Attribute(
        ("{subject} closes every year in {value}.", "{possessive} holiday month is {value}."),
        ("When does {name} close every year?", "What is the holiday month of {name}?"),
        _words(
            "January February March April May June July August September October November December"
        ),
    ),
)

_KINDS = (
    _SubjectKind(_WOMEN, _LAST_NAMES, "she", "her", _PERSON_ATTRIBUTES),
    _SubjectKind(_MEN, _LAST_NAMES, "he", "his", _PERSON_ATTRIBUTES),
    _SubjectKind(
        _COMPANY_NAMES, _COMPANY_SUFFIXES, "the company", "the company's", _COMPANY_ATTRIBUTES
    ),
)
PRONOUNS = frozenset({"she", "her", "he", "his", "company"})
FIRST_NAMES = frozenset(_WOMEN + _MEN + _COMPANY_NAMES)

_INTRODUCTIONS = (
    "This note is about {name}.",
    "These pages describe {name}.",
    "What follows concerns {name}.",
    "The subject of this note is {name}.",
)
_OPENINGS = (
    "According to the records,",
    "As far as we know,",
    "It is well known that",
    "The files say that",
)
_ADJECTIVES = _words(
    "small quaint quiet large famous narrow warm cold bright dark gentle heavy simple modern "
    "wooden distant busy lonely pleasant steep"
)
_NOUNS = _words(
    "river market bridge garden museum station harbour forest tower square library school road "
    "valley theatre hotel kitchen letter story festival lake castle church street wall"
)
_TIMES = _words("morning evening summer winter spring autumn week season")
_VERBS = _words("stands lies opens waits begins changes rests remains appears")
_PLACES = _words("near behind beside above below beyond")
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
_SLOT = re.compile(r"\{(\w+)\}")
_TOKEN = re.compile(r"'s|\w+|[^\w\s]")


def estimate_tokens(text: str) -> int:
    """Words and punctuation marks, which the demo tokenizer makes one token each."""
    return len(_TOKEN.findall(text))


def is_held_out(first: int, last: int) -> bool:
    """Whether a pair of names, by index into its pools, is kept out of all training draws."""
    return (3 * first + last) % 8 == 0


def held_out_names() -> frozenset[str]:
    """Every full name that training never draws."""
    return frozenset(
        f"{first} {last}"
        for kind in _KINDS
        for i, first in enumerate(kind.first_names)
        for j, last in enumerate(kind.last_names)
        if is_held_out(i, j)
    )


def names_and_values() -> frozenset[str]:
    """The words that carry information: what a reader has to match and to copy."""
    words = [name for kind in _KINDS for name in (*kind.first_names, *kind.last_names)]
    for kind in _KINDS:
        words.extend(value for attribute in kind.attributes for value in attribute.values)
    return frozenset(words)


def vocabulary() -> frozenset[str]:
    """Every word the corpus can hold, for the tokenizer."""
    texts: list[str] = [*_INTRODUCTIONS, *_OPENINGS, *_FILLERS]
    for slot in _SLOTS.values():
        texts.extend(slot)
    for frame in (DEFAULT_FRAME, *OTHER_FRAMES):
        texts.extend((frame.head, frame.tail))
    for kind in _KINDS:
        texts.extend((*kind.first_names, *kind.last_names, kind.pronoun, kind.possessive))
        for attribute in kind.attributes:
            texts.extend((*attribute.statements, *attribute.questions, *attribute.values))
    plain = _SLOT.sub(" ", " ".join(texts))
    return frozenset(word for word in re.findall(r"\w+", plain))


def generate_prompts(
    setting: str,
    count: int,
    seed: int,
    *,
    held_out: bool = True,
    shape: CorpusShape = EVALUATION_SHAPE,
    referring_share: float = 0.75,
) -> list[DemoPrompt]:
    """Draw prompts of one question each.

    Args:
        setting: `adjacent` (whole documents in order), `fragments` (only the chunks that refer
            back, and only questions about them) or `shuffled` (all chunks in random order).
        count: how many prompts.
        seed: equal seeds give equal prompts.
        held_out: name only subjects that training never draws, or only ones it may draw.
        shape: size and difficulty of each prompt.
        referring_share: chance that a question is a referring one, where both kinds are possible.
    """
    if setting not in SETTINGS:
        raise ValueError(f"unknown setting {setting!r}; choose one of {', '.join(SETTINGS)}")
    rng = random.Random(f"prompts/{setting}/{seed}")
    return [_draw_prompt(rng, setting, shape, held_out, referring_share) for _ in range(count)]


def generate_collection(
    documents: int, questions: int, seed: int
) -> tuple[list[DemoDocument], list[DemoQuestion]]:
    """Draw one collection for retrieval, about subjects that differ in first and last name.

    A third each is about women, men and companies; a third's documents share their kinds of fact.
    Questions name their subject in full, and `question.document` indexes the collection.
    """
    rng = random.Random(f"collection/{documents}/{questions}/{seed}")
    kinds = [_KINDS[index % len(_KINDS)] for index in range(documents)]
    shape = CorpusShape(
        documents=(documents, documents),
        total_chunks=(2 * documents, 3 * documents),
        context_tokens=(240 * documents, 250 * documents),
    )
    drawn, pool = _draw_documents(rng, shape, kinds, held_out=True)
    if questions > len(pool):
        raise ValueError(f"{documents} documents answer only {len(pool)} questions")
    return drawn, rng.sample(pool, questions)


def draw_documents(
    rng: random.Random, shape: CorpusShape, *, held_out: bool = False
) -> tuple[list[DemoDocument], list[DemoQuestion]]:
    """Draw the documents of one prompt and, in random order, a question on each of their facts."""
    count = rng.randint(*shape.documents)
    if rng.random() < shape.mixed:
        kinds = rng.choices(_KINDS, k=count)
    else:
        kinds = [rng.choice(_KINDS)] * count
    return _draw_documents(rng, shape, kinds, held_out=held_out)


def _draw_prompt(
    rng: random.Random, setting: str, shape: CorpusShape, held_out: bool, referring_share: float
) -> DemoPrompt:
    documents, questions = draw_documents(rng, shape, held_out=held_out)
    retrieved = [(d, c) for d, doc in enumerate(documents) for c in range(len(doc.chunks))]
    wanted = "referring"
    if setting == "fragments":
        retrieved = [(d, c) for d, c in retrieved if c > 0]
    elif rng.random() >= referring_share:
        wanted = "direct"
    if setting == "shuffled":
        rng.shuffle(retrieved)
    question = next(q for q in questions if q.kind == wanted)
    return DemoPrompt(tuple(documents), tuple(retrieved), question, setting)


def _draw_documents(
    rng: random.Random, shape: CorpusShape, kinds: Sequence[_SubjectKind], *, held_out: bool
) -> tuple[list[DemoDocument], list[DemoQuestion]]:
    subjects = _draw_subjects(rng, kinds, shape.names, held_out)
    facts = _draw_facts(rng, shape, kinds)
    counts = _draw_chunk_counts(rng, shape, len(kinds))
    chunk_tokens = rng.randint(*shape.context_tokens) / sum(counts)
    explicit = rng.random() < shape.explicit
    documents: list[DemoDocument] = []
    questions: list[DemoQuestion] = []
    for index, (subject, count) in enumerate(zip(subjects, counts, strict=True)):
        direct, referring = next(facts)
        plan = [direct, *_split(rng, referring, count - 1)]
        writer = _Writer(rng, shape, subject, explicit)
        chunks = tuple(
            writer.chunk(part, position, chunk_tokens) for position, part in enumerate(plan)
        )
        documents.append(DemoDocument(f"{_slug(subject.name)}-{rng.randrange(16**6):06x}", chunks))
        for position, part in enumerate(plan):
            for fact in part:
                text = writer.question(fact.attribute)
                kind: QuestionKind = "referring" if position else "direct"
                questions.append(DemoQuestion(text, fact.value, kind, index, position))
    rng.shuffle(questions)
    return documents, questions


def _draw_subjects(
    rng: random.Random, kinds: Sequence[_SubjectKind], pools: tuple[int, int], held_out: bool
) -> list[_Subject]:
    """Subjects that differ in first and in last name while the pools last."""
    used: set[str] = set()
    subjects: list[_Subject] = []
    for kind in kinds:
        pairs = [
            (first, last)
            for i, first in enumerate(kind.first_names[: pools[0]])
            for j, last in enumerate(kind.last_names[: pools[1]])
            if is_held_out(i, j) == held_out and first not in used
        ]
        fresh = [pair for pair in pairs if pair[1] not in used]
        pair = rng.choice(fresh or pairs)
        used.update(pair)
        subjects.append(_Subject(" ".join(pair), kind))
    return subjects


def _draw_facts(
    rng: random.Random, shape: CorpusShape, kinds: Sequence[_SubjectKind]
) -> Iterator[tuple[list[_Fact], list[_Fact]]]:
    """Direct and referring facts a document: one choice of attributes a kind, distinct values."""
    direct, referring = rng.randint(*shape.direct_facts), rng.randint(*shape.referring_facts)
    chosen: dict[str, list[_Attribute]] = {}
    values: dict[tuple[str, int], list[str]] = {}
    for kind in kinds:
        if kind.pronoun not in chosen:
            chosen[kind.pronoun] = rng.sample(kind.attributes, direct + referring)
        facts: list[_Fact] = []
        for index, attribute in enumerate(chosen[kind.pronoun]):
            left = values.setdefault((kind.pronoun, index), [])
            if not left:
                left.extend(rng.sample(attribute.values, len(attribute.values)))
            facts.append(_Fact(attribute, left.pop()))
        yield facts[:direct], rng.sample(facts[direct:], referring)


def _draw_chunk_counts(rng: random.Random, shape: CorpusShape, documents: int) -> list[int]:
    low, high = shape.total_chunks
    while True:
        counts = [rng.randint(*shape.chunks) for _ in range(documents)]
        if low <= sum(counts) <= high:
            return counts


def _split(rng: random.Random, facts: list[_Fact], parts: int) -> list[list[_Fact]]:
    """Cut a list at random places into parts that all hold something."""
    cuts = sorted(rng.sample(range(1, len(facts)), parts - 1))
    return [facts[i:j] for i, j in zip([0, *cuts], [*cuts, len(facts)], strict=True)]


@dataclass(frozen=True)
class _Writer:
    """Puts facts about one subject into words."""

    rng: random.Random
    shape: CorpusShape
    subject: _Subject
    explicit: bool

    def question(self, attribute: _Attribute) -> str:
        name = self.subject.name
        if not self.shape.begun:
            return self._choose(attribute.questions).format(name=name)
        begun = self._choose(attribute.statements).partition(" {value}")[0]
        return begun.format(subject=name, possessive=f"{name}'s")

    def chunk(self, facts: Sequence[_Fact], position: int, tokens: float) -> str:
        """One passage: facts in the given order, fillers between, the introduction first."""
        rng = self.rng
        sentences = [self._statement(fact, position) for fact in facts]
        opening: list[str] = []
        if position == 0:
            opening.append(rng.choice(_INTRODUCTIONS).format(name=self.subject.name))
        length = sum(map(estimate_tokens, sentences + opening))
        while length < tokens - 6:
            filler = _SLOT.sub(lambda slot: rng.choice(_SLOTS[slot[1]]), rng.choice(_FILLERS))
            sentences.insert(rng.randint(0, len(sentences)), filler)
            length += estimate_tokens(filler)
        return " ".join(opening + sentences)

    def _statement(self, fact: _Fact, position: int) -> str:
        rng, name, kind = self.rng, self.subject.name, self.subject.kind
        named = self.explicit if position else rng.random() < 0.5
        sentence = self._choose(fact.attribute.statements).format(
            subject=name if named else kind.pronoun,
            possessive=f"{name}'s" if named else kind.possessive,
            value=fact.value,
        )
        if self.shape.wordings > 1 and rng.random() < 0.2:
            return f"{rng.choice(_OPENINGS)} {sentence}"
        return sentence[0].upper() + sentence[1:]

    def _choose(self, wordings: tuple[str, ...]) -> str:
        return self.rng.choice(wordings[: self.shape.wordings])


def _slug(name: str) -> str:
    return name.lower().replace(" ", "-")
