"""Who and what the notes are about: name pools, and what is told of a person or a company."""

from __future__ import annotations

from dataclasses import dataclass


def words(text: str) -> tuple[str, ...]:
    """Cut a text at blanks."""
    return tuple(text.split())


@dataclass(frozen=True)
class Attribute:
    """One kind of fact; every statement tells subject and kind before the value."""

    statements: tuple[str, ...]
    questions: tuple[str, ...]
    values: tuple[str, ...]


@dataclass(frozen=True)
class SubjectKind:
    """A type of subject: its name pools, its pronouns and what is told about it."""

    first_names: tuple[str, ...]
    last_names: tuple[str, ...]
    pronoun: str
    possessive: str
    attributes: tuple[Attribute, ...]


WOMEN = words(
    "Clara Edith Greta Helga Irene Julia Karin Laura Maria Nora Petra Sara Tilda Ursula Vera Wanda "
    "Agnes Berta Doris Elena Freya Hanna Ingrid Johanna Lena Monika Paula Renate Sophie Teresa "
    "Viola Yvonne"
)
MEN = words(
    "Adam Boris Carl David Emil Frank Georg Hugo Ivan Jonas Konrad Lars Martin Nils Oscar Paul "
    "Ralf Simon Tomas Ulrich Victor Walter Xaver Anton Bruno Dieter Erik Felix Gustav Henrik "
    "Isaac Julius"
)
_LAST_NAMES = words(
    "Berg Lund Stone Marsh Field Wood Hill Brook Dahl Falk Grant Holm Jansen Keller Lang Moser "
    "Novak Olsen Peters Quist Roth Sander Thorn Unger Vogel Weber Zeller Abbot Carver Dunn Ellis "
    "Fisher Gibbs Harper Irwin Jarvis Kemp Lowell Mason Nash Orton Parker Reeves Salter Turner "
    "Upton Vance Wyatt"
)
COMPANY_NAMES = words(
    "Zenith Acme Orion Vertex Lumen Polar Nova Titan Quartz Helix Delta Omega Sigma Apex Atlas "
    "Borealis Cobalt Dynamo Ember Fulcrum Granite Horizon Jupiter Kestrel Lattice Meridian Nimbus "
    "Obsidian Pinnacle Raven Summit Tundra"
)
_COMPANY_SUFFIXES = words(
    "Works Systems Motors Brothers Partners Industries Supply Trading Group Holdings Company Union "
    "Stores Limited Enterprises Services"
)

_CITIES = words(
    "Paris London Berlin Madrid Rome Vienna Prague Oslo Lisbon Dublin Athens Cairo Delhi Tokyo "
    "Seoul Lima Quito Boston Denver Dallas Toronto Sydney Geneva Milan"
)
_COLOURS = words("red blue green yellow purple orange black white brown pink grey silver")
_ANIMALS = words(
    "dog cat parrot rabbit turtle hamster goat pony lizard ferret canary goldfish horse donkey"
)

_YEARS = tuple(str(year) for year in range(1948, 1988))

_PERSON_ATTRIBUTES = (
    Attribute(
        ("{subject} works as a {value}.", "{possessive} job is that of a {value}."),
        ("What is the job of {name}?", "What does {name} work as?"),
        words(
            "painter baker doctor lawyer teacher farmer pilot sailor nurse singer writer judge "
            "chemist tailor gardener carpenter butcher plumber banker dentist"
        ),
    ),
    Attribute(
        ("{subject} was born in {value}.", "{possessive} year of birth is {value}."),
        ("In which year was {name} born?", "What is the year of birth of {name}?"),
        _YEARS,
    ),
    Attribute(
        ("{subject} lives in {value}.", "{possessive} home is in {value}."),
        ("Where does {name} live?", "In which city is the home of {name}?"),
        _CITIES,
    ),
    Attribute(
        ("{subject} plays the {value}.", "{possessive} instrument is the {value}."),
        ("Which instrument does {name} play?", "What is the instrument of {name}?"),
        words(
            "piano violin cello flute guitar harp trumpet drums oboe organ banjo clarinet trombone "
            "accordion"
        ),
    ),
    Attribute(
        ("{subject} owns a {value}.", "{possessive} pet is a {value}."),
        ("Which animal does {name} own?", "What is the pet of {name}?"),
        _ANIMALS,
    ),
    Attribute(
        ("{subject} likes the colour {value}.", "{possessive} favourite colour is {value}."),
        ("Which colour does {name} like?", "What is the favourite colour of {name}?"),
        _COLOURS,
    ),
    Attribute(
        ("{subject} likes to eat {value}.", "{possessive} favourite food is {value}."),
        ("What does {name} like to eat?", "What is the favourite food of {name}?"),
        words(
            "bread cheese rice soup pasta fish apples cherries cake olives beans honey pears plums"
        ),
    ),
    Attribute(
        ("{subject} speaks {value}.", "{possessive} second language is {value}."),
        ("Which language does {name} speak?", "What is the second language of {name}?"),
        words(
            "French German Spanish Italian Polish Czech Dutch Danish Greek Turkish Arabic Hindi "
            "Swedish Finnish"
        ),
    ),
    Attribute(
        ("{subject} trains in {value}.", "{possessive} sport is {value}."),
        ("Which sport does {name} train in?", "What is the sport of {name}?"),
        words(
            "tennis rowing fencing boxing cycling sailing skating golf rugby cricket hockey judo "
            "archery wrestling"
        ),
    ),
    Attribute(
        ("{subject} grows {value}.", "{possessive} favourite flowers are {value}."),
        ("Which flowers does {name} grow?", "What are the favourite flowers of {name}?"),
        words(
            "roses tulips lilies daisies violets orchids poppies peonies irises asters dahlias "
            "crocuses"
        ),
    ),
)

_COMPANY_ATTRIBUTES = (
    Attribute(
        ("{subject} makes {value}.", "{possessive} main product is {value}."),
        ("What does {name} make?", "What is the main product of {name}?"),
        words(
            "lamps clocks bicycles engines pumps radios chairs boots knives carpets mirrors "
            "kettles tents ropes bottles windows"
        ),
    ),
    Attribute(
        ("{subject} was founded in {value}.", "{possessive} founding year is {value}."),
        ("In which year was {name} founded?", "What is the founding year of {name}?"),
        _YEARS,
    ),
    Attribute(
        ("{subject} is based in {value}.", "{possessive} head office is in {value}."),
        ("Where is {name} based?", "In which city is the head office of {name}?"),
        _CITIES,
    ),
    Attribute(
        ("{subject} paints everything {value}.", "{possessive} house colour is {value}."),
        ("Which colour does {name} paint everything?", "What is the house colour of {name}?"),
        _COLOURS,
    ),
    Attribute(
        ("{subject} uses a {value} as a symbol.", "{possessive} symbol is a {value}."),
        ("Which animal does {name} use as a symbol?", "What is the symbol of {name}?"),
        _ANIMALS,
    ),
    Attribute(
        ("{subject} buys {value} in bulk.", "{possessive} main material is {value}."),
        ("What does {name} buy in bulk?", "What is the main material of {name}?"),
        words(
            "steel copper cotton leather rubber timber glass wool paper clay marble nylon cork zinc"
        ),
    ),
    Attribute(
        ("{subject} sells mainly to {value}.", "{possessive} largest market is {value}."),
        ("Where does {name} mainly sell?", "What is the largest market of {name}?"),
        words(
            "France Germany Spain Italy Poland Canada Mexico Brazil Chile Peru Japan India Egypt "
            "Kenya"
        ),
    ),
    Attribute(
        ("{subject} closes every year in {value}.", "{possessive} holiday month is {value}."),
        ("When does {name} close every year?", "What is the holiday month of {name}?"),
        words(
            "January February March April May June July August September October November December"
        ),
    ),
)

KINDS = (
    SubjectKind(WOMEN, _LAST_NAMES, "she", "her", _PERSON_ATTRIBUTES),
    SubjectKind(MEN, _LAST_NAMES, "he", "his", _PERSON_ATTRIBUTES),
    SubjectKind(
        COMPANY_NAMES, _COMPANY_SUFFIXES, "the company", "the company's", _COMPANY_ATTRIBUTES
    ),
)


def is_held_out(first: int, last: int) -> bool:
    """Whether a pair of names, by index into its pools, is kept out of all training draws."""
    return (3 * first + last) % 8 == 0
