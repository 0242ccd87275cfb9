from __future__ import annotations

import re
from collections import Counter

import pytest

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.quality.data.needles import TASKS, generate
from cacheblend_rag.quality.data.sentences import estimate_tokens


def text(question) -> str:
    return " ".join(passage.text for passage in question.passages)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("tokens", [2000, 6000])
@pytest.mark.parametrize("setting", ["adjacent", "shuffled"])
def test_text_fills_the_tokens_and_is_cut_into_documents(task, tokens, setting):
    for question in generate(task, tokens, 4, 1, setting=setting).questions:
        lengths = [estimate_tokens(passage.text) for passage in question.passages]
        assert 0.85 * tokens <= sum(lengths) <= 1.02 * tokens
        assert max(lengths) <= 100
        assert len(question.documents) > 1
        chunks = [chunk for d in question.documents for chunk in d.to_chunks()]
        assert all(len(d.chunks) > 1 for d in question.documents[:-1])
        assert set(question.passages) == set(chunks)
        assert (list(question.passages) == chunks) == (setting == "adjacent")
        assert question.setting == setting


def test_chunks_are_as_long_as_asked():
    for question in generate("vt", 3000, 2, 1, len, chunk_tokens=300).questions:
        assert all(200 < len(passage.text) <= 320 for passage in question.passages[:-1])


@pytest.mark.parametrize("setting", ["adjacent", "shuffled"])
def test_a_needle_stands_once_in_the_text_and_tells_the_answer(setting):
    kinds = Counter()
    for question in generate("niah", 2000, 8, 5, setting=setting).questions:
        kinds[question.kind] += 1
        (answer,) = question.answers
        told = re.findall(r"The magic number of the (\w+ \w+) is (\d{7})\.", text(question))
        assert len(told) == len(dict(told)) == (4 if question.kind == "niah multi-key" else 1)
        (key,) = re.findall(r"the magic number of the (\w+ \w+)\?", question.question)
        assert dict(told)[key] == answer
        assert text(question).count(answer) == 1
        assert [answer in chunk.text for chunk in question.gold] == [True]
    assert kinds == {"niah single": 4, "niah multi-key": 4}


@pytest.mark.parametrize("setting", ["adjacent", "shuffled"])
def test_the_chain_of_variables_leads_to_the_value(setting):
    for question in generate("vt", 2000, 8, 5, setting=setting).questions:
        told = dict(re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", text(question)))
        (value,) = re.findall(r"have the value (\d+)\?", question.question)
        chain = [next(name for name, source in told.items() if source == value)]
        while following := [name for name, source in told.items() if source == chain[-1]]:
            chain += following
        assert question.answers == (", ".join(chain),)
        assert len(chain) == len(told) == 5
        held = " ".join(chunk.text for chunk in question.gold)
        assert all(f"VAR {name} =" in held for name in chain)


def test_variables_are_set_before_they_are_used():
    for question in generate("vt", 2000, 8, 5).questions:
        places = [text(question).index(f"VAR {n} =") for n in question.answers[0].split(", ")]
        assert places == sorted(places)


def test_common_words_occur_thirty_times_and_others_three_times():
    for question in generate("cwe", 4000, 3, 5).questions:
        listed = re.findall(r"(\d+)\. (\w+)", text(question))
        assert [int(place) for place, _ in listed] == list(range(1, len(listed) + 1))
        counts = Counter(word for _, word in listed)
        common = {word for word, times in counts.items() if times == 30}
        assert set(question.answers[0].split(", ")) == common
        assert len(common) == 10
        assert {counts[word] for word in counts.keys() - common} == {3}
        assert question.gold == question.passages


@pytest.mark.parametrize("task", TASKS)
def test_the_same_seed_gives_the_same_data(task):
    first, again, other = (generate(task, 2000, 2, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert first.questions[0] != first.questions[1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("qa", 2000, 1, 1), "task='qa' of RULER must be one of niah, vt, cwe"),
        (("niah", 0, 1, 1), "tokens=0"),
        (("niah", 20, 1, 1), "tokens=20 is too few"),
        (("vt", 90, 1, 1), "tokens=90 is too few"),
        (("cwe", 900, 1, 1), "tokens=900 is too few"),
        (("cwe", 60_000, 1, 1), "tokens=60000 is more than the words"),
    ],
)
def test_wrong_sizes_and_names_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        generate(*given)


def test_fragments_are_refused():
    with pytest.raises(ConfigError, match="setting='fragments' of RULER must be one of"):
        generate("niah", 2000, 1, 1, setting="fragments")
