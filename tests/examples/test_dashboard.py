"""The dashboard is what its generator writes, and is whole."""

from __future__ import annotations

import re

from tests.examples.dashboard import FOLDER, asked, generator, panels, queries

WANTED = ("chunk_misses", "phase_seconds", "load_seconds", "guard_divergence", "guard_samples",
          "guard_stopped", "recompute_ratio", "time_to_first_token_seconds")  # fmt: skip


def test_the_dashboard_is_what_its_generator_writes() -> None:
    written = (FOLDER / "dashboard.json").read_text(encoding="utf-8")
    assert written == generator().as_json(), "run python examples/observability/dashboard.py"


def test_panels_stand_side_by_side_and_name_their_queries() -> None:
    places = set()
    for panel in panels():
        place = panel["gridPos"]
        places.add((place["x"], place["y"]))
        letters = [target["refId"] for target in panel["targets"]]
        assert len(set(letters)) == len(letters) > 0
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["description"]
    assert len(places) == len(list(panels())) == 12
    assert {x for x, _ in places} == {0, 12}


def test_queries_cover_what_there_is_to_see() -> None:
    named = " ".join(query for _, query in queries())
    assert [one for one in WANTED if one not in named] == []


def test_variables_are_the_dashboards_own() -> None:
    for _, query in queries():
        left = asked(query, generator().SERVER)
        assert not re.search(r"\$", left), left
