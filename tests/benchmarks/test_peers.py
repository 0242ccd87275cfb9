"""Peers' figures come from the records as they should; the run itself takes half an hour."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks import peers
from tests.toy import TOY


def record(full: float, own: float, none: float, kl: float) -> peers.Record:
    """A record of a prompt whose own full prefill takes twice as long as its first token."""
    kinds = {"own": own, "full": full, "none": none}
    scored = {f"{kind}_{name}": one for kind, one in kinds.items() for name in peers.SCORES}
    seconds = {
        f"{of}_{name}": one for of, one in (("first", 2), ("own_full", 4)) for name in peers.CLOCKS
    }
    return {"scenario": "prefix", "system": "one", "kl": kl, "same": 1.0, **scored, **seconds}


def test_figures_are_ratios_of_sums_over_the_prompts_that_full_prefill_answers() -> None:
    (row,) = peers.rows(
        [record(1.0, 0.5, 0.0, 0.2), record(1.0, 1.0, 0.5, 0.4), record(0, 1, 0, 0.6)]
    )
    assert row["answered"] == 2
    assert row["kl"][0] == pytest.approx(0.4)
    assert row["speedup_wall"][0] == row["speedup_cpu"][0] == 2
    assert {row[f"recovered_{name}"][0] for name in peers.SCORES} == {1.0 / 1.5}
    low, high = row["recovered_f1"][1]
    assert low <= 1.0 / 1.5 <= high


@pytest.mark.parametrize(
    ("given", "told"),
    [({"dataset": "none.json"}, "none.json"), ({"model": "none.gguf"}, "none.gguf")],
)
def test_a_file_that_is_not_there_is_named(
    tmp_path: Path, given: dict[str, str], told: str
) -> None:
    with pytest.raises(SystemExit, match=told):
        peers.main(**{"model": TOY, **given}, out=tmp_path / "out.json")
