from __future__ import annotations

METHODS = ["full", "reuse", "blend", "contextual"]


def test_demo_answers_side_by_side(cli, slow_blends):
    outcome = cli("demo", "--questions", 2, "--no-real-size", "--json")
    assert outcome.code == 0
    found = outcome.json
    assert found["real_size"] is None
    assert [method["method"] for method in found["methods"]] == METHODS
    assert len(found["questions"]) == 2
    for asked in found["questions"]:
        assert asked["prompt_tokens"] >= 1000
        assert list(asked["answers"]) == METHODS
        assert asked["answers"]["full"]["reused_tokens"] == 0
        assert asked["answers"]["reuse"]["recomputed_tokens"] == 0
        assert 0 < asked["answers"]["blend"]["recomputed_tokens"] < asked["prompt_tokens"] / 5
    assert found["questions"][0]["question"] in outcome.stderr


def test_the_documents_are_saved_to_be_indexed(cli, tmp_path):
    outcome = cli("demo", "--save", tmp_path / "notes")
    files = sorted((tmp_path / "notes").iterdir())
    texts = [file.read_text() for file in files]
    assert len(files) == 24
    assert all("\n\n" in text for text in texts[:5])
    question, answer = outcome.stdout.splitlines()[1].strip().removesuffix(")").split("  (")
    name = question.removeprefix("What is the sport of ").removesuffix("?")
    assert any(name in text and answer in text for text in texts)
    again = cli("demo", "--save", tmp_path / "notes")
    assert (again.code, again.stderr.count("\n")) == (2, 1)
    assert "File exists" in again.stderr


def test_demo_answers_are_greedy_whatever_the_model_says(cli, drawn_with):
    assert cli("demo", "--questions", 1, "--no-real-size", "--json").code == 0
    assert drawn_with
    assert all((said.temperature, said.repetition_penalty) == (0, 1) for said in drawn_with)
