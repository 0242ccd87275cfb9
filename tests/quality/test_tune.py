"""`tune` on the toy model: it finds what is known of it, and can refuse."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.quality import measure as measuring
from cacheblend_rag.quality.tune import Bar, mixed, tune_model
from cacheblend_rag.settings import BlendConfig, Profile
from tests.toy import TOY
from tests.toy.questions import toy_dataset

DATA = toy_dataset(("adjacent",), 3, 13)


@pytest.fixture(autouse=True)
def _full_prefill_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found does not depend on the machine's load: times are the work that was done."""
    record = measuring.Record

    def timed(**figures: Any) -> Any:
        return record(**{**figures, "ttft_seconds": figures["compute_share"]})

    monkeypatch.setattr(measuring, "Record", timed)


@pytest.mark.parametrize("bar", ["recovered", "fidelity=0.9"])
def test_plain_reuse_of_contextual_kv_is_found_to_be_enough(bar: str, tmp_path: Path) -> None:
    prompts: list[int] = []
    found = tune_model(TOY, DATA, bar=bar, name="mine", on_prompt=lambda: prompts.append(1))
    assert found.outcome == "plain reuse"
    assert found.advice.startswith("plain reuse is enough: document reuse: ")
    assert len(prompts) == 3
    tried = [one.rule.name for one in found.tried]
    assert {"instruction reuse", "document question_mid=0.08", "document hkvd=0.25"} < {*tried}
    assert len(tried) == 8
    speedups = [one.row.ttft_speedup.value for one in found.tried]
    assert speedups == sorted(speedups, reverse=True)
    held = {one.rule.name for one in found.tried if one.holds}
    assert "document reuse" in held
    assert "instruction reuse" not in held
    assert found.profile is not None
    found.profile.save(tmp_path / "mine.toml")
    again = Profile.load(tmp_path / "mine.toml")
    assert (again.name, again.model, again.lead_in.kind) == ("mine", "toy", "document")
    assert again.blended(BlendConfig()).ratio == 0.0
    assert (again.measured["bar"], again.measured["prompts"]) == (bar.partition("=")[0], 3)
    assert found.to_dict()["profile"] == again.to_dict()


def test_answers_that_the_model_never_gives_are_no_measure() -> None:
    wrong = replace(DATA, questions=(replace(DATA.questions[0], answers=("zebra",)),))
    with pytest.raises(ConfigError, match="full prefill answered none of 1 questions"):
        tune_model(TOY, wrong, rules="none=0")


@pytest.mark.parametrize("bar", ["best", "recovered=2", "recovered=0", "fidelity=most"])
def test_a_wrong_bar_is_one_line(bar: str) -> None:
    with pytest.raises(ConfigError, match=f"bar '{bar}"):
        Bar.read(bar)


def test_questions_of_all_settings_take_turns() -> None:
    both = toy_dataset(("adjacent", "shuffled"), 3, 11)
    wanted = [both.questions[at].question for at in (0, 3, 1, 4)]
    assert [one.question for one in mixed(both, 4).questions] == wanted
    assert mixed(both, 4).settings == ("retrieved",)
    assert len(mixed(both, 100).questions) == 6
