"""``verify``: one page, or JSON, and an exit code."""

from __future__ import annotations

import pytest

from tests.toy import TOY
from tests.toy.questions import toy_dataset

CHECKS = {"template", "precision", "blending", "exactness", "stored KV", "fidelity"}


@pytest.fixture
def dataset(tmp_path):
    toy_dataset(("adjacent",), 2, 5).save(tmp_path / "questions.json")
    return tmp_path / "questions.json"


def test_a_sound_model_passes(cli, dataset):
    outcome = cli("verify", TOY, "--dataset", dataset, "--json")
    assert outcome.code == 0
    assert {check["name"] for check in outcome.json["checks"]} == CHECKS
    assert {check["status"] for check in outcome.json["checks"]} == {"ok"}
    assert outcome.json["checks"][-1]["measured"]["prompts"] == 2


def test_a_profile_that_loses_too_much_fails_on_one_page(cli, dataset, tmp_path):
    (tmp_path / "reuse.toml").write_text(
        '[blend]\nselector = "none"\nrecompute_ratio = 0.0\n[lead_in]\nkind = "instruction"\n'
    )
    outcome = cli(
        "verify", TOY, "--dataset", dataset, "--set", f"profile={tmp_path / 'reuse.toml'}",
    )  # fmt: skip
    assert outcome.code == 1
    assert "do not blend this model: it failed fidelity" in outcome.stdout
    assert all(name in outcome.stdout for name in CHECKS)
