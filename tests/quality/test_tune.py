"""`tune` on the bundled model: it finds what is known of it, goes on, and can refuse."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag import TieredKVStore, load_tokenizer
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.kv import ChunkKV
from cacheblend_rag.quality.dataset import EvalDataset, PromptFrame
from cacheblend_rag.quality.evaluator import opened_engines
from cacheblend_rag.quality.ladder import Candidate
from cacheblend_rag.quality.measuring import QuestionMeasurer
from cacheblend_rag.quality.records import RecordLog
from cacheblend_rag.quality.tune import Tuned, mixed, pareto, plot, tune
from cacheblend_rag.settings import EMBEDDED, BlendConfig, Profile
from tests.toy import TOY
from tests.toy.questions import toy_dataset

DATA = toy_dataset(("adjacent",), 3, 13)
REUSE = Candidate("document", "none", 0.0)
BAD = Candidate("instruction", "none", 0.0)
FEW = Candidate("instruction", "random", 0.05)


@contextmanager
def engines() -> Iterator[Any]:
    frame = PromptFrame.of(load_tokenizer(TOY), DATA.instruction)
    with opened_engines(
        EMBEDDED, TOY, ["instruction", "document"], instruction=frame.opening
    ) as opened:
        yield opened, frame


def tuned_on(data: EvalDataset, *tried: Candidate, **options: Any) -> Tuned:
    with engines() as (opened, frame):
        return tune(opened, frame, data, tried, **options)


@pytest.fixture(autouse=True)
def _full_prefill_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found does not depend on the machine's load: times are the work that was done."""
    measure = QuestionMeasurer.measure

    def timed(self: QuestionMeasurer, *given: Any) -> Iterator[Any]:
        for rule, record in measure(self, *given):
            yield rule, replace(record, ttft_seconds=record.compute_share)

    monkeypatch.setattr(QuestionMeasurer, "measure", timed)


@pytest.mark.parametrize("bar", ["score", "fidelity"])
def test_plain_reuse_of_contextual_kv_is_found_to_be_enough(bar: Any, tmp_path: Path) -> None:
    rounds: list[str] = []

    def on_round(name: str, steps: int) -> Any:
        rounds.append(name)
        return lambda: None

    found = tuned_on(DATA, BAD, FEW, REUSE, bar=bar, on_round=on_round, name="mine")
    assert found.outcome == "plain reuse"
    assert found.advice.startswith("plain reuse is enough: document none 0, ")
    assert rounds == ["3 settings, 3 prompts"]
    held = {one.candidate for one in found.standings if one.holds}
    assert REUSE in held
    assert BAD not in held
    assert found.profile is not None
    found.profile.save(tmp_path / "mine.toml")
    again = Profile.load(tmp_path / "mine.toml")
    assert (again.name, again.model, again.lead_in.kind) == ("mine", "toy", "document")
    assert again.blended(BlendConfig()).ratio == 0.0
    assert again.measured["bar"] == bar
    assert again.measured["prompts"] == 3
    assert found.to_dict()["profile"] == again.to_dict()


def test_a_model_that_blending_ruins_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    put = TieredKVStore.put

    def scrambled(store: TieredKVStore, key: Any, kv: Any) -> Any:
        return put(store, key, ChunkKV.of(kv.keys, kv.values.flip(2), kv.position, kv.prior))

    monkeypatch.setattr(TieredKVStore, "put", scrambled)
    found = tuned_on(DATA, REUSE, Candidate("document", "prior", 0.25), bar="fidelity")
    assert (found.outcome, found.profile) == ("do not blend", None)
    assert found.advice.startswith("do not blend this model on such questions")
    assert not any(one.holds for one in found.standings)
    assert found.to_dict()["profile"] is None


def test_it_goes_on_where_it_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, measure, asked = tmp_path / "results.jsonl", QuestionMeasurer.measure, []

    def counted(self: QuestionMeasurer, question: Any, rules: Any) -> Iterator[Any]:
        asked.append(question.question)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return measure(self, question, rules)

    monkeypatch.setattr(QuestionMeasurer, "measure", counted)
    with pytest.raises(KeyboardInterrupt):
        tuned_on(DATA, REUSE, bar="fidelity", log=RecordLog.resumed(path))
    first = tuned_on(DATA, REUSE, bar="fidelity", log=RecordLog.resumed(path))
    assert len(asked) == 4  # the last question alone was asked again
    again = tuned_on(DATA, REUSE, bar="fidelity", log=RecordLog.resumed(path))
    assert len(asked) == 4
    assert again.to_dict() == first.to_dict()


def test_questions_without_answers_are_compared_by_fidelity() -> None:
    bare = replace(DATA, questions=(replace(DATA.questions[0], answers=()),))
    found = tuned_on(bare, REUSE)
    assert (found.bar.kind, found.outcome) == ("fidelity", "plain reuse")


def test_answers_that_the_model_never_gives_are_no_measure() -> None:
    wrong = replace(DATA, questions=(replace(DATA.questions[0], answers=("zebra",)),))
    with pytest.raises(ConfigError, match="full prefill answered none of 1 questions"):
        tuned_on(wrong, REUSE)


def test_bad_input_is_one_line() -> None:
    with pytest.raises(ConfigError, match="must be at least 1 each"):
        tuned_on(replace(DATA, questions=()), REUSE)
    with pytest.raises(ConfigError, match="lead_in='bos' has no engine"):
        tuned_on(DATA, Candidate("bos", "none", 0.0))
    with pytest.raises(ConfigError, match="least=2"):
        tuned_on(DATA, REUSE, least=2)


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    found = tuned_on(DATA, BAD, FEW, REUSE, bar="fidelity")
    front = pareto(found.standings)
    assert REUSE in [one.candidate for one in front]
    assert FEW not in [one.candidate for one in front]
    plot(found, tmp_path / "drawn.svg")
    named = [one for one in found.standings if one.holds or one in front]
    drawn = (tmp_path / "drawn.svg").read_text()
    assert all(f"<!-- {one.candidate.label} -->" in drawn for one in named)


def test_questions_of_all_settings_take_turns() -> None:
    both = toy_dataset(("adjacent", "shuffled"), 3, 11)
    assert [one.setting for one in mixed(both, 4).questions] == ["adjacent", "shuffled"] * 2
    assert len(mixed(both, 100).questions) == 6
