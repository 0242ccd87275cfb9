"""``tune``: a table, a profile, an exit code."""

from __future__ import annotations

import pytest

from cacheblend_rag import Profile
from tests.toy import TOY
from tests.toy.questions import toy_dataset


@pytest.fixture
def dataset(tmp_path):
    toy_dataset(("adjacent",), 2, 13).save(tmp_path / "questions.json")
    return tmp_path / "questions.json"


def test_a_profile_is_written_and_says_where_it_was_measured(cli, dataset, tmp_path):
    arguments = (
        "tune", TOY, "--dataset", dataset, "--rules", "none=0", "--bar", "fidelity=0.01",
        "--out", tmp_path / "mine.toml", "--resume", tmp_path / "results.jsonl",
    )  # fmt: skip
    first = cli(*arguments, "--json")
    assert first.code == 0
    assert first.json["outcome"] == "plain reuse"
    assert len(first.json["candidates"]) == 1
    profile = Profile.load(tmp_path / "mine.toml")
    assert (profile.name, profile.model) == ("mine", "toy")
    assert profile.measured["prompts"] == 2
    told = (tmp_path / "results.jsonl").read_text()
    page = cli(*arguments)
    assert (tmp_path / "results.jsonl").read_text() == told
    assert "plain reuse is enough" in page.stdout
    assert f"--set profile={tmp_path / 'mine.toml'}" in page.stdout.replace("\n", "")


def test_it_refuses_and_writes_nothing(cli, dataset, tmp_path):
    outcome = cli(
        "tune", TOY, "--dataset", dataset, "--rules", "none=0", "--set", "kind=instruction",
        "--bar", "fidelity", "--out", tmp_path / "none.toml",
    )  # fmt: skip
    assert outcome.code == 1
    assert "do not blend this model on such questions" in outcome.stdout
    assert not (tmp_path / "none.toml").exists()
