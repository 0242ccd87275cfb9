"""Invented documents about buildings, whose later chunks say "it", "the library" or another title.

A chunk alone does not tell what a question asks, the prompt does: the first chunk names the
building and perhaps two architects, of whom the second one says "the former"; the opening may be
"in the same year as the theatre of Velden", and the architect that of another building.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import cycle, islice

CHUNKS = 3  # of a document: what it is, whose plans it has, its opening and who paid
FORMS = ("it", "same year", "former", "same architect")
"""What is asked, by turns; every second document refers to another one in one of these ways."""
THINGS = (
    *("library", "theatre", "lighthouse", "town hall", "school", "windmill", "museum", "castle"),
    *("hospital", "railway station", "observatory", "brewery", "concert hall", "swimming bath"),
)
STARTS = ("Vel", "Mar", "Kor", "Tas", "Bel", "Dun", "Hal", "Os", "Rin", "Sol", "Fen", "Gar")
TOWNS = [a + b for a in STARTS for b in ("den", "row", "vik", "mere", "ford", "lin", "stad", "by")]
TITLES = [f"the {thing} of {town}" for thing in THINGS for town in TOWNS]
FIRST_NAMES = ("Ilsa", "Bram", "Nora", "Edwin", "Petra", "Oskar", "Lena", "Hugo", "Marta", "Felix")
LAST_NAMES = [a + b for a in STARTS for b in ("sen", "berg", "mann", "ova", "ini", "well", "ström")]
PEOPLE = [f"{first} {last}" for first in FIRST_NAMES for last in LAST_NAMES]
FILLERS = (
    "Its walls are of pale stone that was brought down the river on {n} barges.",
    "On market days people from {t} used to meet in front of it and trade wool and salt.",
    "The roof was repaired after a storm that had torn away {n} of its tiles.",
    "Schoolchildren learn a short song about it, which has {n} verses.",
    "In winter the steps in front of it are strewn with sand, since they are steep.",
    "A brass plate beside the entrance thanks the {n} workers who took part.",
    "Its cellar was flooded twice, and the marks of the water can still be seen.",
    "Its windows face south, so that even small rooms are bright until the evening.",
    "Swallows nest under its eaves and come back in the first warm week of the year.",
    "It was closed for {n} weeks when the heating had to be replaced.",
    "The iron gate beside it came from a workshop in {t} and weighs more than a cart.",
    "Letters to the newspaper complained about its colour, and later praised the same colour.",
    "From its highest point one can see {n} church towers on a clear day.",
    "Its clock is always a little late, and nobody in the town wants it to be mended.",
    "A postcard of it was sold all over the region and carried its picture as far as {t}.",
    "The floor is laid with grey and red tiles in a pattern of {n} stars.",
    "At night it is lit by lamps that were once part of a ship.",
    "Its bell, which is cracked, is rung only on the last day of the year.",
    "The narrow lane behind it leads to a square with a well and {n} benches.",
    "Carpenters from {t} made its doors, which are so heavy that two people open them.",
    "It has often been compared with a ship, because of its long and narrow shape.",
    "Cats are welcome in it, a custom that nobody can explain any more.",
    "Some of its older furniture was sold to a collector in {t} and later given back.",
)
Made = tuple[str, tuple[str, ...], Sequence[Sequence[str]], Sequence[tuple[int, int]]]


def referring_documents(
    rng: random.Random, index: int, tokens: int, chunk_tokens: int, count: Callable[[str], int]
) -> Made:
    """Return a question, its answers, documents in chunks, and the chunks that it needs."""
    number = max(2, round(tokens / (CHUNKS * chunk_tokens)))
    things = list(islice(cycle(rng.sample(THINGS, len(THINGS))), number))
    towns, years = rng.sample(TOWNS, number), rng.sample(range(1780, 1940), number)
    titles = [f"the {thing} of {town}" for thing, town in zip(things, towns, strict=True)]
    people = iter(rng.sample(PEOPLE, 3 * number))
    architects, rivals, donors = (list(islice(people, number)) for _ in range(3))
    asked = FORMS[index % len(FORMS)]
    written: list[Sequence[str]] = []
    for at, title in enumerate(titles):  # the question is about the first, which names the second
        form = "" if at % 2 else rng.choice(FORMS) if at else asked
        other = titles[at + 1 if at + 1 < number else 1]
        keys = [
            f"{title[0].upper()}{title[1:]} is known far beyond the town.",
            f"The {things[at]} was designed by the architect {architects[at]}.",
            f"The {things[at]} was opened in {years[at]}.",
        ]
        if form == "same year":
            keys[2] = f"The {things[at]} was opened in the same year as {other}."
        elif form == "same architect":
            keys[1] = f"The {things[at]} was designed by the architect of {other}."
        elif form == "former":
            pair = rng.sample((architects[at], rivals[at]), 2)
            keys[0] += f" Two architects, {pair[0]} and {pair[1]}, drew plans for it."
            chosen = ("former", "latter")[pair.index(architects[at])]
            keys[1] = f"The {things[at]} was built after the plans of the {chosen}."
        keys[2] += f" It was paid for by {donors[at]}."
        fillers: list[str] = []
        chunks: list[str] = []
        for key in keys:
            told, room = [key], tokens / (number * CHUNKS) - count(key)
            while room > 8:
                fillers = fillers or rng.sample(FILLERS, len(FILLERS))
                told.append(fillers.pop().format(n=rng.randint(3, 40), t=rng.choice(TOWNS)))
                room -= count(told[-1])
            if chunks:  # the first chunk begins with its title
                rng.shuffle(told)
            chunks.append(" ".join(told))
        written.append(chunks)
    question, answer, place = {
        "it": (f"Who paid for {titles[0]}?", donors[0], 2),
        "same year": (f"In which year was {titles[0]} opened?", str(years[1]), 2),
        "former": (f"After whose plans was {titles[0]} built?", architects[0], 1),
        "same architect": (f"Who was the architect of {titles[0]}?", architects[1], 1),
    }[asked]
    order = rng.sample(range(number), number)
    named = range(2 if asked.startswith("same") else 1)
    gold = [(order.index(at), chunk) for at in named for chunk in (0, place)]
    return question, (answer,), [written[at] for at in order], gold
