from __future__ import annotations

import re

from cacheblend_rag.demo.passages import load_passages


def test_a_model_answers_from_the_passages_in_three_ways(cli, slow_blends, small_model):
    outcome = cli("demo", small_model)
    assert outcome.code == 0, outcome.stderr
    sample, told = load_passages(), outcome.stdout
    assert f"indexed {len(sample.passages)} passages" in told
    for asked in sample.questions[:6]:
        assert f"{asked.question}  ({asked.answers[0]})" in told
    for way in ("full prefill", "plain reuse", "blend"):
        assert len(re.findall(rf"^  {way} +[\d.]+ m?s  ", told, re.MULTILINE)) == 6
    work = re.findall(r"  ([\d,]+) of ([\d,]+) tokens reused$", told, re.MULTILINE)
    counts = [[int(count.replace(",", "")) for count in pair] for pair in work]
    assert len(counts) == 6
    assert all(whole / 2 < reused < whole for reused, whole in counts)
    assert re.search(r"median of 6 questions: .*x sooner", told)
    assert re.search(r"Right of 6: \d by full prefill, \d by plain reuse, \d by blend", told)


def test_without_smollm2_the_demo_names_what_fetches_it(cli, tmp_path, monkeypatch):
    monkeypatch.setenv("CACHEBLEND_MODELS", str(tmp_path))
    outcome = cli("demo")
    assert (outcome.code, outcome.stdout, outcome.stderr.count("\n")) == (2, "", 1)
    assert "run cacheblend-rag models get smollm2" in outcome.stderr


def test_the_passages_are_saved_to_be_indexed(cli, tmp_path):
    outcome = cli("demo", "--save-passages", tmp_path / "passages")
    sample = load_passages()
    saved = {file.stem: file.read_text() for file in (tmp_path / "passages").glob("*.txt")}
    assert saved == {passage.title: f"{passage.text}\n" for passage in sample.passages}
    assert "CC BY 4.0" in outcome.stdout
    assert "Trivedi" in (tmp_path / "passages" / "NOTICE").read_text()
    for item in sample.questions:
        assert f"  {item.question}  ({item.answers[0]})" in outcome.stdout.splitlines()
    assert f"cacheblend-rag index {tmp_path / 'passages'}\n" in outcome.stdout
    again = cli("demo", "--save-passages", tmp_path / "passages")
    assert (again.code, again.stderr.count("\n")) == (2, 1)
    assert "File exists" in again.stderr
